//! Claims: a transaction that holds advisory locks.

use std::any::{Any, TypeId};
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::ClaimDriver;
use leasehold_core::{ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, Result};
use sqlx::pool::{MaybePoolConnection, PoolConnection};
use sqlx::postgres::{PgConnection, Postgres};
use sqlx::{Row, Transaction};

use super::claim_sql::{BEGIN, Statements};
use super::dedupe::first_seen;
use crate::error::{NAME, is_broken, store_error};
use crate::keys::LockKind;
use crate::lanes::{Lane, Lanes};
use crate::server::Server;
use crate::sever::{Severed, SeveredFuture};
use crate::sql::Mode;
use crate::store::{Store, within};

/// What a claim gives out. sqlx alone can make one, by a round trip that drops what the server
/// answers. So it is made once and kept: the next claim begins with one message of plain text, which
/// brings the locks and the token, and ends with one.
type Tx = Transaction<'static, Postgres>;

/// One statement waits no longer: it has a snapshot, which holds back vacuum in the whole
/// database. A longer wait queues anew.
const LONGEST_STATEMENT: Duration = Duration::from_secs(30);
/// What a claim that does not wait allows for reaching the server.
const CHECKOUT: Duration = Duration::from_secs(2);
/// A rollback that takes longer is left to the server: its connection is closed.
const ROLLBACK_LIMIT: Duration = Duration::from_secs(5);

/// While it waits, the server looks each second whether the client is still there.
const BEGIN_CHECKED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL client_connection_check_interval = 1000";
/// The first of a connection that is the handle's own: what the statements of other claims set for
/// the transaction, it sets for the session: in a transaction before, since the level of one that
/// has run a query cannot be set, and the statements of one message are a single transaction.
const BEGIN_KEPT: &str = "BEGIN; SELECT set_config('client_connection_check_interval', '1000', false), \
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' \
    THEN 'on' ELSE current_setting('synchronous_commit') END, false); COMMIT; \
    BEGIN ISOLATION LEVEL READ COMMITTED";
/// `COMMIT` in a transaction that has failed is answered like one that succeeded, and rolls back;
/// the first statement fails there. The empty transaction that follows is for sqlx to roll back
/// when the connection returns to the pool: it believes that one is open.
const COMMIT: &str = "SHOW transaction_isolation; COMMIT AND CHAIN";
/// As [`COMMIT`], for a connection that is kept as it is for the next claim.
const COMMIT_AND_KEEP: &str = "SHOW transaction_isolation; COMMIT";
/// A connection that no claim has used for so long is closed.
const IDLE: Duration = Duration::from_secs(10);
/// More locks than these are not taken by one message.
const SHORT: usize = 16;

#[derive(Debug)]
pub(crate) struct Claims {
    store: Arc<Store>,
    share: f64,
    statements: Arc<Statements>,
    lanes: Arc<Lanes<Tx>>,
}

impl Claims {
    pub(crate) fn new(store: Arc<Store>, share: f64) -> Self {
        let statements = Arc::new(Statements::new(&store.names, store.keys.mark(LockKind::Claim)));
        let lanes = Lanes::new(store.pool.clone(), IDLE, drop);
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
            match self.statements.begin_and_take(&mut lane.conn, ids, wait).await {
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
    async fn end(&self, lane: Lane<Tx>, how: &'static str) -> sqlx::Result<()> {
        end(&self.lanes, lane, how).await
    }

    /// Begins a transaction; the server is then known to answer.
    async fn open(&self, server: Server, deadline: Deadline) -> Result<Severed<Tx>> {
        let keeps = self.keeps(server);
        // an idle connection needs no test of its own: `BEGIN` is one
        let idle = self.store.idle();
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
    Taken(Lane<Tx>, FencingToken),
    Busy,
}

async fn end(lanes: &Arc<Lanes<Tx>>, mut lane: Lane<Tx>, how: &'static str) -> sqlx::Result<()> {
    sqlx::raw_sql(how).execute(&mut **lane.conn).await?;
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
        let claim = |lane: Lane<Tx>, token| PgClaim {
            lane,
            token,
            mode: server.mode(),
            statements: self.statements.clone(),
            store: self.store.clone(),
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
                    let lane = Lane::new(tx);
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
    lane: Lane<Tx>,
    token: FencingToken,
    mode: Mode,
    statements: Arc<Statements>,
    store: Arc<Store>,
    /// Where the connection goes afterwards; none: to its pool.
    lanes: Option<Arc<Lanes<Tx>>>,
}

impl PgClaim {
    /// Where the connection is kept, if there is room.
    fn kept(&self) -> Option<Arc<Lanes<Tx>>> {
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
        &mut *self.lane.conn
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let statement = &self.statements.first_seen;
        first_seen(&mut self.lane.conn, statement, self.mode, &self.store, key, retain).await
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        let kept = self.kept();
        let commit = if kept.is_some() { COMMIT_AND_KEEP } else { COMMIT };
        let committed = sqlx::raw_sql(commit).execute(&mut **self.lane.conn).await;
        match committed {
            Ok(_) => {
                match kept {
                    Some(lanes) => lanes.keep(self.lane),
                    None => drop(self.lane.conn.into_inner()),
                }
                Ok(())
            }
            Err(error) if is_broken(&error) => {
                let detail = "the connection failed during the commit";
                Err(Error::new(ErrorKind::CommitUnknown, detail).with_source(error))
            }
            Err(error) => {
                drop(roll_back(self.lane.conn).await); // it has rolled back already, or will
                Err(store_error(error))
            }
        }
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        let rolled_back = match self.kept() {
            Some(lanes) => within(ROLLBACK_LIMIT, end(&lanes, self.lane, "ROLLBACK")).await,
            None => roll_back(self.lane.conn).await,
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
