//! The session engine under a paused clock, over a store with faults on the way.

mod common;

use common::{key, millis, nothing_left, pair, secs, until};
use leasehold_core::backend::SessionLimits;
use leasehold_core::memory::{MemoryBackend, MemoryStore};
use leasehold_core::{ErrorKind, Key, LockOptions, LossReason, NamedLock, NamedLockExt};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

static KEY_A: LazyLock<Key> = LazyLock::new(|| key("a"));

fn try_once() -> LockOptions {
    LockOptions::try_once()
}

fn wait(wait: Duration) -> LockOptions {
    LockOptions::default().wait(wait)
}

/// The stated bound for a silent network.
fn silence_bound() -> Duration {
    let limits = SessionLimits::default();
    limits.keepalive + limits.answer
}

#[tokio::test(start_paused = true)]
async fn requests_that_arrive_together_go_out_together() {
    let (one, _) = pair();
    drop(one.lock(&key("warm-up"), try_once()).await.unwrap().unwrap());
    one.link().delay(millis(10)); // a round trip takes 20 ms
    let one = Arc::new(one);
    let start = Instant::now();
    let mut locks = JoinSet::new();
    for i in 0..64 {
        let one = one.clone();
        locks.spawn(async move { one.lock(&key(&format!("k{i}")), try_once()).await });
    }
    let guards: Vec<_> = locks.join_all().await.into_iter().map(|g| g.unwrap().unwrap()).collect();
    assert_eq!(guards.len(), 64);
    assert!(start.elapsed() <= millis(60), "64 locks took {:?}", start.elapsed());
    let start = Instant::now();
    drop(guards);
    one.lock(&key("after"), try_once()).await.unwrap().unwrap().release().await.unwrap();
    assert!(start.elapsed() <= millis(80), "64 releases took {:?}", start.elapsed());
    nothing_left(one.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_session_that_the_store_ends_loses_its_guards_at_once() {
    let (one, two) = pair();
    let guards = [
        one.lock(&key("a"), try_once()).await.unwrap().unwrap(),
        one.lock(&key("b"), try_once()).await.unwrap().unwrap(),
    ];
    let lost = guards[0].lost();
    let start = Instant::now();
    one.link().end_sessions();
    assert_eq!(lost.wait().await, LossReason::SessionEnded);
    assert!(start.elapsed() < millis(10));
    let theirs = two.lock(&key("a"), try_once()).await.unwrap().expect("freed by the store");
    for guard in guards {
        assert!(!guard.is_held());
        assert_eq!(guard.token().await.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    }
    assert!(theirs.is_held(), "a stale release freed the successor");
    assert!(one.lock(&key("a"), try_once()).await.unwrap().is_none());
    assert!(one.lock(&key("b"), try_once()).await.unwrap().is_some(), "no new session");
}

#[tokio::test(start_paused = true)]
async fn a_silent_network_is_noticed_within_the_bound_and_never_a_healthy_one() {
    let (one, _) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    tokio::time::sleep(secs(24 * 3600)).await;
    assert!(guard.is_held(), "the keepalive lost a healthy session");
    let start = Instant::now();
    one.link().silence();
    let lost = guard.lost();
    assert_eq!(lost.wait().await, LossReason::Silent);
    assert!(start.elapsed() <= silence_bound(), "noticed after {:?}", start.elapsed());
    assert!(!guard.is_held());
    // closed for good: a call fails within its bound, and works again after
    let start = Instant::now();
    let error = one.lock(&key("b"), try_once()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(start.elapsed() <= silence_bound());
    one.link().heal();
    let again = one.lock(&key("a"), wait(secs(10))).await.unwrap();
    assert!(again.is_some(), "the session of before still holds it");
}

#[tokio::test(start_paused = true)]
async fn is_held_is_false_right_after_a_pause_that_is_longer_than_the_bound() {
    let (one, _) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    // nothing else runs meanwhile, as in a stopped process
    let woken = tokio::time::advance(silence_bound() + secs(1));
    let _ = common::poll_once(woken);
    assert!(!guard.is_held(), "a paused holder believes in its lock");
    assert!(guard.lost().is_set());
}

#[tokio::test(start_paused = true)]
async fn a_wait_rides_through_an_outage_and_a_try_does_not() {
    let (one, _) = pair();
    one.link().silence();
    let start = Instant::now();
    let heal = async {
        tokio::time::sleep(secs(20)).await;
        one.link().heal();
    };
    let (long_key, short_key, tried_key) = (key("long"), key("short"), key("tried"));
    let long = one.lock(&long_key, wait(secs(60)));
    let short = async {
        let outcome = one.lock(&short_key, wait(secs(12))).await;
        (outcome, start.elapsed())
    };
    let tried = async {
        tokio::time::sleep(secs(7)).await;
        let asked = Instant::now();
        (one.lock(&tried_key, try_once()).await, asked.elapsed())
    };
    let ((), long, (short, took), (tried, tried_took)) = tokio::join!(heal, long, short, tried);
    assert!(long.unwrap().is_some());
    assert_eq!(short.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(took <= secs(12) + SessionLimits::default().answer, "gave up after {took:?}");
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(tried_took <= SessionLimits::default().answer, "a try took {tried_took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_too_late_counts_for_nothing() {
    let (one, two) = pair();
    drop(one.lock(&key("warm-up"), try_once()).await.unwrap());
    one.link().delay(secs(4)); // the request arrives, its answer is past the limit
    let error = one.lock(&key("a"), try_once()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    one.link().heal();
    let theirs = two.lock(&key("a"), wait(secs(60))).await.unwrap();
    assert!(theirs.is_some(), "the late grant holds the lock for nobody");
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_leaves_no_lock() {
    let (one, two) = pair();
    drop(one.lock(&key("warm-up"), try_once()).await.unwrap());
    one.link().lose_next_answer();
    // the session is gone, so the engine asks again on the next one
    let guard = one.lock(&key("a"), wait(secs(5))).await.unwrap().expect("ours after a retry");
    guard.release().await.unwrap();
    assert!(two.lock(&key("a"), try_once()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn local_waiters_are_served_in_order_and_others_get_their_turn() {
    let (one, two) = pair();
    let (one, two) = (Arc::new(one), Arc::new(two));
    let order = Arc::new(Mutex::new(Vec::new()));
    let first = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    let mut tasks = JoinSet::new();
    for i in 0..100 {
        let (one, order) = (one.clone(), order.clone());
        tasks.spawn(async move {
            let guard = one.lock(&key("a"), wait(Duration::MAX)).await.unwrap().unwrap();
            order.lock().unwrap().push(format!("one {i}"));
            guard.release().await.unwrap();
        });
        tokio::task::yield_now().await;
    }
    let theirs = {
        let (two, order) = (two.clone(), order.clone());
        tokio::spawn(async move {
            let guard = two.lock(&key("a"), wait(Duration::MAX)).await.unwrap().unwrap();
            order.lock().unwrap().push("two".to_owned());
            guard.release().await.unwrap();
        })
    };
    tokio::time::sleep(secs(1)).await; // it waits on the store now
    first.release().await.unwrap();
    theirs.await.unwrap();
    tasks.join_all().await;
    let order = order.lock().unwrap().clone();
    let limit = SessionLimits::default().max_handovers as usize;
    let turn = order.iter().position(|who| who == "two").unwrap();
    assert!(turn <= limit + 1, "the other process waited for {turn} local hand-overs");
    let ours: Vec<_> = order.iter().filter(|who| *who != "two").collect();
    let expected: Vec<_> = (0..100).map(|i| format!("one {i}")).collect();
    assert_eq!(ours, expected.iter().collect::<Vec<_>>());
    nothing_left(one.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_handed_over_lock_has_a_greater_token() {
    let (one, two) = pair();
    let mut last = None;
    for round in 0..40 {
        let backend = if round % 8 < 6 { &one } else { &two };
        let guard = backend.lock(&key("a"), wait(secs(5))).await.unwrap().unwrap();
        let (next, ()) = tokio::join!(
            async {
                let next = backend.lock(&key("a"), wait(secs(5))).await.unwrap().unwrap();
                let token = next.token().await.unwrap();
                assert_eq!(next.token().await.unwrap(), token);
                next.release().await.unwrap();
                token
            },
            async {
                let token = guard.token().await.unwrap();
                assert!(last < Some(token), "{token} after {last:?}");
                last = Some(token);
                guard.release().await.unwrap();
            }
        );
        assert!(last < Some(next));
        last = Some(next);
    }
}

#[tokio::test(start_paused = true)]
async fn more_contended_keys_than_waiter_sessions_all_come_through() {
    let (one, two) = pair();
    let two = Arc::new(two);
    let mut held = Vec::new();
    for i in 0..30 {
        held.push(one.lock(&key(&format!("k{i}")), try_once()).await.unwrap().unwrap());
    }
    let mut waits = JoinSet::new();
    for i in 0..30 {
        let two = two.clone();
        waits.spawn(async move { two.lock(&key(&format!("k{i}")), wait(secs(30))).await });
    }
    tokio::time::sleep(secs(3)).await;
    assert!(waits.try_join_next().is_none(), "got a held lock");
    let start = Instant::now();
    drop(held);
    let guards: Vec<_> = waits.join_all().await.into_iter().map(|g| g.unwrap().unwrap()).collect();
    assert!(start.elapsed() < secs(2), "woken after {:?}", start.elapsed());
    drop(guards);
    nothing_left(two.store()).await;
}

#[tokio::test(start_paused = true)]
async fn waits_end_on_time_and_leave_no_place() {
    let (one, two) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    for limit in [Duration::from_nanos(1), millis(1), millis(300), secs(3), secs(25)] {
        for backend in [&one, &two] {
            let start = Instant::now();
            assert!(backend.lock(&key("a"), wait(limit)).await.unwrap().is_none());
            let took = start.elapsed();
            assert!(took >= limit && took <= limit + millis(50), "{limit:?} took {took:?}");
        }
    }
    for endless in [Duration::MAX, secs(40 * 24 * 3600)] {
        assert!(timeout(secs(60), two.lock(&key("a"), wait(endless))).await.is_err());
    }
    guard.release().await.unwrap();
    assert!(two.lock(&key("a"), try_once()).await.unwrap().is_some());
    nothing_left(two.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_left_makes_room_for_the_next_one_of_its_process() {
    let (one, two) = pair();
    let two = Arc::new(two);
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    let waiter = |limit: Duration| {
        let two = two.clone();
        tokio::spawn(async move { two.lock(&key("a"), wait(limit)).await.unwrap() })
    };
    let leaver = waiter(secs(60));
    tokio::time::sleep(secs(1)).await;
    let stayer = waiter(secs(60));
    tokio::time::sleep(secs(1)).await;
    leaver.abort();
    tokio::time::sleep(secs(1)).await;
    guard.release().await.unwrap();
    let start = Instant::now();
    let guard = stayer.await.unwrap().expect("its turn");
    assert!(start.elapsed() < millis(500), "its place was lost: {:?}", start.elapsed());
    guard.release().await.unwrap();
    nothing_left(two.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_session_that_dies_does_not_end_the_wait() {
    let (one, two) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    let (waited, ()) = tokio::join!(two.lock(&KEY_A, wait(secs(60))), async {
        for _ in 0..5 {
            tokio::time::sleep(secs(1)).await;
            two.link().end_sessions();
        }
        tokio::time::sleep(secs(3)).await;
        guard.release().await.unwrap();
    });
    assert!(waited.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lock_granted_to_a_waiter_session_is_lost_with_that_session() {
    let (one, two) = pair();
    let first = one.lock(&KEY_A, try_once()).await.unwrap().unwrap();
    let (waited, ()) = tokio::join!(two.lock(&KEY_A, wait(secs(60))), async {
        tokio::time::sleep(secs(1)).await;
        first.release().await.unwrap();
    });
    let guard = waited.unwrap().unwrap();
    guard.token().await.unwrap();
    tokio::time::sleep(secs(3600)).await;
    assert!(guard.is_held(), "the keepalive of a waiter session");
    two.link().end_sessions();
    assert_eq!(guard.lost().wait().await, LossReason::SessionEnded);
    drop(guard);
    assert!(one.lock(&KEY_A, try_once()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_held_locks_is_told_and_hurts_nobody() {
    let store = MemoryStore::new();
    let mut limits = SessionLimits::default();
    limits.max_held = 10;
    let one =
        MemoryBackend::builder().store(&store).namespace("test").session_limits(limits).build();
    let mut guards = Vec::new();
    for i in 0..10 {
        guards.push(one.lock(&key(&i.to_string()), try_once()).await.unwrap().unwrap());
    }
    let error = one.lock(&key("one more"), try_once()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().contains("10 locks"), "{error}");
    guards.pop().unwrap().release().await.unwrap();
    guards.push(one.lock(&key("one more"), try_once()).await.unwrap().unwrap());
    for guard in guards {
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn close_frees_everything_and_tells_the_guards() {
    use leasehold_core::Backend;
    let (one, two) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    let theirs = two.lock(&key("b"), try_once()).await.unwrap().unwrap();
    let wanted = key("b");
    let (waited, closed) = tokio::join!(one.lock(&wanted, wait(secs(60))), async {
        tokio::time::sleep(secs(1)).await;
        one.close().await
    });
    closed.unwrap();
    assert_eq!(waited.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(guard.lost().wait().await, LossReason::Closed);
    assert!(two.lock(&key("a"), try_once()).await.unwrap().is_some());
    assert_eq!(one.lock(&key("c"), try_once()).await.unwrap_err().kind(), ErrorKind::Unavailable);
    theirs.release().await.unwrap();
    nothing_left(two.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_is_dropped_closes_its_sessions_but_not_under_a_guard() {
    let (one, two) = pair();
    let guard = one.lock(&key("a"), try_once()).await.unwrap().unwrap();
    drop(one);
    tokio::time::sleep(secs(60)).await;
    assert!(guard.is_held());
    assert!(two.lock(&key("a"), try_once()).await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(two.lock(&key("a"), try_once()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn with_lock_stops_the_work_on_loss() {
    let (one, two) = pair();
    let done = one.with_lock(&key("a"), try_once(), async |guard| guard.key().to_string()).await;
    assert_eq!(done.unwrap().as_deref(), Some("a"));
    let reached = Mutex::new(Vec::new());
    let (outcome, ()) = tokio::join!(
        one.with_lock(&KEY_A, try_once(), async |_| {
            reached.lock().unwrap().push("start");
            tokio::time::sleep(secs(60)).await;
            reached.lock().unwrap().push("end");
        }),
        async {
            tokio::time::sleep(secs(1)).await;
            one.link().end_sessions();
        }
    );
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(*reached.lock().unwrap(), ["start"]);
    let held = two.lock(&key("a"), try_once()).await.unwrap().unwrap();
    assert!(one.with_lock(&KEY_A, try_once(), async |_| ()).await.unwrap().is_none());
    drop(held);
}

#[tokio::test]
async fn a_future_of_ours_can_be_spawned() {
    let (one, _) = pair();
    let one: Arc<dyn NamedLock> = Arc::new(one);
    let words = vec!["borrowed".to_owned()];
    let task = tokio::spawn(async move {
        let words = &words;
        one.with_lock(&KEY_A, try_once(), async |guard| {
            tokio::task::yield_now().await;
            format!("{} {}", words[0], guard.key())
        })
        .await
    });
    assert_eq!(task.await.unwrap().unwrap().as_deref(), Some("borrowed a"));
}

#[tokio::test(start_paused = true)]
async fn every_key_is_free_once_its_users_are_gone() {
    let (one, two) = pair();
    let (one, two) = (Arc::new(one), Arc::new(two));
    let mut tasks = JoinSet::new();
    for i in 0..200_u64 {
        let backend = if i % 2 == 0 { one.clone() } else { two.clone() };
        tasks.spawn(async move {
            let limit = millis(i * 7 % 50);
            let wanted = key(&format!("k{}", i % 5));
            let work = async {
                if let Ok(Some(guard)) = backend.lock(&wanted, wait(millis(i))).await {
                    tokio::time::sleep(millis(i % 3)).await;
                    drop(guard);
                }
            };
            let _ = timeout(limit, work).await;
        });
    }
    tasks.join_all().await;
    nothing_left(one.store()).await;
    for i in 0..5 {
        let free = two.lock(&key(&format!("k{i}")), wait(secs(5))).await.unwrap();
        until("held", || free.is_some()).await;
    }
}

/// A try that finds the lock held is not in the way of the next one of the same handle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_told_busy_gets_it_once_it_is_free() {
    let store = MemoryStore::new();
    let open = || MemoryBackend::builder().store(&store).build();
    let (one, two) = (open(), open());
    let (key, once) = (Key::new("x").unwrap(), LockOptions::try_once());
    for round in 0..500 {
        let held = two.lock(&key, once).await.unwrap().unwrap();
        assert!(one.lock(&key, once).await.unwrap().is_none());
        held.release().await.unwrap();
        let next = one.lock(&key, once).await.unwrap();
        assert!(next.is_some(), "told busy in round {round}, and nobody had it");
        next.unwrap().release().await.unwrap();
    }
}
