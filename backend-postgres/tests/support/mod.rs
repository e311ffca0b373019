//! What the tests of this crate share: the suite's harness on PostgreSQL.

#![allow(dead_code)] // each test uses a part of it
#![allow(clippy::unnecessary_wraps)] // the suite's `Setup` asks for it

use std::fmt::Write;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::servers::{Kind, Server};
use leasehold_conformance::{Handle, Harness, Link, Proxy};
use leasehold_core::backend::SessionLimits;
use leasehold_core::{Backend, Claim, Error, ErrorKind, Holder, Key, LeaseGuard, Result};
use leasehold_postgres::PostgresBackend;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions, Postgres};
use sqlx::{ConnectOptions, Row, Transaction};

pub(crate) type Tx = Transaction<'static, Postgres>;

/// PostgreSQL under test.
#[derive(Clone, Debug)]
pub(crate) struct PgHarness {
    url: String,
    version: String,
    kind: Kind,
    /// None in another process, which has the address only.
    server: Option<Server>,
}

impl PgHarness {
    /// The harness over the server that all tests of a version share.
    pub(crate) fn shared(kind: Kind) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self::over(Server::shared(kind).map_err(failed)?)?))
    }

    /// A harness over a server, with the tables that it needs.
    pub(crate) fn over(server: Server) -> Result<Self> {
        let version = server.version().map_err(failed)?;
        let harness =
            Self { url: server.url(), version, kind: server.kind(), server: Some(server) };
        let ready = std::thread::scope(|scope| {
            let ready = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.map_err(failed)?.block_on(harness.prepare())
            });
            ready.join()
        });
        ready.map_err(|_| failed("the preparation panicked"))??;
        Ok(harness)
    }

    /// The harness of another process.
    pub(crate) fn join(address: &str) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self::at(address)))
    }

    /// A harness over the server of a URL.
    pub(crate) fn at(url: &str) -> Self {
        Self { url: url.to_owned(), version: String::new(), kind: Kind::Postgres15, server: None }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) async fn prepare(&self) -> Result<()> {
        PostgresBackend::connect(&self.url).await?.migrate().await?;
        let sql = "SELECT pg_advisory_lock(1); CREATE SCHEMA IF NOT EXISTS leasehold_test; \
            CREATE TABLE IF NOT EXISTS leasehold_test.number \
            (name text PRIMARY KEY, value bigint NOT NULL)";
        sqlx::raw_sql(sql).execute(&mut self.admin().await?).await.map_err(failed)?;
        Ok(())
    }

    /// A connection past all faults.
    pub(crate) async fn admin(&self) -> Result<PgConnection> {
        connect(&self.url).await
    }
}

/// A plain connection.
pub(crate) async fn connect(url: &str) -> Result<PgConnection> {
    let options = PgConnectOptions::from_str(url).map_err(failed)?;
    options.application_name("admin").disable_statement_logging().connect().await.map_err(failed)
}

/// What all application names of a namespace begin with: short, since the server cuts them.
pub(crate) fn mark(namespace: &str) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    namespace.hash(&mut hasher);
    format!("lh-{:016x}-", hasher.finish())
}

/// A holder whose label begins with the mark, also where the host's name is long.
pub(crate) fn holder(namespace: &str) -> Holder {
    let mut holder = Holder::this_process().named(&mark(namespace));
    holder.host = holder.host.chars().take(20).collect();
    holder
}

/// Guards outlive their handle, and must reach the server all the same: a proxy lives as long as
/// the runtime of its case.
fn keep(proxy: &Arc<Proxy>) {
    static PROXIES: Mutex<Vec<Arc<Proxy>>> = Mutex::new(Vec::new());
    PROXIES.lock().unwrap_or_else(PoisonError::into_inner).push(proxy.clone());
}

/// Limits that make a silent server known soon.
pub(crate) fn session_limits() -> SessionLimits {
    let mut limits = SessionLimits::default();
    limits.keepalive = Duration::from_millis(500);
    limits.answer = Duration::from_secs(2);
    limits.max_held = usize::MAX;
    limits
}

