//! [`Store`]: what the drivers of a handle share.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::{FencingToken, Result};
use sqlx::pool::PoolConnectionMetadata;
use sqlx::sqlite::{SqliteConnection, SqlitePool, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Row};

use crate::error::{carried, store_error};
use crate::file::{Files, Single, Which};
use crate::place::Identity;
use crate::schema::next_token;

/// The most claims that are open at once.
const POOL_SIZE: u32 = 10;

/// The files of a handle, and its connections to them.
pub(crate) struct Store {
    pub(crate) files: Arc<Files>,
    pub(crate) namespace: String,
    pub(crate) holder: String,
    /// Of claims and of the service.
    pub(crate) pool: SqlitePool,
    /// Of dedupe.
    pub(crate) main: Single,
    pub(crate) leases: Single,
    /// Of the tokens of claims; sessions have connections of their own.
    pub(crate) locks: Single,
}

impl Store {
    pub(crate) fn new(
        files: Files,
        namespace: String,
        holder: String,
        writer_wait: Duration,
    ) -> Self {
        let single = |which| Single::new(files.clone(), which);
        let (main, leases, locks) =
            (single(Which::Main), single(Which::Leases), single(Which::Locks));
        let files = Arc::new(files);
        let pool = pool(&files, writer_wait);
        Self { files, namespace, holder, pool, main, leases, locks }
    }

    /// Opens and sets up all files.
    pub(crate) async fn open(&self) -> Result<()> {
        for single in [&self.main, &self.leases, &self.locks] {
            single.lend().await?.give_back();
        }
        Ok(())
    }

    /// The next token of claims.
    pub(crate) async fn token(&self) -> Result<FencingToken> {
        const NEXT: &str = concat!(
            "UPDATE leasehold_token SET value = ",
            next_token!("leasehold_token"),
            " RETURNING value"
        );
        let rows = self.locks.run(|| Ok(sqlx::query(NEXT))).await?;
        let token: i64 = rows[0].try_get(0).map_err(store_error)?;
        Ok(FencingToken(token.cast_unsigned()))
    }

    pub(crate) async fn close(&self) {
        tokio::join!(self.pool.close(), self.main.close(), self.leases.close(), self.locks.close());
    }
}

impl Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("path", &self.files.place.main)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// The pool of claims: each connection sees the file of the leases as well, so that a lease can be
/// checked in the claim's own transaction.
fn pool(files: &Arc<Files>, writer_wait: Duration) -> SqlitePool {
    // a file that was replaced beneath us is another one: connections to the old one are closed
    let current = Arc::new(Mutex::new(None::<Identity>));
    let (seen, made) = (current.clone(), files.clone());
    let looked = files.clone();
    let options = files.options(Which::Main).busy_timeout(writer_wait).disable_statement_logging();
    SqlitePoolOptions::new()
        .max_connections(POOL_SIZE)
        .max_lifetime(None)
        .test_before_acquire(false)
        .after_connect(move |conn, _: PoolConnectionMetadata| {
            let (files, seen) = (made.clone(), seen.clone());
            Box::pin(async move {
                prepare(&files, conn).await?;
                *seen.lock().unwrap_or_else(PoisonError::into_inner) =
                    Identity::at(&files.path(Which::Main));
                Ok(())
            })
        })
        .before_acquire(move |_, _| {
            let now = Identity::at(&looked.path(Which::Main));
            let same = *current.lock().unwrap_or_else(PoisonError::into_inner) == now;
            Box::pin(async move { Ok(same && now.is_some()) })
        })
        .connect_lazy_with(options)
}

async fn prepare(files: &Files, conn: &mut SqliteConnection) -> sqlx::Result<()> {
    files.set_up(Which::Main, conn).await.map_err(carried)?;
    let leases = files.open(Which::Leases).await.map_err(carried)?; // it exists and is set up
    let path = files.path(Which::Leases);
    let path = path.to_str().ok_or_else(|| {
        let detail = "the path of the database must be UTF-8";
        carried(leasehold_core::Error::new(leasehold_core::ErrorKind::InvalidOptions, detail))
    })?;
    sqlx::query(AssertSqlSafe("ATTACH DATABASE ? AS leasehold_leases"))
        .bind(path.to_owned())
        .execute(&mut *conn)
        .await?;
    sqlx::raw_sql("PRAGMA leasehold_leases.synchronous = NORMAL").execute(conn).await?;
    drop(leases);
    Ok(())
}
