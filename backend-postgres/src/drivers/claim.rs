//! Claims: a transaction that holds advisory locks.

use std::any::{Any, TypeId};
use std::fmt::{self, Debug, Write};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::ClaimDriver;
use leasehold_core::{ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, Result};
use sqlx::pool::{MaybePoolConnection, PoolConnection};
use sqlx::postgres::{PgConnection, PgRow, Postgres};
use sqlx::{AssertSqlSafe, Row, Transaction};
use tokio::time::Instant;

use super::dedupe::first_seen;
use super::first_seen_statement;
use super::lanes::{Lane, Lanes, Tx};
use super::session::lock_timeout;
use crate::error::{NAME, ended_the_wait, is_broken, store_error};
use crate::keys::LockKind;
use crate::server::Server;
use crate::sever::{Severed, SeveredFuture};
use crate::sql::{Arg, Mode, Names, Statement};
use crate::store::{Store, within};

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
/// The first of a connection that is the handle's own: what the statements of other claims set for
/// the transaction, it sets for the session, where the server knows the setting.
const BEGIN_KEPT: &str = "SELECT set_config(v.name, v.value, false) FROM (VALUES \
    ('client_connection_check_interval', '1000'), \
    ('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
    ELSE current_setting('synchronous_commit') END)) AS v (name, value) \
    JOIN pg_settings s USING (name) WHERE v.value <> s.setting; \
    BEGIN ISOLATION LEVEL READ COMMITTED";
/// `COMMIT` in a transaction that has failed is answered like one that succeeded, and rolls back;
/// the first statement fails there. The empty transaction that follows is for sqlx to roll back
/// when the connection returns to the pool: it believes that one is open.
const COMMIT: &str = "SHOW transaction_isolation; COMMIT AND CHAIN";
/// As [`COMMIT`], for a connection that is kept as it is for the next claim.
const COMMIT_AND_KEEP: &str = "SHOW transaction_isolation; COMMIT";
/// More locks than these are not taken by one message.
const SHORT: usize = 16;

#[derive(Debug)]
pub(crate) struct Claims {
    store: Arc<Store>,
    share: f64,
    statements: Arc<Statements>,
    lanes: Arc<Lanes>,
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
    /// How the next token is drawn.
    next_token: String,
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
             SELECT {DURABLE}, CASE WHEN ours THEN {{next_token}} END FROM taken"
        );
        Self {
            lock: names.statement(&lock),
            try_lock: names.statement(&try_lock),
            first_seen: first_seen_statement(names),
            next_token: names.statement("{next_token}").sql().as_str().to_owned(),
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
        taken(rows, wait)
    }

    /// Begins and takes all locks by one message; as [`take`](Self::take).
    async fn begin_and_take(
        &self,
        conn: &mut PgConnection,
        ids: &[i64],
        wait: Duration,
    ) -> sqlx::Result<Option<FencingToken>> {
        let text = AssertSqlSafe(self.one_message(ids, wait));
        taken(sqlx::raw_sql(text).fetch_all(conn).await, wait)
    }

    /// The columns are evaluated from left to right, the token last. Each lock gets what is then
    /// left of the wait, by the server's clock since the message came in.
    fn one_message(&self, ids: &[i64], wait: Duration) -> String {
        let next_token = &self.next_token;
        let mut text = format!("{BEGIN}; SELECT ");
        if wait.is_zero() {
            text.push_str("CASE WHEN true");
            for id in ids {
                append(&mut text, format_args!(" AND pg_try_advisory_xact_lock({id})"));
            }
            append(&mut text, format_args!(" THEN {next_token} END"));
            return text;
        }
        let millis = lock_timeout(wait);
        text.push_str(
            "set_config('leasehold.lock_timeout', current_setting('lock_timeout'), true), ",
        );
        for (n, id) in ids.iter().enumerate() {
            let limit = match n {
                0 => format!("'{millis}'"),
                _ => format!(
                    "greatest(1, ceil({millis} - extract(epoch FROM clock_timestamp() \
                     - statement_timestamp()) * 1000))::int8::text"
                ),
            };
            append(
                &mut text,
                format_args!(
                    "set_config('lock_timeout', {limit}, true), pg_advisory_xact_lock({id}), "
                ),
            );
        }
        text.push_str(
            "set_config('lock_timeout', current_setting('leasehold.lock_timeout'), true), ",
        );
        text.push_str(next_token);
        text
    }
}

