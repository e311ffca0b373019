//! A backend over the mutant driver, with altered user traits, and its harness.

use std::any::{Any, TypeId};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::{Handle, Harness, Link, MemoryHarness, Need};
use leasehold_core::backend::{Backend, Capabilities, Housekeeping, LeaseDriver, LeaseTry, Owner};
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use leasehold_core::memory::{MemoryBackend, MemoryLink};
use leasehold_core::{
    Admission, Claim, ClaimLock, ClaimOptions, Deadline, Dedupe, DedupeOptions, Error, ErrorKind,
    FencingToken, HeldName, Holding, HoldingQuery, Inspect, Key, Keys, Kind, Lease, LeaseGuard,
    LeaseHold, LeaseOptions, LockGuard, LockHold, LockOptions, LossSignal, NameQuery, NamedLock,
    Result,
};

use crate::Mutant;
use crate::driver::MutantDriver;

#[derive(Debug)]
pub(crate) struct MutantHarness {
    mutant: Mutant,
    memory: MemoryHarness,
}

impl MutantHarness {
    pub(crate) fn new(mutant: Mutant) -> Self {
        Self { mutant, memory: MemoryHarness::new() }
    }
}

#[async_trait]
impl Harness for MutantHarness {
    fn name(&self) -> String {
        format!("{:?}", self.mutant)
    }

    fn lacks(&self, need: Need) -> Option<&'static str> {
        self.memory.lacks(need)
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        let kept = match self.mutant {
            Mutant::NamespacesShareASpace => &namespace[..namespace.len().min(10)],
            Mutant::NamespaceRunsIntoTheKey => "",
            _ => namespace,
        };
        let mut limits = leasehold_core::backend::SessionLimits::default();
        limits.keepalive = Duration::from_millis(500);
        limits.answer = Duration::from_secs(2);
        let builder = MemoryBackend::builder().store(self.memory.store()).namespace(kept);
        let inner = builder.session_limits(limits).driver();
        let link = Arc::new(Way(inner.link().clone()));
        let driver = MutantDriver::new(self.mutant, namespace, inner);
        Ok(Handle { backend: Arc::new(MutantBackend::new(driver)), link })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self::new(self.mutant)))
    }

    async fn restart(&self) -> Result<()> {
        self.memory.restart().await
    }

    fn address(&self) -> Option<String> {
        None
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        self.memory.delete_lease(namespace, key).await
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        self.memory.read(claim, name).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        self.memory.write(claim, name, value).await
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        self.memory.committed(name).await
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        self.memory.verify(claim, lease).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        self.memory.leftovers(namespace).await
    }
}

#[derive(Debug)]
struct Way(MemoryLink);

#[async_trait]
impl Link for Way {
    async fn end_sessions(&self) -> Result<()> {
        self.0.end_sessions();
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        self.0.silence();
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.0.heal();
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        self.0.lose_next_answer();
        Ok(())
    }
}

#[derive(Debug)]
struct MutantBackend {
    mutant: Mutant,
    driver: MutantDriver,
    named: Arc<SessionEngine<MutantDriver>>,
    leases: LeaseEngine<MutantDriver>,
    claims: ClaimEngine<MutantDriver>,
    dedupe: DedupeEngine<MutantDriver>,
    memory: MemoryBackend,
    held: Mutex<HashSet<Key>>,
}

impl MutantBackend {
    fn new(driver: MutantDriver) -> Self {
        Self {
            mutant: driver.mutant,
            named: Arc::new(SessionEngine::new(driver.clone())),
            leases: LeaseEngine::new(driver.clone()),
            claims: ClaimEngine::new(driver.clone()),
            dedupe: DedupeEngine::new(driver.clone()),
            memory: MemoryBackend::with_driver(driver.inner.clone()),
            driver,
            held: Mutex::default(),
        }
    }

    /// Takes the lock in a task that does not see its caller go.
    async fn lock_unseen(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let (named, key) = (self.named.clone(), key.clone());
        let (reply, answer) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let taken = named.lock(&key, opts).await;
            if let Err(Ok(Some(guard))) = reply.send(taken) {
                std::mem::forget(guard);
            }
        });
        answer.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Unavailable, "closed")))
    }

    async fn lock_polling(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let deadline = Deadline::after(opts.wait);
        loop {
            let taken = self.named.lock(key, LockOptions::try_once()).await?;
            if taken.is_some() || deadline.has_passed() {
                return Ok(taken);
            }
            tokio::time::sleep(Duration::from_millis(rand::random_range(1..10))).await;
        }
    }
}

