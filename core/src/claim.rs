//! Claims: [`ClaimLock`], [`Claim`] and [`ClaimLockExt`].

use std::any::{Any, TypeId};
use std::fmt::{self, Debug};
use std::future::Future;
use std::ops::AsyncFnOnce;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tracing::Instrument;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, Keys};
use crate::lost::{LossReason, LossSignal, Lost};
use crate::observe::{HoldEnd, Observed, Tracked};
use crate::options::ClaimOptions;
use crate::steer::steered;
use crate::token::FencingToken;

/// How long a commit may take before its outcome counts as unknown.
pub const COMMIT_LIMIT: Duration = Duration::from_secs(30);

/// Transaction-scoped exclusion over a set of keys: all or nothing, until the transaction ends.
///
/// Counting and writing happen *on the claim's own transaction*, so a holder never needs a second
/// connection. The transaction reads what earlier holders of the keys have committed (READ
/// COMMITTED on SQL: a snapshot older than the lock would defeat it). Not re-entrant: a second
/// claim of a key waits, also within one process.
#[async_trait]
pub trait ClaimLock: Debug + Send + Sync + 'static {
    /// The type that [`Claim::tx`] gives, so that a service can refuse a wrong backend at its
    /// start.
    fn tx_type(&self) -> TypeId;

    /// Begins a transaction that holds all `keys`, waiting for them together at most `opts.wait`.
    ///
    /// Keys are taken in one global order, so that claims of overlapping sets do not deadlock.
    /// `Ok(None)`: somebody else held one of them for the whole wait; nothing is held then.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store could not be reached, did not answer, or no
    /// connection was free in time, [`ErrorKind::Deadlock`] if the store chose this wait to break
    /// a cycle.
    ///
    /// # Cancel safety
    /// Safe: dropped at any moment it leaves no lock, no open transaction and no connection in
    /// use.
    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>>;
}

/// What a backend does for a [`Claim`]: the open transaction.
///
/// Dropping it must roll back and must not give a connection with an open transaction back to its
/// pool.
#[async_trait]
pub trait ClaimTx: Debug + Send + 'static {
    /// The claim's token.
    fn token(&self) -> FencingToken;

    /// The backend's own transaction.
    fn tx(&mut self) -> &mut (dyn Any + Send);

    /// Dedupe inside this transaction: whether `key` is seen for the first time.
    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool>;

    /// Commits and frees the keys. [`ErrorKind::CommitUnknown`] if the answer was lost.
    async fn commit(self: Box<Self>) -> Result<()>;

    /// Rolls back and frees the keys.
    async fn rollback(self: Box<Self>) -> Result<()>;

    /// Why it takes no more statements, e.g. because one was dropped before its answer had come and
    /// the next would get that answer; none where the driver itself knows.
    fn broken(&self) -> Option<Error> {
        None
    }

    /// The signal of a claim that can be lost while it is open; none where the transaction itself
    /// fails then.
    fn signal(&self) -> Option<LossSignal> {
        None
    }
}

type Hook = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An open transaction that holds its keys. Dropping it rolls back in the background.
pub struct Claim {
    keys: Keys,
    token: FencingToken,
    backend: &'static str,
    signal: Tracked,
    hooks: Vec<Hook>,
    open: Option<Open>,
    runtime: Handle,
}

/// The transaction, and what must not be freed before it has ended (local queue places).
struct Open {
    tx: Box<dyn ClaimTx>,
    places: Box<dyn Any + Send>,
}