/// What the statement that takes the locks has answered.
fn taken(rows: sqlx::Result<Vec<PgRow>>, wait: Duration) -> sqlx::Result<Option<FencingToken>> {
    let rows = match rows {
        Err(error) if !wait.is_zero() && ended_the_wait(&error) => return Ok(None),
        rows => rows?,
    };
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let token: Option<i64> = row.try_get(row.len() - 1)?;
    Ok(token.map(|token| FencingToken(token.cast_unsigned())))
}

fn append(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a string takes everything");
}

impl Claims {
    pub(crate) fn new(store: Arc<Store>, share: f64) -> Self {
        let statements = Arc::new(Statements::new(&store.names));
        let lanes = Lanes::new(store.pool.clone());
        Self { store, share, statements, lanes }
    }

    /// Closes the connections that stand ready.
    pub(crate) fn close(&self) {
        self.lanes.close();
    }

    pub(crate) fn statements(&self) -> &Statements {
        &self.statements
    }

    /// Takes the locks on a connection that stands ready; none if there is no such connection.
    async fn on_lane(&self, ids: &[i64], wait: Duration) -> Result<Option<OnLane>> {
        while let Some(mut lane) = self.lanes.take() {
            match self.statements.begin_and_take(&mut lane.tx, ids, wait).await {
                Ok(Some(token)) => return Ok(Some(OnLane::Taken(lane, token))),
                Err(error) if is_broken(&error) => {} // it was cut while it was idle
                outcome => {
                    self.end(lane, "ROLLBACK").await.map_err(store_error)?;
                    return outcome.map(|_| Some(OnLane::Busy)).map_err(store_error);
                }
            }
        }
        Ok(None)
    }

    /// Ends the transaction and keeps the connection.
    async fn end(&self, lane: Lane, how: &'static str) -> sqlx::Result<()> {
        end(&self.lanes, lane, how).await
    }

    /// Begins a transaction; the server is then known to answer.
    async fn open(&self, server: Server, deadline: Deadline) -> Result<Severed<Tx>> {
        let keeps = self.keeps(server);
        // an idle connection needs no test of its own: `BEGIN` is one
        let idle = self.store.own_pool.then(|| self.store.pool.try_acquire()).flatten();
        if let Some(idle) = idle {
            match begin(idle, server, keeps).await {
                Err(error) if is_broken(&error) => {} // it was cut while it was idle
                begun => return begun.map_err(store_error),
            }
        }
        let conn = within(self.checkout_limit(deadline), self.store.pool.acquire());
        begin(conn.await.map_err(store_error)?, server, keeps).await.map_err(store_error)
    }

    /// Whether connections are kept for the next claim: nobody else has the pool, and a session of
    /// the client is one of the server.
    fn keeps(&self, server: Server) -> bool {
        self.store.own_pool && server.checks_clients && !server.pooled
    }

    /// How long to wait for a connection of the pool.
    fn checkout_limit(&self, deadline: Deadline) -> Duration {
        let pool = &self.store.pool;
        let may_open = pool.size() < pool.options().get_max_connections() || pool.num_idle() > 0;
        let least = if may_open { CHECKOUT } else { Duration::from_millis(10) };
        deadline.remaining().max(least)
    }
}

enum OnLane {
    Taken(Lane, FencingToken),
    Busy,
}

async fn end(lanes: &Arc<Lanes>, mut lane: Lane, how: &'static str) -> sqlx::Result<()> {
    sqlx::raw_sql(how).execute(&mut **lane.tx).await?;
    lanes.keep(lane);
    Ok(())
}

