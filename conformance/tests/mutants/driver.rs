//! The memory driver with altered calls and answers.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{
    Admit, AdmitAnswer, Batch, BatchAnswer, ClaimDriver, DedupeDriver, LeaseDriver, LeaseLimits,
    LeaseTry, Owner, Renewal, Session, SessionDriver, SessionId, SessionLimits, Try, WakeSource,
};
use leasehold_core::memory::MemoryDriver;
use leasehold_core::{ClaimTx, Deadline, Error, FencingToken, Key, Result};

use crate::Mutant;

type Inner = MemoryDriver;

#[derive(Clone, Debug)]
pub(crate) struct MutantDriver {
    pub(crate) inner: MemoryDriver,
    pub(crate) mutant: Mutant,
    namespace: Arc<str>,
    number: usize,
    memo: Arc<Memo>,
}

/// What a mutant remembers.
#[derive(Debug, Default)]
struct Memo {
    owners: Mutex<HashMap<Owner, Owner>>,
}

/// The latest owner of each dedupe key, over all handles of a store.
static LATEST: Mutex<Option<HashMap<(String, Key), Owner>>> = Mutex::new(None);
/// Every lease that was taken on any store.
static LEASED: Mutex<Vec<(Arc<str>, Key)>> = Mutex::new(Vec::new());
static HANDLES: AtomicUsize = AtomicUsize::new(0);

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn altered(key: &Key, alter: impl Fn(&str) -> String) -> Key {
    Key::new(alter(key.as_str())).unwrap_or_else(|_| key.clone())
}

impl MutantDriver {
    pub(crate) fn new(mutant: Mutant, namespace: &str, inner: MemoryDriver) -> Self {
        let number = HANDLES.fetch_add(1, Ordering::SeqCst);
        let (namespace, memo) = (namespace.into(), Arc::default());
        Self { inner, mutant, namespace, number, memo }
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == mutant
    }

    /// The key as this mutant takes it.
    fn key(&self, key: &Key) -> Key {
        match self.mutant {
            Mutant::FoldsCase => altered(key, str::to_lowercase),
            Mutant::TrimsSpace => altered(key, |name| name.trim_end_matches(' ').to_owned()),
            Mutant::CutsLongNames => altered(key, |name| name.chars().take(64).collect()),
            Mutant::NamespaceRunsIntoTheKey => {
                altered(key, |name| format!("{}{name}", self.namespace))
            }
            _ => key.clone(),
        }
    }

    fn owner(&self, owner: Owner) -> Owner {
        locked(&self.memo.owners).get(&owner).copied().unwrap_or(owner)
    }

    /// Deletes every lease that was ever taken.
    pub(crate) fn delete_leases(&self) {
        for (namespace, key) in locked(&LEASED).iter() {
            self.inner.store().delete_lease(namespace, key);
        }
    }
}

#[async_trait]
impl SessionDriver for MutantDriver {
    type Id = Key;
    type Session = MutantSession;

    fn backend(&self) -> &'static str {
        "mutant"
    }

    fn id(&self, key: &Key) -> Key {
        self.key(key)
    }

    async fn open(&self) -> Result<MutantSession> {
        let session = SessionDriver::open(&self.inner).await?;
        Ok(MutantSession { session, mutant: self.mutant })
    }

    fn limits(&self) -> SessionLimits {
        SessionDriver::limits(&self.inner)
    }
}

#[derive(Debug)]
pub(crate) struct MutantSession {
    session: <Inner as SessionDriver>::Session,
    mutant: Mutant,
}

#[async_trait]
impl Session for MutantSession {
    type Id = Key;

    fn id(&self) -> SessionId {
        Session::id(&self.session)
    }

    async fn exchange(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        let answer = self.session.exchange(batch).await;
        match self.mutant {
            Mutant::NoExclusion => answer.map(|mut answer| {
                answer.tries = batch.tries.iter().map(|_| Try::Granted(None)).collect();
                answer
            }),
            Mutant::LockTokenRepeats => answer.map(|mut answer| {
                answer.tokens = batch.tokens.iter().map(|_| FencingToken(7)).collect();
                answer
            }),
            // as a driver that reconnects by itself
            Mutant::LossIsNeverTold => answer.or_else(|_| {
                Ok(BatchAnswer {
                    released: batch.release.iter().map(|_| true).collect(),
                    tries: batch.tries.iter().map(|_| Try::Busy).collect(),
                    tokens: batch.tokens.iter().map(|_| FencingToken(1)).collect(),
                })
            }),
            _ => answer,
        }
    }

    async fn wait(&mut self, id: &Key, wait: Duration) -> Result<Try> {
        self.session.wait(id, wait).await
    }

    async fn closed(&mut self) -> Error {
        match self.mutant {
            Mutant::LossIsNeverTold => std::future::pending().await,
            _ => self.session.closed().await,
        }
    }

    async fn close(self) {
        self.session.close().await;
    }
}

