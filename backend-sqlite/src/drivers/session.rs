//! Named locks: rows that name a session, and a locked file that proves the session alive.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{
    Batch, BatchAnswer, Session, SessionDriver, SessionId, SessionLimits, Try,
};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use serde_json::json;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments};
use sqlx::{Connection, Row};
use tokio::time::Instant;

use super::dead::{end, is_over, proof_of};
use super::wrong_answer;
use crate::alive::Locked;
use crate::error::{NAME, file_error, is_busy, store_error};
use crate::file::{Open, Which, commit, pause};
use crate::schema::{next_token, wall_clock};
use crate::store::Store;

/// How often a session looks whether it was ended.
const LOOK: Duration = Duration::from_millis(100);

const OPEN: &str = concat!(
    "INSERT INTO leasehold_session (id, holder, since) VALUES (?1, ?2, ",
    wall_clock!(),
    ")"
);
const IS_OPEN: &str = "SELECT count(*) FROM leasehold_session WHERE id = ?1";
const RELEASE: &str = "DELETE FROM leasehold_lock WHERE namespace = ?1 AND session = ?2 \
    AND key IN (SELECT value FROM json_each(?3)) RETURNING key";
const HOLDERS: &str = "SELECT DISTINCT session FROM leasehold_lock WHERE namespace = ?1 \
    AND key IN (SELECT value FROM json_each(?2))";
const TOKENS: &str = concat!(
    "UPDATE leasehold_token SET value = ?1 - 1 + ",
    next_token!("leasehold_token"),
    " RETURNING value"
);
const TAKE: &str = concat!(
    "INSERT INTO leasehold_lock (namespace, key, session, token, since) \
     SELECT ?1, value ->> 0, ?2, value ->> 1, ",
    wall_clock!(),
    " FROM json_each(?3) WHERE true ON CONFLICT (namespace, key) DO NOTHING RETURNING key, token"
);
const RENUMBER: &str = "UPDATE leasehold_lock AS l SET token = t.token \
    FROM (SELECT value ->> 0 AS key, value ->> 1 AS token FROM json_each(?3)) t \
    WHERE l.namespace = ?1 AND l.session = ?2 AND l.key = t.key RETURNING key, token";
const WAIT: &str = "SELECT (SELECT count(*) FROM leasehold_session WHERE id = ?1), \
    (SELECT session FROM leasehold_lock WHERE namespace = ?2 AND key = ?3)";
const QUEUE: &str = "INSERT INTO leasehold_waiter (namespace, key, session) VALUES (?1, ?2, ?3) \
    ON CONFLICT (namespace, key, session) DO NOTHING";
const LEAVE: &str = "DELETE FROM leasehold_waiter WHERE session = ?1";
const WAITERS: &str = "SELECT key, session FROM leasehold_waiter WHERE namespace = ?1 \
    AND session <> ?2 AND key IN (SELECT value FROM json_each(?3))";

/// Opens sessions.
#[derive(Debug)]
pub(crate) struct Sessions {
    store: Arc<Store>,
    limits: SessionLimits,
}

impl Sessions {
    pub(crate) fn new(store: Arc<Store>, limits: SessionLimits) -> Self {
        Self { store, limits }
    }
}

#[async_trait]
impl SessionDriver for Sessions {
    type Id = Key;
    type Session = SqliteSession;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn open(&self) -> Result<SqliteSession> {
        let open = self.store.files.open(Which::Locks).await?;
        let place = &self.store.files.place;
        // a file of a random name; should it exist nevertheless, or be cleared away before it is
        // locked, the next one will do
        let (id, proof) = loop {
            let id: i64 = rand::random_range(1..i64::MAX);
            let path = proof_of(place, id);
            let locked = Locked::try_at(&path);
            if let Some(proof) = locked.map_err(|e| file_error("lock the session's", &path, e))? {
                break (id, proof);
            }
        };
        // the row comes after the proof: whoever finds the row finds the session alive
        let mut session =
            SqliteSession { id, store: self.store.clone(), open, proof, version: None };
        let holder = self.store.holder.clone();
        session.run(|| sqlx::query(OPEN).bind(id).bind(holder.clone())).await?;
        session.check_files()?;
        Ok(session)
    }

    fn limits(&self) -> SessionLimits {
        self.limits
    }
}

/// An open session.
#[derive(Debug)]
pub(crate) struct SqliteSession {
    id: i64,
    store: Arc<Store>,
    open: Open,
    proof: Locked,
    /// What the file was like when its end was last looked for.
    version: Option<i64>,
}

