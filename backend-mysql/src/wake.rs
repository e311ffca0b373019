//! Wakes those who wait for a lease.
//!
//! One task per handle looks at all the leases that its waiters found busy, in one statement by
//! primary key: when a holder's bell rings, and now and then. Waiters try for themselves only when
//! it found their lease free. While all the bells are listened to, the pauses grow fast, to
//! `max_poll`; otherwise slowly, to 100 ms. A ring that came before the bell was listened to is so
//! made up for within about the time that the lease has been waited for by then.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::Result;
use leasehold_core::backend::{Wake, WakeSource};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::listen::Listeners;
use crate::names::{RowId, hex};
use crate::store::{NOW, Store};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// The longest pause while a bell is not listened to.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Leases that one statement looks at.
const CHUNK: usize = 1_000;

/// The leases that are waited for.
#[derive(Debug)]
pub(crate) struct Lookout {
    store: Arc<Store>,
    max_poll: Duration,
    watched: Mutex<HashMap<RowId, Watched>>,
    listeners: Listeners,
    /// A lease was added, or a bell rang.
    news: Arc<Notify>,
    ended: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    wake_id: u64,
    tried: Instant,
    /// The holder's; zero if it has none or has not been looked at.
    bell: u64,
}

impl Lookout {
    pub(crate) fn new(store: Arc<Store>, max_poll: Duration) -> Self {
        let news = Arc::new(Notify::new());
        let listeners = Listeners::new(store.clone(), news.clone());
        Self { store, max_poll, watched: Mutex::default(), listeners, news, ended: false.into() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RowId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody who waits found this lease busy.
    pub(crate) fn look_for(&self, id: RowId, wake_id: u64) {
        let tried = Instant::now();
        let mut watched = self.lock();
        if self.ended.load(Ordering::Relaxed) {
            return;
        }
        if let Some(known) = watched.get_mut(&id) {
            known.tried = tried;
        } else {
            watched.insert(id, Watched { wake_id, tried, bell: 0 });
            self.news.notify_one();
        }
    }

    pub(crate) fn listen(self: Arc<Self>) -> Looks {
        Looks { lookout: self, pause: FIRST_PAUSE, found: VecDeque::new() }
    }

    /// Stops listening.
    pub(crate) fn end(&self) {
        let mut watched = self.lock();
        self.ended.store(true, Ordering::Relaxed);
        watched.clear();
        drop(watched);
        self.listeners.end();
    }

    /// A waiter tries at least every `max_poll`: a lease that nobody tried for so long is not
    /// waited for.
    fn forget(&self) -> Duration {
        Duration::from_secs(5).max(self.max_poll.saturating_mul(2))
    }

    /// The watched leases that are free now, or that must be tried for to be marked as awaited.
    async fn look(&self) -> Result<Vec<u64>> {
        let forget = self.forget();
        let ids: Vec<RowId> = {
            let mut watched = self.lock();
            watched.retain(|_, watched| watched.tried.elapsed() < forget);
            watched.keys().copied().collect()
        };
        let mut free = Vec::new();
        for chunk in ids.chunks(CHUNK) {
            let list: Vec<String> = chunk.iter().map(|id| hex(id)).collect();
            // one that was released and taken again meanwhile is not marked any more
            let text = format!(
                "SELECT id, bell FROM {} WHERE id IN ({}) AND expires > {NOW} AND awaited = 1",
                self.store.tables.lease,
                list.join(",")
            );
            let held: Vec<(Vec<u8>, u64)> = self.store.rows(&text).await?;
            let held: HashMap<Vec<u8>, u64> = held.into_iter().collect();
            let mut watched = self.lock();
            for id in chunk {
                if let Some(bell) = held.get(id.as_slice()) {
                    if let Some(watched) = watched.get_mut(id) {
                        watched.bell = *bell;
                    }
                } else if let Some(watched) = watched.remove(id) {
                    self.listeners.rang_well(watched.bell);
                    free.push(watched.wake_id);
                }
            }
        }
        Ok(free)
    }

    /// Listens to the bells of the watched leases. Says whether all are listened to.
    fn listens(&self) -> bool {
        let mut bells: HashSet<u64> = self.lock().values().map(|watched| watched.bell).collect();
        let all_known = !bells.remove(&0);
        self.listeners.listen_to(&bells) && all_known
    }
}

/// What the look-out finds.
#[derive(Debug)]
pub(crate) struct Looks {
    lookout: Arc<Lookout>,
    pause: Duration,
    found: VecDeque<u64>,
}

impl Looks {
    fn lengthen_pause(&mut self, listens: bool) {
        let max_poll = self.lookout.max_poll;
        self.pause = if listens {
            self.pause.mul_f64(rand::random_range(3.5..4.5)).min(max_poll)
        } else {
            self.pause.mul_f64(rand::random_range(1.2..1.5)).min(LONGEST_PAUSE).min(max_poll)
        };
    }
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
            let news = lookout.news.notified();
            if idle {
                news.await;
                self.pause = FIRST_PAUSE;
            } else {
                tokio::select! {
                    () = news => self.pause = FIRST_PAUSE,
                    () = tokio::time::sleep(self.pause) => {}
                }
            }
            self.found.extend(lookout.look().await?);
            let listens = lookout.listens();
            if self.found.is_empty() {
                self.lengthen_pause(listens);
            } else {
                self.pause = FIRST_PAUSE;
            }
        }
    }
}
