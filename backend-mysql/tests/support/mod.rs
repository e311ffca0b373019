//! MySQL and MariaDB under test: real servers, each handle behind a proxy of its own.

#![allow(dead_code)] // each test program uses a part of it

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::servers::{Kind, Server};
use leasehold_conformance::{Handle, Harness, Link, Proxy, Setup};
use leasehold_core::{Backend, Claim, Error, ErrorKind, Key, LeaseGuard, Result};
use leasehold_mysql::{MySqlBackend, MySqlBuilder};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool, Transaction};

/// User-level locks and transactions are shown only where these are on; MySQL has them on.
const INSTRUMENTS: [&str; 3] = [
    "--performance-schema=ON",
    "--performance-schema-instrument=wait/lock/metadata/sql/mdl=ON",
    "--performance-schema-instrument=transaction=ON",
];
const HANDLE: &str = "leasehold_handle";
const NAMESPACE: &str = "leasehold_namespace";

/// Runs the suite on one server, unless the other one is meant.
pub(crate) fn certify(kind: Kind, setup: Setup) -> ExitCode {
    if is_meant(kind) {
        leasehold_conformance::main(setup)
    } else {
        println!("not {kind}: LEASEHOLD_TEST_ONLY says so");
        ExitCode::SUCCESS
    }
}

/// Whether `LEASEHOLD_TEST_ONLY`, if it is set, names this server.
pub(crate) fn is_meant(kind: Kind) -> bool {
    let only = std::env::var("LEASEHOLD_TEST_ONLY").unwrap_or_default();
    only.is_empty() || only == kind.name()
}

/// The store under test.
#[derive(Clone, Debug)]
pub(crate) struct MySqlHarness {
    kind: Kind,
    /// None in another process of the service.
    server: Option<Server>,
    url: String,
    admin_url: String,
    user_locks: bool,
    max_poll: Option<Duration>,
}

impl MySqlHarness {
    /// Starts a server, or takes the one that the environment names.
    pub(crate) fn start(kind: Kind) -> Result<Self> {
        let given = std::env::var(kind.variable()).is_ok_and(|url| !url.is_empty());
        let server =
            if given { Server::shared(kind) } else { Server::start_with(kind, &INSTRUMENTS) };
        Self::on(kind, server.map_err(failed)?)
    }

    /// A server of its own, with more arguments.
    pub(crate) fn start_own(kind: Kind, arguments: &[&str]) -> Result<Self> {
        let all: Vec<&str> = INSTRUMENTS.iter().chain(arguments).copied().collect();
        Self::on(kind, Server::start_with(kind, &all).map_err(failed)?)
    }

