//! What the drivers of one handle share: how to reach the server, and what things are called.

use std::fmt;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Key, Result};
use mysql_async::prelude::{FromRow, Queryable};
use mysql_async::{Conn, Opts, OptsBuilder, Params, Pool, PoolConstraints, PoolOpts, Row};

use crate::error::mapped;
use crate::flavour::{Flavour, ServerInfo};
use crate::names::{self, Kind, RowId};

macro_rules! now {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    };
}

/// Microseconds since 1970 by the server's clock. `UTC_TIMESTAMP` does not depend on the session's
/// time zone, which has hours that come twice. It is that of the statement's start: one that waits
/// for a row takes over late rather than early, and a new expiry is never before the request was
/// sent plus the ttl.
pub(crate) const NOW: &str = now!();

/// The token of a row that is new: above those of rows that were purged, which have raised the
/// floor, and of those that somebody deleted by hand, which were of earlier microseconds.
pub(crate) const FIRST_TOKEN: &str = concat!("GREATEST(floor + 1, ", now!(), ")");

/// How often a statement is sent again after the server rolled it back.
pub(crate) const TRIES: u32 = 10;

/// How many connections of the pool may turn out to be dead before a call fails for it: after a
/// restart of the server, all that were idle are.
pub(crate) const DEAD: u32 = 16;

/// Evaluates a future's expression again after the server's deadlocks and lock-wait time-outs.
macro_rules! retried {
    ($work:expr) => {{
        let mut tries = 0;
        loop {
            match $work.await {
                Err(error)
                    if $crate::error::is_transient(&error) && tries < $crate::store::TRIES =>
                {
                    tries += 1;
                    $crate::store::pause(tries, &error).await;
                }
                outcome => break outcome,
            }
        }
    }};
}
pub(crate) use retried;

/// What the drivers of one handle share.
pub(crate) struct Store {
    /// For connections of our own.
    pub(crate) opts: Opts,
    /// The caller's, for claims only.
    pub(crate) pool: Pool,
    /// For leases and dedupe, so that they never wait for one of the caller's.
    pub(crate) own: Pool,
    /// For the renewals of leases, so that they never wait for one on which another statement waits
    /// for a row: these wait for none.
    pub(crate) renewing: Pool,
    pub(crate) info: ServerInfo,
    pub(crate) namespace: String,
    pub(crate) tables: Tables,
    /// What the tables call the holder, as a literal.
    pub(crate) holder: String,
}

/// The tables' names, quoted.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) prefix: String,
    pub(crate) meta: String,
    pub(crate) lease: String,
    pub(crate) dedupe: String,
    pub(crate) token: String,
    pub(crate) claim: String,
    pub(crate) session: String,
}

impl Tables {
    /// # Errors
    /// For a prefix that would need quoting.
    pub(crate) fn new(prefix: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if prefix.len() > 32 || !prefix.chars().all(plain) {
            return Err(Error::new(
                ErrorKind::InvalidOptions,
                "a table prefix has up to 32 letters, digits and underscores",
            ));
        }
        let table = |name: &str| format!("`{prefix}{name}`");
        Ok(Self {
            prefix: prefix.to_owned(),
            meta: table("meta"),
            lease: table("lease"),
            dedupe: table("dedupe"),
            token: table("token"),
            claim: table("claim"),
            session: table("session"),
        })
    }
}

impl Store {
    pub(crate) fn is_maria(&self) -> bool {
        self.info.flavour == Flavour::MariaDb
    }

    pub(crate) fn row(&self, kind: Kind, key: &Key) -> RowId {
        names::row_id(kind, &self.namespace, key)
    }

    pub(crate) fn lock_name(&self, kind: Kind, key: &Key) -> String {
        names::lock_name(kind, &self.namespace, key)
    }

    /// The namespace, as a literal.
    pub(crate) fn scope(&self) -> String {
        names::hex(self.namespace.as_bytes())
    }

