//! A foreign writer that keeps a file for a while: everybody waits, nobody fails.

use std::path::Path;
use std::time::{Duration, Instant};

use leasehold_core::{
    Claim, ClaimLock, ClaimLockExt, ClaimOptions, DedupeExt, ErrorKind, Lease, LeaseOptions,
    NamedLock,
};
use leasehold_sqlite::SqliteBackend;

use crate::lab::{LONG, Lab, claim_within, key, keys, lock_within};
use crate::support::{Tx, connect, read, write};

const KEPT: Duration = Duration::from_millis(1_500);

/// Keeps the writer's place of a file, as a foreign program would.
async fn keep(path: &Path) -> impl Future<Output = ()> + use<> {
    let mut conn = connect(path).await.unwrap();
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut conn).await.unwrap();
    async move {
        tokio::time::sleep(KEPT).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut conn).await.unwrap();
    }
}

use std::future::Future;

/// What `work` does while the file is kept takes as long as that, and succeeds.
async fn waits<T>(path: &Path, work: impl Future<Output = T>) -> T {
    let kept = keep(path).await;
    let start = Instant::now();
    let (done, ()) = tokio::join!(work, kept);
    assert!(start.elapsed() >= KEPT, "expected it to wait for the writer");
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn named_locks_wait_for_a_foreign_writer() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let held = store.lock(&key("held"), lock_within(LONG)).await.unwrap().unwrap();
    let guard = waits(&lab.locks(), store.lock(&key("x"), lock_within(LONG))).await;
    let guard = guard.unwrap().unwrap();
    assert!(held.is_held(), "expected a slow file to lose no lock");
    waits(&lab.locks(), guard.release()).await.unwrap();
    held.release().await.unwrap();
    // and one that is kept when the session is opened
    let fresh = lab.open().await;
    waits(&lab.locks(), fresh.lock(&key("x"), lock_within(LONG))).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_wait_for_a_foreign_writer() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let opts = LeaseOptions::default().ttl(Duration::from_secs(20)).wait(LONG);
    let lease = waits(&lab.leases(), store.lease(&key("x"), opts)).await.unwrap().unwrap();
    waits(&lab.leases(), lease.renew()).await.unwrap();
    waits(&lab.leases(), lease.release()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dedupe_and_claims_wait_for_a_foreign_writer() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    assert!(waits(&lab.main(), store.first_seen(&key("x"), LONG)).await.unwrap());
    let claimed = async {
        store
            .with_claim(&keys(&["x"]), ClaimOptions::default(), async |claim: &mut Claim| {
                write(claim.tx::<Tx>()?, "n", 1).await
            })
            .await
    };
    waits(&lab.main(), claimed).await.unwrap().unwrap();
    // what is known already is answered without a writer's place
    let kept = keep(&lab.main()).await;
    let start = Instant::now();
    assert!(!store.first_seen(&key("x"), LONG).await.unwrap());
    let mut claim = store.claim(&keys(&["y"]), ClaimOptions::default()).await.unwrap().unwrap();
    assert!(!claim.first_seen(&key("x"), LONG).await.unwrap());
    claim.commit().await.unwrap();
    assert!(start.elapsed() < KEPT, "expected an answer while the file is kept");
    kept.await;
}

/// The stated end of a wait for the writer's place.
#[tokio::test(flavor = "multi_thread")]
async fn writer_wait_ends_the_wait_of_a_statement() {
    let lab = Lab::new().await;
    let wait = Duration::from_millis(300);
    let store = lab.open_with(SqliteBackend::builder().writer_wait(wait)).await;
    let mut first = store.claim(&keys(&["a"]), ClaimOptions::default()).await.unwrap().unwrap();
    write(first.tx::<Tx>().unwrap(), "n", 1).await.unwrap();
    let mut second = store.claim(&keys(&["b"]), ClaimOptions::default()).await.unwrap().unwrap();
    let error = write(second.tx::<Tx>().unwrap(), "n", 2).await.unwrap_err();
    assert!(error.to_string().contains("database is locked"), "{error}");
    second.rollback().await.unwrap();
    let mut third = store.claim(&keys(&["c"]), ClaimOptions::default()).await.unwrap().unwrap();
    let error = third.first_seen(&key("x"), LONG).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.is_retryable() && error.to_string().contains("writer's place"), "{error}");
    drop(third);
    first.commit().await.unwrap();
    let mut after = store.claim(&keys(&["b"]), claim_within(LONG)).await.unwrap().unwrap();
    assert_eq!(read(after.tx::<Tx>().unwrap(), "n").await.unwrap(), Some(1));
}
