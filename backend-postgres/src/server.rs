//! What is found out about the server, and the way to it, once per handle.

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{Connection, Row};

use crate::dial::connect;
use crate::error::store_error;
use crate::sql::Mode;

/// The server as a handle sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Server {
    /// Sessions of the client are not sessions of the server: a pooler is in between.
    pub(crate) pooled: bool,
    /// It can look whether a client that waits is still there (PostgreSQL 14, on Linux).
    pub(crate) checks_clients: bool,
    /// How many locks its table has room for, at least.
    pub(crate) lock_table: u64,
}

const LOOK: &str = "SELECT pg_is_in_recovery(), \
    current_setting('max_locks_per_transaction')::int8 * (current_setting('max_connections')::int8 \
    + current_setting('max_prepared_transactions')::int8)";

impl Server {
    pub(crate) async fn look(options: &PgConnectOptions) -> Result<Self> {
        let (mut one, mut two) = tokio::try_join!(connect(options), connect(options))?;
        let pooled = shares_sessions(&mut one, &mut two).await.map_err(store_error)?;
        let set = "BEGIN; SET LOCAL client_connection_check_interval = 1000; ROLLBACK";
        let (row, set) = tokio::join!(
            sqlx::raw_sql(LOOK).fetch_one(&mut one),
            sqlx::raw_sql(set).execute(&mut two)
        );
        let row = row.map_err(store_error)?;
        let standby: bool = row.try_get(0).map_err(store_error)?;
        if standby {
            let detail = "this server is a standby, whose locks exclude nobody elsewhere: connect \
                to the primary";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        let lock_table = row.try_get::<i64, _>(1).map_err(store_error)?.unsigned_abs();
        let checks_clients = match set {
            Ok(_) => true,
            Err(sqlx::Error::Database(_)) => false,
            Err(error) => return Err(store_error(error)),
        };
        // a failed good-bye is none of anybody's concern
        drop(one.close().await);
        drop(two.close().await);
        Ok(Self { pooled, checks_clients, lock_table })
    }

    pub(crate) fn mode(&self) -> Mode {
        if self.pooled { Mode::Plain } else { Mode::Prepared }
    }
}

/// Whether two open clients' sessions are one session of the server, or one client's session is
/// several: a pooler gives out its sessions in turn, or the last one used, or what is free.
async fn shares_sessions(one: &mut PgConnection, two: &mut PgConnection) -> sqlx::Result<bool> {
    let mut ones = Vec::new();
    let mut twos = Vec::new();
    ones.push(session(one).await?);
    twos.push(session(two).await?);
    ones.push(session(one).await?);
    ones.push(session(one).await?);
    twos.push(session(two).await?);
    twos.push(session(two).await?);
    let steady = ones.iter().all(|pid| *pid == ones[0]) && twos.iter().all(|pid| *pid == twos[0]);
    Ok(!steady || ones[0] == twos[0])
}

async fn session(conn: &mut PgConnection) -> sqlx::Result<i32> {
    sqlx::raw_sql("SELECT pg_backend_pid()").fetch_one(conn).await?.try_get(0)
}
