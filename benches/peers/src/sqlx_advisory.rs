//! `PgAdvisoryLock` of sqlx, on a pool, as its documentation shows it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockGuard, PgPool, PgPoolOptions};
use sqlx::{Either, Postgres, pool::PoolConnection};
use tokio::time::timeout;

use crate::{Contender, Held, Locker, Outcome, POOL};

/// `sqlx::postgres::PgAdvisoryLock`.
///
/// A held lock keeps a connection of the pool, and so does a waiter, who waits on the server, in
/// its queue. Nothing tells a holder that its session has ended, and there is no fencing token.
/// The wait has no bound of its own: here a timer drops it.
pub(crate) struct SqlxAdvisory {
    url: String,
}

impl SqlxAdvisory {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

impl fmt::Debug for SqlxAdvisory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SqlxAdvisory")
    }
}

#[async_trait]
impl Contender for SqlxAdvisory {
    fn name(&self) -> &'static str {
        "sqlx PgAdvisoryLock 0.9.0"
    }

    fn notes(&self) -> &'static str {
        "a connection of the pool of 10 for each lock that is held or waited for; no notice of \
         loss, no fencing token"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let pool = PgPoolOptions::new().max_connections(POOL).connect(&self.url).await?;
        Ok(Arc::new(OnPool { pool }))
    }
}

struct OnPool {
    pool: PgPool,
}

#[async_trait]
impl Locker for OnPool {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let lock = PgAdvisoryLock::new(name);
        let conn = self.pool.acquire().await?;
        let guard = if wait.is_zero() {
            match lock.try_acquire(conn).await? {
                Either::Left(guard) => guard,
                Either::Right(_) => return Ok(None),
            }
        } else {
            match timeout(wait, lock.acquire(conn)).await {
                Ok(guard) => guard?,
                Err(_) => return Ok(None),
            }
        };
        Ok(Some(Box::new(Guard(guard))))
    }
}

struct Guard(PgAdvisoryLockGuard<PoolConnection<Postgres>>);

#[async_trait]
impl Held for Guard {
    async fn release(self: Box<Self>) -> Outcome {
        self.0.release_now().await?;
        Ok(())
    }
}