    fn on(kind: Kind, server: Server) -> Result<Self> {
        let harness = Self {
            kind,
            url: server.url(),
            admin_url: server.admin_url(),
            server: Some(server),
            user_locks: true,
            max_poll: None,
        };
        // the suite starts it outside of any runtime, a private one within
        std::thread::scope(|scope| {
            let prepared = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .map_err(failed)?;
                runtime.block_on(harness.prepare())
            });
            prepared.join().unwrap_or_else(|_| Err(failed("preparing the server panicked")))
        })?;
        Ok(harness)
    }

    async fn prepare(&self) -> Result<()> {
        let mut admin = self.admin().await?;
        let database = Opts::from_url(&self.url).map_err(failed)?;
        let database = database.db_name().unwrap_or("test").to_owned();
        let numbers = format!(
            "CREATE TABLE IF NOT EXISTS {database}.numbers \
             (name VARBINARY(100) PRIMARY KEY, value BIGINT NOT NULL)"
        );
        admin.query_drop(numbers).await.map_err(failed)?;
        MySqlBackend::connect(&self.url).await?.migrate().await
    }

    /// The same without user-level locks.
    pub(crate) fn without_user_locks(mut self) -> Self {
        self.user_locks = false;
        self
    }

    /// The same with waiters for leases that look so seldom that only a wake-up is in time.
    pub(crate) fn with_max_poll(mut self, poll: Duration) -> Self {
        self.max_poll = Some(poll);
        self
    }

    pub(crate) fn join(address: &str) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self::at(address)?))
    }

    pub(crate) fn at(address: &str) -> Result<Self> {
        let mut parts = address.split(' ');
        let mut part = || parts.next().unwrap_or_default();
        let (kind, user_locks, url, admin_url) = (part(), part(), part(), part());
        Ok(Self {
            kind: kind.parse().map_err(failed)?,
            server: None,
            url: url.to_owned(),
            admin_url: admin_url.to_owned(),
            user_locks: user_locks == "true",
            max_poll: None,
        })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the environment names the server.
    pub(crate) fn is_given(&self) -> bool {
        std::env::var(self.kind.variable()).is_ok_and(|url| !url.is_empty())
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().expect("the server was started by this process")
    }

    /// A connection of one who may do everything. A fresh one each time: cases have runtimes of
    /// their own.
    pub(crate) async fn admin(&self) -> Result<Conn> {
        Conn::from_url(&self.admin_url).await.map_err(failed)
    }

    /// A connection of an application.
    pub(crate) async fn conn(&self) -> Result<Conn> {
        let opts = OptsBuilder::from_opts(Opts::from_url(&self.url).map_err(failed)?);
        Conn::new(opts.prefer_socket(false)).await.map_err(failed)
    }

    /// Limits that make a silent store known soon.
    pub(crate) fn builder(&self, namespace: &str) -> MySqlBuilder {
        let builder = MySqlBackend::builder()
            .namespace(namespace)
            .keepalive(Duration::from_millis(500))
            .answer(Duration::from_secs(2));
        let builder = match self.max_poll {
            Some(poll) => builder.max_poll(poll),
            None => builder,
        };
        if self.user_locks {
            builder
        } else {
            builder.without_user_locks().leased_lock_ttl(Duration::from_secs(3))
        }
    }

    /// A handle behind a proxy, with what the builder says and a pool of so many connections.
    pub(crate) async fn open_with(
        &self,
        namespace: &str,
        builder: MySqlBuilder,
        connections: usize,
    ) -> Result<(MySqlBackend, MySqlLink)> {
        let opts = Opts::from_url(&self.url).map_err(failed)?;
        let server: SocketAddr =
            format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port()).parse().map_err(failed)?;
        let proxy = Arc::new(Proxy::start(server).await.map_err(failed)?);
        // what a dropped handle does in the background still needs the way
        let kept = proxy.clone();
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(kept);
        });
        let name = format!("{:032x}", rand::random::<u128>());
        let constraints = mysql_async::PoolConstraints::new(connections, connections);
        let pool = mysql_async::PoolOpts::default()
            .with_constraints(constraints.ok_or_else(|| failed("no pool of that size"))?);
        let opts = OptsBuilder::from_opts(opts)
            .ip_or_hostname(proxy.addr().ip().to_string())
            .tcp_port(proxy.addr().port())
            .prefer_socket(false)
            .pool_opts(pool)
            .connect_attribute(HANDLE, &name)
            .connect_attribute(NAMESPACE, namespace);
        let pool = Pool::new(opts);
        let backend = builder.from_pool(pool.clone()).await?;
        let link = MySqlLink { proxy, pool, harness: self.clone(), name };
        Ok((backend, link))
    }

    /// The user-level locks on the server that are neither a session's marker nor a handle's bell,
    /// with the namespace of the handle that holds or awaits them.
    pub(crate) async fn locks(&self) -> Result<Vec<(String, String, String)>> {
        let text = format!(
            "SELECT a.ATTR_VALUE, l.OBJECT_NAME, l.LOCK_STATUS \
             FROM performance_schema.metadata_locks l \
             JOIN performance_schema.threads t ON t.THREAD_ID = l.OWNER_THREAD_ID \
             JOIN performance_schema.session_connect_attrs a \
               ON a.PROCESSLIST_ID = t.PROCESSLIST_ID AND a.ATTR_NAME = '{NAMESPACE}' \
             WHERE l.OBJECT_TYPE = 'USER LEVEL LOCK' AND l.OBJECT_NAME NOT LIKE 'lh:session:%' \
               AND l.OBJECT_NAME NOT LIKE 'lh:bell:%'"
        );
        self.admin().await?.query(text).await.map_err(failed)
    }

    /// The connections of a handle that have a bell or wait for one, by the lock's status.
    pub(crate) async fn bells(&self, handle: &str, status: &str) -> Result<Vec<u64>> {
        let text = format!(
            "SELECT t.PROCESSLIST_ID FROM performance_schema.metadata_locks l \
             JOIN performance_schema.threads t ON t.THREAD_ID = l.OWNER_THREAD_ID \
             JOIN performance_schema.session_connect_attrs a \
               ON a.PROCESSLIST_ID = t.PROCESSLIST_ID AND a.ATTR_NAME = '{HANDLE}' \
             WHERE l.OBJECT_NAME LIKE 'lh:bell:%' AND l.LOCK_STATUS = '{status}' \
               AND a.ATTR_VALUE = '{handle}'"
        );
        self.admin().await?.query(text).await.map_err(failed)
    }

    /// The connections of a handle.
    pub(crate) async fn sessions(&self, handle: &str) -> Result<Vec<u64>> {
        let text = format!(
            "SELECT a.PROCESSLIST_ID FROM performance_schema.session_connect_attrs a \
             WHERE a.ATTR_NAME = '{HANDLE}' AND a.ATTR_VALUE = '{handle}'"
        );
        self.admin().await?.query(text).await.map_err(failed)
    }
}

#[async_trait]
impl Harness for MySqlHarness {
    fn name(&self) -> String {
        let rows = if self.user_locks { "" } else { ", without user-level locks" };
        let version = self.server.as_ref().and_then(|server| server.version().ok());
        format!("{} {}{rows}", self.kind, version.unwrap_or_default())
    }

