//! What a server must be before it is trusted, and WAIT.

use std::time::Duration;

use leasehold_conformance::servers::redis::sentinel;
use leasehold_core::{ErrorKind, Lease};
use leasehold_redis::RedisBackend;

use crate::lab::{Lab, blocking, key, kind_of, once, until};
use crate::support::{Raw, kind};

/// B71: a server that may evict a lock is refused, unless that is allowed.
#[tokio::test(flavor = "multi_thread")]
async fn an_evicting_server_is_refused() {
    let lab = Lab::private(&["--maxmemory-policy", "allkeys-lru"]);
    let error = lab.builder().connect(&lab.server.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("allkeys-lru"), "{error}");
    let allowed = lab.builder().allow_eviction(true).connect(&lab.server.url()).await;
    assert!(allowed.unwrap().lease(&key("x"), once(1_000)).await.unwrap().is_some());
}

/// B31: a replica gives no exclusion; it is refused, and a server that becomes one is
/// unavailable. WAIT counts the replicas.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_are_refused_and_waited_for() {
    let servers = blocking(|| sentinel(kind())).unwrap();
    let url = |port: u16| format!("redis://127.0.0.1:{port}");
    let replica = RedisBackend::connect(&url(servers.replica.port())).await;
    assert_eq!(kind_of(replica), ErrorKind::Unsupported);

    let builder = RedisBackend::builder().command_limit(Duration::from_secs(2));
    let primary = url(servers.primary.port());
    let one = builder.clone().wait_replicas(1).connect(&primary).await.unwrap();
    let lease = one.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    let mut raw = Raw::open(servers.replica.port()).await.unwrap();
    let copied = raw.tell(&["KEYS", "leasehold:default:*:lease:x"]).await.unwrap();
    assert_eq!(copied.texts().len(), 1, "it was not waited for");
    lease.release().await.unwrap();

    let two = builder.wait_replicas(2).connect(&primary).await.unwrap();
    let error = two.lease(&key("x"), once(30_000)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("1 of 2 replicas"), "{error}");
    // what was not confirmed is given back
    until("it is free", || async { one.lease(&key("x"), once(1_000)).await.unwrap().is_some() })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn options_out_of_range_are_refused() {
    let lab = Lab::shared();
    let url = lab.server.url();
    let bad = [
        lab.builder().namespace("").connect(&url).await,
        lab.builder().cluster_tag("{}").connect(&url).await,
        lab.builder().lock_ttl(Duration::from_millis(1)).connect(&url).await,
        lab.builder().claim_ttl(Duration::MAX).connect(&url).await,
        lab.builder().command_limit(Duration::ZERO).connect(&url).await,
        lab.builder().connect("http://127.0.0.1").await,
    ];
    for outcome in bad {
        assert_eq!(kind_of(outcome), ErrorKind::InvalidOptions);
    }
}

/// An unreachable server is unavailable, within the limit; no password is told.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_server_is_unavailable() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let url = format!("redis://user:secret@127.0.0.1:{port}");
    let builder = RedisBackend::builder().command_limit(Duration::from_secs(1));
    let error = builder.connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
}

/// A client and a pool of the caller's are used as they are, and stay open.
#[tokio::test(flavor = "multi_thread")]
async fn clients_of_the_callers_are_used() {
    use leasehold_core::Backend;
    use leasehold_redis::fred::prelude::*;
    let lab = Lab::shared();
    let config = Config::from_url(&lab.server.url()).unwrap();
    let client = Builder::from_config(config.clone()).build().unwrap();
    client.init().await.unwrap();
    let handle = lab.builder().with_client(client.clone()).await.unwrap();
    let pool = Builder::from_config(config).build_pool(3).unwrap();
    pool.init().await.unwrap();
    let other = lab.builder().with_pool(pool.clone()).await.unwrap();
    let held = handle.lease(&leasehold_core::Key::new("x").unwrap(), once(30_000)).await.unwrap();
    assert!(other.lease(&key("x"), once(30_000)).await.unwrap().is_none());
    held.unwrap().release().await.unwrap();
    handle.close().await.unwrap();
    other.close().await.unwrap();
    assert!(client.is_connected());
    let _: () = client.ping(None).await.unwrap();
}
