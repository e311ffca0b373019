//! Named locks: [`NamedLock`], its [`LockGuard`] and [`NamedLockExt`].

use std::fmt::{self, Debug};
use std::ops::AsyncFnOnce;
use std::sync::OnceLock;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lost::{LossReason, LossSignal, Lost};
use crate::observe::{HoldEnd, Observed, Tracked};
use crate::options::LockOptions;
use crate::token::FencingToken;

/// Session-scoped exclusion: held until released, or until the holder's session with the store
/// ends.
///
/// No ttl and no clock: a killed process frees its locks the moment the store sees its session
/// end. Not re-entrant, also within one process: a second call for a held key waits or gives
/// `None`. Locks of other kinds (leases, claims) and of other namespaces never meet it.
///
/// **Not guaranteed:** the lock is not a fence. A holder whose session was cut believes in its
/// lock until it next looks; check writes with [`LockGuard::token`].
#[async_trait]
pub trait NamedLock: Debug + Send + Sync + 'static {
    /// Takes the lock, waiting for it at most `opts.wait`.
    ///
    /// `Ok(None)`: somebody else held it for the whole wait.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store could not be reached or did not answer,
    /// [`ErrorKind::Exhausted`] if the handle or the store holds as many locks as it may,
    /// [`ErrorKind::Unsupported`] if the store is reached in a way that cannot hold a session
    /// lock, [`ErrorKind::Deadlock`] if the store chose this wait to break a cycle.
    ///
    /// # Cancel safety
    /// Safe: dropped at any moment it leaves no lock, no queue place and no task; a lock that was
    /// granted meanwhile is released in the background.
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>>;
}

/// What a backend does for a [`LockGuard`].
///
/// Dropping it releases in the background; it must not panic where no runtime is left.
#[async_trait]
pub trait LockHold: Debug + Send + Sync + 'static {
    /// Fetches the token, on the session that holds the lock.
    async fn token(&self) -> Result<FencingToken>;

    /// Releases; called once, after which dropping does nothing. `Ok` means that the store freed
    /// it, or that it was handed to the next local waiter.
    async fn release(&mut self) -> Result<()>;

    /// Looks once more, without I/O, whether the hold can still be believed in.
    fn is_alive(&self) -> bool {
        true
    }
}

/// A held [`NamedLock`]. Dropping it releases in the background, promptly.
pub struct LockGuard {
    key: Key,
    token: OnceLock<FencingToken>,
    signal: Tracked,
    hold: Box<dyn LockHold>,
}

impl Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", &self.key)
            .field("token", &self.token.get())
            .field("lost", &self.signal.reason())
            .finish_non_exhaustive()
    }
}

impl LockGuard {
    /// Builds a guard; for backend authors. `token` is given where the acquiring statement
    /// already fetched it.
    pub fn new(
        key: Key,
        token: Option<FencingToken>,
        signal: LossSignal,
        hold: Box<dyn LockHold>,
    ) -> Self {
        let token = token.map(OnceLock::from).unwrap_or_default();
        Self { key, token, signal: signal.into(), hold }
    }

    /// The locked key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The fencing token; fetched from the store on the first call where it costs something.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock is lost: a lost holder never gets one.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn token(&self) -> Result<FencingToken> {
        if let Some(token) = self.token.get() {
            return Ok(*token);
        }
        if !self.is_held() {
            return Err(lost_error("token", &self.key, self.signal.reason()));
        }
        let token = self.hold.token().await.map_err(|error| error.on_key(&self.key))?;
        self.signal.has_token(token);
        Ok(*self.token.get_or_init(|| token))
    }

    /// Tells when the lock is lost.
    pub fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// Whether the lock is still believed to be held. No I/O; false once lost, for ever.
    pub fn is_held(&self) -> bool {
        if self.signal.is_held() && !self.hold.is_alive() {
            self.signal.lose(LossReason::Silent);
        }
        self.signal.is_held()
    }

    /// Releases the lock and waits until the store has freed it, or until it is handed to the
    /// next waiter of this process.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if it had been lost before: what was done under it may have
    /// overlapped with another holder. [`ErrorKind::Unavailable`] if the store did not answer;
    /// it is then freed when the session ends.
    ///
    /// # Cancel safety
    /// Safe: once polled, the release goes on in the background.
    pub async fn release(mut self) -> Result<()> {
        let held = self.is_held();
        let mut result = self.hold.release().await;
        if !held {
            result = Err(lost_error("release", &self.key, self.signal.reason()));
        }
        self.signal.ended(&result, HoldEnd::Released, LossReason::SessionEnded);
        result.map_err(|error| error.on_key(&self.key))
    }
}

impl Observed for LockGuard {
    fn tracked(&self) -> &Tracked {
        &self.signal
    }

    fn known_token(&self) -> Option<FencingToken> {
        self.token.get().copied()
    }
}

/// The error for an operation on something that is lost.
pub(crate) fn lost_error(operation: &str, key: &Key, reason: Option<LossReason>) -> Error {
    let why = reason.map_or("it is held no longer", LossReason::as_str);
    Error::new(ErrorKind::Lost, format!("cannot {operation}: {why}")).on(key)
}

/// Closures over a [`NamedLock`]; implemented for all of them.
#[allow(async_fn_in_trait)] // auto traits of the future are inferred where it is called
pub trait NamedLockExt: NamedLock {
    /// Runs `work` under the lock and releases it; `Ok(None)` if the lock was not to be had.
    ///
    /// The work is stopped (its future dropped) when the lock is lost.
    ///
    /// # Errors
    /// Those of [`NamedLock::lock`], and [`ErrorKind::Lost`] if the lock was lost before the work
    /// ended. A release that failed otherwise is logged: the work was done under the lock.
    ///
    /// # Cancel safety
    /// As safe as `work`: the lock is released in the background.
    async fn with_lock<T, F>(&self, key: &Key, opts: LockOptions, work: F) -> Result<Option<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        let Some(guard) = self.lock(key, opts).await? else {
            return Ok(None);
        };
        let done = guard.lost().run_until_lost(work(&guard)).await;
        let done = done.map_err(|reason| lost_error("go on", key, Some(reason)))?;
        released("lock", guard.release().await)?;
        Ok(Some(done))
    }
}

impl<L: NamedLock + ?Sized> NamedLockExt for L {}

/// After the work: a loss counts, another failed release is only logged.
pub(crate) fn released(kind: &'static str, result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() != ErrorKind::Lost => {
            tracing::warn!(kind, %error, "release failed after the work was done");
            Ok(())
        }
        other => other,
    }
}
