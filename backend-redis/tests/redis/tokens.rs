//! Fencing tokens rise whatever happens to the data.

use std::time::Duration;

use futures_util::FutureExt;
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, FencingToken, HoldingQuery, Inspect,
    Kind, Lease, LockGuard, LockOptions, NamedLock,
};
use leasehold_redis::RedisBackend;

use crate::lab::{Lab, blocking, key, keys, once, until};

/// One token of each kind.
async fn tokens(handle: &RedisBackend) -> [u64; 4] {
    let lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let first = handle.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    let tokens = [
        lease.token().value(),
        lock.token().await.unwrap().value(),
        claim.token().value(),
        first.token().value(),
    ];
    // what a fault took away is lost, not an error here
    drop((lease.release().await, lock.release().await, claim.rollback().await));
    drop(first.abandon().await);
    tokens
}

fn assert_rise(before: [u64; 4], after: [u64; 4]) {
    for (before, after) in before.into_iter().zip(after) {
        assert!(after > before, "{after} after {before}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_across_flushall() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let mut last = tokens(&handle).await;
    for _ in 0..20 {
        lab.ask(&["FLUSHALL"]).await;
        let next = tokens(&handle).await;
        assert_rise(last, next);
        last = next;
    }
}

/// A lock whose holder has waited for it in the process of the one before: it is the same lock on
/// the server.
async fn handed_on(handle: &RedisBackend) -> (FencingToken, LockGuard) {
    let guard = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let before = guard.token().await.unwrap();
    let (key, opts) = (key("x"), LockOptions::default().wait(Duration::from_secs(20)));
    let mut waiter = handle.lock(&key, opts);
    assert!(waiter.as_mut().now_or_never().is_none());
    guard.release().await.unwrap();
    (before, waiter.await.unwrap().unwrap())
}

async fn shown(handle: &RedisBackend) -> Option<FencingToken> {
    let query = HoldingQuery::key(&key("x")).kinds([Kind::Lock]);
    let held = handle.holdings(&query).await.unwrap();
    held.first().and_then(|held| held.token)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_was_handed_on_goes_by_its_own_token_once_it_has_one() {
    let lab = Lab::shared();
    let (handle, other) = (lab.open().await, lab.open().await);
    let (before, guard) = handed_on(&handle).await;
    assert_eq!(shown(&other).await, Some(before));
    let token = guard.token().await.unwrap();
    assert!(token > before, "{token} after {before}");
    assert_eq!(shown(&other).await, Some(token));
    assert!(!other.release_by_token(Kind::Lock, &key("x"), before).await.unwrap());
    assert!(other.release_by_token(Kind::Lock, &key("x"), token).await.unwrap());
    let next = other.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    assert!(next.token().await.unwrap() > token);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_was_handed_on_and_is_gone_from_the_server_gets_no_token() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let (before, guard) = handed_on(&handle).await;
    lab.ask(&["FLUSHALL"]).await;
    assert_eq!(guard.token().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(guard.lost().is_set());
    drop(guard);
    // handed on after the data was lost and the lock taken anew
    let (after, guard) = handed_on(&handle).await;
    assert!(after > before && guard.token().await.unwrap() > after);
}

/// Restarted empty after `kill -9`.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_across_a_restart_without_persistence() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let before = tokens(&handle).await;
    blocking(|| lab.server.kill().and_then(|()| lab.server.restart())).unwrap();
    assert_eq!(lab.ask(&["DBSIZE"]).await.number(), 0);
    until("the handle is connected again", || async {
        handle.lease(&key("y"), once(1_000)).await.is_ok()
    })
    .await;
    assert_rise(before, tokens(&handle).await);
}

/// B76: a server clock that is set back does not lower a token while the last one is remembered,
/// and that is remembered until the clock has caught up.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_when_the_clock_is_set_back() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    drop(handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap().release().await);
    // what an acquisition with a clock of three days ahead has left
    let last = lab.the_key("last").await;
    let ahead: u64 = lab.ask(&["GET", &last]).await.text().unwrap().parse().unwrap();
    let ahead = ahead + 3 * 24 * 3_600 * 1_000_000;
    lab.ask(&["SET", &last, &ahead.to_string(), "PX", "60000"]).await;
    for step in 1..=3 {
        let lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
        assert_eq!(lease.token().value(), ahead + step);
        lease.release().await.unwrap();
    }
    let ttl = lab.ask(&["PTTL", &last]).await.number();
    assert!(ttl > 3 * 24 * 3_600 * 1_000, "forgotten in {ttl} ms, before the clock caught up");
}
