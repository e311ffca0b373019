//! [`Single`]: one file, behind one connection that callers use in turn.

use std::fmt::{self, Debug};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::ConnectOptions;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteSynchronous};
use sqlx::sqlite::{SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteRow};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::Instant;

use crate::error::{is_busy, store_error};
use crate::place::{Identity, Place};
use crate::schema;

/// SQLite itself waits so long for another's transaction, in the connection's own thread; after
/// that we do, so that nobody who has given up keeps the thread for long.
const BUSY: Duration = Duration::from_millis(250);
/// The longest that a file takes to be opened.
const OPENING: Duration = Duration::from_secs(30);
/// A checkpoint cuts the journal to this size, in bytes.
const JOURNAL: &str = "1048576";

/// Which of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Main,
    Locks,
    Leases,
}

/// The files of a store, and how to open them.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) place: Place,
    pub(crate) prefix: String,
}

impl Files {
    pub(crate) fn path(&self, which: Which) -> PathBuf {
        match which {
            Which::Main => self.place.main.clone(),
            Which::Locks => self.place.locks(),
            Which::Leases => self.place.leases(),
        }
    }

    /// How a connection to a file is made.
    pub(crate) fn options(&self, which: Which) -> SqliteConnectOptions {
        let options = SqliteConnectOptions::new()
            .filename(self.path(which))
            .create_if_missing(true)
            .busy_timeout(BUSY)
            .pragma("journal_size_limit", JOURNAL)
            .disable_statement_logging();
        match which {
            // what the service has committed outlives a power failure
            Which::Main => options.synchronous(SqliteSynchronous::Full),
            // who held something has died in a power failure, too
            Which::Locks | Which::Leases => options.synchronous(SqliteSynchronous::Normal),
        }
    }

    /// Sets the file of a connection up.
    pub(crate) async fn set_up(&self, which: Which, conn: &mut SqliteConnection) -> Result<()> {
        let lock = self.place.set_up();
        match which {
            Which::Main => {
                let tables = schema::main_tables(&self.prefix);
                schema::set_up(conn, &lock, &self.prefix, &tables).await
            }
            Which::Locks => schema::set_up(conn, &lock, "leasehold", schema::LOCKS).await,
            Which::Leases => schema::set_up(conn, &lock, "leasehold", schema::LEASES).await,
        }
    }

    /// Opens a connection to a file that is set up.
    pub(crate) async fn open(&self, which: Which) -> Result<Open> {
        self.place.make_folders()?;
        let path = self.path(which);
        let deadline = Instant::now() + OPENING;
        loop {
            let mut conn = match self.options(which).connect().await {
                Ok(conn) => conn,
                Err(error) if is_busy(&error) && Instant::now() < deadline => {
                    pause(1).await;
                    continue;
                }
                Err(error) => return Err(at(&path, store_error(error))),
            };
            self.set_up(which, &mut conn).await.map_err(|error| at(&path, error))?;
            match Identity::at(&path) {
                Some(identity) => return Ok(Open { conn, identity, path }),
                None if Instant::now() > deadline => {
                    let detail = "the file is removed whenever it is made";
                    return Err(at(&path, Error::new(ErrorKind::Unavailable, detail)));
                }
                None => {}
            }
        }
    }
}

fn at(path: &Path, error: Error) -> Error {
    let detail = format!("{}: {}", path.display(), error.detail());
    Error::new(error.kind(), detail).with_source(error)
}

/// A connection, and the file that it has open.
pub(crate) struct Open {
    pub(crate) conn: SqliteConnection,
    identity: Identity,
    path: PathBuf,
}

impl Open {
    /// Whether it is still the file that others find at its path.
    pub(crate) fn is_in_place(&self) -> bool {
        Identity::at(&self.path) == Some(self.identity)
    }
}

impl Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open").field("path", &self.path).finish_non_exhaustive()
    }
}

