//! [`LockRegistry`]: the locks that a process keeps over many ticks.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::key::Key;
use crate::named::{LockGuard, NamedLock};
use crate::options::LockOptions;

/// Sticky locks of a fleet: each process takes what it can get on its first tick and keeps it, so
/// that one process drives a thing until it goes away; and a sweep frees what has become needless.
///
/// ```
/// use std::collections::HashSet;
/// use std::sync::Arc;
/// use leasehold_core::{Key, LockOptions, LockRegistry, memory::MemoryBackend};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let registry = LockRegistry::new(Arc::new(MemoryBackend::new()));
/// let pipeline = Key::new("pipeline-7")?;
/// for _tick in 0..2 {
///     if registry.hold(&pipeline, LockOptions::try_once()).await? {
///         // drive the pipeline
///     }
/// }
/// // first the snapshot, then the query: what is taken in between is not swept
/// let snapshot = registry.snapshot();
/// let active = HashSet::new(); // ... of a query
/// let freed = snapshot.release_all_except(&active).await?;
/// assert_eq!(freed, [pipeline]);
/// # Ok(())
/// # }
/// ```
///
/// Dropping the registry releases all in the background.
#[derive(Debug)]
pub struct LockRegistry {
    locks: Arc<dyn NamedLock>,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    guards: BTreeMap<Key, Kept>,
    /// The number of the next hold.
    next: u64,
}

#[derive(Debug)]
struct Kept {
    guard: Arc<LockGuard>,
    number: u64,
}

impl LockRegistry {
    /// An empty one.
    pub fn new(locks: Arc<dyn NamedLock>) -> Self {
        Self { locks, held: Mutex::default() }
    }

