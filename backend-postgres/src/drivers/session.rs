//! Named locks: [`Sessions`] opens the sessions of the engine, [`PgSession`] is one.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{
    Batch, BatchAnswer, Session, SessionDriver, SessionId, SessionLimits, Try,
};
use leasehold_core::{Error, ErrorKind, Key, Result};
use sqlx::postgres::{PgListener, PgRow};
use sqlx::{AssertSqlSafe, Row};

use super::exchange::Statements;
use crate::dial::{connect, dial};
use crate::error::{NAME, ended_the_wait, is_broken, store_error};
use crate::keys::LockKind;
use crate::sever::Severed;
use crate::store::Store;

/// Settings of a session that holds locks: nothing that the server or the role sets may end it or
/// its statements, and a client that has vanished is noticed soon.
///
/// Where the client's host is gone, the server notices within 10 + 3 × 5 = 25 s while idle, and
/// within 20 s while it has something to say; one that waits for a lock looks every second. What
/// is written with the lock's tokens is as safe as the tokens: they must be on disk before they
/// are given out.
const SETTINGS: [(&str, &str); 12] = [
    ("statement_timeout", "'0'"),
    ("lock_timeout", "'0'"),
    ("transaction_timeout", "'0'"),
    ("idle_session_timeout", "'0'"),
    ("idle_in_transaction_session_timeout", "'0'"),
    ("tcp_keepalives_idle", "'10'"),
    ("tcp_keepalives_interval", "'5'"),
    ("tcp_keepalives_count", "'3'"),
    ("tcp_user_timeout", "'20000'"),
    ("default_transaction_read_only", "'off'"),
    ("default_transaction_isolation", "'read committed'"),
    (
        "synchronous_commit",
        "CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
         ELSE current_setting('synchronous_commit') END",
    ),
];

/// Opens sessions. Each holds, besides its locks, the shared lock by which others see that they are
/// named locks of this namespace (see [`KeyMap::mark`](crate::keys::KeyMap::mark)).
#[derive(Debug)]
pub(crate) struct Sessions {
    store: Arc<Store>,
    limits: SessionLimits,
    /// The share of the server's lock table that one session may fill.
    share: f64,
    statements: Arc<Statements>,
}

impl Sessions {
    pub(crate) fn new(store: Arc<Store>, limits: SessionLimits, share: f64) -> Self {
        let statements = Arc::new(Statements::new(&store.names));
        Self { store, limits, share, statements }
    }

    /// Asks for what is needed and no more: the views of all settings and of all sessions take the
    /// server milliseconds in a new session.
    fn setup(&self, checks_clients: bool) -> String {
        let mut settings: Vec<String> =
            SETTINGS.iter().map(|(name, value)| format!("('{name}', {value})")).collect();
        if checks_clients {
            settings.push("('client_connection_check_interval', '1000')".to_owned());
        }
        format!(
            "SELECT set_config(v.name, v.value, false) FROM (VALUES {}) AS v (name, value) \
             WHERE current_setting(v.name, true) IS NOT NULL; \
             SELECT pid, (extract(epoch FROM backend_start) * 1000000)::int8, \
             pg_is_in_recovery(), to_regclass({}) IS NOT NULL, \
             pg_try_advisory_lock_shared({}) FROM pg_stat_get_activity(pg_backend_pid())",
            settings.join(", "),
            self.store.names.literal("token"),
            self.store.keys.mark(LockKind::Session),
        )
    }
}

#[async_trait]
impl SessionDriver for Sessions {
    type Id = i64;
    type Session = PgSession;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn id(&self, key: &Key) -> i64 {
        self.store.keys.advisory(LockKind::Session, key)
    }

    async fn open(&self) -> Result<PgSession> {
        let server = self.store.session_server().await?;
        let mut link = dial(&self.store.session_options()).await?;
        let setup = AssertSqlSafe(self.setup(server.checks_clients));
        let rows = sqlx::raw_sql(setup).fetch_all(&mut *link).await.map_err(store_error)?;
        let about = rows.last().map(About::read).transpose().map_err(store_error)?;
        let about = about.ok_or_else(|| {
            Error::new(ErrorKind::Backend, "the server does not show this session to its own role")
        })?;
        if about.standby {
            let detail = "this server is a standby, whose locks exclude nobody elsewhere: connect \
                to the primary";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        if !about.migrated {
            let detail = "the sequence of tokens is missing: run migrate";
            return Err(Error::new(ErrorKind::Schema, detail));
        }
        // a share of a whole number, rounded down
        let room = (server.lock_table as f64 * self.share) as usize;
        Ok(PgSession {
            link,
            id: session_id(about.pid, about.started),
            pid: about.pid,
            held: 0,
            room: room.max(1),
            table: server.lock_table,
            waits: false,
            statements: self.statements.clone(),
            store: self.store.clone(),
        })
    }

    fn limits(&self) -> SessionLimits {
        self.limits
    }
}

/// What a new session says about itself.
struct About {
    pid: i32,
    started: i64,
    standby: bool,
    migrated: bool,
}

impl About {
    fn read(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            pid: row.try_get(0)?,
            started: row.try_get(1)?,
            standby: row.try_get(2)?,
            migrated: row.try_get(3)?,
        })
    }
}

