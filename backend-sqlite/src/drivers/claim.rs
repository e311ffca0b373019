//! Claims: locked keys, and a transaction that takes the writer's place when it is first used.

use std::any::{Any, TypeId};
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use leasehold_core::backend::ClaimDriver;
use leasehold_core::{ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, Result};
use sqlx::sqlite::Sqlite;
use sqlx::{AssertSqlSafe, Transaction};
use tokio::runtime::Handle;

use super::dedupe::Statements;
use super::keys::KeyLocks;
use crate::error::{NAME, is_busy, leaves_open, store_error};
use crate::file::pause;
use crate::store::Store;

type Tx = Transaction<'static, Sqlite>;

/// What a claim that does not wait allows for a free connection.
const CHECKOUT: Duration = Duration::from_secs(2);

/// Begins claims.
#[derive(Debug)]
pub(crate) struct Claims {
    store: Arc<Store>,
    statements: Statements,
    take_turn: Arc<str>,
}

impl Claims {
    pub(crate) fn new(store: Arc<Store>, statements: Statements) -> Self {
        // it deletes nothing; but to do so it must be the file's writer
        let take_turn = format!("DELETE FROM main.{}_token WHERE one = 2", store.files.prefix);
        Self { store, statements, take_turn: take_turn.into() }
    }

    /// A transaction that has read nothing yet: what it reads is no older than its first use.
    async fn open(&self, deadline: Deadline) -> Result<Tx> {
        let limit = deadline.remaining().max(CHECKOUT);
        let begun = tokio::time::timeout(limit, async {
            for tries in 0.. {
                match self.store.pool.begin().await {
                    Err(error) if is_busy(&error) => pause(tries).await,
                    Err(sqlx::Error::PoolTimedOut) => {} // the pool's limit is not the caller's
                    begun => return begun,
                }
            }
            unreachable!("it goes on until it is answered")
        });
        begun.await.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(store_error)
    }
}

#[async_trait]
impl ClaimDriver for Claims {
    type Id = Key;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<Tx>()
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn begin(&self, ids: &[Key], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let Some(keys) = KeyLocks::take(&self.store, ids, deadline).await? else {
            return Ok(None);
        };
        let tx = self.open(deadline).await?;
        // only now that the keys are ours is it over those of all earlier claims
        let token = self.store.token().await?;
        keys.describe(&self.store, ids, token)?;
        Ok(Some(Box::new(SqliteClaim {
            tx: Some(tx),
            keys,
            token,
            turn: Turn::Untouched,
            store: self.store.clone(),
            statements: self.statements.clone(),
            take_turn: self.take_turn.clone(),
            runtime: Handle::current(),
        })))
    }
}

/// How far the transaction has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It has read nothing.
    Untouched,
    /// It may have read something, and must begin anew.
    Read,
    /// It is the file's writer, or waits in front of all other statements to become it.
    Taken,
}

/// An open claim.
struct SqliteClaim {
    /// There until the claim ends.
    tx: Option<Tx>,
    keys: KeyLocks,
    token: FencingToken,
    turn: Turn,
    store: Arc<Store>,
    statements: Statements,
    take_turn: Arc<str>,
    runtime: Handle,
}

impl SqliteClaim {
    fn open(&mut self) -> &mut Tx {
        self.tx.as_mut().expect("an open claim has its transaction")
    }

    /// Puts statements in front of all later ones, without waiting for them: the connection's own
    /// thread carries them out in order.
    fn put_in_front(&mut self, sql: &str) {
        let tx = self.open();
        let statement = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut **tx);
        drop(statement.now_or_never()); // sent by its first poll
    }

    /// Makes the transaction the file's writer, before anything is read: one that has read first
    /// could not write any more once somebody else has written. Who is behind another claim waits
    /// with its first statement.
    fn take_turn(&mut self) {
        if self.turn == Turn::Read {
            self.begin_anew();
        }
        if self.turn == Turn::Untouched {
            self.turn = Turn::Taken;
            let sql = self.take_turn.clone();
            self.put_in_front(&sql);
        }
    }

    /// Forgets what was read. Nothing has been written.
    fn begin_anew(&mut self) {
        self.put_in_front("ROLLBACK");
        self.put_in_front("BEGIN");
        self.turn = Turn::Untouched;
    }
}

#[async_trait]
impl ClaimTx for SqliteClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        self.take_turn();
        self.open()
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let (store, statements) = (self.store.clone(), self.statements.clone());
        if self.turn != Turn::Taken {
            // a key that is known already needs no writer
            self.turn = Turn::Read;
            let known = statements.is_known(self.open(), &store.namespace, key).await;
            self.begin_anew();
            if known.map_err(store_error)? {
                return Ok(false);
            }
        }
        self.take_turn();
        let first = statements.first_seen(self.open(), &store, key, retain);
        first.await.map_err(store_error)
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        let Some(tx) = self.tx.take() else {
            return Ok(());
        };
        if !self.keys.are_in_place() {
            drop(tx.rollback().await); // the drop of the keys tells no less
            let detail = "the files of the claimed keys were removed: nothing is written";
            return Err(Error::new(ErrorKind::Lost, detail));
        }
        tx.commit().await.map_err(|error| match leaves_open(&error) {
            true => {
                let detail = "the file failed during the commit";
                Error::new(ErrorKind::CommitUnknown, detail).with_source(error)
            }
            false => store_error(error),
        })
    }

    async fn rollback(mut self: Box<Self>) -> Result<()> {
        match self.tx.take() {
            Some(tx) => tx.rollback().await.map_err(store_error),
            None => Ok(()),
        }
    }
}

impl Drop for SqliteClaim {
    fn drop(&mut self) {
        // the pool takes its connection back in a task; what the transaction wrote is seen by
        // nobody, and nobody else writes before it has rolled back
        let _context = self.runtime.enter();
        drop(self.tx.take());
    }
}

impl Debug for SqliteClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteClaim")
            .field("token", &self.token)
            .field("turn", &self.turn)
            .finish_non_exhaustive()
    }
}
