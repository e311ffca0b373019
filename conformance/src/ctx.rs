//! [`Ctx`]: what a case works with, so that it reads like prose.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use leasehold_core::{
    Admission, Claim, ClaimOptions, DedupeGuard, DedupeOptions, Error, ErrorKind, Key, Keys,
    LeaseGuard, LeaseOptions, LockGuard, LockOptions, LossReason, Lost,
};
use tokio::task::JoinSet;

use crate::fault::{Fault, Verdict, ensure};
use crate::harness::{Handle, Harness};
use crate::holder::Holder;

/// How long a case waits for what must happen soon: generous, for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a case waits for the news that a silent store is lost.
pub(crate) const SILENCE_BOUND: Duration = Duration::from_secs(30);
/// A ttl that never runs out within a case.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// The harness, a namespace of its own, and helpers.
#[derive(Clone, Debug)]
pub struct Ctx {
    harness: Arc<dyn Harness>,
    namespace: Arc<str>,
    /// Kept until the end, so that what a live handle leaves behind is seen.
    kept: Arc<Mutex<Vec<Handle>>>,
}

impl Ctx {
    /// A fresh namespace on a harness.
    pub(crate) fn new(harness: Arc<dyn Harness>) -> Self {
        let namespace = format!("conf-{:016x}", rand::random::<u64>());
        Self { harness, namespace: namespace.into(), kept: Arc::default() }
    }

    /// The store under test.
    pub(crate) fn harness(&self) -> &dyn Harness {
        &*self.harness
    }

    /// The same with another harness, e.g. a private one.
    pub(crate) fn on(&self, harness: Arc<dyn Harness>) -> Self {
        Self { harness, ..self.clone() }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Opens a handle: one process of the service.
    pub(crate) async fn open(&self) -> Result<Handle, Fault> {
        let handle = self.open_for_now().await?;
        self.keep(handle.clone());
        Ok(handle)
    }

    /// Two processes of the service.
    pub(crate) async fn two(&self) -> Result<(Handle, Handle), Fault> {
        Ok((self.open().await?, self.open().await?))
    }

    /// Opens a handle that ends when the case drops it.
    pub(crate) async fn open_for_now(&self) -> Result<Handle, Fault> {
        let opened = self.harness.open(&self.namespace).await;
        opened.map_err(|error| Fault::from(error).during("opening a handle"))
    }

    /// Takes a lease as a process that then dies without a word: its runtime ends with everything
    /// in it, and nothing is released. Gives the token.
    pub(crate) async fn vanished_lease(&self, name: &str, ttl: Duration) -> Result<u64, Fault> {
        let (ctx, name) = (self.clone(), name.to_owned());
        let dies = move || -> Result<u64, Fault> {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let token = runtime.block_on(async {
                let handle = ctx.open_for_now().await?;
                let guard = handle.leased_once(&name, ttl).await?;
                let token = guard.token().value();
                std::mem::forget((guard, handle));
                Ok::<_, Fault>(token)
            });
            runtime.shutdown_background();
            token
        };
        tokio::task::spawn_blocking(dies).await?
    }

    fn keep(&self, handle: Handle) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
    }

    /// Starts another process of the service, with more environment variables if wanted.
    pub(crate) async fn process(&self, env: &[(&str, &str)]) -> Result<Holder, Fault> {
        Holder::start(&*self.harness, &self.namespace, env).await
    }

    /// The name of a number on the store that no other case uses.
    pub(crate) fn number(&self, name: &str) -> String {
        format!("{}-{name}", self.namespace)
    }

    /// The committed number, none counting as zero.
    pub(crate) async fn committed(&self, name: &str) -> Result<i64, Fault> {
        let number = self.harness.committed(&self.number(name)).await?;
        Ok(number.unwrap_or(0))
    }

    /// Reads a number on the claim's transaction, none counting as zero.
    pub(crate) async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64, Fault> {
        let number = self.harness.read(claim, &self.number(name)).await?;
        Ok(number.unwrap_or(0))
    }

    /// Writes a number on the claim's transaction.
    pub(crate) async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Verdict {
        Ok(self.harness.write(claim, &self.number(name), value).await?)
    }

