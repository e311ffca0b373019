//! The small table of numbers that the suite reads and writes on the transactions of claims.

use std::collections::BTreeSet;

use leasehold::{Claim, Error, LeaseGuard, Result};

use super::harness::failed;

/// The table, or what the keys begin with.
const TABLE: &str = "leasehold_verify_number";

/// How numbers are kept by a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    Memory,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "mysql")]
    MySql,
    #[cfg(feature = "redis")]
    Redis,
    #[cfg(feature = "sqlite")]
    Sqlite,
}

#[cfg(feature = "mysql")]
type MySqlTx = mysql_async::Transaction<'static>;
#[cfg(feature = "postgres")]
type PgTx = sqlx::Transaction<'static, sqlx::Postgres>;
#[cfg(feature = "sqlite")]
type SqliteTx = sqlx::Transaction<'static, sqlx::Sqlite>;

impl Numbers {
    /// That of the backend of this name.
    pub(super) fn of(backend: &str) -> Result<Self> {
        match backend {
            "memory" => Ok(Self::Memory),
            #[cfg(feature = "postgres")]
            "postgres" => Ok(Self::Postgres),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => Ok(Self::MySql),
            #[cfg(feature = "redis")]
            "redis" => Ok(Self::Redis),
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(Self::Sqlite),
            other => Err(failed(format!("no transaction of {other} is known"))),
        }
    }

    /// Makes the table.
    pub(super) async fn prepare(self, claim: &mut Claim) -> Result<()> {
        let sql = match self {
            #[cfg(feature = "mysql")]
            Self::MySql => "name VARBINARY(200) PRIMARY KEY, value BIGINT NOT NULL",
            _ => "name TEXT PRIMARY KEY, value BIGINT NOT NULL",
        };
        self.execute(claim, &format!("CREATE TABLE IF NOT EXISTS {TABLE} ({sql})")).await
    }

    /// Drops the table, or deletes these names where there is none.
    #[allow(unused_variables)] // without a feature nobody needs them
    pub(super) async fn drop(self, claim: &mut Claim, names: &BTreeSet<String>) -> Result<()> {
        #[cfg(feature = "redis")]
        if self == Self::Redis {
            let tx = claim.tx::<leasehold::redis::RedisTx>()?;
            for name in names {
                let key = redis_key(tx.tag(), name);
                tx.del(key)?;
            }
            return Ok(());
        }
        self.execute(claim, &format!("DROP TABLE IF EXISTS {TABLE}")).await
    }

    /// Whether the server commits by itself when a table is made or dropped.
    pub(super) fn tables_commit(self) -> bool {
        match self {
            #[cfg(feature = "mysql")]
            Self::MySql => true,
            _ => false,
        }
    }