#[async_trait]
impl Harness for PgHarness {
    fn name(&self) -> String {
        format!("postgres {}", self.version)
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        static HANDLES: AtomicU64 = AtomicU64::new(0);
        let number = HANDLES.fetch_add(1, Ordering::Relaxed);
        let holder = holder(namespace);
        let name = holder.label(63);
        let options = PgConnectOptions::from_str(&self.url).map_err(failed)?;
        let upstream = format!("{}:{}", options.get_host(), options.get_port());
        let upstream: SocketAddr = upstream.parse().map_err(failed)?;
        let proxy = Arc::new(Proxy::start(upstream).await.map_err(failed)?);
        keep(&proxy);
        let options = options.host(&proxy.addr().ip().to_string()).port(proxy.addr().port());
        let builder = PostgresBackend::builder()
            .namespace(namespace)
            .holder(holder)
            .session_limits(session_limits());
        // both a pool of the handle's own, whose connections it keeps, and one of the service
        let backend = if number.is_multiple_of(2) {
            builder.connect(options.to_url_lossy().as_str()).await?
        } else {
            let options = options.application_name(&name);
            builder.build(PgPoolOptions::new().max_connections(8).connect_lazy_with(options))?
        };
        let link = PgLink { proxy, name, harness: self.clone() };
        Ok(Handle { backend: Arc::new(backend), link: Arc::new(link) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        let kind = self.kind;
        let private = move || Self::over(Server::start(kind).map_err(failed)?);
        let private = tokio::task::spawn_blocking(private).await.map_err(failed)??;
        Ok(Arc::new(private))
    }

    async fn restart(&self) -> Result<()> {
        let server = self.server.clone().ok_or_else(|| failed("not ours to restart"))?;
        let restart = move || {
            server.kill()?;
            server.restart()
        };
        tokio::task::spawn_blocking(restart).await.map_err(failed)?.map_err(failed)
    }

    fn address(&self) -> Option<String> {
        Some(self.url.clone())
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        let sql = "DELETE FROM leasehold.lease WHERE namespace = $1 AND key = $2";
        let delete = sqlx::query(sql).bind(namespace.as_bytes()).bind(key.as_str().as_bytes());
        delete.execute(&mut self.admin().await?).await.map_err(failed)?;
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
        leftovers(&mut self.admin().await?, namespace).await
    }
}

/// What a namespace's handles have on the server.
pub(crate) async fn leftovers(admin: &mut PgConnection, namespace: &str) -> Result<Vec<String>> {
    let sql = "SELECT CASE WHEN l.granted THEN 'held' ELSE 'awaited' END || ' lock of ' \
            || a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
            WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' \
            AND starts_with(a.application_name, $1) \
        UNION ALL SELECT application_name || ' is ' || state || ' at ' || left(query, 300) \
            FROM pg_stat_activity WHERE starts_with(application_name, $1) \
            AND (state LIKE 'idle in transaction%' OR wait_event_type = 'Lock') \
        UNION ALL SELECT 'live lease ' || convert_from(key, 'UTF8') FROM leasehold.lease \
            WHERE namespace = $2 AND expires_at > clock_timestamp()";
    let rows = sqlx::query(sql).bind(mark(namespace)).bind(namespace.as_bytes());
    let rows = rows.fetch_all(admin).await.map_err(failed)?;
    rows.iter().map(|row| row.try_get(0).map_err(failed)).collect()
}

pub(crate) async fn read(conn: &mut PgConnection, name: &str) -> Result<Option<i64>> {
    let sql = "SELECT value FROM leasehold_test.number WHERE name = $1";
    sqlx::query_scalar(sql).bind(name).fetch_optional(conn).await.map_err(failed)
}

pub(crate) async fn write(conn: &mut PgConnection, name: &str, value: i64) -> Result<()> {
    let sql = "INSERT INTO leasehold_test.number VALUES ($1, $2) \
        ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    sqlx::query(sql).bind(name).bind(value).execute(conn).await.map_err(failed)?;
    Ok(())
}

/// The faults of one handle.
#[derive(Debug)]
struct PgLink {
    proxy: Arc<Proxy>,
    name: String,
    harness: PgHarness,
}

#[async_trait]
impl Link for PgLink {
    async fn end_sessions(&self) -> Result<()> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
            WHERE application_name = $1";
        let mut admin = self.harness.admin().await?;
        sqlx::query(sql).bind(&self.name).execute(&mut admin).await.map_err(failed)?;
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        self.proxy.silence();
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.proxy.heal();
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        self.proxy.lose_next_answer();
        Ok(())
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
