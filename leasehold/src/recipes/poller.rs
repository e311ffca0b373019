//! [`Poller`]: a periodic job, ticked by whoever gets the lease.

use std::convert::Infallible;
use std::future::Future;
use std::ops::AsyncFnOnce;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, MissedTickBehavior};

use super::{lost_error, released};
use crate::{
    Error, ErrorKind, FencingToken, Key, Lease, LeaseGuard, LeaseOptions, LossReason, Result,
};

/// A periodic job that every process runs, of which one at a time does the work: it ticks only if
/// it gets the lease.
///
/// As in [ShedLock], a tick holds the lease *at most* so long, so that a dead process does not stop
/// the job, and *at least* so long, so that processes whose timers are apart do not each do a short
/// job once.
///
/// **Guaranteed:** no two ticks at a time; the work is dropped when the lease is lost and at the
/// latest after [`at_most`](Self::at_most); after a tick began nobody else's begins before
/// [`at_least`](Self::at_least) has passed, also if it failed, panicked, was dropped or its process
/// died.
///
/// **Not guaranteed:** that there is a tick in every period (see
/// [`Schedule`](super::Schedule) for that), nor a fence: check writes with the guard's token.
///
/// [ShedLock]: https://github.com/lukas-krecan/ShedLock
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::Poller;
/// use leasehold::Key;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let store = Arc::new(MemoryBackend::new());
/// let poller = Poller::new(store, Key::new("poll-feeds")?)
///     .at_most(Duration::from_secs(300))
///     .at_least(Duration::from_secs(20));
///
/// assert_eq!(poller.tick(async |_| "polled").await?, Some("polled"));
/// assert_eq!(poller.tick(async |_| "polled").await?, None, "within 20 s");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Poller {
    leases: Arc<dyn Lease>,
    key: Key,
    at_most: Duration,
    at_least: Duration,
    keep_alive: Option<Duration>,
}

impl Poller {
    /// A poller that holds the lease for at most 5 min and for no longer than its work.
    pub fn new(leases: Arc<dyn Lease>, key: Key) -> Self {
        let (at_most, at_least) = (Duration::from_secs(300), Duration::ZERO);
        Self { leases, key, at_most, at_least, keep_alive: None }
    }

    /// The longest tick, and after how long the lease of a dead process is free.
    #[must_use]
    pub fn at_most(self, at_most: Duration) -> Self {
        Self { at_most, ..self }
    }

    /// The shortest hold, counted from when the lease was had.
    #[must_use]
    pub fn at_least(self, at_least: Duration) -> Self {
        Self { at_least, ..self }
    }

    /// Takes a lease of this ttl (not shorter than [`at_least`](Self::at_least)) and renews it
    /// while the work runs, so that a dead process's is free after the ttl already. By default the
    /// ttl is [`at_most`](Self::at_most) and nothing is renewed.
    #[must_use]
    pub fn keep_alive(self, ttl: Duration) -> Self {
        Self { keep_alive: Some(ttl), ..self }
    }

    /// Does `work` if the lease is free at this moment; `Ok(None)` if not.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] if `at_least` is longer than `at_most` or a time is out of the
    /// range of a ttl; those of [`Lease::lease`]; [`ErrorKind::Lost`] if the lease was lost, or
    /// `at_most` passed, before the work ended.
    ///
    /// # Cancel safety
    /// As safe as `work`; the lease is kept for `at_least` and released in the background.
    pub async fn tick<T>(&self, work: impl AsyncFnOnce(&LeaseGuard) -> T) -> Result<Option<T>> {
        let Some(guard) = self.leases.lease(&self.key, self.options()?).await? else {
            return Ok(None);
        };
        let kept = Kept::new(guard, self.at_least);
        let lost = kept.guard().lost();
        let done = tokio::select! {
            biased;
            reason = lost.wait() => Err(lost_error(&self.key, reason)),
            () = tokio::time::sleep(self.at_most) => {
                Err(lost_error(&self.key, LossReason::Expired))
            }
            done = work(kept.guard()) => Ok(done),
        }?;
        kept.end().await?;
        Ok(Some(done))
    }

    /// Ticks every `interval` until it is dropped; the first time at once. A failed tick is logged.
    /// A tick that takes longer delays the next. The work gets the fencing token of its lease.
    ///
    /// # Errors
    /// Only [`ErrorKind::InvalidOptions`], as [`tick`](Self::tick).
    ///
    /// # Cancel safety
    /// As [`tick`](Self::tick).
    pub async fn run<F: Future<Output = ()>>(
        &self,
        interval: Duration,
        mut work: impl FnMut(FencingToken) -> F,
    ) -> Result<Infallible> {
        if interval.is_zero() {
            return Err(Error::new(ErrorKind::InvalidOptions, "an interval must not be zero"));
        }
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.tick(async |guard: &LeaseGuard| work(guard.token()).await).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::InvalidOptions => return Err(error),
                Err(error) => tracing::warn!(key = %self.key, %error, "tick failed"),
            }
        }
    }

    fn options(&self) -> Result<LeaseOptions> {
        if self.at_least > self.at_most {
            let (least, most) = (self.at_least, self.at_most);
            let detail = format!("at_least is {least:?}, longer than at_most, {most:?}");
            return Err(Error::new(ErrorKind::InvalidOptions, detail).on(&self.key));
        }
        let opts = LeaseOptions::try_once();
        Ok(match self.keep_alive {
            None => opts.ttl(self.at_most).manual_renewal(),
            Some(ttl) => {
                let ttl = ttl.min(self.at_most).max(self.at_least);
                opts.ttl(ttl).max_hold(self.at_most)
            }
        })
    }
}

/// Keeps the lease until a moment, whatever becomes of the work.
#[derive(Debug)]
struct Kept {
    guard: Option<LeaseGuard>,
    until: Instant,
    runtime: Handle,
}

impl Kept {
    fn new(guard: LeaseGuard, at_least: Duration) -> Self {
        let until = Instant::now() + at_least;
        Self { guard: Some(guard), until, runtime: Handle::current() }
    }

    fn guard(&self) -> &LeaseGuard {
        self.guard.as_ref().expect("it is taken by the methods that consume it")
    }

    /// The work is done: releases now if the time has passed, otherwise in the background.
    async fn end(mut self) -> Result<()> {
        if Instant::now() < self.until {
            return Ok(());
        }
        match self.guard.take() {
            Some(guard) => released(guard.release().await),
            None => Ok(()),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let (Some(guard), until) = (self.guard.take(), self.until) else { return };
        if until <= Instant::now() {
            return;
        }
        // where the runtime ends the guard is dropped, and freed at once if anybody can do it
        let _context = self.runtime.enter();
        self.runtime.spawn(async move {
            tokio::time::sleep_until(until).await;
            drop(guard);
        });
    }
}
