//! Named locks: user-level locks on sessions of our own, outside of any pool.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{
    Batch, BatchAnswer, Session, SessionDriver, SessionId, SessionLimits, Try,
};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, OptsBuilder, Statement};

use crate::error::{BACKEND, code, is_interrupted, mapped, server_code};
use crate::names::Kind;
use crate::store::{Store, last_rows, retried};
use crate::watch::Watch;

/// Opens the sessions that hold named locks.
#[derive(Debug)]
pub(crate) struct Sessions {
    store: Arc<Store>,
    limits: SessionLimits,
}

impl Sessions {
    pub(crate) fn new(store: Arc<Store>, limits: SessionLimits) -> Self {
        Self { store, limits }
    }

    /// After so long without a word the server ends a session: longer than any silence of a live
    /// one, so that only a vanished host's, or a paused process's, is ended.
    fn idle_limit(&self) -> u64 {
        let silence = self.limits.keepalive.saturating_mul(3);
        whole_seconds(silence.saturating_add(self.limits.answer)).clamp(3, 31_536_000)
    }
}

#[async_trait]
impl SessionDriver for Sessions {
    type Id = String;
    type Session = LockSession;

    fn backend(&self) -> &'static str {
        BACKEND
    }

    fn id(&self, key: &Key) -> String {
        self.store.lock_name(Kind::Lock, key)
    }

    async fn open(&self) -> Result<LockSession> {
        let idle = self.idle_limit();
        let opts = OptsBuilder::from_opts(self.store.opts.clone())
            // the system counts whole seconds
            .tcp_keepalive(Some(self.limits.keepalive.max(Duration::from_secs(1))))
            .client_found_rows(false);
        let mut conn = Conn::new(opts).await.map_err(mapped)?;
        let statement_limit =
            if self.store.is_maria() { "max_statement_time" } else { "max_execution_time" };
        let marker = format!("lh:session:{:032x}", rand::random::<u128>());
        // the table is read so that missing ones are told now, not at the first token
        let setup = format!(
            "SET SESSION wait_timeout = {idle}, interactive_timeout = {idle}, autocommit = 1, \
             innodb_lock_wait_timeout = 1, {statement_limit} = 0; \
             DO (SELECT 1 FROM {} LIMIT 1); {}; \
             SELECT GET_LOCK('{marker}', 0), CONNECTION_ID(), @@read_only, \
             @@auto_increment_increment",
            self.store.tables.token,
            self.store.introduction(&marker)
        );
        let mut facts: Vec<(Option<u8>, u64, u8, u64)> =
            retried!(last_rows(&mut conn, &setup)).map_err(mapped)?;
        let (taken, id, read_only, step) = facts.pop().ok_or_else(odd_answer)?;
        if taken != Some(1) {
            let detail = "the server did not give a user-level lock that nobody can have";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        if read_only != 0 {
            let detail = "the server is read-only: it is not the primary";
            return Err(Error::new(ErrorKind::Unavailable, detail));
        }
        let try_one = conn.prep("SELECT GET_LOCK(?, 0)").await.map_err(mapped)?;
        let release_one = conn.prep("SELECT RELEASE_LOCK(?)").await.map_err(mapped)?;
        Ok(LockSession {
            store: self.store.clone(),
            conn,
            try_one,
            release_one,
            id,
            token_step: step,
            marker,
            watch: None,
        })
    }

    fn limits(&self) -> SessionLimits {
        self.limits
    }
}

/// One session, on a connection of its own.
pub(crate) struct LockSession {
    store: Arc<Store>,
    conn: Conn,
    try_one: Statement,
    release_one: Statement,
    id: SessionId,
    /// By how much the token table's ids grow.
    token_step: u64,
    /// A lock that this session holds as long as it lives.
    marker: String,
    /// Tells when the server has ended the session; from the first lock on.
    watch: Option<Watch>,
}

impl LockSession {
    /// Releases, then tries. What a cut statement did is found out, so that a `KILL QUERY` costs
    /// neither a lock nor the session.
    async fn release_and_try(
        &mut self,
        batch: &Batch<String>,
        answer: &mut BatchAnswer,
    ) -> Result<()> {
        let error = match self.ask(&batch.release, &batch.tries).await {
            Ok((released, tried)) => {
                (answer.released, answer.tries) = (released, tried);
                return Ok(());
            }
            Err(error) if is_interrupted(&error) => error,
            Err(error) => return Err(mapped(error)),
        };
        tracing::debug!(%error, "a statement of the lock session was cut, looking what it did");
        let mut released = vec![false; batch.release.len()];
        let mut tried: Vec<Option<Try>> = vec![None; batch.tries.len()];
        for _ in 0..5 {
            // what was to be freed and is not held any more has been freed, and so on
            let held = self.held(batch.release.iter().chain(&batch.tries)).await?;
            let (still, got) = held.split_at(batch.release.len());
            for (released, still) in released.iter_mut().zip(still) {
                *released |= !still;
            }
            for (tried, got) in tried.iter_mut().zip(got) {
                if *got {
                    *tried = Some(Try::Granted(None));
                }
            }
            let release = left(&batch.release, |i| !released[i]);
            let tries = left(&batch.tries, |i| tried[i].is_none());
            match self.ask(&release, &tries).await {
                Ok((freed, outcomes)) => {
                    let mut freed = freed.into_iter();
                    for released in released.iter_mut().filter(|released| !**released) {
                        *released = freed.next().unwrap_or(false);
                    }
                    let mut outcomes = outcomes.into_iter();
                    answer.released = released;
                    answer.tries = tried
                        .into_iter()
                        .filter_map(|known| known.or_else(|| outcomes.next()))
                        .collect();
                    return Ok(());
                }
                Err(error) if is_interrupted(&error) => {}
                Err(error) => return Err(mapped(error)),
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            "the statements of the lock session are killed again and again",
        ))
    }