    /// Writes down whose the connection is that sends it. `marker`: the user-level lock that it has
    /// as long as it lives.
    pub(crate) fn introduction(&self, marker: &str) -> String {
        format!(
            "REPLACE INTO {} (connection, scope, holder, marker, since) \
             VALUES (CONNECTION_ID(), {}, {}, '{marker}', {NOW})",
            self.tables.session,
            self.scope(),
            self.holder
        )
    }

    /// A connection outside of any pool.
    pub(crate) async fn connect(&self) -> Result<Conn> {
        Conn::new(self.opts.clone()).await.map_err(mapped)
    }

    /// Sends text, on a connection of our own pool.
    pub(crate) async fn text(&self, text: &str) -> Result<Done> {
        let mut conn = self.own.get_conn().await.map_err(mapped)?;
        retried!(conn.query_drop(text)).map_err(mapped)?;
        Ok(Done::of(&conn))
    }

    /// The rows of the last of one or more statements, on a connection of our own pool.
    pub(crate) async fn rows<R: FromRow + Send + 'static>(&self, text: &str) -> Result<Vec<R>> {
        let mut conn = self.own.get_conn().await.map_err(mapped)?;
        retried!(last_rows(&mut conn, text)).map_err(mapped)
    }

    /// Executes a prepared statement, on a connection of our own pool.
    pub(crate) async fn exec(&self, statement: &str, params: Params) -> Result<Done> {
        let mut conn = self.own.get_conn().await.map_err(mapped)?;
        retried!(conn.exec_drop(statement, params.clone())).map_err(mapped)?;
        Ok(Done::of(&conn))
    }
}

impl fmt::Debug for Store {
    // the driver's options would print the password
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("host", &self.opts.ip_or_hostname())
            .field("port", &self.opts.tcp_port())
            .field("info", &self.info)
            .field("namespace", &self.namespace)
            .field("tables", &self.tables)
            .finish_non_exhaustive()
    }
}

/// The rows of the last of one or more statements.
pub(crate) async fn last_rows<R: FromRow + Send + 'static>(
    conn: &mut Conn,
    text: &str,
) -> mysql_async::Result<Vec<R>> {
    let mut result = conn.query_iter(text).await?;
    let mut rows = Vec::new();
    while !result.is_empty() {
        rows = result.collect::<Row>().await?;
    }
    result.drop_result().await?;
    Ok(rows.into_iter().map(mysql_async::from_row).collect())
}

/// What a statement without rows did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    /// Rows that it changed.
    pub(crate) changed: u64,
    /// Its last insert id.
    pub(crate) last_id: Option<u64>,
}

impl Done {
    fn of(conn: &Conn) -> Self {
        Self { changed: conn.affected_rows(), last_id: conn.last_insert_id() }
    }
}

/// The pause before a statement that the server rolled back is sent again.
pub(crate) async fn pause(tries: u32, error: &mysql_async::Error) {
    tracing::debug!(%error, tries, "the server rolled a statement back, trying again");
    let longest = Duration::from_millis(5) * tries;
    tokio::time::sleep(longest.mul_f64(rand::random_range(0.2..=1.0))).await;
}

/// The options of our own pool: few connections, that keep their prepared statements and wait for
/// a row for a second at most.
pub(crate) fn own_pool(opts: &Opts, connections: usize) -> Pool {
    let constraints =
        PoolConstraints::new(0, connections.max(1)).expect("zero is not above one or more");
    let pool_opts = PoolOpts::default()
        .with_constraints(constraints)
        .with_reset_connection(false)
        .with_inactive_connection_ttl(Duration::from_secs(60));
    // the driver runs them from the last to the first: ours wins
    let mut setup = vec![
        // the comment is one for MySQL only: MariaDB reads it, and would otherwise turn a long list into a scan
        "SET SESSION innodb_lock_wait_timeout = 1, autocommit = 1, sql_mode = '' \
         /*M!100303 , in_predicate_conversion_threshold = 0 */; \
         SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
            .to_owned(),
    ];
    setup.extend_from_slice(opts.setup());
    Pool::new(OptsBuilder::from_opts(opts.clone()).pool_opts(pool_opts).setup(setup))
}
