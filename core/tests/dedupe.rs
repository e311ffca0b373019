//! The dedupe engine under a paused clock, over a store with faults on the way.

mod common;

use common::{key, millis, pair, secs};
use leasehold_core::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use leasehold_core::engine::DedupeEngine;
use leasehold_core::memory::{MemoryBackend, MemoryDriver};
use leasehold_core::{
    Admission, Backend, Dedupe, DedupeExt, DedupeOptions, Error, ErrorKind, Key, Result, Seen,
};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::Instant;

static KEY: LazyLock<Key> = LazyLock::new(|| key("event"));

fn opts() -> DedupeOptions {
    DedupeOptions::default().in_progress(secs(10)).retain(secs(100))
}

async fn first(backend: &impl Dedupe) -> leasehold_core::DedupeGuard {
    backend.admit(&KEY, opts()).await.unwrap().first().expect("the first")
}

async fn eventually_first(backend: &impl Dedupe) -> leasehold_core::DedupeGuard {
    let start = Instant::now();
    loop {
        match backend.admit(&KEY, opts()).await.unwrap() {
            Admission::First(guard) => return guard,
            other => assert!(start.elapsed() < secs(60), "{other:?}"),
        }
        tokio::time::sleep(millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn progress_then_done_then_forgotten() {
    let (one, two) = pair();
    let guard = first(&one).await;
    let since = match two.admit(&KEY, opts()).await.unwrap() {
        Admission::InProgress { since } => since,
        other => panic!("{other:?}"),
    };
    tokio::time::sleep(secs(3)).await;
    guard.complete().await.unwrap();
    match two.admit(&KEY, opts()).await.unwrap() {
        Admission::Done { at } => assert!(at >= since + secs(3)),
        other => panic!("{other:?}"),
    }
    tokio::time::sleep(secs(99)).await;
    assert!(!two.admit(&KEY, opts()).await.unwrap().is_first());
    tokio::time::sleep(secs(2)).await;
    assert!(two.admit(&KEY, opts()).await.unwrap().is_first());
}

#[tokio::test(start_paused = true)]
async fn a_failure_frees_the_key_at_once() {
    let (one, two) = pair();
    first(&one).await.abandon().await.unwrap();
    drop(first(&two).await);
    eventually_first(&one).await.complete().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_entry_is_taken_over_and_its_owner_can_do_no_harm() {
    let (one, two) = pair();
    let [stale, older] = [first(&one).await, {
        tokio::time::sleep(secs(10)).await;
        first(&one).await
    }];
    assert!(!stale.is_held() && older.is_held() && older.token() > stale.token());
    tokio::time::sleep(secs(10)).await;
    let guard = first(&two).await;
    assert!(guard.token() > older.token());
    assert!(older.lost().is_set());
    assert_eq!(stale.abandon().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(older.complete().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(matches!(one.admit(&KEY, opts()).await.unwrap(), Admission::InProgress { .. }));
    guard.complete().await.unwrap();
    assert!(matches!(one.admit(&KEY, opts()).await.unwrap(), Admission::Done { .. }));
}

#[tokio::test(start_paused = true)]
async fn many_are_admitted_in_their_order_and_repeats_once() {
    let (one, two) = pair();
    two.admit(&key("b"), opts()).await.unwrap().first().unwrap().complete().await.unwrap();
    let keys = ["a", "b", "c", "a"].map(key);
    let admitted = one.admit_many(&keys, opts()).await.unwrap();
    assert!(admitted[0].is_first() && admitted[2].is_first());
    assert!(matches!(admitted[1], Admission::Done { .. }));
    assert!(matches!(admitted[3], Admission::InProgress { .. }));
    let guard = admitted.into_iter().next().unwrap().first().unwrap();
    assert_eq!(guard.key(), &keys[0]);
    assert!(one.admit_many(&[], opts()).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_step_forms() {
    let (one, two) = pair();
    assert!(one.first_seen(&KEY, secs(10)).await.unwrap());
    assert!(!two.first_seen(&KEY, secs(10)).await.unwrap());
    tokio::time::sleep(secs(11)).await;
    assert!(two.first_seen(&KEY, secs(10)).await.unwrap());
    let within = millis(500);
    let seen = async || one.first_seen_or_accept(&KEY, secs(10), within).await;
    assert!(matches!(seen().await.unwrap(), Seen::Before));
    one.link().silence();
    let start = Instant::now();
    let accepted = seen().await.unwrap();
    assert!(accepted.is_accepted() && start.elapsed() == within);
    assert!(matches!(accepted, Seen::Accepted(error) if error.kind() == ErrorKind::Unavailable));
    let error = one.first_seen_or_accept(&KEY, Duration::ZERO, within).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOptions);
}

#[tokio::test(start_paused = true)]
async fn an_admission_whose_answer_was_lost_is_not_burned() {
    let (one, two) = pair();
    one.link().lose_next_answer();
    let guard = one.admit(&KEY, opts()).await.unwrap().first().expect("it is our own");
    assert!(!two.admit(&KEY, opts()).await.unwrap().is_first());
    guard.abandon().await.unwrap();
    one.link().silence();
    let error = one.admit(&KEY, opts()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    one.link().heal();
    drop(eventually_first(&two).await);
}

#[tokio::test(start_paused = true)]
async fn housekeeping_spares_the_live_and_lowers_no_token() {
    let (one, two) = pair();
    let done = first(&one).await;
    let token = done.token();
    done.complete().await.unwrap();
    assert_eq!(two.housekeep().await.unwrap().dedupe, 0);
    tokio::time::sleep(secs(101)).await;
    assert_eq!(two.housekeep().await.unwrap().dedupe, 1);
    assert!(first(&one).await.token() > token);
}

/// Loses the first few abandons on the way.
#[derive(Debug)]
struct Losing(MemoryDriver, AtomicU32);

#[async_trait::async_trait]
impl DedupeDriver for Losing {
    fn backend(&self) -> &'static str {
        "losing"
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        DedupeDriver::admit(&self.0, items).await
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        self.0.complete(key, owner, retain).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        if self.1.fetch_add(1, Ordering::SeqCst) < 5 {
            return Err(Error::new(ErrorKind::Unavailable, "lost on the way"));
        }
        self.0.abandon(key, owner).await
    }
}

#[tokio::test(start_paused = true)]
async fn an_abandon_that_gets_lost_is_tried_on() {
    let driver = MemoryBackend::builder().namespace("test").driver();
    let engine = DedupeEngine::new(Losing(driver, AtomicU32::new(0)));
    let opts = opts().in_progress(secs(3_600));
    let guard = engine.admit(&KEY, opts).await.unwrap().first().unwrap();
    let start = Instant::now();
    assert_eq!(guard.abandon().await.unwrap_err().kind(), ErrorKind::Unavailable);
    eventually_first(&engine).await.complete().await.unwrap();
    assert!(start.elapsed() < secs(30), "it was left to its time-out");
}
