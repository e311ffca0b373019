//! Faults of servers and networks.

use std::time::Duration;

use leasehold_core::backend::Owner;
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, ErrorKind, Lease, LockOptions, LossReason, NamedLock,
};
use leasehold_redis::RedisTx;

use crate::lab::{Lab, PATIENCE, blocking, key, keys, kind_of, once, soon, until};

/// A server that stops longer than the ttl and goes on: the holder knew that it had lost, and the
/// late requests change nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_paused_past_the_ttl() {
    let lab = Lab::private(&[]);
    let (a, b) = (lab.open().await, lab.open().await);
    let lease = a.lease(&key("x"), once(1_000)).await.unwrap().unwrap();
    let lock = a.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let mut claim = a.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    claim.tx::<RedisTx>().unwrap().set(lab.data("n"), 1).unwrap();
    blocking(|| lab.server.pause()).unwrap();
    for lost in [lease.lost(), lock.lost(), claim.lost()] {
        soon("the loss", lost.wait()).await;
    }
    assert!(!lease.is_held() && !lock.is_held());
    blocking(|| lab.server.resume()).unwrap();
    assert_eq!(kind_of(lease.release().await), ErrorKind::Lost);
    assert_eq!(kind_of(lock.release().await), ErrorKind::Lost);
    assert_eq!(kind_of(claim.commit().await), ErrorKind::Lost);
    let wait = PATIENCE;
    let next = b.lease(&key("x"), once(60_000).wait(wait)).await.unwrap().expect("it is free");
    let opts = LockOptions::default().wait(wait);
    let _lock = b.lock(&key("x"), opts).await.unwrap().expect("it is free");
    let opts = ClaimOptions::default().wait(wait);
    let _claim = b.claim(&keys(&["x"]), opts).await.unwrap().expect("it is free");
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    next.renew().await.unwrap();
}

/// Killed and restarted empty: what was held is lost, at the next renewal at the latest.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_killed_and_restarted_empty() {
    let lab = Lab::private(&[]);
    let (a, b) = (lab.open().await, lab.open().await);
    let lease = a.lease(&key("x"), once(2_000)).await.unwrap().unwrap();
    let lock = a.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let mut claim = a.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    claim.tx::<RedisTx>().unwrap().set(lab.data("n"), 1).unwrap();
    blocking(|| lab.server.kill().and_then(|()| lab.server.restart())).unwrap();
    let opts = once(60_000).wait(PATIENCE);
    let next = b.lease(&key("x"), opts).await.unwrap().expect("nobody has it");
    assert!(next.token() > lease.token());
    soon("the loss", lease.lost().wait()).await;
    soon("the loss", lock.lost().wait()).await;
    let error = kind_of(claim.commit().await);
    assert!(matches!(error, ErrorKind::Lost | ErrorKind::Unavailable), "{error:?}");
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn flushall_is_a_loss_at_the_next_renewal() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let lease = handle.lease(&key("x"), once(1_500)).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    lab.ask(&["FLUSHALL"]).await;
    for lost in [lease.lost(), lock.lost(), claim.lost()] {
        assert_eq!(soon("the loss", lost.wait()).await, LossReason::Taken);
    }
    assert_eq!(kind_of(claim.commit().await), ErrorKind::Lost);
    let again = handle.lease(&key("x"), once(60_000).wait(PATIENCE)).await.unwrap();
    assert!(again.is_some());
}

/// B59, B62: a cut connection and a lost answer do not end a lease that has time left.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_fault_does_not_end_a_lease() {
    let lab = Lab::shared();
    let (handle, proxy) = lab.open_behind(lab.builder()).await;
    let lease = handle.lease(&key("x"), once(3_000)).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    for _ in 0..6 {
        proxy.cut();
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.lose_next_answer();
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    assert!(lease.is_held() && lock.is_held());
    until("it can be renewed", || async { lease.renew().await.is_ok() }).await;
    lease.release().await.unwrap();
    lock.release().await.unwrap();
}

