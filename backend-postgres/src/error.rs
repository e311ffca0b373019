//! What sqlx and the server report, as an [`Error`].

use leasehold_core::{Error, ErrorKind};

/// The name of this backend in messages.
pub(crate) const NAME: &str = "postgres";

/// The SQLSTATE of an error that the server reported.
pub(crate) fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(std::borrow::Cow::into_owned)
}

/// Whether the connection is over, or nothing is known about it.
pub(crate) fn is_broken(error: &sqlx::Error) -> bool {
    match code(error) {
        // 57P01 to 57P05: the server ends the session; 25P03: it ended an idle transaction
        Some(code) => code.starts_with("08") || code.starts_with("57P") || code == "25P03",
        None => true,
    }
}

/// Whether a wait for a lock came to its end: its own limit, one of the server or the role, or an
/// administrator's `pg_cancel_backend`.
pub(crate) fn ended_the_wait(error: &sqlx::Error) -> bool {
    matches!(code(error).as_deref(), Some("55P03" | "57014"))
}

/// Whether the same statement may succeed when it is simply repeated: it had no effect.
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(code(error).as_deref(), Some("40001" | "40P01"))
}

pub(crate) fn store_error(error: sqlx::Error) -> Error {
    let (kind, detail) = describe(&error);
    Error::new(kind, detail).with_source(error)
}

fn describe(error: &sqlx::Error) -> (ErrorKind, &'static str) {
    let Some(code) = code(error) else {
        return match error {
            sqlx::Error::PoolTimedOut => {
                (ErrorKind::Unavailable, "no connection of the pool was free in time")
            }
            sqlx::Error::PoolClosed => (ErrorKind::Unavailable, "the pool is closed"),
            sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => {
                (ErrorKind::Unavailable, "the connection failed")
            }
            sqlx::Error::Configuration(_) => (ErrorKind::InvalidOptions, "not a connection's URL"),
            sqlx::Error::Tls(_) => (ErrorKind::Backend, "no encrypted connection"),
            _ => (ErrorKind::Backend, "the driver failed"),
        };
    };
    match code.as_str() {
        "55P03" => (ErrorKind::Unavailable, "another transaction holds the row for too long"),
        "57014" => (ErrorKind::Unavailable, "the server cancelled the statement"),
        "40001" | "40P01" => (ErrorKind::Deadlock, "the server broke a deadlock"),
        "25006" => (
            ErrorKind::Unsupported,
            "the server or the role is read-only, as a standby is: connect to the primary",
        ),
        "25P02" => (
            ErrorKind::Backend,
            "an earlier statement of this transaction failed, so that it can only roll back",
        ),
        "42P01" | "3F000" | "42703" => {
            (ErrorKind::Schema, "the tables are missing or of another version: run migrate")
        }
        "42501" => (ErrorKind::Backend, "the role lacks a privilege: see the crate's grants"),
        "53200" => {
            (ErrorKind::Exhausted, "the server's lock table is full (max_locks_per_transaction)")
        }
        "53300" => (ErrorKind::Unavailable, "the server has no connection to spare"),
        _ if code.starts_with("53") => (ErrorKind::Exhausted, "the server lacks a resource"),
        _ if code.starts_with("08") || code.starts_with("57P") || code == "25P03" => {
            (ErrorKind::Unavailable, "the server ended the session")
        }
        _ => (ErrorKind::Backend, "the server refused"),
    }
}
