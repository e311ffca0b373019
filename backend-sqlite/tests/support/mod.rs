//! What the tests of this crate share: the suite's harness on SQLite.

#![allow(dead_code)] // each test uses a part of it
#![allow(clippy::unnecessary_wraps)] // the suite's `Setup` asks for it

use std::fmt::Write;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::{Handle, Harness, Link, Need};
use leasehold_core::{Backend, Claim, Error, ErrorKind, Holder, Key, LeaseGuard, Result};
use leasehold_sqlite::SqliteBackend;
use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest, Sha256};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Row, Transaction};
use tempfile::TempDir;

pub(crate) type Tx = Transaction<'static, Sqlite>;

/// SQLite under test.
#[derive(Clone, Debug)]
pub(crate) struct SqliteHarness {
    path: PathBuf,
}

impl SqliteHarness {
    /// The harness over the file that all cases share, in a folder that ends with the process.
    pub(crate) fn shared() -> Result<Arc<dyn Harness>> {
        static FOLDER: OnceLock<TempDir> = OnceLock::new();
        let folder = tempfile::tempdir().map_err(failed)?;
        let folder = FOLDER.get_or_init(|| folder).path();
        let harness = Self { path: folder.join("conformance.db") };
        let ready = std::thread::scope(|scope| {
            let ready = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.map_err(failed)?.block_on(harness.prepare())
            });
            ready.join()
        });
        ready.map_err(|_| failed("the preparation panicked"))??;
        Ok(Arc::new(harness))
    }

    /// The harness of another process.
    pub(crate) fn join(address: &str) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self { path: address.into() }))
    }

    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    pub(crate) async fn prepare(&self) -> Result<()> {
        SqliteBackend::connect(&self.url()).await?.close().await?;
        let sql = "CREATE TABLE IF NOT EXISTS number (name TEXT PRIMARY KEY, value INTEGER)";
        sqlx::raw_sql(sql).execute(&mut self.admin().await?).await.map_err(failed)?;
        Ok(())
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path.display())
    }

    /// A plain connection to the database.
    pub(crate) async fn admin(&self) -> Result<SqliteConnection> {
        connect(&self.path).await
    }

    pub(crate) fn folder(&self) -> PathBuf {
        let mut folder = self.path.clone().into_os_string();
        folder.push("-leasehold");
        folder.into()
    }

    pub(crate) async fn locks(&self) -> Result<SqliteConnection> {
        connect(&self.folder().join("locks.db")).await
    }

    pub(crate) async fn leases(&self) -> Result<SqliteConnection> {
        connect(&self.folder().join("leases.db")).await
    }
}

/// A plain connection, which waits for others.
pub(crate) async fn connect(path: &Path) -> Result<SqliteConnection> {
    options(path).connect().await.map_err(failed)
}

/// The same, and makes the file if need be.
pub(crate) async fn connect_or_make(path: &Path) -> Result<SqliteConnection> {
    options(path).create_if_missing(true).connect().await.map_err(failed)
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(Duration::from_secs(30))
        .disable_statement_logging()
}

#[async_trait]
impl Harness for SqliteHarness {
    fn name(&self) -> String {
        "sqlite".to_owned()
    }

