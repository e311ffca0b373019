//! The claim engine under a paused clock, over a store with faults on the way.

mod common;

use common::{key, millis, nothing_left, pair, secs};
use leasehold_core::memory::MemoryTx;
use leasehold_core::{
    Admission, Claim, ClaimLock, ClaimLockExt, ClaimOptions, Dedupe, DedupeOptions, Error,
    ErrorKind, Keys,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

fn keys(names: &[&str]) -> Keys {
    Keys::new(names).expect("valid keys")
}

fn wait(wait: Duration) -> ClaimOptions {
    ClaimOptions::default().wait(wait)
}

fn write(claim: &mut Claim, name: &str, value: &str) {
    claim.tx::<MemoryTx>().unwrap().write(name, value);
}

#[tokio::test(start_paused = true)]
async fn a_commit_writes_and_runs_the_hooks_in_order_once() {
    let (one, two) = pair();
    let ran = Arc::new(Mutex::new(Vec::new()));
    let hook = |what: &'static str| {
        let ran = ran.clone();
        async move { ran.lock().unwrap().push(what) }
    };
    let mut claim = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    write(&mut claim, "x", "1");
    claim.after_commit(hook("first"));
    claim.after_commit(async { panic!("a hook that panics stops no other") });
    claim.after_commit(hook("second"));
    assert_eq!(one.store().read("x"), None);
    assert!(two.claim(&keys(&["a", "b"]), wait(Duration::ZERO)).await.unwrap().is_none());
    claim.commit().await.unwrap();
    assert_eq!(one.store().read("x").as_deref(), Some("1"));
    assert_eq!(*ran.lock().unwrap(), ["first", "second"]);

    let mut claim = two.claim(&keys(&["a", "b"]), wait(Duration::ZERO)).await.unwrap().unwrap();
    write(&mut claim, "x", "2");
    claim.after_commit(hook("never"));
    claim.rollback().await.unwrap();
    let mut claim = two.claim(&keys(&["a", "b"]), wait(Duration::ZERO)).await.unwrap().unwrap();
    claim.after_commit(hook("never"));
    drop(claim);
    nothing_left(one.store()).await;
    assert_eq!(one.store().read("x").as_deref(), Some("1"));
    assert_eq!(ran.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_transaction_lists_what_is_committed_and_its_own_writes() {
    let (one, _) = pair();
    let mut claim = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    for name in ["x/1", "x/2", "y", "w"] {
        write(&mut claim, name, "old");
    }
    claim.commit().await.unwrap();
    let mut claim = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    write(&mut claim, "x/2", "new");
    write(&mut claim, "x/3", "new");
    let tx = claim.tx::<MemoryTx>().unwrap();
    tx.remove("x/1");
    let listed: Vec<_> = tx.list("x/").into_iter().collect();
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(listed, [pair("x/2", "new"), pair("x/3", "new")]);
    assert_eq!(tx.list("").len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_commit_whose_answer_is_lost_is_unknown_and_drops_the_hooks() {
    let (one, _) = pair();
    let ran = Arc::new(Mutex::new(false));
    let mut claim = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    write(&mut claim, "x", "1");
    let flag = ran.clone();
    claim.after_commit(async move { *flag.lock().unwrap() = true });
    one.link().lose_next_answer();
    let error = claim.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CommitUnknown);
    assert!(!error.is_retryable());
    assert!(error.to_string().starts_with("memory: commit \"{a}\" failed: commit outcome unknown"));
    assert_eq!(one.store().read("x").as_deref(), Some("1"), "this one did happen");
    assert!(!*ran.lock().unwrap());
    // silence is unknown as well, after its limit
    let claim = one.claim(&keys(&["b"]), wait(secs(1))).await.unwrap().unwrap();
    one.link().silence();
    let error = timeout(secs(60), claim.commit()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CommitUnknown);
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_session_ended_writes_nothing() {
    let (one, two) = pair();
    let mut claim = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    write(&mut claim, "x", "stale");
    one.link().end_sessions();
    let next = two.claim(&keys(&["a"]), wait(Duration::ZERO)).await.unwrap().expect("free");
    assert!(next.token() > claim.token());
    assert_eq!(claim.commit().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(one.store().read("x"), None);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_has_taken_none_of_the_keys() {
    let (one, two) = pair();
    let held = one.claim(&keys(&["b"]), wait(secs(1))).await.unwrap().unwrap();
    for backend in [&one, &two] {
        let start = Instant::now();
        let set = keys(&["a", "b", "c"]);
        assert!(backend.claim(&set, wait(secs(3))).await.unwrap().is_none());
        assert!(start.elapsed() >= secs(3) && start.elapsed() < millis(3100));
        let others = backend.claim(&keys(&["a", "c"]), wait(Duration::ZERO)).await.unwrap();
        assert!(others.is_some(), "keys of the failed set are still held");
        others.unwrap().rollback().await.unwrap();
    }
    held.commit().await.unwrap();
    nothing_left(one.store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_caller_is_gone_leaves_the_queue() {
    let (one, two) = pair();
    let two = Arc::new(two);
    let held = one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().unwrap();
    for _ in 0..10 {
        let gone = timeout(millis(50), two.claim(&keys(&["a"]), wait(Duration::MAX))).await;
        assert!(gone.is_err());
    }
    held.commit().await.unwrap();
    assert!(one.claim(&keys(&["a"]), wait(Duration::ZERO)).await.unwrap().is_some());
    nothing_left(one.store()).await;
}

#[tokio::test(start_paused = true)]
async fn overlapping_sets_in_any_order_do_not_deadlock() {
    let (one, two) = pair();
    let backends = [Arc::new(one), Arc::new(two)];
    let mut tasks = JoinSet::new();
    for i in 0..60_usize {
        let backend = backends[i % 2].clone();
        tasks.spawn(async move {
            let mut names = ["a", "b", "c", "d"];
            names.rotate_left(i % 4);
            if i % 3 == 0 {
                names.reverse();
            }
            let set = keys(&names[..2 + i % 3]);
            let done = backend.with_claim(&set, wait(secs(60)), async |claim: &mut Claim| {
                let tx = claim.tx::<MemoryTx>()?;
                let count: u32 = tx.read("count").map_or(0, |count| count.parse().unwrap());
                tokio::time::sleep(millis(1)).await;
                tx.write(format!("by {i}"), "done");
                // all sets overlap pairwise in b or c, but not in one key: count by key
                let key = format!("count {}", names[0]);
                let own: u32 = tx.read(&key).map_or(0, |own| own.parse().unwrap());
                tx.write(key, (own + 1).to_string());
                Ok::<_, Error>(count)
            });
            done.await.unwrap().expect("in time");
        });
    }
    tasks.join_all().await;
    let total: u32 = ["a", "b", "c", "d"]
        .iter()
        .map(|name| backends[0].store().read(&format!("count {name}")).unwrap())
        .map(|count| count.parse::<u32>().unwrap())
        .sum();
    assert_eq!(total, 60, "an update was lost");
    nothing_left(backends[0].store()).await;
}

#[tokio::test(start_paused = true)]
async fn with_claim_commits_on_ok_and_rolls_back_on_err() {
    let (one, _) = pair();
    let set = keys(&["a"]);
    let work = async |claim: &mut Claim| -> Result<u8, Error> {
        write(claim, "x", "kept");
        Ok(7)
    };
    assert_eq!(one.with_claim(&set, wait(secs(1)), work).await.unwrap(), Some(7));
    let work = async |claim: &mut Claim| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        write(claim, "x", "dropped");
        Err("the work failed".into())
    };
    let error = one.with_claim(&set, wait(secs(1)), work).await.unwrap_err();
    assert_eq!(error.to_string(), "the work failed");
    assert_eq!(one.store().read("x").as_deref(), Some("kept"));
    nothing_left(one.store()).await;
}

#[tokio::test(start_paused = true)]
async fn dedupe_inside_a_claim_goes_with_it() {
    let (one, two) = pair();
    let event = key("event");
    for commits in [false, true] {
        let mut claim = one.claim(&Keys::none(), wait(secs(1))).await.unwrap().unwrap();
        assert!(claim.first_seen(&event, secs(60)).await.unwrap());
        assert!(!claim.first_seen(&event, secs(60)).await.unwrap());
        let meanwhile = two.admit(&event, DedupeOptions::default()).await.unwrap();
        assert!(matches!(meanwhile, Admission::InProgress { .. }));
        if commits {
            claim.commit().await.unwrap();
        } else {
            claim.rollback().await.unwrap();
        }
    }
    let after = two.admit(&event, DedupeOptions::default()).await.unwrap();
    assert!(matches!(after, Admission::Done { .. }));
    let mut claim = two.claim(&Keys::none(), wait(secs(1))).await.unwrap().unwrap();
    assert!(!claim.first_seen(&event, secs(60)).await.unwrap());
    let error = claim.first_seen(&event, Duration::ZERO).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOptions);
}

#[tokio::test(start_paused = true)]
async fn an_outage_fails_within_wait_and_answer_limit() {
    let (one, _) = pair();
    one.link().silence();
    for limit in [Duration::ZERO, secs(3)] {
        let start = Instant::now();
        let error = one.claim(&keys(&["a"]), wait(limit)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(start.elapsed() <= limit + secs(5));
    }
    one.link().heal();
    assert!(one.claim(&keys(&["a"]), wait(secs(1))).await.unwrap().is_some());
}
