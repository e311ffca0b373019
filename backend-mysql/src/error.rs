//! From the driver's errors to ours.

use leasehold_core::{Error, ErrorKind};
use mysql_async::{DriverError, Error as DbError};

/// What the backend calls itself in messages.
pub(crate) const BACKEND: &str = "mysql";

pub(crate) mod code {
    //! Error numbers of the servers.
    pub(crate) const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub(crate) const DEADLOCK: u16 = 1213;
    /// A cycle of user-level locks, on MySQL; MariaDB says [`DEADLOCK`].
    pub(crate) const USER_LOCK_DEADLOCK: u16 = 3058;
    /// `KILL QUERY`.
    pub(crate) const INTERRUPTED: u16 = 1317;
    /// The time limit of a statement, on MySQL and MariaDB.
    pub(crate) const QUERY_TIMEOUT: u16 = 3024;
    pub(crate) const STATEMENT_TIMEOUT: u16 = 1969;
    pub(crate) const NO_SUCH_THREAD: u16 = 1094;
    /// To end another user's connection.
    pub(crate) const KILL_DENIED: u16 = 1095;
    pub(crate) const COLUMN_EXISTS: u16 = 1060;
    pub(crate) const NO_SUCH_TABLE: u16 = 1146;
    pub(crate) const NO_SUCH_COLUMN: u16 = 1054;
    /// No right to a table, also to one that does not exist.
    pub(crate) const TABLE_DENIED: u16 = 1142;
    pub(crate) const COLUMN_DENIED: u16 = 1143;
    /// Of the option `read_only`, and of a mode of a replica.
    pub(crate) const READ_ONLY: u16 = 1290;
    pub(crate) const READ_ONLY_MODE: u16 = 1836;
    /// `FOR UPDATE NOWAIT` on MySQL.
    pub(crate) const LOCK_NOWAIT: u16 = 3572;
}

/// The server's error number, if it was the server that refused.
pub(crate) fn server_code(error: &DbError) -> Option<u16> {
    match error {
        DbError::Server(error) => Some(error.code),
        _ => None,
    }
}

/// Whether the statement may simply be sent again: the server has rolled it back.
pub(crate) fn is_transient(error: &DbError) -> bool {
    matches!(server_code(error), Some(code::DEADLOCK | code::LOCK_WAIT_TIMEOUT | code::LOCK_NOWAIT))
}

/// Whether the statement was cut short; what it did is not known.
pub(crate) fn is_interrupted(error: &DbError) -> bool {
    matches!(
        server_code(error),
        Some(code::INTERRUPTED | code::QUERY_TIMEOUT | code::STATEMENT_TIMEOUT)
    )
}

/// Whether the connection is gone; what the statement did is not known.
pub(crate) fn is_gone(error: &DbError) -> bool {
    matches!(error, DbError::Io(_) | DbError::Driver(DriverError::ConnectionClosed))
}

/// Ours, with the driver's as the source. The driver's messages hold no password.
pub(crate) fn mapped(error: DbError) -> Error {
    let (kind, detail) = describe(&error);
    Error::new(kind, detail).with_source(error)
}

fn describe(error: &DbError) -> (ErrorKind, &'static str) {
    match error {
        DbError::Io(_) => (ErrorKind::Unavailable, "the connection failed"),
        DbError::Driver(DriverError::ConnectionClosed) => {
            (ErrorKind::Unavailable, "the connection is closed")
        }
        DbError::Driver(DriverError::PoolDisconnected) => {
            (ErrorKind::Unavailable, "the pool is closed")
        }
        DbError::Driver(_) | DbError::Other(_) => (ErrorKind::Backend, "the driver failed"),
        DbError::Url(_) => (ErrorKind::InvalidOptions, "the url is not one of a mysql server"),
        DbError::Server(error) => describe_code(error.code, &error.message),
    }
}

fn describe_code(number: u16, message: &str) -> (ErrorKind, &'static str) {
    match number {
        code::DEADLOCK | code::USER_LOCK_DEADLOCK => {
            (ErrorKind::Deadlock, "the server chose this call to break a deadlock")
        }
        code::LOCK_WAIT_TIMEOUT | code::LOCK_NOWAIT => {
            (ErrorKind::Unavailable, "a row stayed locked by others")
        }
        code::NO_SUCH_TABLE | code::NO_SUCH_COLUMN => {
            (ErrorKind::Schema, "the tables are missing or of another version: run migrate")
        }
        // too many connections, of the server or the user; out of memory or lock memory
        1040 | 1203 | 1226 | 1037 | 1041 | 1206 => {
            (ErrorKind::Exhausted, "the server is at its limit")
        }
        // interrupted, killed, shutting down, gone, timed out on the network
        code::INTERRUPTED
        | code::QUERY_TIMEOUT
        | code::STATEMENT_TIMEOUT
        | 1053
        | 1077
        | 1078
        | 1079
        | 1080
        | 1158..=1161
        | 1927
        | 3168
        | 3169
        | 4031 => (ErrorKind::Unavailable, "the server ended the call"),
        // read-only, super-read-only, a read-only transaction: a replica, or a primary that was
        // demoted; another try may reach the new one
        code::READ_ONLY | 1792 | code::READ_ONLY_MODE => {
            (ErrorKind::Unavailable, "the server is read-only: it is not the primary")
        }
        1047 => (ErrorKind::Unavailable, "the cluster node is not ready"),
        1235 => (ErrorKind::Unsupported, UNSUPPORTED),
        1105 if message.contains("strict_mode") || message.contains("GET_LOCK") => {
            (ErrorKind::Unsupported, UNSUPPORTED)
        }
        _ => (ErrorKind::Backend, "the server refused"),
    }
}

const UNSUPPORTED: &str = "this server has no user-level locks: build without them";

#[cfg(test)]
mod tests {
    use super::*;
    use mysql_async::ServerError;

    fn kind(number: u16, message: &str) -> ErrorKind {
        let error =
            ServerError { code: number, message: message.to_owned(), state: "HY000".to_owned() };
        mapped(DbError::Server(error)).kind()
    }

    /// B49, B50: deadlocks and clusters that refuse user-level locks are told apart.
    #[test]
    fn codes_have_their_kinds() {
        assert_eq!(kind(3058, ""), ErrorKind::Deadlock);
        assert_eq!(kind(1213, ""), ErrorKind::Deadlock);
        assert_eq!(kind(1235, ""), ErrorKind::Unsupported);
        let strict =
            "Percona-XtraDB-Cluster prohibits use of GET_LOCK with pxc_strict_mode = ENFORCING";
        assert_eq!(kind(1105, strict), ErrorKind::Unsupported);
        assert_eq!(kind(1105, "unknown error"), ErrorKind::Backend);
        assert_eq!(kind(1146, ""), ErrorKind::Schema);
        assert_eq!(kind(1040, ""), ErrorKind::Exhausted);
        assert_eq!(kind(1290, ""), ErrorKind::Unavailable);
        assert_eq!(kind(1142, ""), ErrorKind::Backend);
    }
}
