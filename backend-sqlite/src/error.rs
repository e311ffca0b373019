//! What sqlx, SQLite and the file system report, as an [`Error`].

use std::io;
use std::path::Path;

use leasehold_core::{Error, ErrorKind};

/// The name of this backend in messages.
pub(crate) const NAME: &str = "sqlite";

/// SQLite's primary result code.
pub(crate) fn code(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.code()?;
    code.parse::<u32>().ok().map(|code| code & 0xff)
}

/// Whether somebody else is at the file: the same may succeed a little later.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(BUSY | LOCKED))
}

/// Whether nobody can say what became of a commit that ended so.
pub(crate) fn leaves_open(error: &sqlx::Error) -> bool {
    matches!(code(error), None | Some(IO))
}

const BUSY: u32 = 5;
const LOCKED: u32 = 6;
const READ_ONLY: u32 = 8;
const IO: u32 = 10;
const CORRUPT: u32 = 11;
const FULL: u32 = 13;
const CANNOT_OPEN: u32 = 14;
const NOT_A_DATABASE: u32 = 26;

pub(crate) fn store_error(error: sqlx::Error) -> Error {
    let error = match error {
        // one of ours, on its way through a pool
        sqlx::Error::Configuration(inner) => match inner.downcast::<Error>() {
            Ok(own) => return *own,
            Err(inner) => sqlx::Error::Configuration(inner),
        },
        error => error,
    };
    let (kind, detail) = describe(&error);
    Error::new(kind, detail).with_source(error)
}

/// Carries one of our errors through an interface of sqlx.
pub(crate) fn carried(error: Error) -> sqlx::Error {
    sqlx::Error::Configuration(Box::new(error))
}

fn describe(error: &sqlx::Error) -> (ErrorKind, &'static str) {
    let Some(code) = code(error) else {
        return match error {
            sqlx::Error::PoolTimedOut => (
                ErrorKind::Unavailable,
                "no connection of the pool was free in time: too many claims are open",
            ),
            sqlx::Error::PoolClosed => (ErrorKind::Unavailable, "the handle is closed"),
            sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => {
                (ErrorKind::Unavailable, "the connection failed")
            }
            sqlx::Error::Configuration(_) => {
                (ErrorKind::InvalidOptions, "not a path of a database")
            }
            _ => (ErrorKind::Backend, "the driver failed"),
        };
    };
    match code {
        BUSY | LOCKED => (
            ErrorKind::Unavailable,
            "another transaction keeps the file's one writer's place for too long",
        ),
        READ_ONLY => (
            ErrorKind::Backend,
            "the database cannot be written: give this user the right to write the file and its \
             folder, where the journal is",
        ),
        IO => (ErrorKind::Unavailable, "reading or writing the file failed"),
        CORRUPT | NOT_A_DATABASE => (
            ErrorKind::Backend,
            "the file is no SQLite database, or a damaged one: name another file, or move it away",
        ),
        FULL => (ErrorKind::Exhausted, "the disk is full"),
        CANNOT_OPEN => (
            ErrorKind::Unavailable,
            "the file cannot be opened: its folder must exist and be writable",
        ),
        _ => (ErrorKind::Backend, "the database refused"),
    }
}

/// An error of the file system, with the path.
pub(crate) fn file_error(what: &str, path: &Path, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": this user must be allowed to write there"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": the disk is full",
        // too many open files, of the process or of the machine
        _ if matches!(error.raw_os_error(), Some(23 | 24)) => {
            ": too many files are open, raise the limit (ulimit -n)"
        }
        _ => "",
    };
    let kind = match error.raw_os_error() {
        Some(23 | 24) => ErrorKind::Exhausted,
        _ => ErrorKind::Unavailable,
    };
    let path = path.display();
    Error::new(kind, format!("cannot {what} {path}: {error}{advice}")).with_source(error)
}