    fn lacks(&self, need: Need) -> Option<&'static str> {
        match need {
            Need::Silence | Need::LoseAnswer => Some("there is no network before a file"),
            Need::ParallelWriters => Some("a file has one writer at a time"),
            Need::OwnClock => {
                Some("the clock of the machine is the store's, as a process reads it")
            }
            Need::Restart => Some("there is no server: what can be killed are the processes"),
            _ => None,
        }
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        static HANDLES: AtomicU64 = AtomicU64::new(0);
        let number = HANDLES.fetch_add(1, Ordering::Relaxed);
        let holder = Holder::this_process().named(&format!("test-{number}"));
        let backend = SqliteBackend::builder()
            .namespace(namespace)
            .holder(holder.clone())
            .connect(&self.url())
            .await?;
        let link = SqliteLink { holder: holder.to_string(), harness: self.clone() };
        Ok(Handle { backend: Arc::new(backend), link: Arc::new(link) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        Err(failed("there is nothing to restart"))
    }

    async fn restart(&self) -> Result<()> {
        Err(failed("there is nothing to restart"))
    }

    fn address(&self) -> Option<String> {
        self.path.to_str().map(ToOwned::to_owned)
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        let sql = "DELETE FROM leasehold_lease WHERE namespace = ?1 AND key = ?2";
        let delete = sqlx::query(sql).bind(namespace.to_owned()).bind(key.as_str().to_owned());
        delete.execute(&mut self.leases().await?).await.map_err(failed)?;
        Ok(())
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        read(claim.tx::<Tx>()?, name).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        write(claim.tx::<Tx>()?, name, value).await
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        read(&mut self.admin().await?, name).await
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<Tx>()?).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        let mut left = Vec::new();
        let sql = "SELECT key, session FROM leasehold_lock WHERE namespace = ?1";
        let rows = sqlx::query(sql).bind(namespace.to_owned());
        for row in rows.fetch_all(&mut self.locks().await?).await.map_err(failed)? {
            let (key, session): (String, i64) =
                (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
            let proof = self.folder().join("sessions").join(format!("{session:016x}"));
            if is_locked(&proof)? {
                left.push(format!("lock {key} of session {session:016x}"));
            }
        }
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(failed)?;
        let now = clock_gettime(ClockId::Monotonic);
        let sql = "SELECT key FROM leasehold_lease WHERE namespace = ?1 AND boot = ?2 \
            AND expires > ?3";
        let rows = sqlx::query(sql)
            .bind(namespace.to_owned())
            .bind(boot.trim().to_owned())
            .bind(now.tv_sec * 1_000_000 + now.tv_nsec / 1_000);
        for row in rows.fetch_all(&mut self.leases().await?).await.map_err(failed)? {
            left.push(format!("live lease {}", row.try_get::<String, _>(0).map_err(failed)?));
        }
        let mark = Sha256::digest(namespace);
        let mark = mark[..8].iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
        for file in std::fs::read_dir(self.folder().join("claims")).map_err(failed)? {
            let file = file.map_err(failed)?;
            if file.file_name().to_string_lossy().starts_with(&mark) && is_locked(&file.path())? {
                left.push("an open claim".to_owned());
            }
        }
        Ok(left)
    }
}

/// Whether somebody has a file locked.
pub(crate) fn is_locked(path: &Path) -> Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

pub(crate) async fn read(conn: &mut SqliteConnection, name: &str) -> Result<Option<i64>> {
    let sql = "SELECT value FROM number WHERE name = ?1";
    sqlx::query_scalar(sql).bind(name.to_owned()).fetch_optional(conn).await.map_err(failed)
}

pub(crate) async fn write(conn: &mut SqliteConnection, name: &str, value: i64) -> Result<()> {
    let sql = "INSERT INTO number VALUES (?1, ?2) \
        ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    sqlx::query(sql).bind(name.to_owned()).bind(value).execute(conn).await.map_err(failed)?;
    Ok(())
}

/// The faults of one handle.
#[derive(Debug)]
struct SqliteLink {
    holder: String,
    harness: SqliteHarness,
}

#[async_trait]
impl Link for SqliteLink {
    async fn end_sessions(&self) -> Result<()> {
        let sql = "DELETE FROM leasehold_session WHERE holder = ?1";
        let mut locks = self.harness.locks().await?;
        sqlx::query(sql).bind(self.holder.clone()).execute(&mut locks).await.map_err(failed)?;
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        Err(failed("there is no network"))
    }

    async fn heal(&self) -> Result<()> {
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        Err(failed("there is no network"))
    }
}

/// An error of the test's own, with all causes.
pub(crate) fn failed(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    let cause = cause.into();
    let mut text = cause.to_string();
    let mut source = cause.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    Error::new(ErrorKind::Backend, text)
}
