//! [`MySqlBackend`]: the four traits on one server.

use std::any::TypeId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use leasehold_core::{
    Admission, Backend, Capabilities, Claim, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Error,
    ErrorKind, Housekeeping, Key, Keys, Lease, LeaseGuard, LeaseOptions, LockGuard, LockOptions,
    NamedLock, Result,
};

use crate::builder::MySqlBuilder;
use crate::claim::Claims;
use crate::dedupe::Dedupes;
use crate::error::BACKEND;
use crate::flavour::ServerInfo;
use crate::lease::Leases;
use crate::names::Kind;
use crate::schema;
use crate::session::Sessions;
use crate::store::Store;

/// How long `close` waits for the connections to end.
const CLOSING: Duration = Duration::from_secs(5);

/// All four traits on MySQL or MariaDB. See the [crate's documentation](crate).
#[derive(Debug)]
pub struct MySqlBackend {
    pub(crate) locks: Locks,
    pub(crate) leases: LeaseEngine<Leases>,
    pub(crate) claims: ClaimEngine<Claims>,
    pub(crate) dedupe: DedupeEngine<Dedupes>,
    pub(crate) store: Arc<Store>,
    pub(crate) pool_is_ours: bool,
    pub(crate) closed: AtomicBool,
}

/// What named locks are made of.
#[derive(Debug)]
pub(crate) enum Locks {
    User(SessionEngine<Sessions>),
    Leased(LeaseEngine<Leases>, Duration),
}

impl MySqlBackend {
    /// To set options.
    pub fn builder() -> MySqlBuilder {
        MySqlBuilder::default()
    }

    /// A handle with the defaults and a pool of its own.
    ///
    /// # Errors
    /// As [`MySqlBuilder::connect`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().connect(url).await
    }

    /// The server, as it was read when the handle was made.
    pub fn server(&self) -> &ServerInfo {
        &self.store.info
    }

    /// Checks that the tables are there, and of the version that this program knows.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if not, [`ErrorKind::Unavailable`] if the server did not answer.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn check_schema(&self) -> Result<()> {
        let checked = async {
            let mut conn = self.store.connect().await?;
            schema::check(&mut conn, &self.store.tables).await?;
            drop(conn.disconnect().await); // it has done its work
            Ok(())
        };
        checked.await.map_err(|error: Error| error.at(BACKEND, "check_schema"))
    }

    /// The name of the user-level lock behind [`NamedLock::lock`], to look for it in
    /// `performance_schema.metadata_locks` or with `IS_USED_LOCK`, or to share it with a program
    /// that does not use this library.
    pub fn lock_name(&self, key: &Key) -> String {
        self.store.lock_name(Kind::Lock, key)
    }

    /// As [`lock_name`](Self::lock_name), for [`ClaimLock::claim`].
    pub fn claim_name(&self, key: &Key) -> String {
        self.store.lock_name(Kind::Claim, key)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            let detail = "the handle is closed";
            return Err(Error::new(ErrorKind::Unavailable, detail).at(BACKEND, "use"));
        }
        Ok(())
    }
}

#[async_trait]
impl NamedLock for MySqlBackend {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        self.check_open()?;
        match &self.locks {
            Locks::User(engine) => engine.lock(key, opts).await,
            Locks::Leased(engine, ttl) => {
                let opts = LeaseOptions::default().ttl(*ttl).wait(opts.wait);
                engine.lock(key, opts).await
            }
        }
    }
}

#[async_trait]
impl Lease for MySqlBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.check_open()?;
        self.leases.lease(key, opts).await
    }
}

#[async_trait]
impl ClaimLock for MySqlBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.check_open()?;
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for MySqlBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.check_open()?;
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.check_open()?;
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Backend for MySqlBackend {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("mysql_async::Transaction<'static>");
        capabilities.session_locks = matches!(self.locks, Locks::User(_));
        // those of long or unusual keys, and of rows, are hashed
        capabilities.lock_names = false;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        let migrated = schema::migrate(&self.store).await;
        migrated.map_err(|error| error.at(BACKEND, "migrate"))
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        let kept = schema::housekeep(&self.store).await;
        kept.map_err(|error| error.at(BACKEND, "housekeep"))
    }

    async fn close(&self) -> Result<()> {
        let first = !self.closed.swap(true, Ordering::AcqRel);
        let locks = async {
            match &self.locks {
                Locks::User(engine) => {
                    engine.close().await;
                    Ok(())
                }
                Locks::Leased(engine, _) => {
                    let closed = engine.close().await;
                    engine.driver().end();
                    closed
                }
            }
        };
        let leases = async {
            let closed = self.leases.close().await;
            // the end of the bell wakes those who wait for the leases that were just freed
            self.leases.driver().end();
            closed
        };
        let (locks, leases) = tokio::join!(locks, leases);
        // Another close must not take the pool from the releases of the first. If that one was
        // cancelled, the connections end when they are idle or the handle is dropped.
        if !first {
            return Ok(());
        }
        // a pool's end waits for connections that are in use
        let pools = async {
            drop(self.store.own.clone().disconnect().await);
            drop(self.store.renewing.clone().disconnect().await);
            if self.pool_is_ours {
                drop(self.store.pool.clone().disconnect().await);
            }
        };
        if tokio::time::timeout(CLOSING, pools).await.is_err() {
            tracing::debug!("connections are still in use after the handle was closed");
        }
        locks.and(leases).map_err(|error| error.at(BACKEND, "close"))
    }
}
