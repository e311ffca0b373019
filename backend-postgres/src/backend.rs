//! [`PostgresBackend`]: all four traits on one database.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_core::backend::{LeaseLimits, SessionLimits};
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use leasehold_core::{
    Admission, Backend, Capabilities, Claim, ClaimLock, ClaimOptions, Deadline, Dedupe,
    DedupeOptions, Error, ErrorKind, FencingToken, Housekeeping, Key, Keys, Lease, LeaseGuard,
    LeaseOptions, LockGuard, LockOptions, NamedLock, Result,
};
use sqlx::postgres::Postgres;
use sqlx::{PgPool, Transaction};

use crate::builder::PostgresBuilder;
use crate::drivers::{Claims, Deduper, Leases, Sessions, claim_in};
use crate::error::NAME;
use crate::keys::LockKind;
use crate::schema;
use crate::store::Store;

/// One handle on a database: named locks, leases, claims and dedupe. See the crate's page for how
/// each works.
#[derive(Debug)]
pub struct PostgresBackend {
    store: Arc<Store>,
    named: Arc<SessionEngine<Sessions>>,
    leases: Arc<LeaseEngine<Leases>>,
    claims: Arc<ClaimEngine<Claims>>,
    dedupe: DedupeEngine<Deduper>,
}

impl PostgresBackend {
    /// A handle with settings.
    pub fn builder() -> PostgresBuilder {
        PostgresBuilder::new()
    }

    /// A handle with a pool of its own and default settings; see [`PostgresBuilder::connect`].
    ///
    /// # Errors
    /// Those of [`PostgresBuilder::connect`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url).await
    }

    pub(crate) fn assemble(
        store: Arc<Store>,
        session_limits: SessionLimits,
        lease_limits: LeaseLimits,
        share: f64,
    ) -> Self {
        Self {
            named: Arc::new(SessionEngine::new(Sessions::new(
                store.clone(),
                session_limits,
                share,
            ))),
            leases: Arc::new(LeaseEngine::new(Leases::new(store.clone(), lease_limits))),
            claims: Arc::new(ClaimEngine::new(Claims::new(store.clone(), share))),
            dedupe: DedupeEngine::new(Deduper::new(store.clone())),
            store,
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The pool of claims, leases and dedupe.
    pub fn pool(&self) -> &PgPool {
        &self.store.pool
    }

    /// The number of a key's advisory lock, e.g. to find it in `pg_locks`: there, `classid` is its
    /// upper half, `objid` the lower one, and `objsubid` is 1.
    pub fn lock_id(&self, kind: LockKind, key: &Key) -> i64 {
        self.store.keys.advisory(kind, key)
    }

    /// Checks that the server is a primary and that the tables are there, for a service's start.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`](leasehold_core::ErrorKind::Schema) if the tables are missing or of
    /// another version, [`ErrorKind::Unsupported`](leasehold_core::ErrorKind::Unsupported) on a
    /// standby, [`ErrorKind::Unavailable`](leasehold_core::ErrorKind::Unavailable) if the server
    /// does not answer.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn check(&self) -> Result<()> {
        let checked = async {
            self.store.server().await?;
            schema::check(&self.store).await
        };
        checked.await.map_err(|error| error.at(NAME, "check"))
    }

    /// Claims `keys` in a transaction that the caller has begun, at READ COMMITTED: they are held
    /// until it ends. `Ok(None)`: somebody else held one of them for the whole wait; the
    /// transaction can go on, and holds none of them.
    ///
    /// There is no local queue in front of it: many such waits of one process each keep their
    /// connection. Keys of two calls in one transaction are taken in the order of the calls, so
    /// that two transactions can deadlock; the server breaks that after a second.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](leasehold_core::ErrorKind::Unsupported) at another isolation
    /// level, [`ErrorKind::Deadlock`](leasehold_core::ErrorKind::Deadlock) if the server chose
    /// this wait to break a cycle; the transaction can go on.
    ///
    /// # Cancel safety
    /// That of a statement on `tx`: roll it back.
    pub async fn claim_in(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        keys: &Keys,
        opts: ClaimOptions,
    ) -> Result<Option<FencingToken>> {
        let deadline = Deadline::after(opts.wait);
        let id = |key| self.store.keys.advisory(LockKind::Claim, key);
        let ids: BTreeSet<i64> = keys.iter().map(id).collect();
        let ids: Vec<i64> = ids.into_iter().collect();
        let statements = self.claims.driver().statements();
        let claimed = claim_in(&self.store, statements, tx, &ids, deadline).await;
        claimed.map_err(|error| error.at(NAME, "claim_in").on(keys))
    }
}

#[async_trait]
impl NamedLock for PostgresBackend {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        self.named.lock(key, opts).await
    }
}

#[async_trait]
impl Lease for PostgresBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.leases.lease(key, opts).await
    }
}

#[async_trait]
impl ClaimLock for PostgresBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for PostgresBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Backend for PostgresBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("sqlx::Transaction<'static, sqlx::Postgres>");
        capabilities.lock_names = false;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        schema::migrate(&self.store).await.map_err(|error| error.at(NAME, "migrate"))
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        schema::housekeep(&self.store).await.map_err(|error| error.at(NAME, "housekeep"))
    }

    async fn close(&self) -> Result<()> {
        let (store, named) = (self.store.clone(), self.named.clone());
        let (leases, claims) = (self.leases.clone(), self.claims.clone());
        // in a task of its own: it goes on when nobody waits for it any more
        let closing = tokio::spawn(async move {
            store.closed.send_replace(true);
            let ((), released) = tokio::join!(named.close(), leases.close());
            claims.driver().close();
            store.close_ready();
            if store.own_pool {
                store.pool.close().await;
            }
            released
        });
        let closed = closing.await.unwrap_or_else(|error| {
            let detail = "the runtime ended meanwhile";
            Err(Error::new(ErrorKind::Unavailable, detail).with_source(error))
        });
        closed.map_err(|error| error.at(NAME, "close"))
    }
}
