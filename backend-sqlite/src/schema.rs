//! The tables of the three files, and how a file is set up.

use std::path::Path;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Row};
use tokio::time::Instant;

use crate::alive::Locked;
use crate::error::{code, file_error, is_busy, store_error};
use crate::file::pause;

/// What another version's tables are refused by.
const VERSION: i64 = 1;
/// How long others may take to set a file up.
const PATIENCE: Duration = Duration::from_secs(30);
/// SQLite's code for a statement that does not fit the tables.
const ERROR: u32 = 1;

/// Microseconds since 1970 by the clock of the machine.
macro_rules! wall_clock {
    () => {
        "CAST(unixepoch('subsec') * 1000000 AS INTEGER)"
    };
}
/// The next token: over all earlier ones, also where these were lost with the file or in a power
/// failure, since the clock has gone on meanwhile.
macro_rules! next_token {
    ($table:literal) => {
        concat!("(SELECT max(value + 1, ", $crate::schema::wall_clock!(), ") FROM ", $table, ")")
    };
}
pub(crate) use {next_token, wall_clock};

/// The tables of named locks. The end of a session frees its locks. Waiters are there for those who
/// would take again what they release: they let the others have it first.
pub(crate) const LOCKS: &str = "
CREATE TABLE leasehold_token (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT INTO leasehold_token VALUES (1, 0);
CREATE TABLE leasehold_session (
  id INTEGER PRIMARY KEY,
  holder TEXT NOT NULL,
  since INTEGER NOT NULL
);
CREATE TABLE leasehold_lock (
  namespace TEXT NOT NULL,
  key TEXT NOT NULL,
  session INTEGER NOT NULL,
  token INTEGER NOT NULL,
  since INTEGER NOT NULL,
  PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
CREATE INDEX leasehold_lock_session ON leasehold_lock (session);
CREATE TABLE leasehold_waiter (
  namespace TEXT NOT NULL,
  key TEXT NOT NULL,
  session INTEGER NOT NULL,
  PRIMARY KEY (namespace, key, session)
) WITHOUT ROWID;
CREATE INDEX leasehold_waiter_session ON leasehold_waiter (session);
CREATE TRIGGER leasehold_session_ended AFTER DELETE ON leasehold_session BEGIN
  DELETE FROM leasehold_lock WHERE session = OLD.id;
  DELETE FROM leasehold_waiter WHERE session = OLD.id;
END;
";

/// The tables of leases. `expires` and `since` are in microseconds of the
/// life `boot` of the machine.
pub(crate) const LEASES: &str = "
CREATE TABLE leasehold_token (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT INTO leasehold_token VALUES (1, 0);
CREATE TABLE leasehold_lease (
  namespace TEXT NOT NULL,
  key TEXT NOT NULL,
  owner BLOB NOT NULL,
  token INTEGER NOT NULL,
  boot TEXT NOT NULL,
  expires INTEGER NOT NULL,
  since INTEGER NOT NULL,
  holder TEXT NOT NULL,
  PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
CREATE INDEX leasehold_lease_expires ON leasehold_lease (expires);
CREATE TRIGGER leasehold_token_insert AFTER INSERT ON leasehold_lease BEGIN
  UPDATE leasehold_token SET value = max(value, NEW.token);
END;
CREATE TRIGGER leasehold_token_update AFTER UPDATE OF token ON leasehold_lease BEGIN
  UPDATE leasehold_token SET value = max(value, NEW.token);
END;
";

/// The tables beside the service's own. Times are in microseconds since 1970.
const MAIN: &str = "
CREATE TABLE {p}_token (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT INTO {p}_token VALUES (1, 0);
CREATE TABLE {p}_dedupe (
  namespace TEXT NOT NULL,
  key TEXT NOT NULL,
  owner BLOB NOT NULL,
  done INTEGER NOT NULL,
  since INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  holder TEXT NOT NULL,
  PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
CREATE INDEX {p}_dedupe_expires ON {p}_dedupe (expires_at);
";

/// The tables of the main file, with their prefix.
pub(crate) fn main_tables(prefix: &str) -> String {
    MAIN.replace("{p}", prefix)
}

/// Sets a file up unless that has been done: write-ahead logging, and the tables.
///
/// From many processes at once: one does it, under a lock of its own, since SQLite does not wait
/// where the kind of journal changes.
pub(crate) async fn set_up(
    conn: &mut SqliteConnection,
    lock: &Path,
    prefix: &str,
    tables: &str,
) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    if is_ready(conn, prefix, deadline).await? {
        return Ok(());
    }
    let _lock = loop {
        let locked = Locked::try_at(lock).map_err(|error| file_error("lock", lock, error))?;
        match locked {
            Some(locked) => break locked,
            None if Instant::now() > deadline => {
                let detail = format!(
                    "another process has not finished setting the file up for {PATIENCE:?}"
                );
                return Err(Error::new(ErrorKind::Unavailable, detail));
            }
            None => pause(0).await,
        }
    };
    if is_ready(conn, prefix, deadline).await? {
        return Ok(());
    }
    let script = format!(
        "BEGIN IMMEDIATE; \
         CREATE TABLE {prefix}_version (one INTEGER PRIMARY KEY CHECK (one = 1), \
           version INTEGER NOT NULL); \
         INSERT INTO {prefix}_version VALUES (1, {VERSION}); {tables} COMMIT"
    );
    for statement in ["PRAGMA journal_mode = WAL", &script] {
        loop {
            match sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *conn).await {
                Ok(_) => break,
                Err(error) if is_busy(&error) && Instant::now() < deadline => pause(1).await,
                Err(error) => return Err(store_error(error)),
            }
        }
    }
    if is_ready(conn, prefix, deadline).await? {
        return Ok(());
    }
    let detail = "the file cannot be switched to write-ahead logging (journal_mode=WAL): it must \
                  lie on a disk of this machine";
    Err(Error::new(ErrorKind::Unsupported, detail))
}

async fn is_ready(conn: &mut SqliteConnection, prefix: &str, deadline: Instant) -> Result<bool> {
    let sql = format!("SELECT version FROM {prefix}_version");
    let version = loop {
        let version = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql.as_str()));
        match version.fetch_one(&mut *conn).await {
            Ok(version) => break version,
            Err(error) if code(&error) == Some(ERROR) => return Ok(false),
            Err(error) if is_busy(&error) && Instant::now() < deadline => pause(1).await,
            Err(error) => return Err(store_error(error)),
        }
    };
    if version != VERSION {
        let detail = format!(
            "the tables are of version {version}, this library's are of version {VERSION}: \
             use the library that made them, or another file or prefix"
        );
        return Err(Error::new(ErrorKind::Schema, detail));
    }
    let mode = sqlx::query("PRAGMA journal_mode").fetch_one(&mut *conn).await;
    let mode: String = mode.and_then(|row| row.try_get(0)).map_err(store_error)?;
    Ok(mode == "wal")
}
