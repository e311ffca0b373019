//! Claims: a transaction that holds advisory locks.

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::ClaimDriver;
use leasehold_core::{ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, Result};
use sqlx::pool::{MaybePoolConnection, PoolConnection};
use sqlx::postgres::{PgConnection, Postgres};
use sqlx::{Row, Transaction};

use super::dedupe::first_seen;
use super::first_seen_statement;
use super::session::lock_timeout;
use crate::error::{NAME, ended_the_wait, is_broken, store_error};
use crate::keys::LockKind;
use crate::server::Server;
use crate::sever::{Severed, SeveredFuture};
use crate::sql::{Arg, Mode, Names, Statement};
use crate::store::{Store, within};

type Tx = Transaction<'static, Postgres>;

/// One statement waits no longer: it has a snapshot, which holds back vacuum in the whole
/// database. A longer wait queues anew.
const LONGEST_STATEMENT: Duration = Duration::from_secs(30);
/// What a claim that does not wait allows for reaching the server.
const CHECKOUT: Duration = Duration::from_secs(2);
/// A rollback that takes longer is left to the server: its connection is closed.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(5);

/// READ COMMITTED: each statement sees what was committed before it, so that what follows the lock
/// sees what its former holder wrote. A snapshot for the whole transaction would be older than the
/// lock.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
/// While it waits, the server looks each second whether the client is still there.
const BEGIN_CHECKED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL client_connection_check_interval = 1000";
/// `COMMIT` in a transaction that has failed is answered like one that succeeded, and rolls back;
/// the first statement fails there. The empty transaction that follows is for sqlx to roll back
/// when the connection returns to the pool: it believes that one is open.
const COMMIT: &str = "SHOW transaction_isolation; COMMIT AND CHAIN";

#[derive(Debug)]
pub(crate) struct Claims {
    store: Arc<Store>,
    share: f64,
    statements: Arc<Statements>,
}

/// The statements of a claim.
///
/// `lock` takes the locks in their order, each with what is then left of the wait as its limit,
/// puts back the caller's own limit, and draws the token. A transaction that was claimed is
/// committed as durably as its hooks believe.
#[derive(Debug)]
pub(crate) struct Statements {
    lock: Statement,
    try_lock: Statement,
    first_seen: Statement,
}

impl Statements {
    pub(crate) fn new(names: &Names) -> Self {
        const DURABLE: &str = "set_config('synchronous_commit', \
             CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
             ELSE current_setting('synchronous_commit') END, true)";
        let lock = format!(
            "WITH start AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout, \
               clock_timestamp() + $2 * interval '1 millisecond' AS ends), \
             locks AS MATERIALIZED (SELECT set_config('lock_timeout', greatest(1, \
               ceil(extract(epoch FROM ends - clock_timestamp()) * 1000))::int8::text, true), \
               pg_advisory_xact_lock(id) FROM start, unnest($1::int8[]) AS id), \
             taken AS MATERIALIZED (SELECT count(*) AS locks FROM locks) \
             SELECT set_config('lock_timeout', lock_timeout, true), {DURABLE}, {{next_token}} \
             FROM start, taken WHERE locks >= 0"
        );
        let try_lock = format!(
            "WITH locks AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(id) AS ours \
               FROM unnest($1::int8[]) AS id), \
             taken AS MATERIALIZED (SELECT coalesce(bool_and(ours), true) AS ours FROM locks) \
             SELECT '', {DURABLE}, CASE WHEN ours THEN {{next_token}} END FROM taken"
        );
        Self {
            lock: names.statement(&lock),
            try_lock: names.statement(&try_lock),
            first_seen: first_seen_statement(names),
        }
    }

    /// Takes all locks in the transaction; `None`, after which it can only roll back, if others
    /// had one of them for the whole wait.
    async fn take(
        &self,
        tx: &mut PgConnection,
        mode: Mode,
        ids: &[i64],
        wait: Duration,
    ) -> sqlx::Result<Option<FencingToken>> {
        let ids = Arg::Ints(ids.to_vec());
        let rows = if wait.is_zero() {
            self.try_lock.run(tx, mode, vec![ids]).await
        } else {
            let millis = lock_timeout(wait).parse().unwrap_or(i64::from(i32::MAX));
            self.lock.run(tx, mode, vec![ids, Arg::Int(millis)]).await
        };
        let rows = match rows {
            Err(error) if !wait.is_zero() && ended_the_wait(&error) => return Ok(None),
            rows => rows?,
        };
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let token: Option<i64> = row.try_get(2)?;
        Ok(token.map(|token| FencingToken(token.cast_unsigned())))
    }
}

impl Claims {
    pub(crate) fn new(store: Arc<Store>, share: f64) -> Self {
        let statements = Arc::new(Statements::new(&store.names));
        Self { store, share, statements }
    }

    pub(crate) fn statements(&self) -> &Statements {
        &self.statements
    }

    /// Begins a transaction; the server is then known to answer.
    async fn open(&self, server: Server, deadline: Deadline) -> Result<Severed<Tx>> {
        // an idle connection needs no test of its own: `BEGIN` is one
        let idle = self.store.own_pool.then(|| self.store.pool.try_acquire()).flatten();
        if let Some(idle) = idle {
            match begin(idle, server).await {
                Err(error) if is_broken(&error) => {} // it was cut while it was idle
                begun => return begun.map_err(store_error),
            }
        }
        let conn = within(self.checkout_limit(deadline), self.store.pool.acquire());
        begin(conn.await.map_err(store_error)?, server).await.map_err(store_error)
    }

