//! [`Housekeeper`]: sweeps, run by one process at a time.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use super::Poller;
use crate::{Backend, Key, Result};

/// The name of the store's own sweep.
const STORE: &str = "store";
/// The lease of a process that died while it swept is free after the interval, within these bounds.
const TTL: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

type Swept = Pin<Box<dyn Future<Output = Result<u64, Box<dyn StdError + Send + Sync>>> + Send>>;
type SweepFn = Arc<dyn Fn() -> Swept + Send + Sync>;

/// Runs the sweeps of a service, and the store's own [`housekeep`](Backend::housekeep), every 30 s
/// in one of its processes.
///
/// Each process runs one; whoever gets the lease sweeps, and keeps the lease for most of the
/// interval, so that the fleet sweeps once in it. A sweep that fails, panics or takes too long is
/// reported and does not keep the others from running.
///
/// **Guaranteed:** no two processes sweep at a time; sweeping stops (the sweep is dropped) when the
/// lease is lost.
///
/// **Not guaranteed:** a fence: a sweep should be one that may run twice.
///
/// ```
/// use std::sync::Arc;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::{Housekeeper, Sweep};
/// use leasehold::{Error, Key};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let store = Arc::new(MemoryBackend::new());
/// let housekeeper = Housekeeper::new(store, Key::new("housekeeping")?);
/// housekeeper.register_sweep("old deliveries", async || {
///     Ok::<_, Error>(3) // DELETE FROM deliveries WHERE …
/// });
/// // tokio::spawn(async move { housekeeper.run().await });
/// let reports = housekeeper.sweep().await?.expect("nobody else sweeps");
/// assert_eq!(reports[1].outcome, Sweep::Removed(3));
/// assert!(housekeeper.sweep().await?.is_none(), "it has been swept in this interval");
/// # Ok(())
/// # }
/// ```
pub struct Housekeeper {
    backend: Arc<dyn Backend>,
    key: Key,
    interval: Duration,
    limit: Duration,
    sweeps: Mutex<Vec<(String, SweepFn)>>,
}

impl fmt::Debug for Housekeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.registered().into_iter().map(|(name, _)| name).collect();
        f.debug_struct("Housekeeper")
            .field("key", &self.key)
            .field("interval", &self.interval)
            .field("sweeps", &names)
            .finish_non_exhaustive()
    }
}

/// How one sweep went.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepReport {
    /// Its name; `store` is the store's own.
    pub name: String,
    /// How long it took.
    pub took: Duration,
    /// What came of it.
    pub outcome: Sweep,
}

/// What came of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sweep {
    /// It removed so many.
    Removed(u64),
    /// It failed, panicked or took too long; in words.
    Failed(String),
}

impl Housekeeper {
    /// Sweeps every 30 s under a lease of `key`; a sweep may take 2 min.
    pub fn new(backend: Arc<dyn Backend>, key: Key) -> Self {
        let (interval, limit) = (Duration::from_secs(30), Duration::from_secs(120));
        Self { backend, key, interval, limit, sweeps: Mutex::default() }
    }

    /// How often to sweep; from [`MIN_TTL`](crate::MIN_TTL) to [`MAX_TTL`](crate::MAX_TTL).
    #[must_use]
    pub fn interval(self, interval: Duration) -> Self {
        Self { interval, ..self }
    }

    /// How long one sweep may take.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Registers a sweep, which gives how many it removed; a name that is registered is replaced.
    /// May be called at any time, also while it runs.
    pub fn register_sweep<F, Fut, E>(&self, name: impl Into<String>, sweep: F)
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<u64, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let name = name.into();
        let sweep: SweepFn = Arc::new(move || {
            let swept = sweep();
            Box::pin(async move { swept.await.map_err(Into::into) })
        });
        let mut sweeps = self.sweeps.lock().unwrap_or_else(PoisonError::into_inner);
        match sweeps.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = sweep,
            None => sweeps.push((name, sweep)),
        }
    }

    /// Sweeps now, if nobody swept in this interval: the store first, then in the order of
    /// registration. `Ok(None)` if somebody did, or is at it.
    ///
    /// # Errors
    /// Those of [`Poller::tick`]; that of a sweep is in its report.
    ///
    /// # Cancel safety
    /// As safe as the sweeps; the lease is kept for the rest of the interval.
    pub async fn sweep(&self) -> Result<Option<Vec<SweepReport>>> {
        self.poller().tick(async |_| self.each().await).await
    }

    /// Sweeps in every interval until it is dropped; failures are logged.
    ///
    /// # Errors
    /// Only [`ErrorKind::InvalidOptions`](crate::ErrorKind::InvalidOptions) for an interval out of
    /// range.
    ///
    /// # Cancel safety
    /// As [`sweep`](Self::sweep).
    pub async fn run(&self) -> Result<Infallible> {
        let work = |_| async {
            self.each().await;
        };
        self.poller().run(self.interval, work).await
    }

    fn poller(&self) -> Poller {
        let sweeps = u32::try_from(self.registered().len() + 1).unwrap_or(u32::MAX);
        Poller::new(self.backend.clone(), self.key.clone())
            // a little less: the timers of two ticks in one process are never quite apart
            .at_least(self.interval * 9 / 10)
            .at_most(self.limit.saturating_mul(sweeps).max(self.interval))
            .keep_alive(self.interval.clamp(TTL.0, TTL.1))
    }

    fn registered(&self) -> Vec<(String, SweepFn)> {
        self.sweeps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn each(&self) -> Vec<SweepReport> {
        let backend = self.backend.clone();
        let store: SweepFn = Arc::new(move || {
            let backend = backend.clone();
            Box::pin(async move {
                let done = backend.housekeep().await?;
                Ok(done.leases + done.dedupe)
            })
        });
        let mut reports = Vec::new();
        for (name, sweep) in std::iter::once((STORE.to_owned(), store)).chain(self.registered()) {
            let start = Instant::now();
            let outcome = self.outcome(&sweep).await;
            let took = start.elapsed();
            match &outcome {
                Sweep::Removed(removed) => tracing::debug!(name, removed, ?took, "swept"),
                Sweep::Failed(error) => tracing::warn!(name, error, ?took, "sweep failed"),
            }
            reports.push(SweepReport { name, took, outcome });
        }
        reports
    }

    async fn outcome(&self, sweep: &SweepFn) -> Sweep {
        let swept = AssertUnwindSafe(async { sweep().await }).catch_unwind();
        match tokio::time::timeout(self.limit, swept).await {
            Ok(Ok(Ok(removed))) => Sweep::Removed(removed),
            Ok(Ok(Err(error))) => Sweep::Failed(error.to_string()),
            Ok(Err(_)) => Sweep::Failed("it panicked".to_owned()),
            Err(_) => Sweep::Failed(format!("it took longer than {:?}", self.limit)),
        }
    }
}
