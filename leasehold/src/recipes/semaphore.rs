//! [`Semaphore`]: at most n at a time.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;

use super::exclusion::{Exclusion, Hold};
use super::{part, released, unless_lost};
use crate::{
    Deadline, Error, ErrorKind, FencingToken, Key, Lease, LeaseOptions, Lost, NamedLock, Result,
};

/// A counting semaphore over all processes: at most `permits` holders at a time.
///
/// Each permit is a slot, `key/0` to `key/n-1`, and holding a permit is holding its slot's lock.
/// There is no count that could be wrong: the number of slots is the limit.
///
/// **Guaranteed:** never more than `permits` at a time, as far as the lock excludes; a dead
/// holder's permit is free when its lock is (for named locks when its session ends, for leases
/// after the ttl). A waiter is woken by whichever slot is freed first.
///
/// **Not guaranteed:** an order among waiters of different processes (those of one process queue).
/// A try may find no permit in the moment in which a waiter passes on one that it got too many.
/// Processes that give different `permits` share the largest.
///
/// A try costs up to a round trip a slot, a waiting process waits on all of them: it is meant for
/// tens of permits. To count hundreds see [`Limit`](super::Limit).
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::Semaphore;
/// use leasehold::Key;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let store = Arc::new(MemoryBackend::new());
/// let exports = Semaphore::over_locks(store, &Key::new("exports")?, 2)?;
/// let one = exports.acquire(Duration::ZERO).await?.expect("free");
/// let two = exports.acquire(Duration::ZERO).await?.expect("free");
/// assert!(exports.acquire(Duration::ZERO).await?.is_none());
/// one.release().await?;
/// assert!(exports.acquire(Duration::from_secs(5)).await?.is_some());
/// # drop(two);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Semaphore {
    exclusion: Exclusion,
    slots: Vec<Key>,
    /// One waiter of this process at a time waits on the store.
    queue: tokio::sync::Mutex<()>,
}

impl Semaphore {
    /// The most permits.
    pub const MAX_PERMITS: usize = 256;

    /// Over named locks: a dead holder's permit is free when its session ends.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for no permits or more than
    /// [`MAX_PERMITS`](Self::MAX_PERMITS), [`ErrorKind::InvalidKey`] if the slots' keys get too
    /// long.
    pub fn over_locks(locks: Arc<dyn NamedLock>, key: &Key, permits: usize) -> Result<Self> {
        Self::new(Exclusion::Locks(locks), key, permits)
    }

    /// Over leases, renewed while they are held: a dead holder's permit is free after `ttl`.
    ///
    /// # Errors
    /// As [`over_locks`](Self::over_locks), and for a ttl out of range.
    pub fn over_leases(
        leases: Arc<dyn Lease>,
        key: &Key,
        permits: usize,
        ttl: Duration,
    ) -> Result<Self> {
        LeaseOptions::default().ttl(ttl).check()?;
        Self::new(Exclusion::Leases(leases, ttl), key, permits)
    }

    fn new(exclusion: Exclusion, key: &Key, permits: usize) -> Result<Self> {
        if permits == 0 || permits > Self::MAX_PERMITS {
            let detail = format!("permits are from 1 to {}, not {permits}", Self::MAX_PERMITS);
            return Err(Error::new(ErrorKind::InvalidOptions, detail).on(key));
        }
        let slots = (0..permits).map(|slot| part(key, slot)).collect::<Result<_>>()?;
        Ok(Self { exclusion, slots, queue: tokio::sync::Mutex::default() })
    }

    /// How many permits there are.
    pub fn permits(&self) -> usize {
        self.slots.len()
    }

    /// Takes a permit, waiting for one at most `wait` (zero tries once, [`Duration::MAX`] waits for
    /// ever). `Ok(None)`: all were taken for the whole wait.
    ///
    /// # Errors
    /// Those of [`NamedLock::lock`] or [`Lease::lease`].
    ///
    /// # Cancel safety
    /// Safe: it leaves no permit and no queue place; what was granted meanwhile is released in the
    /// background.
    pub async fn acquire(&self, wait: Duration) -> Result<Option<Permit>> {
        let deadline = Deadline::after(wait);
        if let Some(permit) = self.try_each().await? {
            return Ok(Some(permit));
        }
        let _turn = tokio::select! {
            biased;
            () = deadline.passed() => return Ok(None),
            turn = self.queue.lock() => turn,
        };
        self.wait_for_any(deadline).await
    }

    /// Does `work` with a permit; `Ok(None)` if there was none within `wait`. The work is dropped
    /// when the permit is lost.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), and [`ErrorKind::Lost`] if the permit was lost before the
    /// work ended.
    ///
    /// # Cancel safety
    /// As safe as `work`; the permit is released in the background.
    pub async fn with_permit<T>(
        &self,
        wait: Duration,
        work: impl AsyncFnOnce(&Permit) -> T,
    ) -> Result<Option<T>> {
        let Some(permit) = self.acquire(wait).await? else {
            return Ok(None);
        };
        let done = unless_lost(&permit.lost(), permit.hold.key(), work(&permit)).await?;
        released(permit.release().await)?;
        Ok(Some(done))
    }

    /// The slots from a random one on, so that processes do not all try the same ones first.
    fn slots_in_turn(&self) -> impl Iterator<Item = (usize, &Key)> {
        let first = rand::random_range(0..self.slots.len());
        let slots = self.slots.iter().enumerate();
        slots.clone().skip(first).chain(slots.take(first))
    }

    async fn try_each(&self) -> Result<Option<Permit>> {
        for (slot, key) in self.slots_in_turn() {
            if let Some(hold) = self.exclusion.take(key, Duration::ZERO).await? {
                return Ok(Some(Permit { slot, hold }));
            }
        }
        Ok(None)
    }

    /// Waits on all slots at once. The waits for the others are dropped; one that was granted in
    /// the same moment is released by that.
    async fn wait_for_any(&self, deadline: Deadline) -> Result<Option<Permit>> {
        let waits = self.slots_in_turn().map(|(slot, key)| {
            Box::pin(async move {
                let taken = self.exclusion.take(key, deadline.remaining()).await?;
                Ok(taken.map(|hold| Permit { slot, hold }))
            })
        });
        let mut waits: Vec<_> = waits.collect();
        while !waits.is_empty() {
            let (ended, _, others) = select_all(waits).await;
            if let Some(permit) = ended? {
                return Ok(Some(permit));
            }
            waits = others;
        }
        Ok(None)
    }
}

/// A permit of a [`Semaphore`]. Dropping it releases it in the background.
#[derive(Debug)]
pub struct Permit {
    slot: usize,
    hold: Hold,
}

impl Permit {
    /// Which of the permits, from 0: free to be used as the number of a worker, say.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The fencing token; it orders the holders of this slot.
    ///
    /// # Errors
    /// As [`LockGuard::token`](crate::LockGuard::token); none over leases.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn token(&self) -> Result<FencingToken> {
        self.hold.token().await
    }

    /// Tells when the permit is lost.
    pub fn lost(&self) -> Lost {
        self.hold.lost()
    }

    /// Whether the permit is still believed to be held. No I/O.
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// Releases it and waits until the store has freed it.
    ///
    /// # Errors
    /// As [`LockGuard::release`](crate::LockGuard::release).
    ///
    /// # Cancel safety
    /// Safe: once polled, the release goes on in the background.
    pub async fn release(self) -> Result<()> {
        self.hold.release().await
    }
}
