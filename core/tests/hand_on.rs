//! Named locks over leases: handed on within the process, under a paused clock.

mod common;

use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use common::{key, millis, poll_times, secs, until};
use leasehold_core::backend::{
    Freed, LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource,
};
use leasehold_core::engine::LeaseEngine;
use leasehold_core::memory::{MemoryBackend, MemoryDriver, MemoryLink, MemoryStore};
use leasehold_core::{
    ErrorKind, FencingToken, Key, Lease, LeaseOptions, LockGuard, LossReason, Result,
};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};

static KEY: LazyLock<Key> = LazyLock::new(|| key("a"));

const MAX: u32 = 4;

/// What the store was asked for.
#[derive(Debug, Default)]
struct Asked {
    acquisitions: AtomicU32,
    releases: AtomicU32,
    tokens: AtomicU32,
}

impl Asked {
    fn take(&self) -> (u32, u32, u32) {
        let [acquisitions, releases, tokens] = [&self.acquisitions, &self.releases, &self.tokens]
            .map(|count| count.swap(0, Ordering::SeqCst));
        (acquisitions, releases, tokens)
    }
}

#[derive(Debug)]
struct Driver {
    memory: MemoryDriver,
    asked: Arc<Asked>,
}

#[async_trait::async_trait]
impl LeaseDriver for Driver {
    fn backend(&self) -> &'static str {
        "memory"
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.asked.acquisitions.fetch_add(1, Ordering::SeqCst);
        self.memory.acquire(key, owner, ttl).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        self.memory.renew(renewals).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        self.asked.releases.fetch_add(1, Ordering::SeqCst);
        LeaseDriver::release(&self.memory, key, owner).await
    }

    async fn hand_back(&self, key: &Key, owner: Owner) -> Result<Freed> {
        Ok(Freed { ours: self.release(key, owner).await?, awaited: true })
    }

    async fn token(&self, key: &Key, owner: Owner) -> Result<Option<FencingToken>> {
        self.asked.tokens.fetch_add(1, Ordering::SeqCst);
        LeaseDriver::token(&self.memory, key, owner).await
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        self.memory.verify(key, owner, tx).await
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.memory.wake_id(key)
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        self.memory.listen().await
    }

    fn limits(&self) -> LeaseLimits {
        let mut limits = LeaseLimits::default();
        limits.max_handovers = MAX;
        limits
    }
}

/// A handle of a service on a store.
#[derive(Clone)]
struct Handle {
    engine: Arc<LeaseEngine<Driver>>,
    asked: Arc<Asked>,
    link: MemoryLink,
}

fn open(store: &MemoryStore) -> Handle {
    let asked = Arc::new(Asked::default());
    let builder = MemoryBackend::builder().store(store).namespace("test");
    let memory = builder.driver();
    let link = memory.link().clone();
    let engine = Arc::new(LeaseEngine::new(Driver { memory, asked: asked.clone() }));
    Handle { engine, asked, link }
}

fn opts() -> LeaseOptions {
    LeaseOptions::default().ttl(secs(30)).wait(Duration::MAX)
}

impl Handle {
    async fn lock(&self) -> LockGuard {
        self.engine.lock(&KEY, opts()).await.unwrap().unwrap()
    }

    /// One who waits in the queue.
    async fn waiter(&self) -> JoinHandle<LockGuard> {
        let handle = self.clone();
        let waiter = tokio::spawn(async move { handle.lock().await });
        tokio::time::sleep(millis(1)).await;
        waiter
    }
}