    async fn ask(
        &mut self,
        release: &[String],
        tries: &[String],
    ) -> mysql_async::Result<(Vec<bool>, Vec<Try>)> {
        // the common shapes are prepared; names are plain and need no quoting in the others
        match (release, tries) {
            ([], []) => Ok((Vec::new(), Vec::new())),
            ([], [one]) => {
                let got: Option<Option<u8>> = self.conn.exec_first(&self.try_one, (one,)).await?;
                Ok((Vec::new(), vec![outcome(got.flatten())]))
            }
            ([one], []) => {
                let freed: Option<Option<u8>> =
                    self.conn.exec_first(&self.release_one, (one,)).await?;
                Ok((vec![freed.flatten() == Some(1)], Vec::new()))
            }
            _ => {
                let text = statement(release, tries);
                let digits: String = self.conn.query_first(text).await?.unwrap_or_default();
                let (freed, got) = digits.as_bytes().split_at(release.len().min(digits.len()));
                let digit = |byte: &u8| byte.checked_sub(b'0').filter(|digit| *digit < 2);
                let freed = freed.iter().map(|byte| digit(byte) == Some(1)).collect();
                Ok((freed, got.iter().map(|byte| outcome(digit(byte))).collect()))
            }
        }
    }

    /// Which of these this session holds.
    async fn held(&mut self, names: impl Iterator<Item = &String>) -> Result<Vec<bool>> {
        let mut text = String::from("SELECT CONCAT(''");
        for name in names {
            // writing to a string cannot fail
            let _ = write!(text, ",IFNULL(IS_USED_LOCK('{name}')=CONNECTION_ID(),0)");
        }
        text.push(')');
        loop {
            match self.conn.query_first::<String, _>(&text).await {
                Ok(digits) => {
                    let digits = digits.unwrap_or_default();
                    return Ok(digits.bytes().map(|digit| digit == b'1').collect());
                }
                Err(error) if is_interrupted(&error) => {}
                Err(error) => return Err(mapped(error)),
            }
        }
    }

    /// One number of the sequence for each, on the session that holds the locks.
    async fn tokens(&mut self, count: usize) -> Result<Vec<FencingToken>> {
        let rows = vec!["()"; count].join(",");
        let text = format!("INSERT INTO {} VALUES {rows}", self.store.tables.token);
        loop {
            match self.conn.query_drop(&text).await {
                Ok(()) => break,
                // it inserted nothing then
                Err(error) if is_interrupted(&error) => {}
                Err(error) => return Err(mapped(error)),
            }
        }
        let first = self.conn.last_insert_id().ok_or_else(odd_answer)?;
        let numbers = (0..count as u64).map(|i| first + i * self.token_step);
        Ok(numbers.map(FencingToken).collect())
    }

    fn watch(&mut self) {
        if self.watch.is_none() {
            self.watch = Some(Watch::start(self.store.clone(), self.marker.clone()));
        }
    }

    fn watch_if_granted(&mut self, tries: &[Try]) {
        if tries.iter().any(|outcome| matches!(outcome, Try::Granted(_))) {
            self.watch();
        }
    }
}

fn outcome(got: Option<u8>) -> Try {
    match got {
        Some(1) => Try::Granted(None),
        Some(_) => Try::Busy,
        None => Try::Refused(Error::new(
            ErrorKind::Backend,
            "the server could not say whether it gave the lock",
        )),
    }
}

/// One column that holds a digit per lock. Arguments are evaluated from left to right.
fn statement(release: &[String], tries: &[String]) -> String {
    let mut text = String::with_capacity(32 + 100 * (release.len() + tries.len()));
    text.push_str("SELECT CONCAT(''");
    // writing to a string cannot fail
    for name in release {
        let _ = write!(text, ",IFNULL(RELEASE_LOCK('{name}'),'n')");
    }
    for name in tries {
        let _ = write!(text, ",IFNULL(GET_LOCK('{name}',0),'n')");
    }
    text.push_str(")r");
    text
}