#[async_trait]
impl NamedLock for MutantBackend {
    async fn lock(&self, key: &Key, mut opts: LockOptions) -> Result<Option<LockGuard>> {
        match self.mutant {
            Mutant::TryWaits => opts.wait = opts.wait.max(Duration::from_secs(5)),
            Mutant::WaitHasNoEnd => opts.wait = Duration::MAX,
            Mutant::PollsInsteadOfQueueing => return self.lock_polling(key, opts).await,
            Mutant::CancelledAcquireLeaks => return self.lock_unseen(key, opts).await,
            Mutant::KindsShareASpace => {
                let opts = LeaseOptions::default().wait(opts.wait);
                return self.leases.lock(key, opts).await;
            }
            _ => {}
        }
        let taken = self.named.lock(key, opts).await;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.mutant, taken) {
            (Mutant::Reentrant, Ok(None)) if held.contains(key) => {
                let (token, signal) = (Some(FencingToken(1)), LossSignal::new());
                Ok(Some(LockGuard::new(key.clone(), token, signal, Box::new(Nothing))))
            }
            (Mutant::DropLeaks, Ok(Some(guard))) => {
                let (signal, hold) = (LossSignal::new(), Box::new(Leak(Some(guard))));
                Ok(Some(LockGuard::new(key.clone(), Some(FencingToken(1)), signal, hold)))
            }
            (Mutant::SilenceLooksLikeContention, Err(_)) => Ok(None),
            (_, taken) => {
                if let Ok(Some(_)) = &taken {
                    held.insert(key.clone());
                }
                taken
            }
        }
    }
}

#[derive(Debug)]
struct Nothing;

#[async_trait]
impl LockHold for Nothing {
    async fn token(&self) -> Result<FencingToken> {
        Ok(FencingToken(1))
    }

    async fn release(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Releases when it is told to, and not when it is dropped.
#[derive(Debug)]
struct Leak(Option<LockGuard>);

#[async_trait]
impl LockHold for Leak {
    async fn token(&self) -> Result<FencingToken> {
        Ok(FencingToken(1))
    }

    async fn release(&mut self) -> Result<()> {
        match self.0.take() {
            Some(guard) => guard.release().await,
            None => Ok(()),
        }
    }
}

impl Drop for Leak {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

#[async_trait]
impl Lease for MutantBackend {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        if self.mutant != Mutant::RenewalResurrects {
            return self.leases.lease(key, opts).await;
        }
        let (owner, deadline) = (Owner::fresh(), Deadline::after(opts.wait));
        let (driver, ttl) = (self.driver.clone(), opts.ttl);
        while !deadline.has_passed() {
            if let LeaseTry::Acquired(token) = driver.acquire(key, owner, ttl).await? {
                let hold = Box::new(Undead { driver, key: key.clone(), owner, ttl });
                return Ok(Some(LeaseGuard::new(key.clone(), token, LossSignal::new(), hold)));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(None)
    }
}

/// A lease whose renewal is another acquisition.
#[derive(Debug)]
struct Undead {
    driver: MutantDriver,
    key: Key,
    owner: Owner,
    ttl: Duration,
}

#[async_trait]
impl LeaseHold for Undead {
    async fn renew(&self) -> Result<()> {
        match self.driver.acquire(&self.key, self.owner, self.ttl).await? {
            LeaseTry::Acquired(_) => Ok(()),
            LeaseTry::Busy { .. } => Err(Error::new(ErrorKind::Lost, "others have it")),
        }
    }

    async fn release(&mut self) -> Result<()> {
        self.driver.release(&self.key, self.owner).await.map(|_| ())
    }

    async fn verify(&self, tx: &mut (dyn Any + Send)) -> Result<()> {
        self.driver.verify(&self.key, self.owner, tx).await
    }
}

#[async_trait]
impl ClaimLock for MutantBackend {
    fn tx_type(&self) -> TypeId {
        self.claims.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        self.claims.claim(keys, opts).await
    }
}

#[async_trait]
impl Dedupe for MutantBackend {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.dedupe.admit(key, opts).await
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        self.dedupe.admit_many(keys, opts).await
    }
}

#[async_trait]
impl Inspect for MutantBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let held = self.memory.holdings(query).await?;
        if let (Mutant::ShowsWhatIsFree, NameQuery::Key(key), []) =
            (self.mutant, &query.names, held.as_slice())
        {
            return Ok(vec![Holding::new(query.kinds[0], HeldName::Key(key.clone()))]);
        }
        Ok(held)
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        match self.mutant {
            Mutant::ForcedReleaseOnlyShows => {
                let query = HoldingQuery::key(key).kinds([kind]).done(true);
                Ok(self.memory.holdings(&query).await?.pop())
            }
            Mutant::ForcedReleaseEndsAllSessions => {
                self.memory.store().restart();
                self.memory.force_release(kind, key).await
            }
            _ => self.memory.force_release(kind, key).await,
        }
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        let query = HoldingQuery::key(key).kinds([kind]);
        let held = async || Ok::<_, Error>(self.memory.holdings(&query).await?.pop());
        match self.mutant {
            Mutant::ReleasesAnyToken => match held().await?.and_then(|held| held.token) {
                Some(token) => self.memory.release_by_token(kind, key, token).await,
                None => Ok(false),
            },
            Mutant::ReleaseByTokenOnlyShows => {
                Ok(held().await?.is_some_and(|held| held.token == Some(token)))
            }
            _ => self.memory.release_by_token(kind, key, token).await,
        }
    }
}

#[async_trait]
impl Backend for MutantBackend {
    fn name(&self) -> &'static str {
        "mutant"
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    async fn migrate(&self) -> Result<()> {
        self.memory.migrate().await
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        if self.mutant == Mutant::HousekeepingDeletesTheLive {
            self.driver.delete_leases();
        }
        self.memory.housekeep().await
    }

    async fn close(&self) -> Result<()> {
        self.named.close().await;
        match self.mutant {
            Mutant::CloseLeavesLeases => Ok(()),
            _ => self.leases.close().await,
        }
    }
}
