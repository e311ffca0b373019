//! Sessions: ended by others, and what dead ones leave.

use std::time::Duration;

use leasehold_core::{Backend, ErrorKind, Holder, LockOptions, LossReason, NamedLock};
use leasehold_sqlite::SqliteBackend;

use crate::lab::{LONG, Lab, eventually, key, lock_within, soon};

async fn count(lab: &Lab, table: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM {table}");
    let mut locks = lab.harness.locks().await.unwrap();
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(&mut locks).await.unwrap()
}

fn files(lab: &Lab, folder: &str) -> usize {
    std::fs::read_dir(lab.harness.folder().join(folder)).unwrap().count()
}

/// B10: an administrator ends a session by its row; the guard is told although nobody asks it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_loses_its_locks_while_it_is_idle() {
    let lab = Lab::new().await;
    let store =
        lab.open_with(SqliteBackend::builder().holder(Holder::this_process().named("one"))).await;
    let guard = store.lock(&key("x"), LockOptions::default()).await.unwrap().unwrap();
    let sql = "DELETE FROM leasehold_session WHERE holder LIKE 'one@%'";
    sqlx::raw_sql(sql).execute(&mut lab.harness.locks().await.unwrap()).await.unwrap();
    assert_eq!(soon("the loss", guard.lost().wait()).await, LossReason::SessionEnded);
    assert!(!guard.is_held());
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    let again = soon("a new session", store.lock(&key("x"), lock_within(LONG))).await;
    again.unwrap().unwrap().release().await.unwrap();
}

/// B106: sessions that were killed leave a file and rows; housekeeping clears them away, and no
/// live one.
#[tokio::test(flavor = "multi_thread")]
async fn housekeeping_clears_dead_sessions_away() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let held = store.lock(&key("live"), LockOptions::default()).await.unwrap().unwrap();
    for number in 0..3 {
        let mut process = lab.process(&format!("lock dead-{number}"));
        process.says().await;
        process.dies().await;
        let mut process = lab.process(&format!("claim dead-{number}"));
        process.says().await;
        process.dies().await;
    }
    assert_eq!(count(&lab, "leasehold_lock").await, 4);
    assert_eq!((files(&lab, "sessions"), files(&lab, "claims")), (4, 3));
    store.housekeep().await.unwrap();
    assert_eq!(count(&lab, "leasehold_lock").await, 1);
    assert_eq!(count(&lab, "leasehold_session").await, 1);
    assert_eq!((files(&lab, "sessions"), files(&lab, "claims")), (1, 0));
    assert!(held.is_held());
    held.release().await.unwrap();
    store.close().await.unwrap();
    assert_eq!((count(&lab, "leasehold_session").await, files(&lab, "sessions")), (0, 0));
}

/// Whoever wants a dead session's lock takes it over, whoever else looks at it at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_takes_over_from_the_dead() {
    let lab = Lab::new().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(lab.open().await);
        // its session is there before the holder dies
        let last = stores.last().unwrap();
        last.lock(&key("other"), lock_within(LONG))
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    for _ in 0..5 {
        let mut process = lab.process("lock x");
        process.says().await;
        process.dies().await;
        let x = key("x");
        let tries = stores.iter().map(|store| store.lock(&x, LockOptions::try_once()));
        let mut won = Vec::new();
        for outcome in futures_util::future::join_all(tries).await {
            won.extend(outcome.unwrap());
        }
        assert_eq!(won.len(), 1, "expected one to take over");
        won.remove(0).release().await.unwrap();
    }
}

/// Removed files are another store's: who holds by them has lost, before anybody else can believe
/// to hold for long.
#[tokio::test(flavor = "multi_thread")]
async fn removed_files_lose_the_locks() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    for what in ["proof of life", "folder"] {
        let guard = store.lock(&key("x"), lock_within(LONG)).await.unwrap().unwrap();
        let token = guard.token().await.unwrap();
        let gone = match what {
            "folder" => lab.harness.folder(),
            _ => lab.harness.folder().join("sessions"),
        };
        std::fs::rename(&gone, gone.with_extension("old")).unwrap();
        soon("the loss", guard.lost().wait()).await;
        let other = lab.open().await;
        let next = soon("a lock", other.lock(&key("x"), lock_within(LONG))).await.unwrap().unwrap();
        assert!(next.token().await.unwrap() > token, "expected a greater token without its {what}");
        next.release().await.unwrap();
    }
}

/// Thousands of locks on one session, and their end with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_holds_thousands() {
    let lab = Lab::new().await;
    let (store, other) = (lab.open().await, lab.open().await);
    let names: Vec<_> = (0..3_000).map(|number| key(&format!("key-{number}"))).collect();
    let taken = names.iter().map(|name| store.lock(name, lock_within(LONG)));
    let taken = futures_util::future::join_all(taken).await;
    let held: Vec<_> = taken.into_iter().map(|guard| guard.unwrap().unwrap()).collect();
    assert_eq!(count(&lab, "leasehold_lock").await, 3_000);
    drop(held);
    eventually("all to be free", async || count(&lab, "leasehold_lock").await == 0).await;
    assert!(other.lock(&names[7], LockOptions::try_once()).await.unwrap().is_some());
}

/// A handle whose runtime ends without a word leaves no lock behind.
#[test]
fn an_ended_runtime_frees() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let one = runtime();
    let lab = one.block_on(Lab::new());
    let guard = one.block_on(async {
        let store = lab.open().await;
        let guard = store.lock(&key("x"), LockOptions::default()).await.unwrap().unwrap();
        std::mem::forget(store);
        guard
    });
    one.shutdown_timeout(Duration::from_secs(5));
    runtime().block_on(async {
        let store = lab.open().await;
        let locked = soon("the lock", store.lock(&key("x"), lock_within(LONG))).await;
        locked.unwrap().unwrap().release().await.unwrap();
    });
    drop(guard);
}
