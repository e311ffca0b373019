//! [`RedisBackend`]: the drivers put together.

use std::any::TypeId;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine};
use leasehold_core::{
    Admission, Backend, Capabilities, Claim, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Error,
    ErrorKind, Housekeeping, Key, Keys, Lease, LeaseGuard, LeaseOptions, LockGuard, LockOptions,
    NamedLock, Result,
};
use tokio::sync::watch;

use crate::Builder;
use crate::claim::Claims;
use crate::conn::{Conn, NAME};
use crate::dedupe::Entries;
use crate::holder::Told;
use crate::keys::Kind;
use crate::lease::Leases;
use crate::wake::Wakes;

/// Named locks, leases, claims and dedupe on Redis or Valkey.
///
/// See the [crate's page](crate) for how it works and what it does not promise.
#[derive(Debug)]
pub struct RedisBackend {
    pub(crate) conn: Arc<Conn>,
    _told: Told,
    wakes: Arc<Wakes>,
    locks: Arc<LeaseEngine<Leases>>,
    leases: Arc<LeaseEngine<Leases>>,
    claims: ClaimEngine<Claims>,
    dedupe: DedupeEngine<Entries>,
    /// How the close ended, once it was begun.
    closed: OnceLock<watch::Receiver<Option<Result<()>>>>,
}

impl RedisBackend {
    /// Connects with the default options.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    ///
    /// # Cancel safety
    /// As [`Builder::connect`].
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url).await
    }

    /// Options, then a connection.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The hash tag of claims, without braces. In a cluster, `{tag}anything` is a key that the
    /// transaction of a claim can read and write.
    pub fn claim_tag(&self) -> &str {
        self.conn.keys.claim_tag()
    }

    pub(crate) fn over(conn: Conn) -> Self {
        let conn = Arc::new(conn);
        let wakes = Arc::new(Wakes::new(&conn, conn.settings.keyspace_events));
        let leases = |kind| {
            let driver = Leases::new(conn.clone(), wakes.clone(), kind);
            Arc::new(LeaseEngine::new(driver))
        };
        Self {
            locks: leases(Kind::Lock),
            leases: leases(Kind::Lease),
            claims: ClaimEngine::new(Claims::new(conn.clone(), wakes.clone())),
            dedupe: DedupeEngine::new(Entries::new(conn.clone())),
            _told: Told::start(&conn),
            conn,
            wakes,
            closed: OnceLock::new(),
        }
    }

    /// Closes in a task of its own, which goes on if nobody waits for it.
    fn start_close(&self) -> watch::Receiver<Option<Result<()>>> {
        let (conn, wakes) = (self.conn.clone(), self.wakes.clone());
        let (locks, leases) = (self.locks.clone(), self.leases.clone());
        let (done, closed) = watch::channel(None);
        tokio::spawn(async move {
            conn.closing.cancel();
            conn.tasks_of_claims.close();
            let limit = conn.answer_limit();
            let (locks, leases, claims) = tokio::join!(
                locks.close(),
                leases.close(),
                tokio::time::timeout(limit, conn.tasks_of_claims.wait()),
            );
            wakes.stop();
            conn.quit().await;
            let claims = claims.map_err(|_| {
                let detail = "the claims were not freed in time, they expire";
                Error::new(ErrorKind::Unavailable, detail)
            });
            done.send_replace(Some(locks.and(leases).and(claims)));
        });
        closed
    }
}

#[async_trait]
impl NamedLock for RedisBackend {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let opts = LeaseOptions::default().ttl(self.conn.settings.lock_ttl).wait(opts.wait);
        self.locks.lock(key, opts).await
    }
}

#[async_trait]
impl Lease for RedisBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.leases.lease(key, opts).await
    }
}

#[async_trait]
impl ClaimLock for RedisBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for RedisBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Backend for RedisBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("leasehold_redis::RedisTx");
        (capabilities.session_locks, capabilities.durable) = (false, false);
        capabilities
    }

    /// There is nothing to create: this only asks for a sign of life.
    async fn migrate(&self) -> Result<()> {
        let hash = fred::types::ClusterHash::Random;
        let time = self.conn.command(0, "TIME", hash, Vec::new()).await;
        time.map(|_| ()).map_err(|error| error.at(NAME, "migrate"))
    }

    /// There is nothing to do: every key has a ttl.
    async fn housekeep(&self) -> Result<Housekeeping> {
        Ok(Housekeeping::default())
    }

    async fn close(&self) -> Result<()> {
        let mut closed = self.closed.get_or_init(|| self.start_close()).clone();
        let outcome = closed.wait_for(Option::is_some).await;
        let outcome = outcome.ok().and_then(|outcome| outcome.clone());
        let ended = || Err(Error::new(ErrorKind::Unavailable, "the runtime has ended"));
        outcome.unwrap_or_else(ended).map_err(|error| error.at(NAME, "close"))
    }
}