impl SqliteSession {
    /// Whoever finds other files than ours finds no lock of ours.
    fn check_files(&self) -> Result<()> {
        if self.open.is_in_place() && self.proof.is_in_place() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unavailable, "the session's files were removed or replaced"))
    }

    async fn check_row(&mut self) -> Result<()> {
        let open = loop {
            let open = sqlx::query_scalar::<_, i64>(IS_OPEN).bind(self.id);
            match open.fetch_one(&mut self.open.conn).await {
                Err(error) if is_busy(&error) => pause(1).await,
                open => break open.map_err(store_error)?,
            }
        };
        if open == 1 { Ok(()) } else { Err(ended()) }
    }

    /// Carries a batch out, in a transaction.
    async fn carry_out(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        self.check_row().await?;
        let kill: Vec<i64> = batch.kill.iter().map(|id| id.cast_signed()).collect();
        if !kill.is_empty() {
            self.end(&kill).await?;
        }
        let mut answer = BatchAnswer::default();
        if !batch.release.is_empty() {
            let rows = sqlx::query(RELEASE)
                .bind(self.store.namespace.clone())
                .bind(self.id)
                .bind(keys(&batch.release))
                .fetch_all(&mut self.open.conn)
                .await
                .map_err(store_error)?;
            let released = rows.iter().map(|row| row.try_get(0).map_err(store_error));
            let released: HashSet<String> = released.collect::<Result<_>>()?;
            answer.released =
                batch.release.iter().map(|key| released.contains(key.as_str())).collect();
        }
        if !batch.tries.is_empty() {
            let others = self.awaited_by_others(batch).await?;
            let tries = batch.tries.iter().filter(|key| !others.contains(key.as_str()));
            let tries: Vec<Key> = tries.cloned().collect();
            self.end_dead_holders(&tries).await?;
            let taken = self.numbered(TAKE, &tries).await?;
            let tried = |key: &Key| match taken.get(key.as_str()) {
                Some(token) => Try::Granted(Some(*token)),
                None => Try::Busy,
            };
            answer.tries = batch.tries.iter().map(tried).collect();
        }
        if !batch.tokens.is_empty() {
            let tokens = self.numbered(RENUMBER, &batch.tokens).await?;
            let token = |key: &Key| tokens.get(key.as_str()).copied().ok_or_else(wrong_answer);
            answer.tokens = batch.tokens.iter().map(token).collect::<Result<_>>()?;
        }
        Ok(answer)
    }

    /// The keys that would be taken again as soon as they are released, although others wait: it
    /// is their turn.
    async fn awaited_by_others(&mut self, batch: &Batch<Key>) -> Result<HashSet<String>> {
        let released: HashSet<&Key> = batch.release.iter().collect();
        let again = batch.tries.iter().filter(|key| released.contains(key));
        let again: Vec<Key> = again.cloned().collect();
        let mut awaited = HashSet::new();
        if again.is_empty() {
            return Ok(awaited);
        }
        let rows = sqlx::query(WAITERS)
            .bind(self.store.namespace.clone())
            .bind(self.id)
            .bind(keys(&again))
            .fetch_all(&mut self.open.conn)
            .await
            .map_err(store_error)?;
        for row in rows {
            if !is_over(&self.store.files.place, row.try_get(1).map_err(store_error)?) {
                awaited.insert(row.try_get(0).map_err(store_error)?);
            }
        }
        Ok(awaited)
    }

    /// Waits for a key that is in the list of those awaited.
    async fn wait_until(&mut self, key: &Key, deadline: Instant) -> Result<Try> {
        for looks in 0.. {
            self.check_files()?;
            let holder = self.holder(key).await?;
            let is_free = match holder {
                Some(holder) => is_over(&self.store.files.place, holder),
                None => true,
            };
            if is_free {
                let batch = Batch { tries: vec![key.clone()], ..Batch::default() };
                let answer = self.exchange(&batch).await?.tries.pop();
                match answer.ok_or_else(wrong_answer)? {
                    Try::Busy => {} // somebody was faster
                    other => return Ok(other),
                }
            }
            if Instant::now() >= deadline {
                break;
            }
            tokio::select! {
                () = pause(looks) => {}
                () = tokio::time::sleep_until(deadline) => {}
            }
        }
        Ok(Try::Busy)
    }

    /// Carries out a statement of its own.
    async fn run(
        &mut self,
        statement: impl Fn() -> Query<'static, Sqlite, SqliteArguments>,
    ) -> Result<()> {
        for tries in 0.. {
            match statement().execute(&mut self.open.conn).await {
                Ok(_) => break,
                Err(error) if is_busy(&error) => pause(tries).await,
                Err(error) => return Err(store_error(error)),
            }
        }
        Ok(())
    }

    /// Runs a statement that writes a fresh token for each key; the tokens that it wrote.
    async fn numbered(
        &mut self,
        sql: &'static str,
        keys: &[Key],
    ) -> Result<HashMap<String, FencingToken>> {
        let last: i64 = sqlx::query_scalar(TOKENS)
            .bind(i64::try_from(keys.len()).unwrap_or(i64::MAX))
            .fetch_one(&mut self.open.conn)
            .await
            .map_err(store_error)?;
        let pairs = keys.iter().zip((0..=last).rev());
        let list: Vec<_> = pairs.map(|(key, token)| json!([key.as_str(), token])).collect();
        let rows = sqlx::query(sql)
            .bind(self.store.namespace.clone())
            .bind(self.id)
            .bind(json!(list).to_string())
            .fetch_all(&mut self.open.conn)
            .await
            .map_err(store_error)?;
        let written = rows.iter().map(|row| {
            let token: i64 = row.try_get(1).map_err(store_error)?;
            Ok((row.try_get(0).map_err(store_error)?, FencingToken(token.cast_unsigned())))
        });
        written.collect()
    }

    /// Ends the sessions that hold one of the keys and are dead. In a transaction that writes, so
    /// that nobody else takes them over meanwhile.
    async fn end_dead_holders(&mut self, wanted: &[Key]) -> Result<()> {
        let rows = sqlx::query(HOLDERS)
            .bind(self.store.namespace.clone())
            .bind(keys(wanted))
            .fetch_all(&mut self.open.conn)
            .await
            .map_err(store_error)?;
        let mut dead = Vec::new();
        for row in rows {
            let holder: i64 = row.try_get(0).map_err(store_error)?;
            if holder != self.id && is_over(&self.store.files.place, holder) {
                dead.push(holder);
            }
        }
        if dead.is_empty() {
            return Ok(());
        }
        tracing::debug!(sessions = ?dead, "taking over from dead sessions");
        self.end(&dead).await
    }

    async fn end(&mut self, sessions: &[i64]) -> Result<()> {
        end(&mut self.open.conn, sessions).await
    }

    /// Who holds a key; an error if this session was ended.
    async fn holder(&mut self, key: &Key) -> Result<Option<i64>> {
        let row = loop {
            let look = sqlx::query(WAIT)
                .bind(self.id)
                .bind(self.store.namespace.clone())
                .bind(key.as_str().to_owned());
            match look.fetch_one(&mut self.open.conn).await {
                Err(error) if is_busy(&error) => pause(1).await,
                row => break row.map_err(store_error)?,
            }
        };
        match row.try_get::<i64, _>(0).map_err(store_error)? {
            1 => row.try_get(1).map_err(store_error),
            _ => Err(ended()),
        }
    }
}