/// The names whose index passes.
fn left(names: &[String], passes: impl Fn(usize) -> bool) -> Vec<String> {
    let names = names.iter().enumerate();
    names.filter(|(i, _)| passes(*i)).map(|(_, name)| name.clone()).collect()
}

/// Rounded up.
pub(crate) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// A statement that waits for a lock. MySQL rounds the seconds, and takes a negative number for
/// ever, which MariaDB refuses: so whole seconds there, rounded up, with the exact time as the
/// statement's limit; a fraction on MariaDB.
pub(crate) fn wait_statement(maria: bool, name: &str, wait: Duration) -> String {
    // a year is long enough, and far from every overflow
    let wait = wait.min(Duration::from_secs(31_536_000));
    let millis = wait.as_micros().div_ceil(1000).max(1);
    if maria {
        let (seconds, rest) = (millis / 1000, millis % 1000);
        format!("SELECT GET_LOCK('{name}',{seconds}.{rest:03})")
    } else {
        let seconds = whole_seconds(wait).max(1);
        // a limit has 32 bits
        let limit = millis.min(u128::from(u32::MAX));
        format!("SELECT /*+ MAX_EXECUTION_TIME({limit}) */ GET_LOCK('{name}',{seconds})")
    }
}

fn odd_answer() -> Error {
    Error::new(ErrorKind::Backend, "the server's answer is not one to the question")
}

#[async_trait]
impl Session for LockSession {
    type Id = String;

    fn id(&self) -> SessionId {
        self.id
    }

    async fn exchange(&mut self, batch: &Batch<String>) -> Result<BatchAnswer> {
        for session in &batch.kill {
            match self.conn.query_drop(format!("KILL {session}")).await {
                Err(error) if server_code(&error) != Some(code::NO_SUCH_THREAD) => {
                    return Err(mapped(error));
                }
                _ => {}
            }
        }
        let mut answer = BatchAnswer::default();
        if batch.is_empty() {
            self.conn.ping().await.map_err(mapped)?;
            return Ok(answer);
        }
        self.release_and_try(batch, &mut answer).await?;
        self.watch_if_granted(&answer.tries);
        if !batch.tokens.is_empty() {
            answer.tokens = self.tokens(batch.tokens.len()).await?;
        }
        Ok(answer)
    }

    async fn wait(&mut self, id: &String, wait: Duration) -> Result<Try> {
        let statement = wait_statement(self.store.is_maria(), id, wait);
        let outcome = match self.conn.query_first::<Option<u8>, _>(statement).await {
            Ok(Some(Some(1))) => Try::Granted(None),
            Ok(Some(Some(_))) => Try::Busy,
            // NULL is MariaDB's answer to a KILL QUERY; the lock may have been granted just before
            Ok(_) => match self.held(std::iter::once(id)).await?.first() {
                Some(true) => Try::Granted(None),
                _ => Try::Busy,
            },
            Err(error) if is_interrupted(&error) => {
                match self.held(std::iter::once(id)).await?.first() {
                    Some(true) => Try::Granted(None),
                    _ => Try::Busy,
                }
            }
            Err(error) if server_code(&error).is_some() => {
                let error = mapped(error);
                match error.kind() {
                    ErrorKind::Deadlock => Try::Refused(error),
                    _ => return Err(error),
                }
            }
            Err(error) => return Err(mapped(error)),
        };
        self.watch_if_granted(std::slice::from_ref(&outcome));
        Ok(outcome)
    }

    async fn closed(&mut self) -> Error {
        match &mut self.watch {
            Some(watch) => watch.ended().await,
            None => std::future::pending().await,
        }
    }

    async fn close(self) {
        // the server ends the session as well when the connection breaks
        drop(self.conn.disconnect().await);
    }
}

impl fmt::Debug for LockSession {
    // the connection would print the password
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockSession")
            .field("id", &self.id)
            .field("marker", &self.marker)
            .field("watched", &self.watch.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B25, B43: no wait is negative, fractional where that is misread, zero, or too large.
    #[test]
    fn waits_are_what_the_servers_understand() {
        let millis = Duration::from_millis;
        for (wait, mysql, maria) in [
            (Duration::from_nanos(1), "MAX_EXECUTION_TIME(1) */ GET_LOCK('x',1)", "'x',0.001)"),
            (millis(300), "MAX_EXECUTION_TIME(300) */ GET_LOCK('x',1)", "'x',0.300)"),
            (millis(1500), "MAX_EXECUTION_TIME(1500) */ GET_LOCK('x',2)", "'x',1.500)"),
            (
                Duration::from_secs(10),
                "MAX_EXECUTION_TIME(10000) */ GET_LOCK('x',10)",
                "'x',10.000)",
            ),
            (
                Duration::MAX,
                "MAX_EXECUTION_TIME(4294967295) */ GET_LOCK('x',31536000)",
                "'x',31536000.000)",
            ),
        ] {
            assert!(wait_statement(false, "x", wait).ends_with(mysql), "{wait:?}");
            assert!(wait_statement(true, "x", wait).ends_with(maria), "{wait:?}");
        }
    }
}
