//! Deletions by an outsider, told by keyspace events.

use std::time::Duration;

use leasehold_core::{Lease, LeaseOptions, LockOptions, LossReason, NamedLock};

use crate::lab::{Lab, PATIENCE, key, soon, until};

/// With keyspace events a deleted or overwritten key is lost at once: long before a renewal.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_key_is_lost_at_once() {
    let lab = Lab::private(&["--notify-keyspace-events", "Kg$xe"]);
    let opened = lab.builder().lock_ttl(Duration::from_secs(600)).keyspace_events(true);
    let handle = opened.connect(&lab.server.url()).await.unwrap();
    let opts = LeaseOptions::default().ttl(Duration::from_secs(600));
    let lease = handle.lease(&key("a:{b}"), opts).await.unwrap().unwrap();
    let other = handle.lease(&key("other"), opts).await.unwrap().unwrap();
    let lock = handle.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    until("it subscribes", || async { lab.ask(&["PUBSUB", "NUMPAT"]).await.number() > 0 }).await;
    for name in lab.keys("lease").await {
        if name.ends_with("a:{b}") {
            lab.ask(&["DEL", &name]).await;
        }
    }
    assert_eq!(soon("the loss", lease.lost().wait()).await, LossReason::Taken);
    lab.ask(&["SET", &lab.the_key("lock").await, "somebody's"]).await;
    assert_eq!(soon("the loss", lock.lost().wait()).await, LossReason::Taken);
    assert!(other.is_held());
    let (renewed, wait) = (other.renew().await, PATIENCE);
    renewed.unwrap();
    assert!(handle.lease(&key("a:{b}"), opts.wait(wait)).await.unwrap().is_some());
}
