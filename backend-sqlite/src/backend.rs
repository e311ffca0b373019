//! [`SqliteBackend`]: all four traits on one file.

use std::any::TypeId;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_core::backend::{LeaseLimits, SessionLimits, log_released, no_token};
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use leasehold_core::{
    Admission, Backend, Capabilities, Claim, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Error,
    ErrorKind, FencingToken, Finding, Holding, HoldingQuery, Housekeeping, Inspect, Key, Keys,
    Kind, Lease, LeaseGuard, LeaseOptions, LockGuard, LockOptions, NamedLock, Reach, Result,
};
use sqlx::sqlite::SqlitePool;

use crate::builder::SqliteBuilder;
use crate::drivers::{Claims, Deduper, Leases, Sessions, clear_dead};
use crate::error::NAME;
use crate::inspect;
use crate::store::Store;

/// What is deleted by one statement of housekeeping: others write between two.
const BATCH: u32 = 1_000;

/// One handle on a file: named locks, leases, claims and dedupe. See the crate's page for how
/// each works.
#[derive(Debug)]
pub struct SqliteBackend {
    store: Arc<Store>,
    named: Arc<SessionEngine<Sessions>>,
    leases: Arc<LeaseEngine<Leases>>,
    claims: ClaimEngine<Claims>,
    dedupe: DedupeEngine<Deduper>,
}

impl SqliteBackend {
    /// A handle with settings.
    pub fn builder() -> SqliteBuilder {
        SqliteBuilder::new()
    }

    /// A handle with default settings; see [`SqliteBuilder::connect`].
    ///
    /// # Errors
    /// Those of [`SqliteBuilder::connect`].
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
    ) -> Self {
        let deduper = Deduper::new(store.clone());
        let claims = Claims::new(store.clone(), deduper.statements().clone());
        Self {
            named: Arc::new(SessionEngine::new(Sessions::new(store.clone(), session_limits))),
            leases: Arc::new(LeaseEngine::new(Leases::new(store.clone(), lease_limits))),
            claims: ClaimEngine::new(claims),
            dedupe: DedupeEngine::new(deduper),
            store,
        }
    }

    /// The path of the database.
    pub fn path(&self) -> &Path {
        &self.store.files.place.main
    }

    /// The pool of claims, for the service's own statements on the same file. Begin with
    /// `BEGIN IMMEDIATE` what reads before it writes: SQLite refuses the write of a transaction
    /// whose reads are out of date.
    pub fn pool(&self) -> &SqlitePool {
        &self.store.pool
    }
}

#[async_trait]
impl NamedLock for SqliteBackend {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        self.named.lock(key, opts).await
    }
}

#[async_trait]
impl Lease for SqliteBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.leases.lease(key, opts).await
    }
}

#[async_trait]
impl ClaimLock for SqliteBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for SqliteBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Inspect for SqliteBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let holdings = inspect::holdings(&self.store, query).await;
        holdings.map_err(|error| error.at(NAME, "holdings"))
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let displaced = inspect::force_release(&self.store, kind, key).await;
        let displaced = displaced.map_err(|error| error.at(NAME, "force_release").on(key))?;
        displaced.iter().for_each(|displaced| displaced.log_displaced(NAME));
        Ok(displaced)
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        let released = match kind {
            Kind::Lease => inspect::release_lease(&self.store, key, token).await,
            Kind::Lock | Kind::Claim | Kind::Dedupe => Err(no_token(kind)),
        };
        let released = released.map_err(|error| error.at(NAME, "release_by_token").on(key))?;
        if released {
            log_released(NAME, kind, key, token);
        }
        Ok(released)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        inspect::diagnose(&self.store).await.map_err(|error| error.at(NAME, "diagnose"))
    }
}

#[async_trait]
impl Backend for SqliteBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("sqlx::Transaction<'static, sqlx::Sqlite>");
        capabilities.reach = Reach::Machine;
        capabilities
    }

    /// Nothing is left to do: [`SqliteBuilder::connect`] has set the files up.
    async fn migrate(&self) -> Result<()> {
        self.store.open().await.map_err(|error| error.at(NAME, "migrate"))
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        let kept = async {
            let (mut leases, mut dedupe) = (0, 0);
            loop {
                let purged = self.leases.driver().purge(BATCH).await?;
                leases += purged;
                if purged < u64::from(BATCH) {
                    break;
                }
            }
            loop {
                let purged = self.dedupe.driver().purge(BATCH).await?;
                dedupe += purged;
                if purged < u64::from(BATCH) {
                    break;
                }
            }
            clear_dead(&self.store).await?;
            Ok(Housekeeping::new(leases, dedupe))
        };
        kept.await.map_err(|error: Error| error.at(NAME, "housekeep"))
    }

    async fn close(&self) -> Result<()> {
        let (store, named) = (self.store.clone(), self.named.clone());
        let leases = self.leases.clone();
        // in a task of its own: it goes on when nobody waits for it any more
        let closing = tokio::spawn(async move {
            let ((), released) = tokio::join!(named.close(), leases.close());
            store.close().await;
            released
        });
        let closed = closing.await.unwrap_or_else(|error| {
            let detail = "the runtime ended meanwhile";
            Err(Error::new(ErrorKind::Unavailable, detail).with_source(error))
        });
        closed.map_err(|error| error.at(NAME, "close"))
    }
}
