//! The files: their size, and what happens when they go away.

use std::time::Duration;

use leasehold_core::{Backend, ClaimLock, ClaimOptions, DedupeExt, Lease, LeaseOptions, NamedLock};

use crate::lab::{LONG, Lab, key, keys, lock_within};
use crate::support::{Tx, read, write};

/// The write-ahead log is cut short now and then, and does not grow with the writes.
#[tokio::test(flavor = "multi_thread")]
async fn the_journals_stay_small() {
    const MOST: u64 = 6 << 20; // a checkpoint comes each 4 MiB
    let lab = Lab::new().await;
    let store = lab.open().await;
    for round in 0..3_000 {
        let name = key(&format!("key-{}", round % 7));
        store.lock(&name, lock_within(LONG)).await.unwrap().unwrap().release().await.unwrap();
        let opts = LeaseOptions::default().ttl(LONG).wait(LONG);
        store.lease(&name, opts).await.unwrap().unwrap().release().await.unwrap();
    }
    for path in [lab.locks(), lab.leases()] {
        let wal = format!("{}-wal", path.display());
        let size = std::fs::metadata(&wal).unwrap().len();
        assert!(size <= MOST, "{wal} has {size} bytes");
        assert!(std::fs::metadata(&path).unwrap().len() <= 1 << 20);
    }
}

/// The database is replaced beneath a handle, e.g. by a restored backup: the handle goes on with
/// the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_database_is_gone_on_with() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    assert!(store.first_seen(&key("event"), LONG).await.unwrap());
    let mut claim = store.claim(&keys(&["x"]), ClaimOptions::default()).await.unwrap().unwrap();
    write(claim.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
    claim.commit().await.unwrap();
    for end in ["", "-wal", "-shm"] {
        let path = format!("{}{end}", lab.main().display());
        std::fs::rename(&path, format!("{path}.old")).unwrap();
    }
    lab.harness.prepare().await.unwrap(); // another process makes a new one
    assert!(store.first_seen(&key("event"), LONG).await.unwrap(), "expected another database");
    let mut claim = store.claim(&keys(&["x"]), ClaimOptions::default()).await.unwrap().unwrap();
    let tx = claim.tx::<Tx>().unwrap();
    assert_eq!(read(tx, "n").await.unwrap(), None);
    write(tx, "n", 2).await.unwrap();
    claim.commit().await.unwrap();
    assert_eq!(read(&mut lab.harness.admin().await.unwrap(), "n").await.unwrap(), Some(2));
}

/// The same for the leases: who held by the old file is told at its next renewal.
#[tokio::test(flavor = "multi_thread")]
async fn replaced_leases_are_lost() {
    let lab = Lab::new().await;
    let (store, other) = (lab.open().await, lab.open().await);
    let opts = LeaseOptions::default().ttl(Duration::from_secs(3)).wait(LONG);
    let lease = store.lease(&key("x"), opts).await.unwrap().unwrap();
    for end in ["", "-wal", "-shm"] {
        std::fs::remove_file(format!("{}{end}", lab.leases().display())).unwrap();
    }
    let next = other.lease(&key("x"), opts).await.unwrap().unwrap();
    assert!(next.token() > lease.token(), "expected tokens to rise without the file");
    crate::lab::soon("the loss", lease.lost().wait()).await;
    assert!(next.is_held());
    next.release().await.unwrap();
}

/// Housekeeping keeps what lives (B106).
#[tokio::test(flavor = "multi_thread")]
async fn housekeeping_deletes_what_has_expired() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let short = Duration::from_millis(300);
    for number in 0..2_500 {
        let name = key(&format!("event {number}"));
        assert!(store.first_seen(&name, if number == 0 { LONG } else { short }).await.unwrap());
    }
    tokio::time::sleep(short).await;
    assert_eq!(store.housekeep().await.unwrap().dedupe, 2_499);
    assert_eq!(store.housekeep().await.unwrap().dedupe, 0);
    assert!(!store.first_seen(&key("event 0"), LONG).await.unwrap());
    assert!(store.first_seen(&key("event 1"), LONG).await.unwrap());
}
