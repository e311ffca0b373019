//! The one statement of an exchange.

use std::collections::HashSet;

use leasehold_core::backend::{Batch, BatchAnswer, Try};
use leasehold_core::{Error, ErrorKind, FencingToken, Result};
use sqlx::postgres::PgRow;
use sqlx::{Row, SqlStr};

use super::session::PgSession;
use crate::error::{is_broken, store_error};
use crate::sql::Names;

/// The statements of a session. Each says first on which session it ran.
///
/// In `all`, the columns are evaluated from left to right, so that what is released can be taken
/// again in the same statement. (Where that did not hold, a lock that is released and tried for at
/// once would stay ours: others would miss a turn, and nothing worse.) All that it grants has the
/// same token, as tokens order the holders of one key: drawn after the last lock, it is above those
/// of all holders before. One for each would have to wait for the disk, as the server logs
/// 32 of a sequence at a time.
///
/// `wait` draws no token: whoever waits for the lock would wait for the disk as well, once in 32
/// times. It is drawn when it is asked for.
#[derive(Debug)]
pub(super) struct Statements {
    alive: SqlStr,
    try_one: SqlStr,
    release_one: SqlStr,
    all: SqlStr,
    held: SqlStr,
    pub(super) kill: SqlStr,
    pub(super) wait: SqlStr,
    pub(super) is_held: SqlStr,
}

/// The server shows a 64-bit advisory lock as two unsigned halves, in the current database.
const OWN_LOCKS: &str = "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted \
    AND mode = 'ExclusiveLock' AND pid = pg_backend_pid()";
const OWN_ID: &str = "(classid::int8 << 32) | objid::int8";

impl Statements {
    pub(super) fn new(names: &Names) -> Self {
        let sql = |template: &str| names.statement(template).sql();
        Self {
            alive: sql("SELECT pg_backend_pid()"),
            try_one: sql("SELECT pg_backend_pid(), \
                 CASE WHEN pg_try_advisory_lock($1) THEN {next_token} END"),
            release_one: sql("SELECT pg_backend_pid(), pg_advisory_unlock($1)"),
            all: sql("SELECT pg_backend_pid(), \
                 done.released, done.granted, \
                 CASE WHEN $3 OR true = ANY (done.granted) THEN {next_token} END \
                 FROM (SELECT \
                   ARRAY(SELECT pg_advisory_unlock(id) FROM unnest($1::int8[]) AS id) AS released, \
                   ARRAY(SELECT pg_try_advisory_lock(id) FROM unnest($2::int8[]) AS id) AS granted \
                   OFFSET 0) AS done"),
            held: sql(&format!("SELECT {OWN_ID} {OWN_LOCKS}")),
            kill: sql("SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a \
                 JOIN unnest($1::int8[]) AS k (id) ON a.pid = (k.id & 4294967295) \
                 AND (extract(epoch FROM a.backend_start) * 1000000)::int8 & 4294967295 \
                   = (k.id >> 32) & 4294967295"),
            wait: sql("SELECT set_config('lock_timeout', $1, true), pg_advisory_lock($2)"),
            is_held: sql(&format!("SELECT EXISTS (SELECT 1 {OWN_LOCKS} AND {OWN_ID} = $1)")),
        }
    }
}

impl PgSession {
    /// Asks everything but the kills.
    pub(super) async fn ask(&mut self, batch: &Batch<i64>) -> Result<BatchAnswer> {
        let free = self.room.saturating_sub(self.held.saturating_sub(batch.release.len()));
        let (tries, refused) = batch.tries.split_at(batch.tries.len().min(free));
        let asked = match (&*batch.release, tries, &*batch.tokens) {
            ([], [], []) => self.ask_alive().await,
            ([], [id], []) => self.ask_try(*id).await,
            ([id], [], []) => self.ask_release(*id).await,
            _ => self.ask_all(&batch.release, tries, batch.tokens.len()).await,
        };
        let mut answer = match asked {
            Ok(answer) => answer,
            Err(error) if is_broken(&error) => return Err(store_error(error)),
            Err(error) => self.recover(batch, tries, error).await?,
        };
        let released = answer.released.iter().filter(|released| **released).count();
        let granted = answer.tries.iter().filter(|outcome| matches!(outcome, Try::Granted(_)));
        self.held = self.held.saturating_sub(released) + granted.count();
        for _ in refused {
            let detail = format!(
                "this session holds {} locks, its share of the {} for which the server has room \
                 (max_locks_per_transaction): set lock_table_share if it may have more",
                self.room, self.table
            );
            answer.tries.push(Try::Refused(Error::new(ErrorKind::Exhausted, detail)));
        }
        Ok(answer)
    }

