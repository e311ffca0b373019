//! PostgreSQL.

use std::str::FromStr;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold::backend::SessionLimits;
use leasehold::postgres::PostgresBackend;
use leasehold::{Backend, Claim, LeaseGuard, Result};
use leasehold_conformance::servers::Server;
use sqlx::postgres::{PgConnectOptions, PgConnection, Postgres};
use sqlx::{ConnectOptions, Row, Transaction};

use super::{ANSWER, Census, KEEPALIVE, Lab, NAMESPACE, Shop, failed};

type Tx = Transaction<'static, Postgres>;

/// What the names of all clients begin with.
const MARK: &str = "torture-";

/// As a client sees it.
#[derive(Debug)]
pub(super) struct PgShop {
    url: String,
}

impl PgShop {
    pub(super) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

#[async_trait]
impl Shop for PgShop {
    async fn open(&self, client: &str) -> Result<Arc<dyn Backend>> {
        let mut limits = SessionLimits::default();
        (limits.keepalive, limits.answer) = (KEEPALIVE, ANSWER);
        let builder = PostgresBackend::builder().namespace(NAMESPACE).session_limits(limits);
        let builder = builder.application_name(format!("{MARK}{client}"));
        // connections of the pool bear the name as well
        let url = format!("{}?application_name={MARK}{client}", self.url);
        Ok(Arc::new(builder.connect(&url).await?))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64> {
        let sql = "SELECT value FROM torture WHERE name = $1";
        let read = sqlx::query_scalar(sql).bind(name);
        let value: Option<i64> =
            read.fetch_optional(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        Ok(value.unwrap_or(0))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()> {
        lease.verify(claim.tx::<Tx>()?).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        let sql = "INSERT INTO torture VALUES ($1, $2) \
            ON CONFLICT (name) DO UPDATE SET value = excluded.value";
        let write = sqlx::query(sql).bind(name).bind(value);
        write.execute(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        Ok(())
    }
}

/// As the controller sees it.
#[derive(Debug)]
pub(super) struct PgLab {
    server: Server,
    shop: Arc<PgShop>,
}

impl PgLab {
    pub(super) fn new(server: Server) -> Self {
        let shop = Arc::new(PgShop::new(&server.url()));
        Self { server, shop }
    }

    async fn admin(&self) -> Result<PgConnection> {
        let options = PgConnectOptions::from_str(&self.shop.url).map_err(failed)?;
        options.disable_statement_logging().connect().await.map_err(failed)
    }
}

#[async_trait]
impl Lab for PgLab {
    fn shop(&self) -> Arc<dyn Shop> {
        self.shop.clone()
    }

    async fn prepare(&self, names: &[String]) -> Result<()> {
        let handle = self.shop.open("controller").await?;
        handle.migrate().await?;
        handle.close().await?;
        let mut admin = self.admin().await?;
        let table = "CREATE TABLE torture (name text PRIMARY KEY, value bigint NOT NULL)";
        sqlx::raw_sql(table).execute(&mut admin).await.map_err(failed)?;
        let rows = "INSERT INTO torture SELECT name, 0 FROM unnest($1) name";
        sqlx::query(rows).bind(names).execute(&mut admin).await.map_err(failed)?;
        Ok(())
    }

    fn server(&self) -> Option<&Server> {
        Some(&self.server)
    }

    async fn end_sessions(&self, client: &str) -> Result<bool> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
            WHERE application_name = $1";
        let end = sqlx::query(sql).bind(format!("{MARK}{client}"));
        end.execute(&mut self.admin().await?).await.map_err(failed)?;
        Ok(true)
    }

    async fn census(&self) -> Result<Census> {
        let sql = "SELECT (SELECT count(*) FROM pg_stat_activity \
                WHERE starts_with(application_name, $1) AND application_name <> $1 || 'controller'), \
            (SELECT count(*) FROM leasehold.lease) + (SELECT count(*) FROM leasehold.dedupe)";
        let row = sqlx::query(sql).bind(MARK).fetch_one(&mut self.admin().await?).await;
        let row = row.map_err(failed)?;
        let number = |column| row.try_get(column).map(i64::cast_unsigned).map_err(failed);
        Ok(Census { connections: Some(number(0)?), entries: Some(number(1)?) })
    }

    async fn leftovers(&self) -> Result<Vec<String>> {
        let sql = "SELECT CASE WHEN granted THEN 'held' ELSE 'awaited' END \
                || ' advisory lock of ' || pid FROM pg_locks WHERE locktype = 'advisory' \
            UNION ALL SELECT application_name || ' is ' || state || ' at ' || left(query, 200) \
                FROM pg_stat_activity WHERE starts_with(application_name, $1) \
            UNION ALL SELECT 'prepared transaction ' || gid FROM pg_prepared_xacts \
            UNION ALL SELECT 'live lease ' || convert_from(key, 'UTF8') FROM leasehold.lease \
                WHERE expires_at > clock_timestamp()";
        let rows = sqlx::query(sql).bind(MARK).fetch_all(&mut self.admin().await?).await;
        let rows = rows.map_err(failed)?;
        rows.iter().map(|row| row.try_get(0).map_err(failed)).collect()
    }
}
