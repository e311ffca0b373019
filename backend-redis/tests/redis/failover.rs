//! A sentinel that makes the replica the primary.

use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::servers::redis::{Sentinel, sentinel};
use leasehold_core::{ClaimLock, ClaimOptions, ErrorKind, Lease, LockOptions, NamedLock};
use leasehold_redis::{RedisBackend, RedisTx};

use crate::lab::{blocking, key, keys, kind_of, once, soon, until};
use crate::support::{Raw, Reply, kind};

async fn open(servers: &Sentinel) -> Arc<RedisBackend> {
    let builder = RedisBackend::builder()
        .command_limit(Duration::from_secs(2))
        .lock_ttl(Duration::from_secs(60))
        .claim_ttl(Duration::from_secs(60));
    Arc::new(builder.connect(&servers.url()).await.unwrap())
}

/// Kills the primary and waits until the replica is the primary.
async fn fail_over(servers: &Sentinel) {
    let before = servers.primary.port();
    blocking(|| servers.primary.kill()).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let now = blocking(|| servers.primary_port());
        if now.is_ok_and(|now| now != before)
            && let Ok(mut raw) = Raw::open(servers.replica.port()).await
            && let Ok(Reply::List(role)) = raw.ask(&["ROLE"]).await
            && role[0].text() == Some("master")
        {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "no failover");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The acquisition that first succeeds after the failover.
async fn acquire(handle: &RedisBackend, name: &str) -> leasehold_core::LeaseGuard {
    let opts = once(60_000).wait(Duration::from_secs(40));
    handle.lease(&key(name), opts).await.unwrap().expect("nobody has it")
}

/// What was replicated is still held after a failover, and released on the new primary.
#[tokio::test(flavor = "multi_thread")]
async fn a_replicated_hold_survives_a_failover() {
    let servers = blocking(|| sentinel(kind())).unwrap();
    let handle = open(&servers).await;
    let held = handle.lease(&key("x"), once(120_000)).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    until("the replica has both", || async {
        let mut raw = Raw::open(servers.replica.port()).await.unwrap();
        let keys = raw.tell(&["KEYS", "leasehold:default:*:l*:x"]).await.unwrap();
        keys.texts().len() == 2
    })
    .await;
    fail_over(&servers).await;
    let other = acquire(&handle, "y").await;
    assert!(held.is_held() && lock.is_held());
    held.renew().await.unwrap();
    let fresh = open(&servers).await;
    assert!(fresh.lease(&key("x"), once(1_000)).await.unwrap().is_none());
    held.release().await.unwrap();
    lock.release().await.unwrap();
    other.release().await.unwrap();
    assert!(fresh.lease(&key("x"), once(1_000)).await.unwrap().is_some());
}

/// B67: the replica lags, the failover loses an acknowledged lock. The token still rises, the old
/// holder is told at its next renewal, and its commit writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_lagging_replica_loses_a_lock_and_tokens_rise() {
    let servers = blocking(|| sentinel(kind())).unwrap();
    let handle = open(&servers).await;
    drop(acquire(&handle, "x").await.release().await);
    // the replica's link is cut and it cannot log in again: from here on nothing reaches it
    let mut replica = Raw::open(servers.replica.port()).await.unwrap();
    replica.tell(&["CONFIG", "SET", "masterauth", "wrong"]).await.unwrap();
    let mut primary = Raw::open(servers.primary.port()).await.unwrap();
    primary.tell(&["CLIENT", "KILL", "TYPE", "replica"]).await.unwrap();
    let held = handle.lease(&key("x"), once(120_000)).await.unwrap().unwrap();
    let mut claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    claim.tx::<RedisTx>().unwrap().set("{default}n", 1).unwrap();
    let copied = replica.tell(&["KEYS", "leasehold:default:*:lease:x"]).await.unwrap();
    assert!(copied.texts().is_empty(), "the replica does not lag");
    fail_over(&servers).await;
    let fresh = handle_of(&servers).await;
    let successor = acquire(&fresh, "x").await;
    assert!(successor.token() > held.token(), "the token fell in the failover");
    let old = claim.token();
    let renewed = soon("the new primary answers", async {
        loop {
            match held.renew().await {
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                outcome => return outcome,
            }
        }
    })
    .await;
    assert_eq!(kind_of(renewed), ErrorKind::Lost);
    assert_eq!(kind_of(claim.commit().await), ErrorKind::Lost);
    let mut raw = Raw::open(servers.replica.port()).await.unwrap();
    assert_eq!(raw.tell(&["EXISTS", "{default}n"]).await.unwrap().number(), 0);
    let next = handle.claim(&keys(&["x"]), ClaimOptions::default()).await.unwrap().unwrap();
    assert!(next.token() > old);
    successor.renew().await.unwrap();
}

/// Another process, which only knows the new primary.
async fn handle_of(servers: &Sentinel) -> Arc<RedisBackend> {
    let deadline = std::time::Instant::now() + Duration::from_secs(40);
    loop {
        match RedisBackend::connect(&servers.url()).await {
            Ok(handle) => return Arc::new(handle),
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
