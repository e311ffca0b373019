//! A user with no more rights than needed.

use std::time::Duration;

use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, HoldingQuery, Inspect,
    Kind, Lease, LockOptions, NamedLock,
};
use leasehold_redis::{LEAST_COMMANDS, RedisTx};

use crate::lab::{Lab, key, keys, kind_of, once};

/// The documented list of commands is enough for everything, and each of them is needed.
#[tokio::test(flavor = "multi_thread")]
async fn the_least_privileged_user_can_do_everything() {
    let lab = Lab::private(&[]);
    let set = |without: Option<&'static str>| {
        let lab = &lab;
        async move {
            let (keys, channels) = (
                format!("~leasehold:{}:*", lab.namespace),
                format!("&leasehold:{}:*", lab.namespace),
            );
            let data = format!("~{}", lab.data("*"));
            let mut words = vec!["ACL", "SETUSER", "least", "reset", "on", ">secret"];
            words.extend([keys.as_str(), channels.as_str(), data.as_str()]);
            let allowed = LEAST_COMMANDS.iter().filter(|word| Some(**word) != without);
            let allowed: Vec<String> = allowed.map(|word| format!("+{word}")).collect();
            words.extend(allowed.iter().map(String::as_str));
            // what the application's own writes need
            words.extend(["+incrby"]);
            lab.ask(&words).await;
        }
    };
    set(None).await;
    everything(&lab).await.unwrap();
    for command in LEAST_COMMANDS {
        set(Some(command)).await;
        let outcome = everything(&lab).await;
        // without these the server is not checked, the client does not know its number, and
        // waiters find out by polling
        if !["info", "client|id", "subscribe", "ping"].contains(command) {
            assert!(outcome.is_err(), "{command} is not needed");
        }
    }
    // inspection by key and forced release need no more, lists only `scan`
    set(None).await;
    let handle = open(&lab).await.unwrap();
    let _lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    assert_eq!(handle.holdings(&HoldingQuery::key(&key("x"))).await.unwrap().len(), 1);
    let listed = handle.holdings(&HoldingQuery::default()).await.unwrap_err();
    assert!(listed.to_string().contains("+scan"), "{listed}");
    lab.ask(&["ACL", "SETUSER", "least", "+scan"]).await;
    assert_eq!(handle.holdings(&HoldingQuery::default()).await.unwrap().len(), 1);
    assert!(handle.force_release(Kind::Lease, &key("x")).await.unwrap().is_some());
    // a write that the user may not do is refused before anything is written
    set(None).await;
    let handle = open(&lab).await.unwrap();
    let mut claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let tx = claim.tx::<RedisTx>().unwrap();
    tx.incr_by(lab.data("first"), 1).unwrap().sadd(lab.data("s"), "m").unwrap();
    assert_eq!(kind_of(claim.commit().await), ErrorKind::Backend);
    assert_eq!(lab.ask(&["EXISTS", &lab.data("first")]).await.number(), 0);
}

async fn open(lab: &Lab) -> leasehold_core::Result<leasehold_redis::RedisBackend> {
    let url = format!("redis://least:secret@127.0.0.1:{}", lab.server.port());
    lab.builder().command_limit(Duration::from_millis(500)).connect(&url).await
}

async fn everything(lab: &Lab) -> leasehold_core::Result<()> {
    // what an earlier round could not free, and the scripts that it made known
    lab.ask(&["FLUSHALL"]).await;
    lab.ask(&["SCRIPT", "FLUSH"]).await;
    let handle = open(lab).await?;
    handle.migrate().await?;
    let lease = handle.lease(&key("x"), once(30_000)).await?.expect("it is free");
    // a waiter of another process, which subscribes
    let other = open(lab).await?;
    let waits = other.lease(&key("x"), once(30_000).wait(Duration::from_millis(100))).await?;
    assert!(waits.is_none());
    lease.renew().await?;
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await?.expect("it is free");
    lock.release().await?;
    let mut claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await?.expect("free");
    let tx = claim.tx::<RedisTx>()?;
    lease.verify(tx).await?;
    tx.incr_by(lab.data("n"), 1)?;
    claim.first_seen(&key("event"), Duration::from_secs(1)).await?;
    claim.commit().await?;
    let open = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await?.expect("free");
    open.rollback().await?;
    lease.release().await?;
    let opts = DedupeOptions::default().retain(Duration::from_millis(100));
    if let Some(first) = handle.admit(&key("e"), opts).await?.first() {
        first.complete().await?;
    }
    if let Some(first) = handle.admit(&key("f"), opts).await?.first() {
        first.abandon().await?;
    }
    other.close().await?;
    handle.close().await
}
