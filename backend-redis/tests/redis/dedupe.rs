//! Dedupe.

use std::time::Duration;

use leasehold_core::{
    Admission, ClaimLock, ClaimOptions, Dedupe, DedupeExt, DedupeGuard, DedupeOptions, ErrorKind,
    Key,
};
use leasehold_redis::RedisBackend;

use crate::lab::{Lab, PATIENCE, key, keys, kind_of};

fn within(ms: u64) -> DedupeOptions {
    DedupeOptions::default().in_progress(Duration::from_millis(ms))
}

async fn take_over(handle: &RedisBackend, name: &str) -> DedupeGuard {
    let taking = async {
        loop {
            let admission = handle.admit(&key(name), within(60_000)).await.unwrap();
            if let Some(first) = admission.first() {
                return first;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taking).await.expect("it can be taken over")
}

/// An unfinished entry is taken over when its time is up; the late owner can then neither
/// complete nor abandon its successor's.
#[tokio::test(flavor = "multi_thread")]
async fn a_taken_over_entry_is_not_the_late_owners() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let late = handle.admit(&key("x"), within(200)).await.unwrap().first().unwrap();
    let busy = handle.admit(&key("x"), within(200)).await.unwrap();
    assert!(matches!(busy, Admission::InProgress { .. }), "{busy:?}");
    let successor = take_over(&handle, "x").await;
    assert!(successor.token() > late.token());
    assert_eq!(kind_of(late.abandon().await), ErrorKind::Lost);
    successor.complete().await.unwrap();
    let done = handle.admit(&key("x"), within(200)).await.unwrap();
    assert!(matches!(done, Admission::Done { .. }), "{done:?}");
}

/// Work that took longer than it was given, and that nobody took over, still counts as done.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_owner_completes_what_nobody_took_over() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let late = handle.admit(&key("x"), within(100)).await.unwrap().first().unwrap();
    late.lost().wait().await;
    late.complete().await.unwrap();
    let done = handle.admit(&key("x"), within(100)).await.unwrap();
    assert!(matches!(done, Admission::Done { .. }), "{done:?}");
}

/// One round trip, whatever the number of keys.
#[tokio::test(flavor = "multi_thread")]
async fn many_are_admitted_at_once() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let names: Vec<Key> = (0..1_234).map(|n| key(&format!("k{n}"))).collect();
    drop(handle.admit(&names[77], within(60_000)).await.unwrap().first().unwrap().complete().await);
    let admissions = handle.admit_many(&names, within(60_000)).await.unwrap();
    assert_eq!(admissions.len(), names.len());
    for (n, admission) in admissions.into_iter().enumerate() {
        if n == 77 {
            assert!(matches!(admission, Admission::Done { .. }));
        } else {
            let first = admission.first().expect("it is the first");
            assert_eq!(first.key(), &names[n]);
            first.complete().await.unwrap();
        }
    }
    let again = handle.admit_many(&names, within(60_000)).await.unwrap();
    assert!(again.iter().all(|admission| matches!(admission, Admission::Done { .. })));
}

/// `first_seen` inside a claim is undone with it, waits for another open claim that has seen the
/// key, and meets the plain form.
#[tokio::test(flavor = "multi_thread")]
async fn first_seen_belongs_to_its_claim() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let retain = Duration::from_secs(60);
    let claim = |name: &'static str| {
        let handle = handle.clone();
        async move {
            let names = keys(&[name]);
            let claim = handle.claim(&names, ClaimOptions::try_once()).await.unwrap();
            claim.expect("nobody has it")
        }
    };
    let mut first = claim("a").await;
    assert!(first.first_seen(&key("event"), retain).await.unwrap());
    assert!(!first.first_seen(&key("event"), retain).await.unwrap());
    first.rollback().await.unwrap();

    let mut second = claim("a").await;
    assert!(second.first_seen(&key("event"), retain).await.unwrap());
    let mut third = claim("b").await;
    let waits = tokio::spawn(async move {
        let seen = third.first_seen(&key("event"), retain).await;
        third.commit().await.unwrap();
        seen
    });
    // it is reserved: seen from outside it is in progress
    let outside = handle.admit(&key("event"), within(100)).await.unwrap();
    assert!(matches!(outside, Admission::InProgress { .. }), "{outside:?}");
    assert!(!waits.is_finished());
    second.commit().await.unwrap();
    assert!(!waits.await.unwrap().unwrap(), "seen first by two committed claims");
    assert!(!handle.first_seen(&key("event"), retain).await.unwrap());
}

/// A claim that lives longer than its ttl keeps what it has seen first.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_long_claim_has_seen_stays_its_own() {
    let lab = Lab::shared();
    let builder = lab.builder().claim_ttl(Duration::from_millis(1_800));
    let handle = builder.connect(&lab.server.url()).await.unwrap();
    let names = keys(&["a"]);
    let mut claim = handle.claim(&names, ClaimOptions::try_once()).await.unwrap().unwrap();
    let retain = Duration::from_secs(60);
    assert!(claim.first_seen(&key("event"), retain).await.unwrap());
    let end = tokio::time::Instant::now() + Duration::from_secs(5);
    while tokio::time::Instant::now() < end {
        let outside = handle.admit(&key("event"), within(100)).await.unwrap();
        assert!(matches!(outside, Admission::InProgress { .. }), "{outside:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    claim.commit().await.unwrap();
    assert!(!handle.first_seen(&key("event"), retain).await.unwrap());
}