    /// A write that is guarded by the lease.
    pub(crate) async fn guarded_write(
        &self,
        handle: &Handle,
        lease: &LeaseGuard,
        name: &str,
        value: i64,
    ) -> leasehold_core::Result<()> {
        let name = self.number(name);
        self.harness.guarded_write(handle, lease, &name, value).await
    }

    /// Waits until nothing of the namespace is left on the store.
    pub(crate) async fn nothing_left(&self, within: Duration) -> Verdict {
        let deadline = Instant::now() + within;
        loop {
            let left = self.harness.leftovers(&self.namespace).await?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "expected nothing to be left on the store within {within:?}, but there is:\n  {}",
                left.join("\n  ")
            );
            pause().await;
        }
    }

    /// Ends the network faults and closes the handles.
    pub(crate) async fn tidy(&self) {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        let mut closing = JoinSet::new();
        for handle in kept {
            closing.spawn(async move {
                drop(handle.link.heal().await); // a harness that cannot make silence
                drop(tokio::time::timeout(PATIENCE, handle.backend.close()).await); // best effort
            });
        }
        closing.join_all().await;
    }
}

/// A short pause between two looks at a condition.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

/// Waits for what must happen soon.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Result<T, Fault> {
    within(PATIENCE, what, future).await
}

/// Waits for what must happen within a bound.
pub(crate) async fn within<T>(
    bound: Duration,
    what: &str,
    future: impl Future<Output = T>,
) -> Result<T, Fault> {
    tokio::time::timeout(bound, future)
        .await
        .map_err(|_| Fault::new(format!("expected {what} within {bound:?}")))
}

/// Looks again and again until the condition holds.
pub(crate) async fn eventually<F: Future<Output = Result<bool, Fault>>>(
    what: &str,
    mut holds: impl FnMut() -> F,
) -> Verdict {
    let looks = async {
        while !holds().await? {
            pause().await;
        }
        Ok(())
    };
    soon(what, looks).await?
}

/// Polls once: whether the future is still pending. It has its queue place then.
pub(crate) async fn is_waiting<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx).is_pending())).await
}