/// What is free is free for others.
async fn is_free(store: &MemoryStore) {
    let start = Instant::now();
    open(store).lock().await.release().await.unwrap();
    assert!(start.elapsed() < millis(50), "it was free only after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_process_are_served_in_order_and_without_the_store() {
    let store = MemoryStore::new();
    let one = open(&store);
    let (tell, mut told) = mpsc::unbounded_channel();
    let first = one.lock().await;
    let mut waiters = Vec::new();
    for number in 0..MAX {
        let (one, tell) = (one.clone(), tell.clone());
        waiters.push(tokio::spawn(async move {
            let guard = one.lock().await;
            tell.send(number).unwrap();
            // half are released, half dropped
            if number % 2 == 0 {
                guard.release().await.unwrap();
            }
        }));
        tokio::time::sleep(millis(1)).await;
    }
    let lost = first.lost();
    first.release().await.unwrap();
    for number in 0..MAX {
        assert_eq!(told.recv().await, Some(number));
    }
    for waiter in waiters {
        waiter.await.unwrap();
    }
    is_free(&store).await;
    assert_eq!(one.asked.take(), (1, 1, 0));
    tokio::time::sleep(secs(60)).await;
    assert!(!lost.is_set(), "the first one's release was told as a loss");
}

#[tokio::test(start_paused = true)]
async fn tokens_rise_along_the_queue_and_past_it() {
    let store = MemoryStore::new();
    let (one, two) = (open(&store), open(&store));
    let mut last = FencingToken(0);
    let mut guard = one.lock().await;
    for number in 0..3 * MAX {
        let waiter = one.waiter().await;
        // some are never asked for theirs
        if number % 3 != 1 {
            let token = guard.token().await.unwrap();
            assert!(token > last, "{token} after {last}");
            assert_eq!(guard.token().await.unwrap(), token, "it changed");
            last = token;
        }
        guard.release().await.unwrap();
        guard = waiter.await.unwrap();
    }
    let (_, _, tokens) = one.asked.take();
    assert!((1..=2 * MAX).contains(&tokens), "{tokens} questions");
    last = last.max(guard.token().await.unwrap());
    guard.release().await.unwrap();
    let theirs = two.lock().await.token().await.unwrap();
    assert!(theirs > last, "{theirs} after {last}");
}

#[tokio::test(start_paused = true)]
async fn other_processes_have_their_turn_after_a_bounded_number() {
    let store = MemoryStore::new();
    let (one, two) = (open(&store), open(&store));
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for (who, handle) in [("one", &one), ("one", &one), ("one", &one), ("two", &two)] {
        let (handle, tell) = (handle.clone(), tell.clone());
        tasks.spawn(async move {
            for _ in 0..60 {
                let guard = handle.lock().await;
                tell.send(who).unwrap();
                tokio::time::sleep(millis(1)).await;
                guard.release().await.unwrap();
            }
        });
    }
    drop(tell);
    let (mut run, mut theirs) = (0, 0);
    while let Some(who) = told.recv().await {
        run = if who == "one" { run + 1 } else { 0 };
        theirs += u32::from(who == "two");
        assert!(theirs == 0 || theirs >= 60 || run <= MAX + 1, "{run} in a row");
    }
    tasks.join_all().await;
    assert_eq!(theirs, 60);
}

#[tokio::test(start_paused = true)]
async fn who_holds_for_long_does_not_hand_on() {
    let store = MemoryStore::new();
    let one = open(&store);
    let guard = one.lock().await;
    let waiter = one.waiter().await;
    tokio::time::sleep(secs(1)).await;
    guard.release().await.unwrap();
    let next = waiter.await.unwrap();
    assert_eq!(one.asked.take(), (2, 1, 0));
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_was_handed_on_is_renewed_and_lost_at_its_deadline() {
    let store = MemoryStore::new();
    let one = open(&store);
    let start = Instant::now();
    let guard = one.lock().await;
    let waiter = one.waiter().await;
    guard.release().await.unwrap();
    let next = waiter.await.unwrap();
    assert_eq!(one.asked.take(), (1, 0, 0));
    tokio::time::sleep(secs(600)).await;
    assert!(next.is_held(), "nobody renewed it");
    one.link.silence();
    let lost = timeout(secs(31), next.lost().wait()).await.expect("the deadline has passed");
    assert_eq!(lost, LossReason::Expired);
    assert!(start.elapsed() < secs(631));
    assert_eq!(next.token().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(next.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

/// The renewal is answered when the lock is another guard's by then.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_under_way_at_the_hand_over_is_the_next_ones() {
    let store = MemoryStore::new();
    let one = open(&store);
    let ttl = millis(200);
    let opts = opts().ttl(ttl);
    let guard = one.engine.lock(&KEY, opts).await.unwrap().unwrap();
    let waiter = {
        let one = one.clone();
        tokio::spawn(async move { one.engine.lock(&KEY, opts).await.unwrap().unwrap() })
    };
    one.link.delay(millis(15));
    tokio::time::sleep(ttl / 3 + millis(10)).await; // sent, not answered
    guard.release().await.unwrap();
    let next = waiter.await.unwrap();
    assert_eq!(one.asked.take(), (1, 0, 0));
    tokio::time::sleep(ttl * 20).await;
    assert!(next.is_held(), "it was renewed for nobody");
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_is_about_to_be_lost_is_not_handed_on() {
    let store = MemoryStore::new();
    let one = open(&store);
    let opts = opts().ttl(millis(150));
    let guard = one.engine.lock(&KEY, opts).await.unwrap().unwrap();
    let waiter = {
        let one = one.clone();
        tokio::spawn(async move { one.engine.lock(&KEY, opts).await.unwrap().unwrap() })
    };
    one.link.silence();
    tokio::time::sleep(millis(90)).await; // no renewal came through
    drop(guard);
    tokio::time::sleep(millis(200)).await;
    assert!(!waiter.is_finished(), "it was handed on with little time left");
    one.link.heal();
    waiter.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_the_store_has_given_to_others_has_no_token_any_more() {
    let store = MemoryStore::new();
    let one = open(&store);
    let guard = one.lock().await;
    let waiter = one.waiter().await;
    guard.release().await.unwrap();
    let next = waiter.await.unwrap();
    store.delete_lease("test", &KEY);
    let other = open(&store).lock().await;
    assert_eq!(next.token().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(next.lost().reason(), Some(LossReason::Taken));
    assert!(other.is_held());
    assert!(other.token().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn waiters_that_leave_at_any_moment_leave_nothing() {
    let store = MemoryStore::new();
    let one = open(&store);
    for polls in 0..12 {
        let guard = one.lock().await;
        let next = one.waiter().await;
        let leaver = {
            let one = one.clone();
            tokio::spawn(async move { drop(poll_times(one.lock(), polls).await) })
        };
        let last = one.waiter().await;
        guard.release().await.unwrap();
        next.await.unwrap().release().await.unwrap();
        leaver.await.unwrap();
        last.await.unwrap().release().await.unwrap();
        is_free(&store).await;
    }
}

/// The guard is in the channel when the waiter goes.
#[tokio::test(start_paused = true)]
async fn what_nobody_received_is_handed_on() {
    let store = MemoryStore::new();
    let one = open(&store);
    let guard = one.lock().await;
    let unread = one.waiter().await;
    let next = one.waiter().await;
    guard.release().await.unwrap();
    unread.abort();
    assert!(unread.await.is_err(), "it was polled");
    let next = next.await.unwrap();
    assert_eq!(one.asked.take(), (1, 0, 0));
    next.release().await.unwrap();
    is_free(&store).await;
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_kept_to_in_the_queue() {
    let store = MemoryStore::new();
    let one = open(&store);
    let guard = one.lock().await;
    let start = Instant::now();
    assert!(one.engine.lock(&KEY, opts().wait(Duration::ZERO)).await.unwrap().is_none());
    assert!(one.engine.lock(&KEY, opts().wait(secs(2))).await.unwrap().is_none());
    assert_eq!(start.elapsed(), secs(2));
    guard.release().await.unwrap();
    is_free(&store).await;
}

#[tokio::test(start_paused = true)]
async fn a_close_loses_what_was_handed_on() {
    let store = MemoryStore::new();
    let one = open(&store);
    let guard = one.lock().await;
    let next = one.waiter().await;
    guard.release().await.unwrap();
    let next = next.await.unwrap();
    one.engine.close().await.unwrap();
    assert_eq!(next.lost().reason(), Some(LossReason::Closed));
    assert_eq!(next.release().await.unwrap_err().kind(), ErrorKind::Lost);
    is_free(&store).await;
}

#[tokio::test(start_paused = true)]
async fn leases_and_locks_with_a_time_of_their_own_are_not_handed_on() {
    let store = MemoryStore::new();
    let one = open(&store);
    let lease = |opts: LeaseOptions| {
        let one = one.clone();
        tokio::spawn(async move { one.engine.lease(&KEY, opts).await.unwrap().unwrap() })
    };
    let held = one.engine.lease(&KEY, opts()).await.unwrap().unwrap();
    let next = lease(opts());
    tokio::time::sleep(millis(1)).await;
    held.release().await.unwrap();
    let held = next.await.unwrap();
    assert_eq!(one.asked.take(), (2, 1, 0));
    held.release().await.unwrap();
    one.asked.take();
    // a lock to a lease, and to a lock that is held in another way
    let held = one.lock().await;
    let next = lease(opts());
    tokio::time::sleep(millis(1)).await;
    held.release().await.unwrap();
    next.await.unwrap().release().await.unwrap();
    for other in [opts().ttl(secs(20)), opts().max_hold(secs(20))] {
        let held = one.lock().await;
        let next = {
            let one = one.clone();
            tokio::spawn(async move { one.engine.lock(&KEY, other).await.unwrap().unwrap() })
        };
        tokio::time::sleep(millis(1)).await;
        held.release().await.unwrap();
        next.await.unwrap().release().await.unwrap();
    }
    assert_eq!(one.asked.take(), (6, 6, 0));
    until("all is free", || store.leftovers("test").is_empty()).await;
}
