use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::memory::MemoryBackend;
use leasehold::recipes::{Leader, Standing};
use leasehold::{LockOptions, LossReason, NamedLock};

use crate::{key, processes, secs, settle, soon};

/// Both kinds of leaders.
fn leaders(store: &Arc<MemoryBackend>) -> [Leader; 2] {
    [
        Leader::over_locks(store.clone(), key("x")).start(),
        Leader::over_leases(store.clone(), key("x"), secs(30)).start(),
    ]
}

#[tokio::test(start_paused = true)]
async fn one_leads_and_the_next_follows_a_resignation() {
    let [a, b] = processes();
    for (a, b) in leaders(&a).into_iter().zip(leaders(&b)) {
        let (first, second) = tokio::select! {
            _ = a.elected() => (&a, &b),
            _ = b.elected() => (&b, &a),
        };
        settle().await;
        assert!(first.is_leader() && !second.is_leader());
        let token = first.term().unwrap().token();
        // sticky
        tokio::time::sleep(secs(3600)).await;
        assert_eq!(first.term().map(|term| term.token()), Some(token));
        assert_eq!(second.health().standing, Standing::Campaigning);
        assert!(second.health().is_ok(), "{:?}", second.health());
        assert!(second.health().answered.unwrap() < secs(15), "a wait is a sign of life");

        soon("the resignation", first.resign()).await;
        assert!(!first.is_leader());
        assert_eq!(first.health().standing, Standing::Resigned);
        let next = soon("the next", second.elected()).await;
        assert!(next.token() > token);
        tokio::time::sleep(secs(3600)).await;
        assert!(!first.is_leader(), "it resigned");
        first.campaign();
        soon("the resignation", second.resign()).await;
        soon("the first again", first.elected()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn gain_and_loss_are_told_and_the_work_is_dropped() {
    let [a, b] = processes();
    let leader = Leader::over_locks(a.clone(), key("x")).start();
    let mut news = leader.watch();
    let term = soon("the news", news.wait_for(Option::is_some)).await.unwrap().clone().unwrap();
    let (begun, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = leader.lead(async |_| {
        let _dropped = OnDrop(&dropped);
        if begun.fetch_add(1, Ordering::SeqCst) == 1 {
            return "done";
        }
        std::future::pending().await
    });
    tokio::pin!(work);
    tokio::select! {
        _ = &mut work => panic!("it does not end in the first term"),
        () = settle() => {}
    }
    a.link().end_sessions();
    assert_eq!(soon("the loss", term.lost().wait()).await, LossReason::SessionEnded);
    assert!(!leader.is_leader() || leader.term().unwrap().token() > term.token());
    assert_eq!(soon("the work in the next term", &mut work).await, "done");
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
    drop(b);
}

struct OnDrop<'a>(&'a AtomicUsize);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_resignation_frees_the_lock_only_after_the_work_is_dropped() {
    struct Works<'a>(&'a AtomicBool);
    impl Drop for Works<'_> {
        fn drop(&mut self) {
            self.0.store(false, Ordering::SeqCst);
        }
    }
    let [a, b] = processes();
    let leader = Leader::over_locks(a, key("x")).start();
    let works = AtomicBool::new(false);
    let work = leader.lead(async |_| {
        works.store(true, Ordering::SeqCst);
        let _works = Works(&works);
        std::future::pending::<()>().await;
    });
    let mut work = Box::pin(work);
    tokio::select! {
        () = &mut work => {}
        () = settle() => {}
    }
    assert!(works.load(Ordering::SeqCst));
    let resigned = tokio::time::timeout(secs(60), leader.resign()).await;
    assert!(resigned.is_err(), "the work was not polled, and may be writing");
    assert!(!leader.is_leader());
    assert!(b.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_none());
    tokio::select! {
        () = &mut work => {}
        () = leader.resign() => {}
    }
    assert!(!works.load(Ordering::SeqCst));
    assert!(b.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn dropping_it_tells_so_and_frees_the_lock() {
    let [a, b] = processes();
    for (leader, other) in leaders(&a).into_iter().zip(leaders(&b)) {
        let (leader, other) = tokio::select! {
            _ = leader.elected() => (leader, other),
            _ = other.elected() => (other, leader),
        };
        let mut news = leader.watch();
        assert!(news.borrow_and_update().is_some());
        drop(leader);
        soon("the news", news.wait_for(Option::is_none)).await.unwrap();
        soon("the other", other.elected()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_bounded_term_goes_round() {
    let [a, b] = processes();
    let campaign = |store: Arc<MemoryBackend>| {
        Leader::over_leases(store, key("x"), secs(30)).max_term(secs(60)).start()
    };
    let (a, b) = (campaign(a), campaign(b));
    for _ in 0..5 {
        soon("a", a.elected()).await;
        soon("b", b.elected()).await;
        assert!(!a.is_leader());
    }
}

#[tokio::test(start_paused = true)]
async fn a_resignation_that_is_taken_back_at_once_is_still_one() {
    let [a] = processes();
    let leader = Leader::over_locks(a, key("x")).start();
    let token = soon("it leads", leader.elected()).await.token();
    let resigned = async {
        leader.resign().await;
    };
    let back = async { leader.campaign() };
    soon("both", async { tokio::join!(resigned, back) }).await;
    let again = soon("it leads again", leader.elected()).await.token();
    assert!(again > token);
}

#[tokio::test(start_paused = true)]
async fn silence_is_no_leadership_and_shows_in_its_health() {
    let [a, b] = processes();
    for leader in leaders(&a) {
        let term = soon("it leads", leader.elected()).await;
        a.link().silence();
        soon("the loss", term.lost().wait()).await;
        assert!(!leader.is_leader());
        tokio::time::sleep(secs(60)).await;
        let health = leader.health();
        assert!(!health.is_ok() && health.error.is_some(), "{health:?}");
        a.link().heal();
        soon("it leads again", leader.elected()).await;
        assert!(leader.health().is_ok());
    }
    drop(b);
}

#[tokio::test]
async fn it_works_in_a_spawned_task() {
    let [a] = processes();
    let leader = Arc::new(Leader::over_locks(a, key("x")).start());
    let task = {
        let leader = leader.clone();
        tokio::spawn(async move { leader.lead(async |term| term.token()).await })
    };
    assert!(
        tokio::time::timeout(Duration::from_secs(60), task).await.unwrap().unwrap().value() > 0
    );
}
