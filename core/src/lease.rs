//! Leases: [`Lease`], its [`LeaseGuard`] and [`LeaseExt`].

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::AsyncFnOnce;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::error::Result;
use crate::key::Key;
use crate::lost::{LossReason, LossSignal, Lost};
use crate::named::{lost_error, released};
use crate::observe::{HoldEnd, Observed, Tracked};
use crate::options::LeaseOptions;
use crate::token::FencingToken;

/// Time-scoped exclusion: held until released, or until its ttl passes without a renewal.
///
/// Only the store's clock decides expiry; the holder goes by a local monotonic deadline counted
/// from *before* the request was sent, minus a drift margin of 1 % of the ttl plus 2 ms, so that
/// it always gives up first. Not re-entrant, also within one process.
///
/// **Not guaranteed:** the lease is not a fence. A holder that is paused between a check and a
/// write may write late; use [`LeaseGuard::verify`] or compare [`LeaseGuard::token`].
#[async_trait]
pub trait Lease: Debug + Send + Sync + 'static {
    /// Takes the lease, waiting for it at most `opts.wait`.
    ///
    /// `Ok(None)`: somebody else held it for the whole wait.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`](crate::ErrorKind::InvalidOptions) for a ttl out of range,
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store could not be reached
    /// or did not answer.
    ///
    /// # Cancel safety
    /// Safe: dropped at any moment it leaves no lease, no queue place and no task; a lease that
    /// was granted meanwhile is released in the background.
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>>;
}

/// What a backend does for a [`LeaseGuard`].
///
/// Dropping it releases in the background; it must not panic where no runtime is left.
#[async_trait]
pub trait LeaseHold: Debug + Send + Sync + 'static {
    /// Renews now, for another ttl.
    async fn renew(&self) -> Result<()>;

    /// Releases; called once, after which dropping does nothing.
    async fn release(&mut self) -> Result<()>;

    /// Checks inside the caller's transaction that the lease is still held, and keeps it from
    /// being taken over until that transaction ends.
    async fn verify(&self, tx: &mut (dyn Any + Send)) -> Result<()>;
}

/// A held [`Lease`]. Dropping it stops the renewals and releases in the background, promptly; a
/// *forgotten* guard is renewed for ever unless [`LeaseOptions::max_hold`] is set.
pub struct LeaseGuard {
    key: Key,
    token: FencingToken,
    signal: Tracked,
    hold: Box<dyn LeaseHold>,
}

impl Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard")
            .field("key", &self.key)
            .field("token", &self.token)
            .field("lost", &self.signal.reason())
            .finish_non_exhaustive()
    }
}

impl LeaseGuard {
    /// Builds a guard; for backend authors. The signal must have a deadline.
    pub fn new(
        key: Key,
        token: FencingToken,
        signal: LossSignal,
        hold: Box<dyn LeaseHold>,
    ) -> Self {
        Self { key, token, signal: signal.into(), hold }
    }

    /// The leased key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The fencing token; the same for the whole hold, renewals included.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Tells when the lease is lost.
    pub fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// Whether the lease is still believed to be held. No I/O; false once lost, for ever.
    pub fn is_held(&self) -> bool {
        self.signal.is_held()
    }

    /// The time until the local deadline; zero once lost.
    pub fn remaining(&self) -> Duration {
        match self.signal.deadline() {
            Some(deadline) if self.is_held() => deadline.saturating_duration_since(Instant::now()),
            _ => Duration::ZERO,
        }
    }

    /// Renews now, for another ttl from now.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if it is lost: a renewal never resurrects.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store did not answer; it
    /// is then held until the deadline.
    ///
    /// # Cancel safety
    /// Safe: the renewal may or may not happen.
    pub async fn renew(&self) -> Result<()> {
        if !self.is_held() {
            return Err(lost_error("renew", &self.key, self.signal.reason()));
        }
        self.hold.renew().await.map_err(|error| error.on_key(&self.key))
    }

    /// Fails unless the lease is still held, by the store's clock, and keeps it from being taken
    /// over until the transaction ends. Call it in the transaction that does the guarded write.
    ///
    /// `tx` is the backend's own transaction type (the one that
    /// [`Claim::tx`](crate::Claim::tx) gives).
    ///
    /// # Errors
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if it is held no longer (roll back),
    /// [`ErrorKind::WrongBackend`](crate::ErrorKind::WrongBackend) for another transaction type.
    ///
    /// # Cancel safety
    /// That of a statement on `tx`.
    pub async fn verify<T: Any + Send>(&self, tx: &mut T) -> Result<()> {
        if !self.is_held() {
            return Err(lost_error("verify", &self.key, self.signal.reason()));
        }
        self.hold.verify(tx).await.map_err(|error| error.on_key(&self.key))
    }

    /// Stops the renewals, releases the lease and waits until the store has freed it.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if it had been lost before: what was done under
    /// it may have overlapped with another holder.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store did not answer; the
    /// release is tried on in the background until the ttl has passed.
    ///
    /// # Cancel safety
    /// Safe: once polled, the release goes on in the background.
    pub async fn release(mut self) -> Result<()> {
        let reason = self.signal.reason();
        let mut result = self.hold.release().await;
        if reason.is_some() {
            result = Err(lost_error("release", &self.key, reason));
        }
        self.signal.ended(&result, HoldEnd::Released, LossReason::Taken);
        result.map_err(|error| error.on_key(&self.key))
    }
}

impl Observed for LeaseGuard {
    fn tracked(&self) -> &Tracked {
        &self.signal
    }

    fn known_token(&self) -> Option<FencingToken> {
        Some(self.token)
    }
}

/// Closures over a [`Lease`]; implemented for all of them.
#[allow(async_fn_in_trait)] // auto traits of the future are inferred where it is called
pub trait LeaseExt: Lease {
    /// Runs `work` under the lease and releases it; `Ok(None)` if the lease was not to be had.
    ///
    /// The work is stopped (its future dropped) when the lease is lost.
    ///
    /// # Errors
    /// Those of [`Lease::lease`], and [`ErrorKind::Lost`](crate::ErrorKind::Lost) if the lease was
    /// lost before the work ended. A release that failed otherwise is logged.
    ///
    /// # Cancel safety
    /// As safe as `work`: the lease is released in the background.
    async fn with_lease<T, F>(&self, key: &Key, opts: LeaseOptions, work: F) -> Result<Option<T>>
    where
        F: AsyncFnOnce(&LeaseGuard) -> T,
    {
        let Some(guard) = self.lease(key, opts).await? else {
            return Ok(None);
        };
        let done = guard.lost().run_until_lost(work(&guard)).await;
        let done = done.map_err(|reason| lost_error("go on", key, Some(reason)))?;
        released("lease", guard.release().await)?;
        Ok(Some(done))
    }
}

impl<L: Lease + ?Sized> LeaseExt for L {}