    #[allow(unused_variables)] // without a feature nobody needs them
    async fn execute(self, claim: &mut Claim, sql: &str) -> Result<()> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres => {
                let tx = claim.tx::<PgTx>()?;
                sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut **tx).await.map_err(failed)?;
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite => {
                let tx = claim.tx::<SqliteTx>()?;
                sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut **tx).await.map_err(failed)?;
            }
            #[cfg(feature = "mysql")]
            Self::MySql => {
                use mysql_async::prelude::Queryable;
                claim.tx::<MySqlTx>()?.query_drop(sql).await.map_err(failed)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Reads one.
    pub(super) async fn read(self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        match self {
            Self::Memory => {
                let text = claim.tx::<leasehold::memory::MemoryTx>()?.read(name);
                text.map(|text| text.parse().map_err(failed)).transpose()
            }
            #[cfg(feature = "postgres")]
            Self::Postgres => {
                let tx = claim.tx::<PgTx>()?;
                let sql = "SELECT value FROM leasehold_verify_number WHERE name = $1";
                let read = sqlx::query_scalar(sql).bind(name);
                read.fetch_optional(&mut **tx).await.map_err(failed)
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite => {
                let tx = claim.tx::<SqliteTx>()?;
                let sql = "SELECT value FROM leasehold_verify_number WHERE name = $1";
                let read = sqlx::query_scalar(sql).bind(name);
                read.fetch_optional(&mut **tx).await.map_err(failed)
            }
            #[cfg(feature = "mysql")]
            Self::MySql => {
                use mysql_async::prelude::Queryable;
                let sql = "SELECT value FROM leasehold_verify_number WHERE name = ?";
                claim.tx::<MySqlTx>()?.exec_first(sql, (name,)).await.map_err(failed)
            }
            #[cfg(feature = "redis")]
            Self::Redis => {
                let tx = claim.tx::<leasehold::redis::RedisTx>()?;
                tx.get(redis_key(tx.tag(), name)).await
            }
        }
    }

    /// Reads a committed one past all claims, where a claim could not: on SQLite it would wait
    /// until it is the file's one writer. None where it could.
    #[cfg(feature = "sqlite")]
    pub(super) async fn committed(self, url: &str, name: &str) -> Option<Result<Option<i64>>> {
        if self != Self::Sqlite {
            return None;
        }
        let read = async {
            let mut builder = leasehold::sqlite::SqliteBackend::builder();
            if let Some(prefix) = crate::store::option(url, "prefix") {
                builder = builder.prefix(prefix);
            }
            let (file, _) = url.split_once('?').unwrap_or((url, ""));
            let store = builder.connect(file).await?;
            let sql = "SELECT value FROM leasehold_verify_number WHERE name = $1";
            let read = sqlx::query_scalar(sql).bind(name).fetch_optional(store.pool()).await;
            leasehold::Backend::close(&store).await?;
            read.map_err(failed)
        };
        Some(read.await)
    }

    /// Writes one.
    pub(super) async fn write(self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        match self {
            Self::Memory => {
                claim.tx::<leasehold::memory::MemoryTx>()?.write(name, value.to_string());
            }
            #[cfg(feature = "postgres")]
            Self::Postgres => {
                let tx = claim.tx::<PgTx>()?;
                let sql = "INSERT INTO leasehold_verify_number VALUES ($1, $2) \
                    ON CONFLICT (name) DO UPDATE SET value = excluded.value";
                let write = sqlx::query(sql).bind(name).bind(value);
                write.execute(&mut **tx).await.map_err(failed)?;
            }
            #[cfg(feature = "sqlite")]
            Self::Sqlite => {
                let tx = claim.tx::<SqliteTx>()?;
                let sql = "INSERT INTO leasehold_verify_number VALUES ($1, $2) \
                    ON CONFLICT (name) DO UPDATE SET value = excluded.value";
                let write = sqlx::query(sql).bind(name).bind(value);
                write.execute(&mut **tx).await.map_err(failed)?;
            }
            #[cfg(feature = "mysql")]
            Self::MySql => {
                use mysql_async::prelude::Queryable;
                let sql = "INSERT INTO leasehold_verify_number (name, value) VALUES (?, ?) \
                    ON DUPLICATE KEY UPDATE value = ?";
                let tx = claim.tx::<MySqlTx>()?;
                tx.exec_drop(sql, (name, value, value)).await.map_err(failed)?;
            }
            #[cfg(feature = "redis")]
            Self::Redis => {
                let tx = claim.tx::<leasehold::redis::RedisTx>()?;
                let key = redis_key(tx.tag(), name);
                tx.set(key, value)?;
            }
        }
        Ok(())
    }

    /// Checks the lease on the claim's transaction.
    pub(super) async fn verify(self, claim: &mut Claim, lease: &LeaseGuard) -> Result<(), Error> {
        match self {
            Self::Memory => lease.verify(claim.tx::<leasehold::memory::MemoryTx>()?).await,
            #[cfg(feature = "postgres")]
            Self::Postgres => lease.verify(claim.tx::<PgTx>()?).await,
            #[cfg(feature = "sqlite")]
            Self::Sqlite => lease.verify(claim.tx::<SqliteTx>()?).await,
            #[cfg(feature = "mysql")]
            Self::MySql => lease.verify(claim.tx::<MySqlTx>()?).await,
            #[cfg(feature = "redis")]
            Self::Redis => lease.verify(claim.tx::<leasehold::redis::RedisTx>()?).await,
        }
    }
}

/// In the slot of the claim's keys, where the server is a cluster.
#[cfg(feature = "redis")]
fn redis_key(tag: &str, name: &str) -> String {
    format!("{{{tag}}}{TABLE}:{name}")
}
