//! Claims: the caller's pool, one connection from begin to commit.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::FutureExt;
use leasehold_core::backend::ClaimDriver;
use leasehold_core::{ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, Result};
use mysql_async::consts::StatusFlags;
use mysql_async::prelude::Queryable;
use mysql_async::{Transaction, TxOpts};

use crate::dedupe;
use crate::error::{BACKEND, is_interrupted, mapped};
use crate::names::Kind;
use crate::store::Store;
use crate::{rows, session::wait_statement};

/// How long a try without a wait may take to get a connection of the pool.
const CHECKOUT: Duration = Duration::from_secs(1);
/// The longest single wait on the server.
const SLICE: Duration = Duration::from_secs(10);
/// What an answer may take beyond the wait.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);

/// A connection says so often whose it is, so that the entry of one that is in use is not old.
pub(crate) const INTRODUCED: Duration = Duration::from_secs(60);

/// By what claims exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Means {
    UserLocks,
    Rows,
}

/// Each statement reads what is committed by then.
const BEGIN: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION";

/// Begins claims.
#[derive(Debug)]
pub(crate) struct Claims {
    store: Arc<Store>,
    means: Means,
    /// The connections of the pool that have said whose they are, and when.
    introduced: Mutex<HashMap<u32, Instant>>,
}

impl Claims {
    pub(crate) fn new(store: Arc<Store>, means: Means) -> Self {
        Self { store, means, introduced: Mutex::default() }
    }

    /// A connection of the pool, in a transaction, which is the only way to own one. It has read
    /// nothing, and is ended before the claim begins.
    async fn open(&self, deadline: Deadline) -> Result<Guarded> {
        let opts = TxOpts::default();
        let limit = deadline.remaining().max(CHECKOUT);
        let opening = self.store.pool.start_transaction(opts);
        let Ok(tx) = tokio::time::timeout(limit, opening).await else {
            let detail = "no connection of the pool was free within the wait";
            return Err(Error::new(ErrorKind::Unavailable, detail));
        };
        let tx = tx.map_err(mapped)?;
        Ok(Guarded { tx: Some(tx), release: String::new() })
    }

    /// What a connection must say first: once in a while whose it is.
    fn introduction(&self, connection: u32) -> String {
        let introduced = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        match introduced.get(&connection) {
            Some(at) if at.elapsed() < INTRODUCED => String::new(),
            _ => format!("{}; ", self.store.introduction("")),
        }
    }

    fn has_introduced(&self, connection: u32) {
        let mut introduced = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        if introduced.len() >= 1_000 {
            introduced.retain(|_, at| at.elapsed() < INTRODUCED);
        }
        introduced.insert(connection, Instant::now());
    }

    /// Takes the locks in order, then begins; none if the deadline passes.
    async fn lock(
        &self,
        guarded: &mut Guarded,
        names: &[String],
        deadline: Deadline,
    ) -> Result<Option<FencingToken>> {
        let mut from = 0;
        loop {
            // all that are free at once, and with the last of them the token and the transaction
            let connection = guarded.tx().id();
            let also = self.introduction(connection);
            let (got, token) = guarded.try_locks(&self.store, names, from, &also).await?;
            if !also.is_empty() {
                self.has_introduced(connection);
            }
            if token.is_some() {
                return Ok(token);
            }
            from += got;
            let Some(busy) = names.get(from) else { continue };
            // nothing behind a busy one is kept while it is waited for: that would be a deadlock
            if deadline.has_passed() || !self.wait(guarded, busy, deadline).await? {
                return Ok(None);
            }
            guarded.hold(busy);
            from += 1;
        }
    }

