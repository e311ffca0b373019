//! Backends that are broken on purpose, to see that a run finds it: wrappers that alter what a
//! sound backend answers.

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold::backend::Housekeeping;
use leasehold::memory::MemoryTx;
use leasehold::redis::RedisTx;
use leasehold::{
    Admission, Backend, Capabilities, Claim, ClaimLock, ClaimOptions, ClaimTx, Dedupe, DedupeGuard,
    DedupeHold, DedupeOptions, Error, ErrorKind, FencingToken, Inspect, Key, Keys, Kind, Lease,
    LeaseGuard, LeaseHold, LeaseOptions, LockGuard, LockHold, LockOptions, LossSignal, NamedLock,
    Result,
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

type PgTx = sqlx::Transaction<'static, sqlx::Postgres>;
type SqliteTx = sqlx::Transaction<'static, sqlx::Sqlite>;
type MySqlTx = mysql_async::Transaction<'static>;

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Mutant {
    /// A lease never tells its loss.
    SilentLoss,
    /// The release of a lost lease frees its successor's. Needs a store that can release by force.
    StaleRelease,
    /// Tokens of locks repeat.
    RepeatingTokens,
    /// A claim commits although its keys are no longer held.
    UnlockedCommit,
    /// A dedupe entry that is in progress or done is now and then admitted again.
    AdmitsTwice,
    /// A lock that somebody else has is now and then handed out again.
    TwoHolders,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::SilentLoss,
        Self::StaleRelease,
        Self::RepeatingTokens,
        Self::UnlockedCommit,
        Self::AdmitsTwice,
        Self::TwoHolders,
    ];

    /// Breaks a backend.
    pub fn of(self, inner: Arc<dyn Backend>) -> Arc<dyn Backend> {
        Arc::new(Broken { inner, mutant: self, count: AtomicU64::new(0) })
    }
}

#[derive(Debug)]
struct Broken {
    inner: Arc<dyn Backend>,
    mutant: Mutant,
    count: AtomicU64,
}

impl Broken {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == mutant
    }

    /// Every third time.
    fn now_and_then(&self) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed).is_multiple_of(3)
    }
}

#[async_trait]
impl NamedLock for Broken {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let guard = self.inner.lock(key, opts).await?;
        let stolen = guard.is_none() && self.is(Mutant::TwoHolders) && self.now_and_then();
        if !stolen && !self.is(Mutant::RepeatingTokens) {
            return Ok(guard);
        }
        if guard.is_none() && !stolen {
            return Ok(None);
        }
        let hold = Box::new(Lock(guard));
        Ok(Some(LockGuard::new(key.clone(), None, LossSignal::new(), hold)))
    }
}

/// A lock, or the pretence of one.
#[derive(Debug)]
struct Lock(Option<LockGuard>);

#[async_trait]
impl LockHold for Lock {
    async fn token(&self) -> Result<FencingToken> {
        match &self.0 {
            Some(guard) => guard.token().await.map(|_| FencingToken(7)),
            None => Err(Error::new(ErrorKind::Lost, "there is no lock")),
        }
    }

    async fn release(&mut self) -> Result<()> {
        match self.0.take() {
            Some(guard) => guard.release().await,
            None => Ok(()),
        }
    }

    fn is_alive(&self) -> bool {
        self.0.as_ref().is_none_or(LockGuard::is_held)
    }
}

#[async_trait]
impl Lease for Broken {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        let Some(guard) = self.inner.lease(key, opts).await? else { return Ok(None) };
        match self.mutant {
            Mutant::SilentLoss => {
                let far = Instant::now() + Duration::from_secs(24 * 60 * 60);
                let (token, signal) = (guard.token(), LossSignal::until(far));
                let hold = Box::new(Leased(Some(guard)));
                Ok(Some(LeaseGuard::new(key.clone(), token, signal, hold)))
            }
            Mutant::StaleRelease => {
                let (inner, key, lost) = (self.inner.clone(), key.clone(), guard.lost());
                tokio::spawn(async move {
                    lost.wait().await;
                    // when a successor may have it
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    // a store that cannot do it cannot be broken in this way
                    drop(inner.force_release(Kind::Lease, &key).await);
                });
                Ok(Some(guard))
            }
            _ => Ok(Some(guard)),
        }
    }
}