    /// How long to wait for a connection of the pool.
    fn checkout_limit(&self, deadline: Deadline) -> Duration {
        let pool = &self.store.pool;
        let may_open = pool.size() < pool.options().get_max_connections() || pool.num_idle() > 0;
        let least = if may_open { CHECKOUT } else { Duration::from_millis(10) };
        deadline.remaining().max(least)
    }
}

async fn begin(conn: PoolConnection<Postgres>, server: Server) -> sqlx::Result<Severed<Tx>> {
    let begin = if server.checks_clients { BEGIN_CHECKED } else { BEGIN };
    let conn = MaybePoolConnection::PoolConnection(conn);
    let begun: SeveredFuture<_> = Severed::new(Transaction::begin(conn, Some(sql(begin))));
    begun.await.map(Severed::new)
}

fn sql(text: &'static str) -> sqlx::SqlStr {
    sqlx::SqlSafeStr::into_sql_str(text)
}

/// Rolls back and gives the connection back; where that takes too long it is closed.
async fn roll_back(tx: Severed<Tx>) -> sqlx::Result<()> {
    let rollback: SeveredFuture<_> = Severed::new(Box::pin(tx.into_inner().rollback()));
    within(ROLLBACK_LIMIT, rollback).await
}

#[async_trait]
impl ClaimDriver for Claims {
    type Id = i64;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<Tx>()
    }

    fn id(&self, key: &Key) -> i64 {
        self.store.keys.advisory(LockKind::Claim, key)
    }

    async fn begin(&self, ids: &[i64], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let server = self.store.server().await?;
        let room = (server.lock_table as f64 * self.share) as usize;
        if ids.len() > room {
            let detail = format!(
                "{} keys are more than this handle's share of the server's lock table, {room}",
                ids.len()
            );
            return Err(Error::new(ErrorKind::Exhausted, detail));
        }
        loop {
            let mut tx = self.open(server, deadline).await?;
            let wait = deadline.remaining().min(LONGEST_STATEMENT);
            match self.statements.take(&mut tx, server.mode(), ids, wait).await {
                Ok(Some(token)) => {
                    let statements = self.statements.clone();
                    let keys = self.store.keys.clone();
                    let mode = server.mode();
                    return Ok(Some(Box::new(PgClaim { tx, token, mode, statements, keys })));
                }
                Ok(None) => roll_back(tx).await.map_err(store_error)?,
                Err(error) if is_broken(&error) => return Err(store_error(error)),
                Err(error) => {
                    drop(roll_back(tx).await); // the first error says more
                    return Err(store_error(error));
                }
            }
            if deadline.has_passed() {
                return Ok(None);
            }
        }
    }
}

/// An open claim.
#[derive(Debug)]
struct PgClaim {
    tx: Severed<Tx>,
    token: FencingToken,
    mode: Mode,
    statements: Arc<Statements>,
    keys: crate::keys::KeyMap,
}

#[async_trait]
impl ClaimTx for PgClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        &mut *self.tx
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let statement = &self.statements.first_seen;
        first_seen(&mut self.tx, statement, self.mode, &self.keys, key, retain).await
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        let committed = sqlx::raw_sql(COMMIT).execute(&mut **self.tx).await;
        match committed {
            Ok(_) => {
                drop(self.tx.into_inner());
                Ok(())
            }
            Err(error) if is_broken(&error) => {
                let detail = "the connection failed during the commit";
                Err(Error::new(ErrorKind::CommitUnknown, detail).with_source(error))
            }
            Err(error) => {
                drop(roll_back(self.tx).await); // it has rolled back already, or will
                Err(store_error(error))
            }
        }
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        roll_back(self.tx).await.map_err(store_error)
    }
}

/// Takes the locks in a transaction of the caller's.
pub(crate) async fn claim_in(
    store: &Store,
    statements: &Statements,
    tx: &mut PgConnection,
    ids: &[i64],
    deadline: Deadline,
) -> Result<Option<FencingToken>> {
    let mode = store.server().await?.mode();
    // what the locks of a failed try held is freed with the savepoint
    let mark = "SAVEPOINT leasehold; SELECT current_setting('transaction_isolation')";
    let row = sqlx::raw_sql(mark).fetch_one(&mut *tx).await.map_err(store_error)?;
    let isolation: String = row.try_get(0).map_err(store_error)?;
    if isolation != "read committed" {
        let detail = format!(
            "the transaction is at {isolation}, with a snapshot that may be older than the lock: \
             claim at read committed"
        );
        return Err(Error::new(ErrorKind::Unsupported, detail));
    }
    loop {
        let wait = deadline.remaining().min(LONGEST_STATEMENT);
        let taken = statements.take(&mut *tx, mode, ids, wait).await;
        let end = match &taken {
            Ok(Some(_)) => "RELEASE SAVEPOINT leasehold",
            Err(error) if is_broken(error) => return taken.map_err(store_error),
            Ok(None) if !deadline.has_passed() => "ROLLBACK TO SAVEPOINT leasehold",
            _ => "ROLLBACK TO SAVEPOINT leasehold; RELEASE SAVEPOINT leasehold",
        };
        sqlx::raw_sql(end).execute(&mut *tx).await.map_err(store_error)?;
        if deadline.has_passed() || !matches!(taken, Ok(None)) {
            return taken.map_err(store_error);
        }
    }
}
