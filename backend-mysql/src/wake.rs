//! Wakes those who wait for a lease.
//!
//! Neither server has a push. So one task per handle looks at all the leases that its waiters
//! found busy, in one statement by primary key, at 5 ms after the first and then at growing pauses
//! of up to 100 ms. The load is that of one handle, not of its waiters, and there is none while
//! nobody waits; waiters try for themselves only when it found their lease free.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::Result;
use leasehold_core::backend::{Wake, WakeSource};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::{RowId, hex};
use crate::store::{NOW, Store};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// A waiter tries at least so often; a lease that nobody tried for so long is not waited for.
const FORGET: Duration = Duration::from_secs(5);
/// Leases that one statement looks at.
const CHUNK: usize = 1_000;

/// The leases that are waited for.
#[derive(Debug)]
pub(crate) struct Lookout {
    store: Arc<Store>,
    watched: Mutex<HashMap<RowId, Watched>>,
    added: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    wake_id: u64,
    tried: Instant,
}

impl Lookout {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        Self { store, watched: Mutex::default(), added: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RowId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody found this lease busy.
    pub(crate) fn look_for(&self, id: RowId, wake_id: u64) {
        let tried = Instant::now();
        let watched = Watched { wake_id, tried };
        if self.lock().insert(id, watched).is_none() {
            self.added.notify_one();
        }
    }

    pub(crate) fn listen(self: Arc<Self>) -> Looks {
        Looks { lookout: self, pause: FIRST_PAUSE, found: VecDeque::new() }
    }

    /// The watched leases that are free now.
    async fn look(&self) -> Result<Vec<u64>> {
        let ids: Vec<RowId> = {
            let mut watched = self.lock();
            watched.retain(|_, watched| watched.tried.elapsed() < FORGET);
            watched.keys().copied().collect()
        };
        let mut free = Vec::new();
        for chunk in ids.chunks(CHUNK) {
            let list: Vec<String> = chunk.iter().map(|id| hex(id)).collect();
            let text = format!(
                "SELECT id FROM {} WHERE id IN ({}) AND expires > {NOW}",
                self.store.tables.lease,
                list.join(",")
            );
            let held: Vec<Vec<u8>> = self.store.rows(&text).await?;
            let held: HashSet<Vec<u8>> = held.into_iter().collect();
            let mut watched = self.lock();
            for id in chunk.iter().filter(|id| !held.contains(id.as_slice())) {
                free.extend(watched.remove(id).map(|watched| watched.wake_id));
            }
        }
        Ok(free)
    }
}

/// What the look-out finds.
#[derive(Debug)]
pub(crate) struct Looks {
    lookout: Arc<Lookout>,
    pause: Duration,
    found: VecDeque<u64>,
}

#[async_trait]
impl WakeSource for Looks {
    async fn next(&mut self) -> Result<Wake> {
        loop {
            if let Some(wake_id) = self.found.pop_front() {
                return Ok(Wake::Released(wake_id));
            }
            let idle = self.lookout.lock().is_empty();
            let lookout = self.lookout.clone();
            let added = lookout.added.notified();
            if idle {
                added.await;
                self.pause = FIRST_PAUSE;
            } else {
                tokio::select! {
                    () = added => self.pause = FIRST_PAUSE,
                    () = tokio::time::sleep(self.pause) => {}
                }
            }
            self.found.extend(self.lookout.look().await?);
            self.pause = if self.found.is_empty() {
                self.pause.mul_f64(rand::random_range(1.2..1.5)).min(LONGEST_PAUSE)
            } else {
                FIRST_PAUSE
            };
        }
    }
}