#[async_trait]
impl Session for SqliteSession {
    type Id = Key;

    fn id(&self) -> SessionId {
        self.id.cast_unsigned()
    }

    async fn exchange(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        self.check_files()?;
        if batch.is_empty() {
            self.check_row().await?;
            return Ok(BatchAnswer::default());
        }
        self.run(|| sqlx::query("BEGIN IMMEDIATE")).await?;
        let carried = match self.carry_out(batch).await {
            Ok(answer) => commit(&mut self.open.conn).await.map(|()| answer),
            failed => failed,
        };
        let answer = match carried {
            Err(error) if error.kind() == ErrorKind::Exhausted && only_tries(batch) => {
                // on a full disk nothing is to be had, and nothing that is held is lost by that
                sqlx::raw_sql("ROLLBACK")
                    .execute(&mut self.open.conn)
                    .await
                    .map_err(store_error)?;
                let refused = || Try::Refused(error.clone());
                let tries = batch.tries.iter().map(|_| refused()).collect();
                BatchAnswer { tries, ..BatchAnswer::default() }
            }
            carried => carried?,
        };
        self.check_files()?; // a lock in a file that nobody else sees is none
        Ok(answer)
    }

    async fn wait(&mut self, key: &Key, wait: Duration) -> Result<Try> {
        let deadline = Instant::now() + wait;
        let (id, namespace, name) =
            (self.id, self.store.namespace.clone(), key.as_str().to_owned());
        self.check_files()?;
        self.run(|| sqlx::query(QUEUE).bind(namespace.clone()).bind(name.clone()).bind(id)).await?;
        let outcome = self.wait_until(key, deadline).await?;
        self.run(|| sqlx::query(LEAVE).bind(id)).await?;
        Ok(outcome)
    }

    async fn closed(&mut self) -> Error {
        loop {
            if let Err(error) = self.check_files() {
                return error;
            }
            // it changes with every commit of another connection
            let version = sqlx::query_scalar::<_, i64>("PRAGMA data_version");
            let version = match version.fetch_one(&mut self.open.conn).await {
                Ok(version) => Some(version),
                Err(error) if is_busy(&error) => None,
                Err(error) => return store_error(error),
            };
            if version.is_none() || self.version != version {
                if let Err(error) = self.check_row().await {
                    return error;
                }
                self.version = version;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn close(mut self) {
        // what fails here is cleared away by others
        drop(self.end(&[self.id]).await);
        let Self { open, proof, .. } = self;
        drop(open.conn.close().await);
        drop(proof);
    }
}

fn only_tries(batch: &Batch<Key>) -> bool {
    batch.kill.is_empty() && batch.release.is_empty() && batch.tokens.is_empty()
}

fn keys(keys: &[Key]) -> String {
    json!(keys.iter().map(Key::as_str).collect::<Vec<_>>()).to_string()
}

fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the session was ended: its row is gone")
}
