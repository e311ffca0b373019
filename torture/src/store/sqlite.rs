//! SQLite: a file that the processes share, without a server or a network.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold::backend::SessionLimits;
use leasehold::sqlite::SqliteBackend;
use leasehold::{Backend, Claim, HoldingQuery, Kind, LeaseGuard, Result};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Transaction};
use tempfile::TempDir;

use super::{ANSWER, Census, KEEPALIVE, Lab, NAMESPACE, Shop, failed};

type Tx = Transaction<'static, Sqlite>;

/// As a client sees it.
#[derive(Debug)]
pub(super) struct SqliteShop {
    url: String,
}

impl SqliteShop {
    pub(super) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

#[async_trait]
impl Shop for SqliteShop {
    async fn open(&self, _client: &str) -> Result<Arc<dyn Backend>> {
        let mut limits = SessionLimits::default();
        (limits.keepalive, limits.answer) = (KEEPALIVE, ANSWER);
        let builder = SqliteBackend::builder().namespace(NAMESPACE).session_limits(limits);
        Ok(Arc::new(builder.connect(&self.url).await?))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64> {
        let read = sqlx::query_scalar("SELECT value FROM torture WHERE name = ?1");
        let read = read.bind(name.to_owned());
        let value: Option<i64> =
            read.fetch_optional(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        Ok(value.unwrap_or(0))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()> {
        lease.verify(claim.tx::<Tx>()?).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        let sql = "INSERT INTO torture VALUES (?1, ?2) \
            ON CONFLICT (name) DO UPDATE SET value = excluded.value";
        let write = sqlx::query(sql).bind(name.to_owned()).bind(value);
        write.execute(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        Ok(())
    }
}

/// As the controller sees it.
#[derive(Debug)]
pub(super) struct SqliteLab {
    shop: Arc<SqliteShop>,
    file: PathBuf,
    /// Its end removes the file.
    _folder: TempDir,
}

impl SqliteLab {
    pub(super) fn new() -> Result<Self> {
        let folder = tempfile::tempdir().map_err(failed)?;
        let file = folder.path().join("torture.db");
        let shop = Arc::new(SqliteShop::new(&format!("sqlite:{}", file.display())));
        Ok(Self { shop, file, _folder: folder })
    }

    async fn admin(&self) -> Result<SqliteConnection> {
        let options = SqliteConnectOptions::new().filename(&self.file);
        let options = options.busy_timeout(Duration::from_secs(30)).disable_statement_logging();
        options.connect().await.map_err(failed)
    }
}

#[async_trait]
impl Lab for SqliteLab {
    fn shop(&self) -> Arc<dyn Shop> {
        self.shop.clone()
    }

    async fn prepare(&self, _names: &[String]) -> Result<()> {
        let handle = self.shop.open("controller").await?;
        handle.migrate().await?;
        handle.close().await?;
        let mut admin = self.admin().await?;
        let table = "CREATE TABLE torture (name TEXT PRIMARY KEY, value INTEGER NOT NULL)";
        sqlx::raw_sql(table).execute(&mut admin).await.map_err(failed)?;
        Ok(())
    }

    fn url(&self) -> Option<String> {
        Some(self.shop.url.clone())
    }

    /// Nobody ends sessions here but their processes.
    async fn end_sessions(&self, _client: &str) -> Result<bool> {
        Ok(false)
    }

    /// Connections are open files here.
    async fn census(&self) -> Result<Census> {
        let mut admin = self.admin().await?;
        let tables =
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'leasehold%'";
        let tables: Vec<String> =
            sqlx::query_scalar(tables).fetch_all(&mut admin).await.map_err(failed)?;
        let mut entries = 0;
        for table in tables {
            let count = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
            let count: i64 =
                sqlx::query_scalar(count).fetch_one(&mut admin).await.map_err(failed)?;
            entries += count.cast_unsigned();
        }
        Ok(Census { connections: None, entries: Some(entries) })
    }

    async fn leftovers(&self) -> Result<Vec<String>> {
        let handle = self.shop.open("controller").await?;
        let held = HoldingQuery::default().kinds([Kind::Lock, Kind::Lease, Kind::Claim]);
        let held = handle.holdings(&held).await?;
        handle.close().await?;
        Ok(held.iter().map(|holding| format!("{holding:?}")).collect())
    }
}