    fn lacks(&self, need: leasehold_conformance::Need) -> Option<&'static str> {
        match need {
            leasehold_conformance::Need::SessionLocks if !self.user_locks => {
                Some("named locks are leases without user-level locks")
            }
            _ => None,
        }
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        let builder = self.builder(namespace);
        let (backend, link) = self.open_with(namespace, builder, 10).await?;
        Ok(Handle { backend: Arc::new(backend), link: Arc::new(link) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        let (kind, user_locks) = (self.kind, self.user_locks);
        let own = tokio::task::spawn_blocking(move || {
            // what it promises to keep is kept: as an administrator would set it
            let mut harness = Self::start_own(kind, &["--innodb-flush-log-at-trx-commit=1"])?;
            harness.user_locks = user_locks;
            Ok::<_, Error>(harness)
        });
        Ok(Arc::new(own.await.map_err(failed)??))
    }

    async fn restart(&self) -> Result<()> {
        let server = self.server().clone();
        let restarted = tokio::task::spawn_blocking(move || {
            server.kill()?;
            server.restart()
        });
        restarted.await.map_err(failed)?.map_err(failed)
    }

    fn address(&self) -> Option<String> {
        Some(format!("{} {} {} {}", self.kind, self.user_locks, self.url, self.admin_url))
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        // By the ids, which are read without locks: a statement that deletes by these columns locks
        // every row that it scans, waits for one that a transaction keeps, and keeps all the others
        // meanwhile.
        let find = "SELECT id FROM leasehold_lease WHERE scope = ? AND name = ?";
        let params = (namespace.as_bytes(), key.as_str().as_bytes());
        let mut conn = self.conn().await?;
        let ids: Vec<(Vec<u8>,)> = conn.exec(find, params).await.map_err(failed)?;
        let delete = "DELETE FROM leasehold_lease WHERE id = ?";
        conn.exec_batch(delete, ids).await.map_err(failed)
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        let tx = claim.tx::<Transaction<'static>>()?;
        let read = "SELECT value FROM numbers WHERE name = ?";
        tx.exec_first(read, (name,)).await.map_err(failed)
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        write(claim.tx::<Transaction<'static>>()?, name, value).await
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        let read = "SELECT value FROM numbers WHERE name = ?";
        self.conn().await?.exec_first(read, (name,)).await.map_err(failed)
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<Transaction<'static>>()?).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        let mut left: Vec<String> = self
            .locks()
            .await?
            .into_iter()
            .filter(|(of, ..)| of == namespace)
            .map(|(_, name, status)| format!("user-level lock {name}: {status}"))
            .collect();
        let mut admin = self.admin().await?;
        let open = format!(
            "SELECT t.PROCESSLIST_ID, IFNULL(t.PROCESSLIST_INFO, 'idle') \
             FROM performance_schema.events_transactions_current e \
             JOIN performance_schema.threads t USING (THREAD_ID) \
             JOIN performance_schema.session_connect_attrs a \
               ON a.PROCESSLIST_ID = t.PROCESSLIST_ID AND a.ATTR_NAME = '{NAMESPACE}' \
             WHERE e.STATE = 'ACTIVE' AND e.AUTOCOMMIT = 'NO' AND a.ATTR_VALUE = '{namespace}'"
        );
        let open: Vec<(u64, String)> = admin.query(open).await.map_err(failed)?;
        left.extend(open.into_iter().map(|(id, doing)| format!("transaction of {id}: {doing}")));
        let leases = "SELECT CAST(name AS CHAR) FROM leasehold_lease WHERE scope = ? AND expires > \
                      TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
        let mut conn = self.conn().await?;
        let leases: Vec<String> =
            conn.exec(leases, (namespace.as_bytes(),)).await.map_err(failed)?;
        left.extend(leases.into_iter().map(|name| format!("lease {name}")));
        Ok(left)
    }
}

async fn write(tx: &mut Transaction<'static>, name: &str, value: i64) -> Result<()> {
    let write = "INSERT INTO numbers (name, value) VALUES (?, ?) \
                 ON DUPLICATE KEY UPDATE value = ?";
    tx.exec_drop(write, (name, value, value)).await.map_err(failed)
}

/// The faults of one handle.
#[derive(Debug)]
pub(crate) struct MySqlLink {
    pub(crate) proxy: Arc<Proxy>,
    /// The caller's, which a handle does not close.
    pub(crate) pool: Pool,
    harness: MySqlHarness,
    /// By which its connections are known.
    pub(crate) name: String,
}

#[async_trait]
impl Link for MySqlLink {
    async fn end_sessions(&self) -> Result<()> {
        let mut admin = self.harness.admin().await?;
        for session in self.harness.sessions(&self.name).await? {
            // one that is gone already is fine
            drop(admin.query_drop(format!("KILL {session}")).await);
        }
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

pub(crate) fn failed(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Backend, format!("the harness failed: {error}"))
}
