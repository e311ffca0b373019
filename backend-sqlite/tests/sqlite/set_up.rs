//! Zero set-up: where the files are, who makes them, and what is refused.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use leasehold_core::{Backend, ErrorKind, LockOptions, NamedLock};
use leasehold_sqlite::SqliteBackend;

use crate::lab::{Lab, Process, key};

/// Many processes start at once on a file that is not there yet.
#[tokio::test(flavor = "multi_thread")]
async fn many_processes_make_a_new_file_at_once() {
    for _ in 0..3 {
        let lab = Lab::empty();
        let mut processes = Vec::new();
        for _ in 0..6 {
            processes.push(lab.process("connect"));
        }
        for mut process in processes {
            assert_eq!(process.says().await, "connected");
            process.ends().await;
        }
    }
}

#[tokio::test]
async fn without_a_path_it_is_the_state_folder_of_the_user() {
    let home = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "lab::child", "--nocapture"]).env("XDG_STATE_HOME", home.path());
    child.env("LEASEHOLD_SQLITE_URL", "sqlite:").env("LEASEHOLD_SQLITE_ORDER", "connect");
    assert!(child.output().unwrap().status.success());
    let folder = home.path().join("leasehold");
    assert!(folder.join("leasehold.db").is_file());
    for folder in [folder.clone(), folder.join("leasehold.db-leasehold")] {
        let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{}", folder.display());
    }
}

/// Two names of one file are one store, or two processes would hold the same lock.
#[tokio::test]
async fn links_lead_to_one_store() {
    let lab = Lab::new().await;
    let other = tempfile::tempdir().unwrap();
    let (folder, file) = (other.path().join("folder"), other.path().join("file.db"));
    std::fs::create_dir(lab.folder.path().join("sub")).unwrap();
    std::os::unix::fs::symlink(lab.folder.path(), &folder).unwrap();
    std::os::unix::fs::symlink(lab.main(), &file).unwrap();
    let one = lab.open().await;
    let held = one.lock(&key("x"), LockOptions::default()).await.unwrap().unwrap();
    for path in [folder.join("test.db"), file, folder.join("./sub/../test.db")] {
        let url = format!("sqlite:{}", path.display());
        let two = SqliteBackend::connect(&url).await.unwrap();
        assert_eq!(two.path(), one.path());
        assert!(two.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_none());
    }
    held.release().await.unwrap();
}

#[tokio::test]
async fn prefixes_are_stores_of_their_own() {
    let lab = Lab::new().await;
    let one = lab.open().await;
    let two = lab.open_with(SqliteBackend::builder().prefix("other")).await;
    let _held = one.lock(&key("x"), LockOptions::default()).await.unwrap().unwrap();
    assert!(two.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_some());
    for prefix in ["", "a-b", "1a", "a b", "ä", "\"; DROP TABLE number; --"] {
        let refused = SqliteBackend::builder().prefix(prefix).connect("sqlite:x.db").await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidOptions, "{prefix}");
    }
}

#[tokio::test]
async fn what_cannot_be_a_database_is_told() {
    let lab = Lab::empty();
    std::fs::write(lab.main(), "this is no database. ".repeat(500)).unwrap();
    let refused = SqliteBackend::connect(&lab.harness.url()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Backend);
    let text = refused.to_string();
    assert!(text.contains("no SQLite database") && text.contains("test.db"), "{text}");

    let folder = SqliteBackend::connect(&format!("sqlite:{}", lab.folder.path().display())).await;
    assert!(folder.unwrap_err().to_string().contains("is a folder"));
    // where nobody can write, whatever the user
    let refused = SqliteBackend::connect("sqlite:/proc/leasehold/x.db").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("cannot make the folder /proc/leasehold"), "{refused}");
}

/// Shown by another user than root, whom no mode keeps from writing.
#[tokio::test]
async fn a_read_only_folder_is_told() {
    let lab = Lab::empty();
    std::fs::set_permissions(lab.folder.path(), PermissionsExt::from_mode(0o500)).unwrap();
    let is_root = std::fs::write(lab.folder.path().join("probe"), "").is_ok();
    let refused = SqliteBackend::connect(&lab.harness.url()).await;
    std::fs::set_permissions(lab.folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
    if !is_root {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("must be allowed to write there"), "{text}");
    }
}

#[tokio::test]
async fn tables_of_another_version_are_refused() {
    let lab = Lab::new().await;
    let sql = "UPDATE leasehold_version SET version = 99";
    sqlx::raw_sql(sql).execute(&mut lab.harness.leases().await.unwrap()).await.unwrap();
    let refused = SqliteBackend::connect(&lab.harness.url()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Schema);
    assert!(refused.to_string().contains("leases.db"), "{refused}");
}

#[tokio::test]
async fn a_closed_handle_says_so() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    store.migrate().await.unwrap();
    store.close().await.unwrap();
    store.close().await.unwrap();
    let refused = store.lock(&key("x"), LockOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(store.housekeep().await.is_err());
    assert!(Path::new(&lab.main()).exists());
}

/// A file of somebody else's own keeps what is in it.
#[tokio::test]
async fn a_services_own_file_is_joined() {
    let lab = Lab::empty();
    let mut admin = crate::support::connect_or_make(&lab.main()).await.unwrap();
    let sql =
        "PRAGMA journal_mode = DELETE; CREATE TABLE own (n INTEGER); INSERT INTO own VALUES (7)";
    sqlx::raw_sql(sql).execute(&mut admin).await.unwrap();
    let mut process: Process = lab.process("connect");
    assert_eq!(process.says().await, "connected");
    process.ends().await;
    let n: i64 = sqlx::query_scalar("SELECT n FROM own").fetch_one(&mut admin).await.unwrap();
    assert_eq!(n, 7);
}