async fn begin(
    conn: PoolConnection<Postgres>,
    server: Server,
    keeps: bool,
) -> sqlx::Result<Severed<Tx>> {
    let begin = match (keeps, server.checks_clients) {
        (true, _) => BEGIN_KEPT,
        (false, true) => BEGIN_CHECKED,
        (false, false) => BEGIN,
    };
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
        let keeps = self.keeps(server);
        let claim = |lane: Lane, token| PgClaim {
            lane,
            token,
            mode: server.mode(),
            statements: self.statements.clone(),
            keys: self.store.keys.clone(),
            lanes: keeps.then(|| self.lanes.clone()),
        };
        loop {
            let wait = deadline.remaining().min(LONGEST_STATEMENT);
            if keeps && ids.len() <= SHORT {
                match self.on_lane(ids, wait).await? {
                    Some(OnLane::Taken(lane, token)) => {
                        return Ok(Some(Box::new(claim(lane, token))));
                    }
                    Some(OnLane::Busy) if deadline.has_passed() => return Ok(None),
                    Some(OnLane::Busy) => continue,
                    None => {}
                }
            }
            let mut tx = self.open(server, deadline).await?;
            let wait = deadline.remaining().min(LONGEST_STATEMENT);
            match self.statements.take(&mut tx, server.mode(), ids, wait).await {
                Ok(Some(token)) => {
                    let lane = Lane { tx, made: Instant::now() };
                    return Ok(Some(Box::new(claim(lane, token))));
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
struct PgClaim {
    lane: Lane,
    token: FencingToken,
    mode: Mode,
    statements: Arc<Statements>,
    keys: crate::keys::KeyMap,
    /// Where the connection goes afterwards; none: to its pool.
    lanes: Option<Arc<Lanes>>,
}

impl PgClaim {
    /// Where the connection is kept, if there is room.
    fn kept(&self) -> Option<Arc<Lanes>> {
        self.lanes.clone().filter(|lanes| lanes.has_room(self.lane.made))
    }
}

impl Debug for PgClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgClaim").field("token", &self.token).finish_non_exhaustive()
    }
}

#[async_trait]
impl ClaimTx for PgClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        &mut *self.lane.tx
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let statement = &self.statements.first_seen;
        first_seen(&mut self.lane.tx, statement, self.mode, &self.keys, key, retain).await
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        let kept = self.kept();
        let commit = if kept.is_some() { COMMIT_AND_KEEP } else { COMMIT };
        let committed = sqlx::raw_sql(commit).execute(&mut **self.lane.tx).await;
        match committed {
            Ok(_) => {
                match kept {
                    Some(lanes) => lanes.keep(self.lane),
                    None => drop(self.lane.tx.into_inner()),
                }
                Ok(())
            }
            Err(error) if is_broken(&error) => {
                let detail = "the connection failed during the commit";
                Err(Error::new(ErrorKind::CommitUnknown, detail).with_source(error))
            }
            Err(error) => {
                drop(roll_back(self.lane.tx).await); // it has rolled back already, or will
                Err(store_error(error))
            }
        }
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        let rolled_back = match self.kept() {
            Some(lanes) => within(ROLLBACK_LIMIT, end(&lanes, self.lane, "ROLLBACK")).await,
            None => roll_back(self.lane.tx).await,
        };
        rolled_back.map_err(store_error)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_takes_the_locks_in_their_order_and_then_the_token() {
        let statements = Statements::new(&Names::new("s"));
        let tried = statements.one_message(&[-3, 7], Duration::ZERO);
        assert_eq!(
            tried,
            "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT CASE WHEN true \
             AND pg_try_advisory_xact_lock(-3) AND pg_try_advisory_xact_lock(7) \
             THEN nextval('\"s\".token'::regclass) END"
        );
        let waited = statements.one_message(&[-3, 7], Duration::from_millis(1500));
        let place = |what: &str| waited.find(what).expect(what);
        let order = [
            place("'leasehold.lock_timeout', current_setting('lock_timeout')"),
            place("set_config('lock_timeout', '1500', true)"),
            place("pg_advisory_xact_lock(-3)"),
            place("greatest(1, ceil(1500 - "),
            place("pg_advisory_xact_lock(7)"),
            place("set_config('lock_timeout', current_setting('leasehold.lock_timeout'), true)"),
            place("nextval("),
        ];
        assert!(order.is_sorted(), "{waited}");
    }
}
