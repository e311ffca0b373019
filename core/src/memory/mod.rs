//! The memory backend: the executable specification, for tests and doctests.
//!
//! A [`MemoryStore`] stands for the server; each [`MemoryBackend`] over it stands for one process
//! of a service, with a [`MemoryLink`] that can be cut, delayed and silenced. Leases expire by
//! tokio's clock, so a paused clock tests hours in no time. The transaction of a claim is a small
//! key-value map, [`MemoryTx`].
//!
//! ```
//! use leasehold_core::memory::{MemoryBackend, MemoryStore};
//! use leasehold_core::{Key, LockOptions, NamedLock};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> leasehold_core::Result<()> {
//! let store = MemoryStore::new();
//! let one = MemoryBackend::builder().store(&store).build();
//! let two = MemoryBackend::builder().store(&store).build();
//! let key = Key::new("pipeline-7")?;
//!
//! let guard = one.lock(&key, LockOptions::try_once()).await?.expect("free");
//! assert!(two.lock(&key, LockOptions::try_once()).await?.is_none());
//! guard.release().await?;
//! assert!(two.lock(&key, LockOptions::try_once()).await?.is_some());
//! # Ok(())
//! # }
//! ```

mod driver;
mod link;
mod store;
mod tx;

use std::any::TypeId;

use async_trait::async_trait;

pub use self::driver::MemoryDriver;
pub use self::link::MemoryLink;
pub use self::store::MemoryStore;
pub use self::tx::MemoryTx;

use crate::backend::{
    Backend, Capabilities, Housekeeping, LeaseLimits, Reach, SessionLimits, log_released, no_token,
};
use crate::claim::{Claim, ClaimLock};
use crate::dedupe::{Admission, Dedupe};
use crate::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use crate::error::Result;
use crate::holder::Holder;
use crate::inspect::{Finding, Holding, HoldingQuery, Inspect, Kind};
use crate::key::{Key, Keys};
use crate::lease::{Lease, LeaseGuard};
use crate::named::{LockGuard, NamedLock};
use crate::options::{ClaimOptions, DedupeOptions, LeaseOptions, LockOptions};
use crate::token::FencingToken;

/// One handle on a [`MemoryStore`]: all four traits.
#[derive(Debug)]
pub struct MemoryBackend {
    driver: MemoryDriver,
    named: SessionEngine<MemoryDriver>,
    leases: LeaseEngine<MemoryDriver>,
    claims: ClaimEngine<MemoryDriver>,
    dedupe: DedupeEngine<MemoryDriver>,
}

impl MemoryBackend {
    /// A handle on a store of its own.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// A handle with settings.
    pub fn builder() -> MemoryBuilder {
        MemoryBuilder::default()
    }

    /// A handle over a driver.
    pub fn with_driver(driver: MemoryDriver) -> Self {
        Self {
            named: SessionEngine::new(driver.clone()),
            leases: LeaseEngine::new(driver.clone()),
            claims: ClaimEngine::new(driver.clone()),
            dedupe: DedupeEngine::new(driver.clone()),
            driver,
        }
    }

    /// The store.
    pub fn store(&self) -> &MemoryStore {
        self.driver.store()
    }

    /// The way to the store, to put faults on it.
    pub fn link(&self) -> &MemoryLink {
        self.driver.link()
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

/// Settings of a [`MemoryBackend`].
#[derive(Clone, Debug, Default)]
pub struct MemoryBuilder {
    store: MemoryStore,
    namespace: String,
    holder: Option<Holder>,
    session_limits: SessionLimits,
    lease_limits: LeaseLimits,
}

impl MemoryBuilder {
    /// The store; by default a new one.
    #[must_use]
    pub fn store(mut self, store: &MemoryStore) -> Self {
        self.store = store.clone();
        self
    }

    /// The namespace: keys of different ones never meet. Default: empty.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Whom others are told as the holder; default [`Holder::this_process`].
    #[must_use]
    pub fn holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }

    /// The limits of the named locks.
    #[must_use]
    pub fn session_limits(mut self, limits: SessionLimits) -> Self {
        self.session_limits = limits;
        self
    }

    /// The limits of the leases.
    #[must_use]
    pub fn lease_limits(mut self, limits: LeaseLimits) -> Self {
        self.lease_limits = limits;
        self
    }

    /// The driver alone, for a backend that changes some of its answers.
    pub fn driver(self) -> MemoryDriver {
        let holder = self.holder.unwrap_or_else(Holder::this_process);
        let (session_limits, lease_limits) = (self.session_limits, self.lease_limits);
        MemoryDriver::new(self.store, &self.namespace, holder, session_limits, lease_limits)
    }

    /// The handle.
    pub fn build(self) -> MemoryBackend {
        MemoryBackend::with_driver(self.driver())
    }
}

#[async_trait]
impl NamedLock for MemoryBackend {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        self.named.lock(key, opts).await
    }
}

#[async_trait]
impl Lease for MemoryBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.leases.lease(key, opts).await
    }
}

#[async_trait]
impl ClaimLock for MemoryBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for MemoryBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Inspect for MemoryBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let (store, query) = (self.driver.store().clone(), query.clone());
        let namespace = self.driver.namespace().clone();
        self.driver.link().call(move || store.holdings(&namespace, &query)).await
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let (store, key) = (self.driver.store().clone(), key.clone());
        let namespace = self.driver.namespace().clone();
        let displaced = self.driver.link().call(move || store.displace(&namespace, kind, &key));
        let displaced = displaced.await?;
        displaced.iter().for_each(|displaced| displaced.log_displaced(driver::NAME));
        Ok(displaced)
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        if kind != Kind::Lease {
            return Err(no_token(kind));
        }
        let (store, name) = (self.driver.store().clone(), key.clone());
        let namespace = self.driver.namespace().clone();
        let release = move || store.release_by_token(&namespace, &name, token);
        let released = self.driver.link().call(release).await?;
        if released {
            log_released(driver::NAME, kind, key, token);
        }
        Ok(released)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let reach = "it coordinates the handles of this process only";
        let advice = "take another store where several processes run";
        Ok(vec![Finding::warning("reach", reach, advice)])
    }
}

#[async_trait]
impl Backend for MemoryBackend {
    fn name(&self) -> &'static str {
        driver::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { reach: Reach::Process, ..Capabilities::new("MemoryTx") }
    }

    async fn migrate(&self) -> Result<()> {
        Ok(())
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        let store = self.driver.store().clone();
        let namespace = self.driver.namespace().clone();
        self.driver.link().call(move || store.housekeep(&namespace)).await
    }

    async fn close(&self) -> Result<()> {
        // together: both have begun once this was polled, and go on if it is dropped
        let ((), freed) = tokio::join!(self.named.close(), self.leases.close());
        freed
    }
}