    /// Whether this process holds the lock: kept from before, or taken now.
    ///
    /// A lock that was lost meanwhile is taken anew, by a new guard with a new token.
    ///
    /// # Errors
    /// Those of [`NamedLock::lock`]. Fail closed: drive nothing then.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn hold(&self, key: &Key, opts: LockOptions) -> Result<bool> {
        if self.is_held(key) {
            return Ok(true);
        }
        let Some(guard) = self.locks.lock(key, opts).await? else {
            // another task of this process may have taken it meanwhile
            return Ok(self.is_held(key));
        };
        let mut held = self.lock();
        let number = held.next;
        held.next += 1;
        held.guards.insert(key.clone(), Kept { guard: Arc::new(guard), number });
        Ok(true)
    }

    /// Whether the lock is kept and still believed to be held. No I/O.
    pub fn is_held(&self, key: &Key) -> bool {
        self.lock().guards.get(key).is_some_and(|kept| kept.guard.is_held())
    }

    /// The guard of a lock that is kept and still believed to be held, for its token and its
    /// [`lost`](LockGuard::lost).
    pub fn guard(&self, key: &Key) -> Option<Arc<LockGuard>> {
        let held = self.lock();
        let kept = held.guards.get(key).filter(|kept| kept.guard.is_held())?;
        Some(kept.guard.clone())
    }

    /// The keys that are held, in order. Those that were lost are forgotten.
    pub fn keys(&self) -> Vec<Key> {
        let mut held = self.lock();
        held.guards.retain(|_, kept| kept.guard.is_held());
        held.guards.keys().cloned().collect()
    }

    /// What is held now. Take it **before** asking which keys are still wanted: a lock that is
    /// taken after it is never swept by it, also if it is one that was held and freed before.
    pub fn snapshot(&self) -> HeldSnapshot<'_> {
        let held = self.lock();
        let numbers = held.guards.iter().map(|(key, kept)| (key.clone(), kept.number));
        HeldSnapshot { registry: self, numbers: numbers.collect() }
    }

    /// Frees one lock, and waits until that is done; says whether it was kept.
    ///
    /// # Errors
    /// Those of [`LockGuard::release`].
    ///
    /// # Cancel safety
    /// Safe: once polled, the release goes on in the background.
    pub async fn release(&self, key: &Key) -> Result<bool> {
        let kept = self.lock().guards.remove(key);
        match kept {
            Some(kept) => release(kept.guard).await.map(|()| true),
            None => Ok(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a hold out, unless it has ended or been replaced.
    fn take(&self, key: &Key, number: u64) -> Option<Arc<LockGuard>> {
        let mut held = self.lock();
        if held.guards.get(key)?.number != number {
            return None;
        }
        held.guards.remove(key).map(|kept| kept.guard)
    }
}

/// One that somebody still uses is freed when the last of them drops it.
async fn release(guard: Arc<LockGuard>) -> Result<()> {
    match Arc::try_unwrap(guard) {
        Ok(guard) => guard.release().await,
        Err(_) => Ok(()),
    }
}

/// What a [`LockRegistry`] held at one moment.
#[derive(Debug)]
pub struct HeldSnapshot<'a> {
    registry: &'a LockRegistry,
    numbers: BTreeMap<Key, u64>,
}

impl HeldSnapshot<'_> {
    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.numbers.keys()
    }

    /// Frees what was held at the snapshot and is not in `wanted`; gives the keys that were freed.
    /// All are tried, also after an error.
    ///
    /// # Errors
    /// The first that [`LockGuard::release`] gave, except that a lock had been lost before.
    ///
    /// # Cancel safety
    /// Safe: dropped, it has freed some of them.
    pub async fn release_all_except(self, wanted: &HashSet<Key>) -> Result<Vec<Key>> {
        let mut freed = Vec::new();
        let mut outcome = Ok(());
        for (key, number) in self.numbers {
            if wanted.contains(&key) {
                continue;
            }
            let Some(guard) = self.registry.take(&key, number) else { continue };
            match release(guard).await {
                Err(error) if error.kind() != crate::ErrorKind::Lost => {
                    outcome = outcome.and(Err(error));
                }
                _ => freed.push(key),
            }
        }
        outcome.map(|()| freed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{MemoryBackend, MemoryStore};

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn fleet() -> (LockRegistry, LockRegistry, Arc<MemoryBackend>) {
        let store = MemoryStore::default();
        let server = || Arc::new(MemoryBackend::builder().store(&store).build());
        let one = server();
        (LockRegistry::new(one.clone()), LockRegistry::new(server()), one)
    }

    async fn holds(registry: &LockRegistry, name: &str) -> bool {
        registry.hold(&key(name), LockOptions::try_once()).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn sticky_locks_stay_with_the_first() {
        let (one, two, _) = fleet();
        for _ in 0..3 {
            assert!(holds(&one, "a").await && !holds(&two, "a").await);
        }
        assert_eq!(one.keys(), [key("a")]);
        assert!(two.keys().is_empty() && two.guard(&key("a")).is_none());
        let token = one.guard(&key("a")).unwrap().token().await.unwrap();
        assert!(one.release(&key("a")).await.unwrap());
        assert!(!one.release(&key("a")).await.unwrap(), "freed twice");
        assert!(holds(&two, "a").await);
        assert!(two.guard(&key("a")).unwrap().token().await.unwrap() > token);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sweep_spares_what_is_wanted_and_what_was_taken_meanwhile() {
        let (one, two, _) = fleet();
        for name in ["wanted", "idle", "again"] {
            assert!(holds(&one, name).await);
        }
        let snapshot = one.snapshot();
        assert!(holds(&one, "new").await);
        one.release(&key("again")).await.unwrap();
        assert!(holds(&one, "again").await);
        let freed = snapshot.release_all_except(&HashSet::from([key("wanted")])).await.unwrap();
        assert_eq!(freed, [key("idle")]);
        assert_eq!(one.keys(), [key("again"), key("new"), key("wanted")]);
        assert!(holds(&two, "idle").await && !holds(&two, "new").await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_lock_is_not_held_and_can_be_taken_anew() {
        let (one, _, backend) = fleet();
        assert!(holds(&one, "a").await);
        let lost = one.guard(&key("a")).unwrap().lost();
        backend.link().end_sessions();
        lost.wait().await;
        assert!(!one.is_held(&key("a")) && one.keys().is_empty());
        while !holds(&one, "a").await {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        assert!(one.is_held(&key("a")));
    }
}
