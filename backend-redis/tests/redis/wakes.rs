//! Waiting: wake-ups, and what happens when they get lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{ClaimLock, ClaimOptions, Lease, LeaseOptions};

use crate::lab::{Lab, PATIENCE, key, keys, once, soon, until};

/// The connections that have a subscription.
async fn subscribers(lab: &Lab) -> Vec<String> {
    let list = lab.ask(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
    let list = list.text().unwrap().to_owned();
    let ids = list.lines().filter_map(|line| line.split(' ').next());
    ids.filter_map(|id| id.strip_prefix("id=").map(str::to_owned)).collect()
}

/// A waiter is told of a release: much sooner than the ttl of the lease, and than the poll.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_the_waiter() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let opts = LeaseOptions::default().ttl(Duration::from_secs(60)).wait(PATIENCE);
    let mut handover = Vec::new();
    for _ in 0..20 {
        let held = a.lease(&key("x"), opts).await.unwrap().unwrap();
        let waits = tokio::spawn({
            let b = b.clone();
            async move {
                let got = b.lease(&key("x"), opts).await.unwrap().unwrap();
                (Instant::now(), got)
            }
        });
        until("the other one waits", || async {
            let value = lab.ask(&["GET", &lab.the_key("lease").await]).await;
            value.text().is_some_and(|value| value.ends_with('!'))
        })
        .await;
        let released = Instant::now();
        held.release().await.unwrap();
        let (got, guard) = soon("the hand-over", waits).await.unwrap();
        handover.push(got - released);
        guard.release().await.unwrap();
    }
    handover.sort();
    // by polling half of them would take 250 ms and more
    assert!(handover[10] < Duration::from_millis(100), "{handover:?}");
}

/// B73, CLIENT KILL of the subscriber: a lost wake-up costs no more than a poll.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_subscription_delays_no_more_than_a_poll() {
    let lab = Lab::private(&[]);
    let (a, b) = (lab.open().await, lab.open().await);
    let opts = LeaseOptions::default().ttl(Duration::from_secs(60)).wait(PATIENCE);
    for _ in 0..5 {
        let held = a.lease(&key("x"), opts).await.unwrap().unwrap();
        let waits = tokio::spawn({
            let b = b.clone();
            async move { b.lease(&key("x"), opts).await.unwrap().unwrap() }
        });
        until("it subscribes", || async { !subscribers(&lab).await.is_empty() }).await;
        for id in subscribers(&lab).await {
            lab.raw().await.ask(&["CLIENT", "KILL", "ID", &id]).await.unwrap();
        }
        held.release().await.unwrap();
        let guard = soon("the hand-over", waits).await.unwrap();
        guard.release().await.unwrap();
    }
    until("it subscribes again", || async { !subscribers(&lab).await.is_empty() }).await;
}

/// A lease that nobody releases wakes its waiter by its expiry.
#[tokio::test(flavor = "multi_thread")]
async fn an_expiry_ends_the_wait() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let held = a.lease(&key("x"), once(700).manual_renewal()).await.unwrap().unwrap();
    let opts = once(60_000).wait(PATIENCE);
    let start = Instant::now();
    let next = b.lease(&key("x"), opts).await.unwrap().expect("it expires");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(!held.is_held(), "two believe to hold it");
    next.release().await.unwrap();
}

/// B74: waiters share one subscription; their number changes neither connections nor channels.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_share_one_subscription() {
    let lab = Lab::private(&[]);
    let (a, b) = (lab.open().await, lab.open().await);
    let mut held = Vec::new();
    for n in 0..100 {
        held.push(a.lease(&key(&n.to_string()), once(60_000)).await.unwrap().unwrap());
    }
    let connections = || async {
        let info = lab.ask(&["INFO", "clients"]).await;
        let info = info.text().unwrap().to_owned();
        let count = info.lines().find_map(|line| line.strip_prefix("connected_clients:"));
        count.unwrap().trim().parse::<usize>().unwrap()
    };
    let mut counts = Vec::new();
    for _ in 0..3 {
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..1_000 {
            let (b, name) = (b.clone(), (n % 100).to_string());
            let opts = LeaseOptions::default().wait(Duration::from_millis(500));
            tasks.spawn(async move { b.lease(&key(&name), opts).await });
        }
        while let Some(outcome) = tasks.join_next().await {
            assert!(outcome.unwrap().unwrap().is_none(), "a plain time-out, nothing else");
        }
        assert_eq!(subscribers(&lab).await.len(), 1);
        counts.push(connections().await);
    }
    assert_eq!(counts[0], counts[2], "connections grow: {counts:?}");
}

/// B77: one waiter of each process contends; a release makes few tries, not one per waiter.
#[tokio::test(flavor = "multi_thread")]
async fn there_is_no_thundering_herd() {
    const WAITERS: usize = 200;
    let lab = Lab::private(&[]);
    let handles = [lab.open().await, lab.open().await];
    let held = handles[0].lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let (done, mut tasks) = (Arc::new(AtomicUsize::new(0)), tokio::task::JoinSet::new());
    for n in 0..WAITERS {
        let (handle, done) = (handles[n % 2].clone(), done.clone());
        tasks.spawn(async move {
            let opts = once(60_000).wait(Duration::from_secs(50));
            let guard = handle.lease(&key("x"), opts).await.unwrap().expect("its turn comes");
            done.fetch_add(1, Ordering::SeqCst);
            guard.release().await.unwrap();
        });
    }
    let calls = || async {
        let stats = lab.ask(&["INFO", "commandstats"]).await;
        let stats = stats.text().unwrap().to_owned();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()).unwrap().parse::<usize>().unwrap()
    };
    until("the first of each process waits", || async {
        let value = lab.ask(&["GET", &lab.the_key("lease").await]).await;
        value.text().is_some_and(|value| value.ends_with('!'))
    })
    .await;
    let before = calls().await;
    held.release().await.unwrap();
    soon("all have had their turn", tasks.join_all()).await;
    assert_eq!(done.load(Ordering::SeqCst), WAITERS);
    // an acquisition and a release each, and a few tries of the other process
    let made = calls().await - before;
    assert!(made < 6 * WAITERS, "{made} requests for {WAITERS} turns");
}

/// Claims are woken as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_claims_end_wakes_the_next() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let mut handover = Vec::new();
    for _ in 0..20 {
        let opts = ClaimOptions::default().wait(PATIENCE);
        let held = a.claim(&keys(&["x", "y"]), opts).await.unwrap().unwrap();
        let waits = tokio::spawn({
            let b = b.clone();
            async move {
                let claim = b.claim(&keys(&["y"]), opts).await.unwrap().unwrap();
                (Instant::now(), claim)
            }
        });
        until("the other one waits", || async {
            let mut wanted = false;
            for name in lab.keys("claim").await {
                let value = lab.ask(&["GET", &name]).await;
                wanted |= value.text().is_some_and(|value| value.ends_with('!'));
            }
            wanted
        })
        .await;
        let committed = Instant::now();
        held.commit().await.unwrap();
        let (got, claim) = soon("the hand-over", waits).await.unwrap();
        handover.push(got - committed);
        claim.rollback().await.unwrap();
    }
    handover.sort();
    assert!(handover[10] < Duration::from_millis(100), "{handover:?}");
}