#[async_trait]
impl LeaseDriver for MutantDriver {
    fn backend(&self) -> &'static str {
        "mutant"
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        locked(&LEASED).push((self.namespace.clone(), key.clone()));
        let ttl = match self.mutant {
            Mutant::NeverExpires => ttl * 1000,
            Mutant::ExpiresEarly => ttl / 4,
            _ => ttl,
        };
        let owner = match self.mutant {
            Mutant::NewOwnerForEachTry => {
                let fresh = Owner::fresh();
                locked(&self.memo.owners).insert(owner, fresh);
                fresh
            }
            _ => owner,
        };
        let tried = LeaseDriver::acquire(&self.inner, &self.key(key), owner, ttl).await;
        match tried? {
            LeaseTry::Acquired(_) if self.is(Mutant::LeaseTokenRepeats) => {
                Ok(LeaseTry::Acquired(FencingToken(7)))
            }
            LeaseTry::Busy { .. } if self.is(Mutant::LeasesExcludeNobody) => {
                Ok(LeaseTry::Acquired(FencingToken(1)))
            }
            other => Ok(other),
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let renewals: Vec<Renewal> = renewals
            .iter()
            .map(|Renewal { key, owner, ttl }| Renewal {
                key: self.key(key),
                owner: self.owner(*owner),
                ttl: *ttl,
            })
            .collect();
        self.inner.renew(&renewals).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        if self.is(Mutant::StaleReleaseFreesSuccessor) {
            self.inner.store().delete_lease(&self.namespace, key);
            return Ok(true);
        }
        LeaseDriver::release(&self.inner, &self.key(key), self.owner(owner)).await
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        if self.is(Mutant::VerifyAlwaysPasses) {
            return Ok(());
        }
        LeaseDriver::verify(&self.inner, &self.key(key), self.owner(owner), tx).await
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.inner.wake_id(&self.key(key))
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        // the one, so that nothing else tells the late writer
        if self.is(Mutant::VerifyAlwaysPasses) || self.is(Mutant::ReleaseByTokenWakesNobody) {
            return Ok(None);
        }
        self.inner.listen().await
    }

    fn limits(&self) -> LeaseLimits {
        LeaseDriver::limits(&self.inner)
    }
}

#[async_trait]
impl ClaimDriver for MutantDriver {
    type Id = Key;

    fn backend(&self) -> &'static str {
        "mutant"
    }

    fn tx_type(&self) -> TypeId {
        ClaimDriver::tx_type(&self.inner)
    }

    fn id(&self, key: &Key) -> Key {
        self.key(key)
    }

    async fn begin(&self, ids: &[Key], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let mut ids = ids.to_vec();
        match self.mutant {
            Mutant::KeysUnsorted if self.number % 2 == 1 => ids.reverse(),
            Mutant::LocksTheFirstKeyOnly => ids.truncate(1),
            Mutant::ClaimsExcludeNobody => ids.clear(),
            _ => {}
        }
        let tx = self.inner.begin(&ids, deadline).await?;
        Ok(tx.map(|tx| Box::new(MutantTx { tx, mutant: self.mutant }) as Box<dyn ClaimTx>))
    }
}

#[derive(Debug)]
struct MutantTx {
    tx: Box<dyn ClaimTx>,
    mutant: Mutant,
}

#[async_trait]
impl ClaimTx for MutantTx {
    fn token(&self) -> FencingToken {
        self.tx.token()
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        self.tx.tx()
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        self.tx.first_seen(key, retain).await
    }

    async fn commit(self: Box<Self>) -> Result<()> {
        let committed = self.tx.commit().await;
        match self.mutant {
            Mutant::UnknownCommitIsReportedAsDone => Ok(()),
            _ => committed,
        }
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        match self.mutant {
            Mutant::RollbackKeepsWrites | Mutant::SeenInRolledBackClaimStays => {
                self.tx.commit().await
            }
            _ => self.tx.rollback().await,
        }
    }
}

#[async_trait]
impl DedupeDriver for MutantDriver {
    fn backend(&self) -> &'static str {
        "mutant"
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let mut items = items.to_vec();
        for item in &mut items {
            item.key = self.key(&item.key);
            if self.is(Mutant::NoTakeover) {
                item.in_progress = item.in_progress.map(|time| time * 1000);
            }
        }
        let answers = self.inner.admit(&items).await?;
        let alter = |(item, answer): (&Admit, AdmitAnswer)| match answer {
            AdmitAnswer::InProgress { .. } if self.is(Mutant::AdmitsDuplicates) => {
                AdmitAnswer::First(FencingToken(1))
            }
            // only these: the clock of a schedule lives on an entry that is done
            AdmitAnswer::Done { .. }
                if self.is(Mutant::TicksAreFirstAgain) && item.key.as_str().contains("/tick/") =>
            {
                AdmitAnswer::First(FencingToken(1))
            }
            AdmitAnswer::First(token) => {
                let at = (self.namespace.to_string(), item.key.clone());
                locked(&LATEST).get_or_insert_default().insert(at, item.owner);
                AdmitAnswer::First(token)
            }
            other => other,
        };
        Ok(items.iter().zip(answers).map(alter).collect())
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        let retain = if self.is(Mutant::ForgetsDoneEarly) { retain / 10 } else { retain };
        let completed = self.inner.complete(&self.key(key), owner, retain).await?;
        Ok(completed || self.is(Mutant::AcceptsStaleComplete))
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        let key = self.key(key);
        if self.is(Mutant::AbandonCompletes) {
            return self.inner.complete(&key, owner, Duration::from_secs(60)).await;
        }
        let latest = locked(&LATEST)
            .as_ref()
            .and_then(|latest| latest.get(&(self.namespace.to_string(), key.clone())).copied());
        let owner = match latest {
            Some(latest) if self.is(Mutant::StaleAbandonFreesSuccessor) => latest,
            _ => owner,
        };
        self.inner.abandon(&key, owner).await
    }
}