/// A process id is used again: the time of the session's start (µs, its lower half) tells two of
/// them apart.
fn session_id(pid: i32, started: i64) -> SessionId {
    (started.cast_unsigned() << 32) | u64::from(pid.cast_unsigned())
}

/// One session.
#[derive(Debug)]
pub(crate) struct PgSession {
    pub(super) link: Severed<PgListener>,
    id: SessionId,
    pub(super) pid: i32,
    /// How many locks it holds.
    pub(super) held: usize,
    /// How many it may hold.
    pub(super) room: usize,
    pub(super) table: u64,
    /// A wait was begun and has not ended.
    waits: bool,
    pub(super) statements: Arc<Statements>,
    store: Arc<Store>,
}

#[async_trait]
impl Session for PgSession {
    type Id = i64;

    fn id(&self) -> SessionId {
        self.id
    }

    async fn exchange(&mut self, batch: &Batch<i64>) -> Result<BatchAnswer> {
        if !batch.kill.is_empty() {
            let ids: Vec<i64> = batch.kill.iter().map(|id| id.cast_signed()).collect();
            let kill = sqlx::query(self.statements.kill.clone()).bind(ids);
            kill.execute(&mut *self.link).await.map_err(store_error)?;
        }
        self.ask(batch).await
    }

    async fn wait(&mut self, id: &i64, wait: Duration) -> Result<Try> {
        self.waits = true;
        let asked = sqlx::query(self.statements.wait.clone())
            .bind(lock_timeout(wait))
            .bind(*id)
            .fetch_one(&mut *self.link)
            .await;
        let outcome = match asked {
            Ok(_) => Ok(Try::Granted(None)),
            Err(error) if is_broken(&error) => Err(store_error(error)),
            Err(error) => self.after_failed_wait(*id, error).await,
        };
        self.waits = false;
        if matches!(outcome, Ok(Try::Granted(_))) {
            self.held += 1;
        }
        outcome
    }

    async fn closed(&mut self) -> Error {
        loop {
            match self.link.try_recv().await {
                Ok(Some(_)) => {} // it subscribes to nothing
                Ok(None) => {
                    return Error::new(ErrorKind::Unavailable, "the server ended the session");
                }
                Err(error) => return store_error(error),
            }
        }
    }

    async fn close(mut self) {
        if self.waits {
            // it listens to nobody now: another session has to end it
            let ids = vec![self.id.cast_signed()];
            if let Ok(mut other) = connect(&self.store.session_options()).await {
                let kill = sqlx::query(self.statements.kill.clone()).bind(ids);
                drop(kill.execute(&mut other).await); // the closed socket ends it as well, later
            }
        } else {
            let all = sqlx::raw_sql("SELECT pg_advisory_unlock_all()");
            drop(all.execute(&mut *self.link).await); // the closed socket frees them as well
        }
    }
}

impl PgSession {
    /// A failed wait may have been granted all the same, in the moment in which its limit passed:
    /// a lock of a session survives the error.
    async fn after_failed_wait(&mut self, id: i64, error: sqlx::Error) -> Result<Try> {
        let held = sqlx::query(self.statements.is_held.clone()).bind(id);
        let row = held.fetch_one(&mut *self.link).await.map_err(store_error)?;
        if row.try_get(0).map_err(store_error)? {
            return Ok(Try::Granted(None));
        }
        if ended_the_wait(&error) {
            return Ok(Try::Busy);
        }
        Ok(Try::Refused(store_error(error)))
    }
}

/// A wait as a `lock_timeout` in milliseconds: rounded up, since zero means no limit, and cut to
/// the largest that the server takes (24 days; whoever waits longer asks again).
pub(super) fn lock_timeout(wait: Duration) -> String {
    let millis = wait.as_micros().div_ceil(1000).clamp(1, i32::MAX as u128);
    millis.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CASES B25.
    #[test]
    fn a_lock_timeout_is_never_zero_and_never_too_large() {
        for (wait, millis) in [
            (Duration::ZERO, "1"),
            (Duration::from_nanos(1), "1"),
            (Duration::from_micros(300), "1"),
            (Duration::from_millis(1), "1"),
            (Duration::from_micros(1001), "2"),
            (Duration::from_secs(40 * 24 * 3600), "2147483647"),
            (Duration::MAX, "2147483647"),
        ] {
            assert_eq!(lock_timeout(wait), millis, "{wait:?}");
        }
    }

    #[test]
    fn a_session_is_known_by_pid_and_start() {
        let id = session_id(4711, 0x1234_5678_9abc_def0);
        assert_eq!(id & 0xffff_ffff, 4711);
        assert_eq!(id >> 32, 0x9abc_def0);
    }
}
