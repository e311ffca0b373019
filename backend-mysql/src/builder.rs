//! How a handle is made.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use leasehold_core::backend::{LeaseLimits, SessionLimits};
use leasehold_core::engine::{ClaimEngine, DedupeEngine, LeaseEngine, SessionEngine};
use leasehold_core::{Error, ErrorKind, Holder, Result};
use mysql_async::{Opts, Pool};

use crate::backend::{Locks, MySqlBackend};
use crate::claim::{Claims, Means};
use crate::dedupe::Dedupes;
use crate::error::{BACKEND, mapped};
use crate::flavour::{Facts, Flavour};
use crate::lease::Leases;
use crate::names::{Kind, MAX_NAMESPACE, hex};
use crate::probe;
use crate::schema;
use crate::session::Sessions;
use crate::store::{Store, Tables, own_pool};

/// Opening a handle takes at most so long: longer than the probe of the locks, which waits.
const OPENED: Duration = Duration::from_secs(20);

/// Makes a [`MySqlBackend`].
///
/// ```no_run
/// # async fn example(pool: mysql_async::Pool) -> leasehold_core::Result<()> {
/// use leasehold_mysql::MySqlBackend;
/// let backend = MySqlBackend::builder()
///     .namespace("billing")
///     .table_prefix("lh_")
///     .from_pool(pool)
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct MySqlBuilder {
    namespace: String,
    prefix: String,
    user_locks: bool,
    own_connections: usize,
    session: SessionLimits,
    max_held: Option<usize>,
    max_per_session: Option<usize>,
    lease: LeaseLimits,
    leased_lock_ttl: Duration,
    holder: Holder,
}

/// The longest label of a holder that the tables keep, in bytes.
const LABEL_BYTES: usize = 160;
/// Connections for the renewals of leases. Each takes a moment, on an idle server: on a busy one, those
/// that were given up are still being answered while others are sent.
const RENEWING: usize = 4;

impl Default for MySqlBuilder {
    fn default() -> Self {
        let mut lease = LeaseLimits::default();
        // half a megabyte of text
        lease.max_batch = 5_000;
        Self {
            namespace: String::new(),
            prefix: "leasehold_".to_owned(),
            user_locks: true,
            own_connections: 8,
            session: SessionLimits::default(),
            max_held: None,
            max_per_session: None,
            lease,
            leased_lock_ttl: Duration::from_secs(15),
            holder: Holder::this_process(),
        }
    }
}

impl MySqlBuilder {
    /// Handles of one namespace contend, those of different ones never meet; default empty. Up to
    /// 200 bytes. User-level locks are one space per *server*, so databases of one server that use
    /// the same namespace meet on named locks and claims.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// What the tables' names begin with; default `leasehold_`.
    #[must_use]
    pub fn table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Who others are told that holds what the handle holds; default [`Holder::this_process`], as
    /// of when the builder was made.
    #[must_use]
    pub fn holder(mut self, holder: Holder) -> Self {
        self.holder = holder;
        self
    }

    /// Uses no `GET_LOCK`, for Galera, group replication, `ProxySQL` and Vitess: claims lock rows of
    /// a table, and named locks are leases that the handle's heartbeat renews (lost within
    /// [`leased_lock_ttl`](Self::leased_lock_ttl), not at once). All handles must agree on this.
    #[must_use]
    pub fn without_user_locks(mut self) -> Self {
        self.user_locks = false;
        self
    }

    /// The ttl of named locks that are leases; default 15 s.
    #[must_use]
    pub fn leased_lock_ttl(mut self, ttl: Duration) -> Self {
        self.leased_lock_ttl = ttl;
        self
    }

    /// The most connections for leases and dedupe; default 8. They are opened as needed and closed
    /// when idle for a minute. Leases are renewed on up to four more of the same kind: neither on the
    /// caller's pool, which may be in use, nor on these, where a try for a lease can wait for a second
    /// for a transaction that has verified it.
    #[must_use]
    pub fn own_connections(mut self, connections: usize) -> Self {
        self.own_connections = connections;
        self
    }

    /// How often an idle lock session is asked for a sign of life; default 5 s. Silence is noticed
    /// within this plus [`answer`](Self::answer); the server frees the locks of a vanished host
    /// within three times this plus `answer`, in whole seconds (`wait_timeout`).
    #[must_use]
    pub fn keepalive(mut self, keepalive: Duration) -> Self {
        self.session.keepalive = keepalive;
        self
    }

    /// How long the server may take to answer; default 5 s.
    #[must_use]
    pub fn answer(mut self, answer: Duration) -> Self {
        self.session.answer = answer;
        self.lease.answer = answer;
        self
    }

    /// The most named locks that the handle holds, besides those that were waited for on the server;
    /// default 10,000 on MySQL and 2,000 on MariaDB, where they are spread (see
    /// [`max_per_session`](Self::max_per_session)).
    #[must_use]
    pub fn max_held(mut self, locks: usize) -> Self {
        self.max_held = Some(locks);
        self
    }