    async fn ask_alive(&mut self) -> sqlx::Result<BatchAnswer> {
        let row = sqlx::query(self.statements.alive.clone()).fetch_one(&mut *self.link).await?;
        self.same_session(&row)?;
        Ok(BatchAnswer::default())
    }

    async fn ask_try(&mut self, id: i64) -> sqlx::Result<BatchAnswer> {
        let query = sqlx::query(self.statements.try_one.clone()).bind(id);
        let row = query.fetch_one(&mut *self.link).await?;
        self.same_session(&row)?;
        Ok(BatchAnswer { tries: vec![outcome(row.try_get(1)?)], ..BatchAnswer::default() })
    }

    async fn ask_release(&mut self, id: i64) -> sqlx::Result<BatchAnswer> {
        let query = sqlx::query(self.statements.release_one.clone()).bind(id);
        let row = query.fetch_one(&mut *self.link).await?;
        self.same_session(&row)?;
        Ok(BatchAnswer { released: vec![row.try_get(1)?], ..BatchAnswer::default() })
    }

    async fn ask_all(
        &mut self,
        release: &[i64],
        tries: &[i64],
        tokens: usize,
    ) -> sqlx::Result<BatchAnswer> {
        let row = sqlx::query(self.statements.all.clone())
            .bind(release)
            .bind(tries)
            .bind(tokens > 0)
            .fetch_one(&mut *self.link)
            .await?;
        self.same_session(&row)?;
        let granted: Vec<bool> = row.try_get(2)?;
        let token: Option<i64> = row.try_get(3)?;
        Ok(BatchAnswer {
            released: row.try_get(1)?,
            tries: granted.into_iter().map(|granted| outcome(token.filter(|_| granted))).collect(),
            // fewer than were asked for would be noticed
            tokens: token.map_or_else(Vec::new, |token| vec![fencing(token); tokens]),
        })
    }

    /// Another session of the server than the one that was opened holds none of our locks.
    fn same_session(&self, row: &PgRow) -> sqlx::Result<()> {
        if row.try_get::<i32, _>(0)? == self.pid {
            return Ok(());
        }
        Err(sqlx::Error::Protocol("a pooler moved the session to another one".to_owned()))
    }

    /// The server refused the statement half-way (its lock table is full, say). Locks of a session
    /// survive that: what is held now says what was done.
    async fn recover(
        &mut self,
        batch: &Batch<i64>,
        tries: &[i64],
        error: sqlx::Error,
    ) -> Result<BatchAnswer> {
        let mut held = self.held_now().await?;
        let again: HashSet<i64> = tries.iter().copied().collect();
        for id in &batch.release {
            if held.contains(id) && !again.contains(id) {
                self.ask_release(*id).await.map_err(store_error)?;
                held.remove(id);
            }
        }
        let refusal = store_error(error);
        let tokens = match batch.tokens.len() {
            0 => Vec::new(),
            wanted => self.ask_all(&[], &[], wanted).await.map_err(store_error)?.tokens,
        };
        let tries = tries.iter().map(|id| match held.contains(id) {
            true => Try::Granted(None),
            false => Try::Refused(refusal.clone()),
        });
        Ok(BatchAnswer {
            released: vec![true; batch.release.len()],
            tries: tries.collect(),
            tokens,
        })
    }

    async fn held_now(&mut self) -> Result<HashSet<i64>> {
        let held = sqlx::query(self.statements.held.clone());
        let rows = held.fetch_all(&mut *self.link).await.map_err(store_error)?;
        rows.iter().map(|row| row.try_get(0).map_err(store_error)).collect()
    }
}

fn outcome(token: Option<i64>) -> Try {
    token.map_or(Try::Busy, |token| Try::Granted(Some(fencing(token))))
}

fn fencing(token: i64) -> FencingToken {
    FencingToken(token.cast_unsigned())
}