    async fn wait(&self, guarded: &mut Guarded, name: &str, deadline: Deadline) -> Result<bool> {
        while !deadline.has_passed() {
            let slice = deadline.remaining().min(SLICE);
            let statement = wait_statement(self.store.is_maria(), name, slice);
            let asking = guarded.tx().query_first::<Option<u8>, _>(statement);
            let granted = match tokio::time::timeout(slice + ANSWER, asking).await {
                Err(_) => return Err(no_answer()),
                Ok(Ok(Some(Some(granted)))) => granted == 1,
                // NULL, or cut short: it may have been granted just before
                Ok(Ok(_)) => guarded.holds(name).await?,
                Ok(Err(error)) if is_interrupted(&error) => guarded.holds(name).await?,
                Ok(Err(error)) => return Err(mapped(error)),
            };
            if granted {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[async_trait]
impl ClaimDriver for Claims {
    type Id = String;

    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<Transaction<'static>>()
    }

    fn id(&self, key: &Key) -> String {
        match self.means {
            Means::UserLocks => self.store.lock_name(Kind::Claim, key),
            Means::Rows => crate::names::hex(&self.store.row(Kind::Claim, key)),
        }
    }

    async fn begin(&self, ids: &[String], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let mut guarded = self.open(deadline).await?;
        if self.means == Means::Rows {
            let begin = format!("ROLLBACK; {BEGIN}");
            guarded.tx().query_drop(begin).await.map_err(mapped)?;
            rows::create(&self.store, guarded.tx(), ids).await?;
            if !rows::lock(&self.store, guarded.tx(), ids, deadline).await? {
                guarded.end("ROLLBACK").await?;
                return Ok(None);
            }
            let token = rows::token(&self.store, guarded.tx(), ids).await?;
            return Ok(Some(self.claim(guarded, token)));
        }
        let Some(token) = self.lock(&mut guarded, ids, deadline).await? else {
            guarded.end("ROLLBACK").await?;
            return Ok(None);
        };
        Ok(Some(self.claim(guarded, token)))
    }

    fn answer_limit(&self) -> Duration {
        ANSWER
    }
}

impl Claims {
    fn claim(&self, guarded: Guarded, token: FencingToken) -> Box<dyn ClaimTx> {
        Box::new(OpenClaim { store: self.store.clone(), guarded, token })
    }
}

/// A transaction whose connection goes back to the pool only after a clean end; otherwise it is
/// closed, and the server rolls back and frees the locks.
struct Guarded {
    tx: Option<Transaction<'static>>,
    /// The arguments of the statement that frees what is held.
    release: String,
}

impl Guarded {
    fn tx(&mut self) -> &mut Transaction<'static> {
        // only `end` and `drop` take it
        self.tx.as_mut().expect("an open claim has its transaction")
    }

    /// Tries all from an index on, and keeps those before the first busy one; says how many. If
    /// all are held then, the same round trip fetches the token and begins the transaction: after
    /// the locks, so that nothing that it reads is older than they are. `also` is done before that.
    ///
    /// The token is the next number of a sequence, committed before: a transaction's own rows
    /// would be rolled back with it, or lost in a crash.
    async fn try_locks(
        &mut self,
        store: &Store,
        names: &[String],
        from: usize,
        also: &str,
    ) -> Result<(usize, Option<FencingToken>)> {
        let table = &store.tables.token;
        let (mut locks, mut all) = (String::new(), String::from("1"));
        // writing to a string cannot fail
        for name in &names[from..] {
            let _ = write!(locks, ",IFNULL(GET_LOCK('{name}',0),'n')");
        }
        for name in names {
            let _ = write!(all, " AND IS_USED_LOCK('{name}')=CONNECTION_ID()");
        }
        let text = format!(
            "SELECT CONCAT(''{locks})r; INSERT INTO {table} SELECT NULL FROM DUAL WHERE {all}; \
             {also}COMMIT; {BEGIN}"
        );
        let mut result = self.tx().query_iter(text).await.map_err(mapped)?;
        let digits: Vec<String> = result.collect().await.map_err(mapped)?;
        // that of the second statement, whose answer has been read with the end of the first
        let token = Some(result.affected_rows()).filter(|rows| *rows > 0);
        let token = token.and_then(|_| result.last_insert_id()).map(FencingToken);
        result.drop_result().await.map_err(mapped)?;
        let digits = digits.concat();
        let got: Vec<bool> = digits.bytes().map(|digit| digit == b'1').collect();
        if got.len() != names.len() - from {
            let detail =
                format!("asked for {} locks, the answer is {digits:?}", names.len() - from);
            return Err(Error::new(ErrorKind::Backend, detail));
        }
        let kept = got.iter().take_while(|got| **got).count();
        for name in &names[from..from + kept] {
            self.hold(name);
        }
        let given_back: String = (kept..got.len())
            .filter(|i| got[*i])
            .fold(String::new(), |text, i| format!("{text},RELEASE_LOCK('{}')", names[from + i]));
        if !given_back.is_empty() {
            let text = format!("DO 0{given_back}");
            self.tx().query_drop(text).await.map_err(mapped)?;
        }
        if token.is_none() && from + kept == names.len() {
            let detail = "the server gave no number of the sequence";
            return Err(Error::new(ErrorKind::Backend, detail));
        }
        Ok((kept, token))
    }

    async fn holds(&mut self, name: &str) -> Result<bool> {
        let text = format!("SELECT IFNULL(IS_USED_LOCK('{name}')=CONNECTION_ID(),0)");
        let held: Option<u8> = self.tx().query_first(text).await.map_err(mapped)?;
        Ok(held == Some(1))
    }

    fn hold(&mut self, name: &str) {
        let _ = write!(self.release, ",IFNULL(RELEASE_LOCK('{name}'),0)");
    }

    /// Why the connection takes no more statements: the answer to an earlier one was not read,
    /// because its future was dropped, and the next statement would get it.
    fn broken(&self) -> Option<Error> {
        let broken = self.tx.as_ref().is_some_and(|tx| tx.is_disconnected());
        broken.then(|| {
            let detail = "a statement was dropped before its answer had come: \
                          the transaction is rolled back";
            Error::new(ErrorKind::Lost, detail)
        })
    }

    /// Ends the transaction, then frees the locks, in one round trip. Only if the server confirms
    /// all of it does the connection go back to the pool.
    ///
    /// The answer repeats a random number: if a user's statement was dropped and others followed,
    /// the answers are those to earlier questions.
    async fn end(mut self, how: &str) -> Result<()> {
        let release = std::mem::take(&mut self.release);
        let asked = format!("{:016x}:", rand::random::<u64>());
        let text = format!("{how}; SELECT CONCAT('{asked}'{release})r");
        let tx = self.tx();
        let mut result = tx.query_iter(text).await.map_err(mapped)?;
        // the transaction has ended; what follows only matters for the connection
        let freed = match result.collect::<String>().await {
            Ok(_) => result.collect::<String>().await,
            Err(error) => Err(error),
        };
        let freed = match (freed, result.drop_result().await) {
            (Ok(freed), Ok(())) => freed.concat(),
            (Err(error), _) | (_, Err(error)) => {
                tracing::debug!(%error, "a claim's locks were not freed, closing its connection");
                return Ok(());
            }
        };
        let Some(freed) = freed.strip_prefix(&asked) else {
            let detail = "the answers are not those to these questions: \
                          a statement was dropped before its answer had come";
            return Err(Error::new(ErrorKind::CommitUnknown, detail));
        };
        if freed.bytes().all(|digit| digit == b'1') {
            drop(self.tx.take());
        }
        Ok(())
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(tx) = self.tx.take() {
            discard(tx);
        }
    }
}

/// Closes the connection instead of giving it back. The pool keeps no connection whose answer has
/// not been read, so one is left unread.
fn discard(mut tx: Transaction<'static>) {
    for _ in 0..100 {
        // an answer was already left unread
        if tx.is_disconnected() {
            break;
        }
        if tx.query_drop("DO 0").now_or_never().is_none() {
            break;
        }
    }
}

/// A claim that was begun.
struct OpenClaim {
    store: Arc<Store>,
    guarded: Guarded,
    token: FencingToken,
}

impl OpenClaim {
    /// A deadlock rolls the whole transaction back and a statement such as `CREATE TABLE` commits
    /// it; what follows is then on its own.
    async fn check_open(&mut self) -> Result<()> {
        if let Some(error) = self.guarded.broken() {
            return Err(error);
        }
        let tx = self.guarded.tx();
        if tx.last_ok_packet().is_none() {
            // after an error the status is not known
            tx.query_drop("DO 0").await.map_err(mapped)?;
        }
        let open = tx.last_ok_packet().is_some_and(|answer| {
            answer.status_flags().contains(StatusFlags::SERVER_STATUS_IN_TRANS)
        });
        if open {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::CommitUnknown,
            "the transaction had ended before: a deadlock rolled it back, or a statement committed it",
        ))
    }
}

#[async_trait]
impl ClaimTx for OpenClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        self.guarded.tx()
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        if let Some(error) = self.guarded.broken() {
            return Err(error);
        }
        dedupe::first_seen(&self.store, self.guarded.tx(), key, retain).await
    }

    fn broken(&self) -> Option<Error> {
        self.guarded.broken()
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        self.check_open().await?;
        self.guarded.end("COMMIT").await.map_err(|error| match error.kind() {
            // the server said no; otherwise its answer is lost
            ErrorKind::Deadlock | ErrorKind::Backend | ErrorKind::Unsupported => error,
            _ => Error::new(ErrorKind::CommitUnknown, "the answer to the commit was lost")
                .with_source(error),
        })
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        if self.guarded.broken().is_some() {
            return Ok(()); // its connection is closed, and the server rolls back
        }
        match self.guarded.end("ROLLBACK").await {
            Err(error) if error.kind() == ErrorKind::CommitUnknown => Ok(()), // as above
            other => other,
        }
    }
}

pub(crate) fn no_answer() -> Error {
    Error::new(ErrorKind::Unavailable, "the server did not answer in time")
}

impl fmt::Debug for OpenClaim {
    // the transaction would print the password
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenClaim").field("token", &self.token).finish_non_exhaustive()
    }
}