/// B62: a renewal that hangs is cut short; the loss is told by the local deadline, no later.
#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_renewal_does_not_delay_the_loss() {
    let lab = Lab::shared();
    let (handle, proxy) = lab.open_behind(lab.builder()).await;
    let lease = handle.lease(&key("x"), once(1_000)).await.unwrap().unwrap();
    proxy.silence();
    assert_eq!(soon("the loss", lease.lost().wait()).await, LossReason::Expired);
    // the server's word: the holder gave up first
    let name = lab.the_key_if_any("lease").await;
    if let Some(name) = name {
        assert_ne!(lab.ask(&["PTTL", &name]).await.number(), -1);
    }
    proxy.heal();
    assert_eq!(kind_of(lease.release().await), ErrorKind::Lost);
}

/// B03: 500 acquisitions, each given up at a random moment, leave nothing behind.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_acquisitions_leave_nothing() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    for round in 0..500_u32 {
        let random = (Owner::fresh().0 % 3_000) as u64;
        let limit = Duration::from_micros(random);
        let name = key(&format!("k{}", round % 5));
        let (wait, ttl) = (Duration::from_secs(5), Duration::from_secs(120));
        let outcome = match round % 3 {
            0 => {
                let opts = leasehold_core::LeaseOptions::default().ttl(ttl).wait(wait);
                let taking = handle.lease(&name, opts);
                tokio::time::timeout(limit, taking).await.map(|taken| taken.map(drop))
            }
            1 => {
                let opts = LockOptions::default().wait(wait);
                let taking = handle.lock(&name, opts);
                tokio::time::timeout(limit, taking).await.map(|taken| taken.map(drop))
            }
            _ => {
                let names = keys(&[name.as_str(), "k9"]);
                let taking = handle.claim(&names, ClaimOptions::default().wait(wait));
                tokio::time::timeout(limit, taking).await.map(|taken| taken.map(drop))
            }
        };
        if let Ok(outcome) = outcome {
            outcome.unwrap();
        }
    }
    until("nothing is left", || async {
        let mut left = 0;
        for kind in ["lease", "lock", "claim"] {
            left += lab.keys(kind).await.len();
        }
        left == 0
    })
    .await;
}

/// Closing frees everything, tells every guard, and closes the connections.
#[tokio::test(flavor = "multi_thread")]
async fn closing_frees_and_tells() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let lease = handle.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    // a waiter opens the subscription
    assert!(
        handle
            .lease(&key("x"), once(1_000).wait(Duration::from_millis(50)))
            .await
            .unwrap()
            .is_none()
    );
    soon("it closes", handle.close()).await.unwrap();
    for lost in [lease.lost(), lock.lost(), claim.lost()] {
        assert_eq!(soon("the loss", lost.wait()).await, LossReason::Closed);
    }
    for kind in ["lease", "lock", "claim"] {
        assert!(lab.keys(kind).await.is_empty(), "{kind}");
    }
    assert!(handle.lease(&key("y"), once(1_000)).await.is_err());
    assert!(handle.claim(&keys(&["y"]), ClaimOptions::try_once()).await.is_err());
    no_connections_but_ours(&lab).await;
}

/// A handle that is dropped closes its connections.
#[tokio::test(flavor = "multi_thread")]
async fn dropping_closes_the_connections() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let lease = handle.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    assert!(
        handle
            .lease(&key("x"), once(1_000).wait(Duration::from_millis(50)))
            .await
            .unwrap()
            .is_none()
    );
    drop(handle);
    lease.release().await.unwrap();
    no_connections_but_ours(&lab).await;
}

async fn no_connections_but_ours(lab: &Lab) {
    until("the connections are closed", || async {
        let list = lab.ask(&["CLIENT", "LIST"]).await;
        list.text().unwrap().lines().count() == 1
    })
    .await;
}