/// Waits for all tasks; the first fault counts.
pub(crate) async fn all(tasks: JoinSet<Verdict>) -> Verdict {
    let mut tasks = tasks;
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// A key.
pub(crate) fn key(name: &str) -> Key {
    Key::new(name).expect("a case's key is valid")
}

/// A set of keys.
pub(crate) fn keys(names: &[&str]) -> Keys {
    Keys::new(names).expect("a case's keys are valid")
}

/// Expects an error of this kind.
pub(crate) fn fails<T>(
    what: &str,
    kind: ErrorKind,
    outcome: Result<T, Error>,
) -> Result<Error, Fault> {
    match outcome {
        Err(error) if error.kind() == kind => Ok(error),
        Err(error) => Err(Fault::new(format!(
            "expected {what} to fail as {kind:?}, it failed as {:?}: {error}",
            error.kind()
        ))),
        Ok(_) => Err(Fault::new(format!("expected {what} to fail as {kind:?}, it succeeded"))),
    }
}

/// Expects the news of a loss within a bound.
pub(crate) async fn is_lost(bound: Duration, what: &str, lost: &Lost) -> Result<LossReason, Fault> {
    within(bound, &format!("the loss of {what} to be told"), lost.wait()).await
}

/// What a handle does in a case, with the expectation in the name.
#[async_trait]
pub(crate) trait HandleExt {
    /// Takes a lock that must be to be had.
    async fn locked(&self, name: &str) -> Result<LockGuard, Fault>;
    /// Tries for a lock.
    async fn try_lock(&self, name: &str) -> Result<Option<LockGuard>, Fault>;
    /// Waits for a lock.
    async fn lock_within(&self, name: &str, wait: Duration) -> Result<Option<LockGuard>, Fault>;
    /// Takes a lease that must be to be had, renewed by the heartbeat.
    async fn leased(&self, name: &str, ttl: Duration) -> Result<LeaseGuard, Fault>;
    /// Takes a lease that must be to be had, not renewed.
    async fn leased_once(&self, name: &str, ttl: Duration) -> Result<LeaseGuard, Fault>;
    /// Tries for a lease of a long ttl.
    async fn try_lease(&self, name: &str) -> Result<Option<LeaseGuard>, Fault>;
    /// Waits for a lease of a long ttl.
    async fn lease_within(&self, name: &str, wait: Duration) -> Result<Option<LeaseGuard>, Fault>;
    /// Claims keys that must be to be had.
    async fn claimed(&self, names: &[&str]) -> Result<Claim, Fault>;
    /// Tries for keys.
    async fn try_claim(&self, names: &[&str]) -> Result<Option<Claim>, Fault>;
    /// Waits for keys.
    async fn claim_within(&self, names: &[&str], wait: Duration) -> Result<Option<Claim>, Fault>;
    /// Admits a key.
    async fn admission(&self, name: &str) -> Result<Admission, Fault>;
    /// Admits a key that must be the first.
    async fn admitted(&self, name: &str, opts: DedupeOptions) -> Result<DedupeGuard, Fault>;
}

fn had<T>(what: &str, name: &str, taken: Option<T>) -> Result<T, Fault> {
    taken.ok_or_else(|| {
        Fault::new(format!(
            "expected the {what} {name:?} to be to be had within {PATIENCE:?}, others have it"
        ))
    })
}

#[async_trait]
impl HandleExt for Handle {
    async fn locked(&self, name: &str) -> Result<LockGuard, Fault> {
        had("lock", name, self.lock_within(name, PATIENCE).await?)
    }

    async fn try_lock(&self, name: &str) -> Result<Option<LockGuard>, Fault> {
        self.lock_within(name, Duration::ZERO).await
    }

    async fn lock_within(&self, name: &str, wait: Duration) -> Result<Option<LockGuard>, Fault> {
        let opts = LockOptions::default().wait(wait);
        Ok(self.backend.lock(&key(name), opts).await?)
    }

    async fn leased(&self, name: &str, ttl: Duration) -> Result<LeaseGuard, Fault> {
        let opts = LeaseOptions::default().ttl(ttl).wait(PATIENCE);
        had("lease", name, self.backend.lease(&key(name), opts).await?)
    }

    async fn leased_once(&self, name: &str, ttl: Duration) -> Result<LeaseGuard, Fault> {
        let opts = LeaseOptions::default().ttl(ttl).wait(PATIENCE);
        let opts = opts.manual_renewal();
        had("lease", name, self.backend.lease(&key(name), opts).await?)
    }

    async fn try_lease(&self, name: &str) -> Result<Option<LeaseGuard>, Fault> {
        self.lease_within(name, Duration::ZERO).await
    }

    async fn lease_within(&self, name: &str, wait: Duration) -> Result<Option<LeaseGuard>, Fault> {
        let opts = LeaseOptions::default().ttl(LONG).wait(wait);
        Ok(self.backend.lease(&key(name), opts).await?)
    }

    async fn claimed(&self, names: &[&str]) -> Result<Claim, Fault> {
        let taken = self.claim_within(names, PATIENCE).await?;
        had("claim", &names.join(", "), taken)
    }

    async fn try_claim(&self, names: &[&str]) -> Result<Option<Claim>, Fault> {
        self.claim_within(names, Duration::ZERO).await
    }

    async fn claim_within(&self, names: &[&str], wait: Duration) -> Result<Option<Claim>, Fault> {
        let opts = ClaimOptions::default().wait(wait);
        Ok(self.backend.claim(&keys(names), opts).await?)
    }

    async fn admission(&self, name: &str) -> Result<Admission, Fault> {
        let opts = DedupeOptions::default();
        Ok(self.backend.admit(&key(name), opts).await?)
    }

    async fn admitted(&self, name: &str, opts: DedupeOptions) -> Result<DedupeGuard, Fault> {
        match self.backend.admit(&key(name), opts).await? {
            Admission::First(guard) => Ok(guard),
            other => Err(Fault::new(format!(
                "expected {name:?} to be admitted as the first, the answer was {other:?}"
            ))),
        }
    }
}
