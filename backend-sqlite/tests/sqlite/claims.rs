//! Claims on a file that has one writer.

use std::time::Duration;

use leasehold_core::{ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Keys, NamedLock};
use leasehold_core::{Lease, LeaseOptions};

use crate::lab::{LONG, Lab, claim_within, eventually, key, keys, lock_within, soon};
use crate::support::{Tx, is_locked, read, write};

/// Claims of different keys are held side by side, and take turns from their first statement on.
#[tokio::test(flavor = "multi_thread")]
async fn different_keys_take_turns_in_writing() {
    let lab = Lab::new().await;
    let (a, b) = (lab.open().await, lab.open().await);
    let mut one = a.claim(&keys(&["one"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let mut two = b.claim(&keys(&["two"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let tx = one.tx::<Tx>().unwrap();
    let n = read(tx, "n").await.unwrap().unwrap_or(0);
    let second = tokio::spawn(async move {
        let tx = two.tx::<Tx>().unwrap();
        let n = read(tx, "n").await.unwrap().unwrap_or(0);
        write(tx, "n", n + 1).await.unwrap();
        two.commit().await.unwrap();
    });
    tokio::time::sleep(Duration::from_millis(100)).await; // it reads in vain meanwhile
    write(one.tx::<Tx>().unwrap(), "n", n + 1).await.unwrap();
    one.commit().await.unwrap();
    soon("the second claim", second).await.unwrap();
    assert_eq!(read(&mut lab.harness.admin().await.unwrap(), "n").await.unwrap(), Some(2));
}

/// A plain deferred transaction that reads, and writes after somebody else has written, fails as
/// locked. A claim does not.
#[tokio::test(flavor = "multi_thread")]
async fn reading_before_writing_never_fails_as_locked() {
    let lab = Lab::new().await;
    let stores = [lab.open().await, lab.open().await, lab.open().await];
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..12 {
        let store = lab.open().await;
        tasks.spawn(async move {
            for round in 0..10 {
                let set = keys(&[&format!("own {task} {round}")]);
                let mut claim = store.claim(&set, claim_within(LONG)).await.unwrap().unwrap();
                if round % 3 == 0 {
                    let event = key(&format!("event {round}"));
                    claim.first_seen(&event, LONG).await.unwrap();
                }
                let tx = claim.tx::<Tx>().unwrap();
                let n = read(tx, "n").await.unwrap().unwrap_or(0);
                tokio::task::yield_now().await;
                write(tx, "n", n + 1).await.unwrap();
                claim.commit().await.unwrap();
            }
        });
    }
    while let Some(done) = soon("all claims", tasks.join_next()).await {
        done.unwrap();
    }
    drop(stores);
    assert_eq!(read(&mut lab.harness.admin().await.unwrap(), "n").await.unwrap(), Some(120));
}

/// A claim that is in use for long keeps no lock, no lease and no other claim's keys from anybody.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_claim_keeps_locks_and_leases_from_nobody() {
    let lab = Lab::new().await;
    let (a, b) = (lab.open().await, lab.open().await);
    let ttl = Duration::from_secs(2);
    let lease = b.lease(&key("x"), LeaseOptions::default().ttl(ttl)).await.unwrap().unwrap();
    let mut claim = a.claim(&keys(&["long"]), ClaimOptions::default()).await.unwrap().unwrap();
    write(claim.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
    tokio::time::sleep(ttl * 2).await; // so long, renewed all the while
    assert!(lease.is_held());
    let lock = b.lock(&key("y"), lock_within(Duration::ZERO)).await.unwrap().unwrap();
    lock.release().await.unwrap();
    lease.release().await.unwrap();
    let other = b.claim(&keys(&["other"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    other.commit().await.unwrap();
    claim.commit().await.unwrap();
}

/// Claims that are dropped at any moment, the wait for the writer's place included, leave no file
/// locked and no transaction open (B03, B06).
#[tokio::test(flavor = "multi_thread")]
async fn dropped_claims_leave_nothing() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    for round in 0..60_u64 {
        let set = keys(&["x", "y"]);
        let work = async {
            let mut claim = store.claim(&set, ClaimOptions::default()).await.unwrap().unwrap();
            write(claim.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
            let _ = claim.first_seen(&key("event"), LONG).await; // cut short at most
            std::future::pending::<()>().await;
        };
        let limit = Duration::from_micros(rand::random_range(0..200) * (round % 20));
        drop(tokio::time::timeout(limit, work).await);
    }
    eventually("all keys to be free", async || {
        let claims = lab.harness.folder().join("claims");
        let left = std::fs::read_dir(claims).unwrap().map(|file| file.unwrap().path());
        left.into_iter().all(|path| !is_locked(&path).unwrap())
    })
    .await;
    let mut claim = store.claim(&keys(&["x"]), claim_within(LONG)).await.unwrap().unwrap();
    let tx = claim.tx::<Tx>().unwrap();
    assert_eq!(soon("the writer's place", read(tx, "n")).await.unwrap(), None);
    assert!(claim.first_seen(&key("event"), LONG).await.unwrap());
    claim.commit().await.unwrap();
}

/// A caller who leaves while it waits for the writer's place frees its key when its turn comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_wait_for_the_writer_frees_its_key() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut writer = store.claim(&keys(&["a"]), ClaimOptions::default()).await.unwrap().unwrap();
    write(writer.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
    let mut waiter = store.claim(&keys(&["b"]), ClaimOptions::default()).await.unwrap().unwrap();
    let write_in_vain = write(waiter.tx::<Tx>().unwrap(), "n", 2);
    assert!(tokio::time::timeout(Duration::from_millis(50), write_in_vain).await.is_err());
    drop(waiter);
    writer.commit().await.unwrap();
    let next = soon("the key", store.claim(&keys(&["b"]), claim_within(LONG))).await;
    let mut next = next.unwrap().unwrap();
    assert_eq!(read(next.tx::<Tx>().unwrap(), "n").await.unwrap(), Some(1));
    next.commit().await.unwrap();
}

/// Without the files of its keys a claim excludes nobody: it must not commit.
#[tokio::test(flavor = "multi_thread")]
async fn removed_key_files_write_nothing() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut claim = store.claim(&keys(&["x"]), ClaimOptions::default()).await.unwrap().unwrap();
    write(claim.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
    std::fs::remove_dir_all(lab.harness.folder().join("claims")).unwrap();
    assert_eq!(claim.commit().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(read(&mut lab.harness.admin().await.unwrap(), "n").await.unwrap(), None);
}

/// SQLite rolls some failures back by itself: such a transaction is not told as committed.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ended_by_itself_is_no_commit() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut claim = store.claim(&Keys::none(), ClaimOptions::default()).await.unwrap().unwrap();
    let tx = claim.tx::<Tx>().unwrap();
    write(tx, "n", 1).await.unwrap();
    let sql = "INSERT OR ROLLBACK INTO number VALUES ('n', 2)";
    assert!(sqlx::raw_sql(sql).execute(&mut **tx).await.is_err());
    assert!(claim.commit().await.is_err(), "expected the commit not to succeed");
    assert_eq!(read(&mut lab.harness.admin().await.unwrap(), "n").await.unwrap(), None);
    // and the connection goes on
    let mut claim = store.claim(&Keys::none(), ClaimOptions::default()).await.unwrap().unwrap();
    write(claim.tx::<Tx>().unwrap(), "n", 3).await.unwrap();
    claim.commit().await.unwrap();
    assert!(store.admit(&key("e"), DedupeOptions::default()).await.unwrap().first().is_some());
}