    /// The most named locks on one session; further ones go on a further session, of two
    /// connections, which is closed when it has held nothing for half a minute. Default: no bound on
    /// MySQL, and 500 on MariaDB, which looks through all locks of a session to give it another.
    #[must_use]
    pub fn max_per_session(mut self, locks: usize) -> Self {
        self.max_per_session = Some(locks);
        self
    }

    /// The most connections that wait for named locks which others hold; default 8.
    #[must_use]
    pub fn max_waiters(mut self, connections: usize) -> Self {
        self.session.max_waiters = connections;
        self
    }

    /// How often, at least, a waiter for a lease tries that nobody woke: the fallback for a lost
    /// wake-up; default 1 s.
    #[must_use]
    pub fn max_poll(mut self, poll: Duration) -> Self {
        self.lease.max_poll = poll;
        self
    }

    /// A handle with a pool of its own.
    ///
    /// # Errors
    /// As [`from_pool`](Self::from_pool), and [`ErrorKind::InvalidOptions`] if the URL is none.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn connect(self, url: &str) -> Result<MySqlBackend> {
        // a message of the parser could quote the password
        let opts = Opts::from_url(url).map_err(|_| {
            let detail = "the url is not of the form mysql://user:password@host:port/database";
            Error::new(ErrorKind::InvalidOptions, detail).at(BACKEND, "connect")
        })?;
        let pool = Pool::new(opts.clone());
        let built = answered(self.build(opts, pool, true)).await;
        built.map_err(|error| error.at(BACKEND, "connect"))
    }

    /// A handle whose claims use the caller's pool. Connections of its own are opened with the
    /// pool's options.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the server cannot be reached or is read-only,
    /// [`ErrorKind::Unsupported`] if it is too old, or has no (or only node-local) user-level locks
    /// and they were not turned off, or gives one to two sessions or keeps it after its session has
    /// ended, [`ErrorKind::Schema`] if the tables are of a later version,
    /// [`ErrorKind::InvalidOptions`] for a bad option.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn from_pool(self, pool: Pool) -> Result<MySqlBackend> {
        let built = answered(async {
            let opts = pool.get_conn().await.map_err(mapped)?.opts().clone();
            self.build(opts, pool, false).await
        });
        built.await.map_err(|error| error.at(BACKEND, "connect"))
    }

    async fn build(mut self, opts: Opts, pool: Pool, pool_is_ours: bool) -> Result<MySqlBackend> {
        if self.namespace.len() > MAX_NAMESPACE || self.namespace.contains('\0') {
            let detail = format!("a namespace has up to {MAX_NAMESPACE} bytes without NUL");
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        let tables = Tables::new(&self.prefix)?;
        let mut conn = mysql_async::Conn::new(opts.clone()).await.map_err(mapped)?;
        let facts = Facts::read(&mut conn).await?;
        facts.check(self.user_locks)?;
        schema::check_version(&mut conn, &tables).await?;
        if self.user_locks {
            probe::check(&mut conn, opts.clone()).await?;
        }
        drop(conn.disconnect().await); // it has done its work
        let (max_held, max_per_session) = match facts.info.flavour {
            Flavour::MySql => (10_000, usize::MAX),
            Flavour::MariaDb => (2_000, 500),
        };
        self.session.max_held = self.max_held.unwrap_or(max_held);
        self.session.max_per_session = self.max_per_session.unwrap_or(max_per_session);
        let store = Arc::new(Store {
            own: own_pool(&opts, self.own_connections),
            renewing: own_pool(&opts, RENEWING),
            opts,
            pool,
            info: facts.info,
            namespace: self.namespace,
            tables,
            holder: hex(self.holder.label(LABEL_BYTES).as_bytes()),
        });
        let (locks, means) = if self.user_locks {
            let sessions = Sessions::new(store.clone(), self.session);
            (Locks::User(SessionEngine::new(sessions)), Means::UserLocks)
        } else {
            let leases = Leases::new(store.clone(), Kind::LeasedLock, self.lease, false);
            let engine = LeaseEngine::new(leases);
            (Locks::Leased(engine, self.leased_lock_ttl), Means::Rows)
        };
        let leases = Leases::new(store.clone(), Kind::Lease, self.lease, self.user_locks);
        Ok(MySqlBackend {
            locks,
            leases: LeaseEngine::new(leases),
            claims: ClaimEngine::new(Claims::new(store.clone(), means)),
            dedupe: DedupeEngine::new(Dedupes::new(store.clone())),
            store,
            pool_is_ours,
            closed: false.into(),
        })
    }
}

/// Opens a handle, unless the server accepts connections and says nothing, or nonsense: rows of
/// another shape than was asked for make `mysql_common` panic.
async fn answered<T>(opening: impl Future<Output = Result<T>>) -> Result<T> {
    let silent = |_| {
        let detail = format!("no answer within {OPENED:?}");
        Err(Error::new(ErrorKind::Unavailable, detail))
    };
    let nonsense = |_| Err(Error::new(ErrorKind::Unavailable, "the server answers nonsense"));
    let opening = AssertUnwindSafe(opening).catch_unwind();
    let opened = tokio::time::timeout(OPENED, opening).await;
    opened.map_or_else(silent, |opened| opened.unwrap_or_else(nonsense))
}