/// A lease whose own signal nobody sees.
#[derive(Debug)]
struct Leased(Option<LeaseGuard>);

#[async_trait]
impl LeaseHold for Leased {
    async fn renew(&self) -> Result<()> {
        match &self.0 {
            Some(guard) => guard.renew().await,
            None => Ok(()),
        }
    }

    async fn release(&mut self) -> Result<()> {
        match self.0.take() {
            Some(guard) => guard.release().await,
            None => Ok(()),
        }
    }

    async fn verify(&self, tx: &mut (dyn Any + Send)) -> Result<()> {
        let Some(guard) = &self.0 else { return Ok(()) };
        if tx.is::<MemoryTx>() {
            guard.verify(tx.downcast_mut::<MemoryTx>().expect("it is one")).await
        } else if tx.is::<RedisTx>() {
            guard.verify(tx.downcast_mut::<RedisTx>().expect("it is one")).await
        } else if tx.is::<PgTx>() {
            guard.verify(tx.downcast_mut::<PgTx>().expect("it is one")).await
        } else if tx.is::<SqliteTx>() {
            guard.verify(tx.downcast_mut::<SqliteTx>().expect("it is one")).await
        } else if tx.is::<MySqlTx>() {
            guard.verify(tx.downcast_mut::<MySqlTx>().expect("it is one")).await
        } else {
            Err(Error::new(ErrorKind::WrongBackend, "an unknown transaction"))
        }
    }
}

#[async_trait]
impl ClaimLock for Broken {
    fn tx_type(&self) -> TypeId {
        self.inner.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        let Some(claim) = self.inner.claim(keys, opts).await? else { return Ok(None) };
        if !self.is(Mutant::UnlockedCommit) || keys.is_empty() {
            return Ok(Some(claim));
        }
        let token = claim.token();
        claim.rollback().await?;
        let Some(claim) = self.inner.claim(&Keys::none(), opts).await? else { return Ok(None) };
        let tx = Unlocked { token, claim, kind: self.inner.tx_type() };
        Ok(Some(Claim::new("mutant", keys.clone(), Box::new(tx), Box::new(()))))
    }
}

/// A transaction without its keys.
#[derive(Debug)]
struct Unlocked {
    token: FencingToken,
    claim: Claim,
    kind: TypeId,
}

#[async_trait]
impl ClaimTx for Unlocked {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        let known = "the transaction is of the backend's type";
        match self.kind {
            kind if kind == TypeId::of::<MemoryTx>() => self.claim.tx::<MemoryTx>().expect(known),
            kind if kind == TypeId::of::<RedisTx>() => self.claim.tx::<RedisTx>().expect(known),
            kind if kind == TypeId::of::<SqliteTx>() => self.claim.tx::<SqliteTx>().expect(known),
            kind if kind == TypeId::of::<PgTx>() => self.claim.tx::<PgTx>().expect(known),
            _ => self.claim.tx::<MySqlTx>().expect(known),
        }
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        self.claim.first_seen(key, retain).await
    }

    async fn commit(self: Box<Self>) -> Result<()> {
        self.claim.commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        self.claim.rollback().await
    }
}

#[async_trait]
impl Dedupe for Broken {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        let admission = self.inner.admit(key, opts).await?;
        if admission.is_first() || !self.is(Mutant::AdmitsTwice) || !self.now_and_then() {
            return Ok(admission);
        }
        let token = FencingToken(u64::MAX >> 16);
        let guard = DedupeGuard::new(key.clone(), token, LossSignal::new(), Box::new(Pretended));
        Ok(Admission::First(guard))
    }
}

/// An entry that is not on the store.
#[derive(Debug)]
struct Pretended;

#[async_trait]
impl DedupeHold for Pretended {
    async fn complete(&mut self) -> Result<()> {
        Ok(())
    }

    async fn abandon(&mut self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Inspect for Broken {}

#[async_trait]
impl Backend for Broken {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn migrate(&self) -> Result<()> {
        self.inner.migrate().await
    }

    async fn housekeep(&self) -> Result<Housekeeping> {
        self.inner.housekeep().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}
