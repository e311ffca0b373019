//! A cluster of three masters.

use std::time::Duration;

use leasehold_conformance::servers::Server;
use leasehold_conformance::servers::redis::{Cluster, cluster};
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Lease, LeaseOptions, LockOptions,
    NamedLock,
};
use leasehold_redis::{RedisBackend, RedisTx};

use crate::lab::{PATIENCE, blocking, key, keys, kind_of, once, soon};
use crate::support::{Raw, Reply, kind};

fn start() -> Cluster {
    blocking(|| cluster(kind())).unwrap()
}

async fn open(cluster: &Cluster) -> RedisBackend {
    let builder = RedisBackend::builder().command_limit(Duration::from_secs(2));
    builder.connect(&cluster.url()).await.unwrap()
}

/// How many keys each node has.
async fn sizes(nodes: &[Server]) -> Vec<i64> {
    let mut sizes = Vec::new();
    for node in nodes {
        let mut raw = Raw::open(node.port()).await.unwrap();
        sizes.push(raw.tell(&["DBSIZE"]).await.unwrap().number());
    }
    sizes
}

/// B70: a handle that takes the node of a cluster for a single server would name keys of slots
/// that are elsewhere; it says so at once, and not only for some keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_not_taken_for_a_single_server() {
    let cluster = start();
    let refused = RedisBackend::connect(&cluster.nodes()[0].url()).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("redis-cluster://"), "{error}");
}

/// B70: braces in names change nothing; leases are spread over the nodes, and renewed there.
#[tokio::test(flavor = "multi_thread")]
async fn any_name_works_on_any_node() {
    let cluster = start();
    let handle = open(&cluster).await;
    let mut held = Vec::new();
    let odd = ["a", "{a}", "a{b}c", "{}", "}{", "{a", "{}{x}"].map(str::to_owned);
    for name in odd.into_iter().chain((0..60).map(|n| n.to_string())) {
        let opts = LeaseOptions::try_once().ttl(Duration::from_secs(2));
        let lease = handle.lease(&key(&name), opts).await.unwrap().unwrap();
        let lock = handle.lock(&key(&name), LockOptions::try_once()).await.unwrap().unwrap();
        let first = handle.admit(&key(&name), DedupeOptions::default()).await.unwrap();
        let claim = handle.claim(&keys(&[&name]), ClaimOptions::try_once()).await.unwrap().unwrap();
        claim.commit().await.unwrap();
        first.first().unwrap().complete().await.unwrap();
        held.push((lease, lock));
    }
    assert!(sizes(cluster.nodes()).await.into_iter().all(|size| size > 0));
    tokio::time::sleep(Duration::from_secs(3)).await; // longer than the ttl
    for (lease, lock) in held {
        assert!(lease.is_held(), "{:?}", lease.lost().reason());
        lease.renew().await.unwrap();
        lease.release().await.unwrap();
        lock.release().await.unwrap();
    }
}

/// Sharded publish: a release wakes waiters wherever the key lies.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_the_waiter_of_any_slot() {
    let cluster = start();
    let (a, b) = (open(&cluster).await, std::sync::Arc::new(open(&cluster).await));
    let opts = LeaseOptions::default().ttl(Duration::from_secs(60)).wait(PATIENCE);
    let mut handover = Vec::new();
    for n in 0..12 {
        let name = key(&format!("k{}", n % 4));
        let held = a.lease(&name, opts).await.unwrap().unwrap();
        let waits = tokio::spawn({
            let (b, name) = (b.clone(), name.clone());
            async move {
                let guard = b.lease(&name, opts).await.unwrap().unwrap();
                (std::time::Instant::now(), guard)
            }
        });
        // it waits for the subscription of the slot, then it looks once more
        tokio::time::sleep(Duration::from_millis(300)).await;
        let released = std::time::Instant::now();
        held.release().await.unwrap();
        let (got, guard) = soon("the hand-over", waits).await.unwrap();
        handover.push(got - released);
        guard.release().await.unwrap();
    }
    handover.sort();
    assert!(handover[6] < Duration::from_millis(150), "{handover:?}");
}

/// Keys of a claim share a slot by themselves; data in another slot is refused with the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_lives_in_one_slot() {
    let cluster = start();
    let handle = open(&cluster).await;
    let names = keys(&["a", "{b}", "c"]);
    let mut claim = handle.claim(&names, ClaimOptions::try_once()).await.unwrap().unwrap();
    let tx = claim.tx::<RedisTx>().unwrap();
    let error = tx.set("elsewhere", 1).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("{default}elsewhere"), "{error}");
    assert_eq!(kind_of(tx.get::<i64>("elsewhere").await), ErrorKind::Unsupported);
    tx.set(format!("{{{}}}n", handle.claim_tag()), 7).unwrap();
    // spread leases and claims have no slot in common
    let lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    assert_eq!(kind_of(lease.verify(tx).await), ErrorKind::Unsupported);
    let seen = claim.first_seen(&key("event"), Duration::from_secs(60)).await;
    assert_eq!(kind_of(seen), ErrorKind::Unsupported);
    claim.commit().await.unwrap();
    let mut found = None;
    for node in cluster.nodes() {
        let mut raw = Raw::open(node.port()).await.unwrap();
        if let Reply::Text(text) = raw.ask(&["GET", "{default}n"]).await.unwrap() {
            found = Some(text);
        }
    }
    assert_eq!(found.as_deref(), Some("7"));
}

/// A slot moves to another node in the middle of a hold: the hold goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_survives_the_move_of_its_slot() {
    let cluster = start();
    let builder = RedisBackend::builder().cluster_tag("moving");
    let handle = builder.connect(&cluster.url()).await.unwrap();
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(20));
    let lease = handle.lease(&key("x"), opts).await.unwrap().unwrap();
    move_slot(&cluster, "{moving}").await;
    lease.renew().await.unwrap();
    assert!(handle.lease(&key("x"), opts).await.unwrap().is_none());
    let mut claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let tx = claim.tx::<RedisTx>().unwrap();
    lease.verify(tx).await.unwrap();
    tx.set("{moving}n", 1).unwrap();
    claim.commit().await.unwrap();
    lease.release().await.unwrap();
    assert!(handle.lease(&key("x"), opts).await.unwrap().is_some());
}

/// Moves the slot of a name from its node to the next.
async fn move_slot(cluster: &Cluster, name: &str) {
    let nodes = cluster.nodes();
    let mut raws = Vec::new();
    let mut ids = Vec::new();
    for node in nodes {
        let mut raw = Raw::open(node.port()).await.unwrap();
        ids.push(raw.tell(&["CLUSTER", "MYID"]).await.unwrap().text().unwrap().to_owned());
        raws.push(raw);
    }
    let slot = raws[0].tell(&["CLUSTER", "KEYSLOT", name]).await.unwrap().number();
    let from = match slot {
        0..=5_460 => 0,
        5_461..=10_922 => 1,
        _ => 2,
    };
    let to = (from + 1) % 3;
    let slot = slot.to_string();
    let (from_id, to_id) = (ids[from].clone(), ids[to].clone());
    raws[to].tell(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await.unwrap();
    raws[from].tell(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await.unwrap();
    let names = raws[from].tell(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]).await.unwrap();
    let port = nodes[to].port().to_string();
    for name in names.texts() {
        let migrate = ["MIGRATE", "127.0.0.1", &port, &name, "0", "5000"];
        raws[from].tell(&migrate).await.unwrap();
    }
    for raw in &mut raws {
        raw.tell(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await.unwrap();
    }
}