impl Claim {
    /// Builds a claim; for backend authors. `places` is dropped after the transaction has ended.
    /// Must be called within a tokio runtime.
    pub fn new(
        backend: &'static str,
        keys: Keys,
        tx: Box<dyn ClaimTx>,
        places: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            keys,
            token: tx.token(),
            backend,
            signal: tx.signal().unwrap_or_default().into(),
            hooks: Vec::new(),
            open: Some(Open { tx, places }),
            runtime: Handle::current(),
        }
    }

    /// The claimed keys.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The fencing token: greater than those of all earlier claims of each of its keys.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Tells when the claim is lost while it is open. Where the store ends the transaction with
    /// the session (SQL), the next statement fails instead.
    pub fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// The backend's own transaction.
    ///
    /// # Errors
    /// [`ErrorKind::WrongBackend`] if it is not a `T`.
    pub fn tx<T: Any>(&mut self) -> Result<&mut T> {
        let backend = self.backend;
        if let Some(error) = self.open_tx().broken() {
            return Err(error.at(backend, "tx"));
        }
        self.open_tx().tx().downcast_mut().ok_or_else(|| {
            let wanted = std::any::type_name::<T>();
            Error::new(ErrorKind::WrongBackend, format!("the transaction is not a {wanted}"))
                .at(backend, "tx")
        })
    }

    /// Whether `key` is seen for the first time within `retain`, inside this transaction: rolled
    /// back with it, and it never aborts it.
    ///
    /// # Errors
    /// Those of a statement on the transaction.
    ///
    /// # Cancel safety
    /// That of a statement on the transaction: drop the claim after it.
    pub async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        crate::DedupeOptions::default().retain(retain).check()?;
        let backend = self.backend;
        let seen = self.open_tx().first_seen(key, retain).await;
        seen.map_err(|error| error.at(backend, "first_seen").on(key))
    }

    /// Registers what to do after the commit: in order, once, and only after a commit that is
    /// known to have happened. The future is not polled before; on a rollback it is dropped.
    ///
    /// **Not guaranteed:** hooks die with the process. Use an outbox where that matters.
    pub fn after_commit(&mut self, hook: impl Future<Output = ()> + Send + 'static) {
        self.hooks.push(Box::pin(hook));
    }

    /// Commits, frees the keys and runs the hooks; returns after the last hook.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if a key was lost: nothing is written. [`ErrorKind::CommitUnknown`] if
    /// the answer was lost. In every error the hooks are dropped.
    ///
    /// # Cancel safety
    /// Safe: once polled, commit and hooks go on in the background.
    pub async fn commit(mut self) -> Result<()> {
        let Some(Open { tx, places }) = self.open.take() else {
            return Ok(());
        };
        let hooks = std::mem::take(&mut self.hooks);
        let signal = self.signal.hand_over();
        let (backend, keys) = (self.backend, self.keys.clone());
        let commit = async move {
            let outcome = tokio::time::timeout(COMMIT_LIMIT, tx.commit()).await;
            let outcome = outcome.unwrap_or_else(|_| {
                let detail = format!("no answer to the commit within {COMMIT_LIMIT:?}");
                Err(Error::new(ErrorKind::CommitUnknown, detail))
            });
            let outcome = outcome.map_err(|error| error.at(backend, "commit").on(&keys));
            signal.settle();
            signal.committed(backend, &keys, &outcome);
            drop(places);
            outcome?;
            for hook in hooks {
                if AssertUnwindSafe(hook).catch_unwind().await.is_err() {
                    tracing::error!("an after_commit hook panicked");
                }
            }
            Ok(())
        };
        let task = self.runtime.spawn(steered(commit.in_current_span()));
        let outcome = task.await.unwrap_or_else(|error| {
            let detail = "the runtime ended during the commit";
            Err(Error::new(ErrorKind::CommitUnknown, detail).with_source(error))
        });
        outcome.map_err(|error| error.at(self.backend, "commit").on(&self.keys))
    }

    /// Rolls back and frees the keys; hooks are dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store did not answer; it rolls back by itself then.
    ///
    /// # Cancel safety
    /// Safe: once polled, it goes on in the background.
    pub async fn rollback(mut self) -> Result<()> {
        let outcome = match self.start_rollback() {
            Some(task) => task.await.unwrap_or(Ok(())), // a runtime that ended dropped it
            None => Ok(()),
        };
        self.signal.ended(&outcome, HoldEnd::RolledBack, LossReason::Taken);
        outcome.map_err(|error| error.at(self.backend, "rollback").on(&self.keys))
    }

    fn start_rollback(&mut self) -> Option<tokio::task::JoinHandle<Result<()>>> {
        let Open { tx, places } = self.open.take()?;
        self.hooks.clear();
        self.signal.settle();
        // Where the runtime has shut down, spawn drops the transaction here and now: it needs the
        // runtime's context for that.
        let _context = self.runtime.enter();
        Some(self.runtime.spawn(steered(async move {
            let outcome = tokio::time::timeout(COMMIT_LIMIT, tx.rollback()).await;
            drop(places);
            outcome.unwrap_or_else(|_| {
                let detail = format!("no answer to the rollback within {COMMIT_LIMIT:?}");
                Err(Error::new(ErrorKind::Unavailable, detail))
            })
        })))
    }

    fn open_tx(&mut self) -> &mut dyn ClaimTx {
        // `open` is taken only by the methods that consume the claim
        &mut *self.open.as_mut().expect("an open claim has its transaction").tx
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.start_rollback();
    }
}

impl Observed for Claim {
    fn tracked(&self) -> &Tracked {
        &self.signal
    }

    fn known_token(&self) -> Option<FencingToken> {
        Some(self.token)
    }
}

impl Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("backend", &self.backend)
            .field("keys", &self.keys)
            .field("token", &self.token)
            .field("hooks", &self.hooks.len())
            .finish_non_exhaustive()
    }
}

/// Closures over a [`ClaimLock`]; implemented for all of them.
#[allow(async_fn_in_trait)] // auto traits of the future are inferred where it is called
pub trait ClaimLockExt: ClaimLock {
    /// Runs `work` on a claim, commits if it returns `Ok` and rolls back if it returns `Err`;
    /// `Ok(None)` if the keys were not to be had: the work has not run then.
    ///
    /// # Errors
    /// Those of [`ClaimLock::claim`] and [`Claim::commit`], and the work's own.
    ///
    /// # Cancel safety
    /// As safe as `work`: the claim is rolled back in the background.
    async fn with_claim<T, E, F>(
        &self,
        keys: &Keys,
        opts: ClaimOptions,
        work: F,
    ) -> Result<Option<T>, E>
    where
        F: AsyncFnOnce(&mut Claim) -> Result<T, E>,
        E: From<Error>,
    {
        let Some(mut claim) = self.claim(keys, opts).await? else {
            return Ok(None);
        };
        match work(&mut claim).await {
            Ok(done) => {
                claim.commit().await?;
                Ok(Some(done))
            }
            Err(error) => {
                if let Err(rollback) = claim.rollback().await {
                    tracing::warn!(error = %rollback, "rollback failed after the work had failed");
                }
                Err(error)
            }
        }
    }
}

impl<L: ClaimLock + ?Sized> ClaimLockExt for L {}
