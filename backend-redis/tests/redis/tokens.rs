//! Fencing tokens rise whatever happens to the data.

use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Lease, LockOptions, NamedLock,
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