/// One file, behind one connection: callers of this process queue here, in order, and only the
/// first of them meets other processes in the file.
#[derive(Debug)]
pub(crate) struct Single {
    files: Files,
    which: Which,
    open: Mutex<Option<Open>>,
    closed: watch::Sender<bool>,
}

/// The connection, lent. Dropping it closes the connection, as after a statement that was cut
/// short; [`give_back`](Self::give_back) says that all is well.
pub(crate) struct Lent<'a> {
    place: MutexGuard<'a, Option<Open>>,
    open: Option<Open>,
}

impl Single {
    pub(crate) fn new(files: Files, which: Which) -> Self {
        Self { files, which, open: Mutex::new(None), closed: watch::Sender::new(false) }
    }

    /// The connection, when it is this caller's turn.
    pub(crate) async fn lend(&self) -> Result<Lent<'_>> {
        let mut place = self.open.lock().await;
        if *self.closed.borrow() {
            return Err(Error::new(ErrorKind::Unavailable, "the handle is closed"));
        }
        // a file that was replaced beneath us is another one
        let open = match place.take().filter(Open::is_in_place) {
            Some(open) => open,
            None => self.files.open(self.which).await?,
        };
        Ok(Lent { place, open: Some(open) })
    }

    /// Runs one statement, again and again while the file is busy: the caller limits the time.
    pub(crate) async fn run(
        &self,
        statement: impl Fn() -> Result<Query<'static, Sqlite, SqliteArguments>>,
    ) -> Result<Vec<SqliteRow>> {
        for tries in 0.. {
            let mut lent = self.lend().await?;
            match statement()?.fetch_all(&mut *lent).await {
                Ok(rows) => {
                    lent.give_back();
                    return Ok(rows);
                }
                Err(error) if is_busy(&error) => lent.give_back(),
                Err(error) => return Err(store_error(error)),
            }
            pause(tries).await;
        }
        unreachable!("it goes on until it is answered")
    }

    /// Begins a transaction that may write, again and again while the file is busy: the caller
    /// limits the time. Others have their turn between two tries, so that who only reads need not
    /// wait for a writer.
    pub(crate) async fn begin(&self) -> Result<Lent<'_>> {
        for tries in 0.. {
            let mut lent = self.lend().await?;
            match sqlx::query("BEGIN IMMEDIATE").execute(&mut *lent).await {
                Ok(_) => return Ok(lent),
                Err(error) if is_busy(&error) => lent.give_back(),
                Err(error) => return Err(store_error(error)),
            }
            pause(tries).await;
        }
        unreachable!("it goes on until it is answered")
    }

    /// Ends it: later calls fail.
    pub(crate) async fn close(&self) {
        self.closed.send_replace(true);
        if let Some(open) = self.open.lock().await.take() {
            drop(sqlx::Connection::close(open.conn).await); // nothing is left to save
        }
    }
}

impl Lent<'_> {
    pub(crate) fn give_back(mut self) {
        *self.place = self.open.take();
    }
}

impl Deref for Lent<'_> {
    type Target = SqliteConnection;
    fn deref(&self) -> &SqliteConnection {
        &self.open.as_ref().expect("it is there until it is given back").conn
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.open.as_mut().expect("it is there until it is given back").conn
    }
}

/// A pause before another look, growing from 1 to 10 ms, and to 25 ms for those who have looked for
/// long; with jitter, so that those who wait do not look in step.
pub(crate) async fn pause(looks: u32) {
    const FOR_LONG: u32 = 100;
    let longest = if looks < FOR_LONG { (looks + 2).min(10) } else { 25 };
    let millis = rand::random_range(0.5..1.0) * f64::from(longest);
    tokio::time::sleep(Duration::from_secs_f64(millis / 1000.0)).await;
}

pub(crate) async fn commit(conn: &mut SqliteConnection) -> Result<()> {
    sqlx::raw_sql("COMMIT").execute(conn).await.map_err(store_error)?;
    Ok(())
}
