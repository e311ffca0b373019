//! sqlx by hand: `pg_advisory_lock` on a connection.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_peers::{Contender, Held, Locker, Outcome};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Row};
use tokio::time::timeout;

use super::pool::{Stack, Used};

/// The driver alone: a prepared statement to lock, on a connection that is then the lock's, and one
/// to unlock. It waits on the server, in its queue.
#[derive(Debug)]
pub struct RawPostgres {
    options: PgConnectOptions,
}

impl RawPostgres {
    /// On the server at `url`.
    ///
    /// # Errors
    /// If it is no URL of a Postgres.
    pub fn new(url: &str) -> Outcome<Self> {
        Ok(Self { options: url.parse::<PgConnectOptions>()?.disable_statement_logging() })
    }
}

#[async_trait]
impl Contender for RawPostgres {
    fn name(&self) -> &'static str {
        "raw sqlx 0.9.0"
    }

    fn notes(&self) -> &'static str {
        "pg_advisory_lock, prepared, on a connection for each lock that is held or waited for, of \
         which it has 64"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let stack = Stack::new(self.options.connect().await?);
        Ok(Arc::new(Raw { options: self.options.clone(), stack }))
    }
}

struct Raw {
    options: PgConnectOptions,
    stack: Stack<PgConnection>,
}

#[async_trait]
impl Locker for Raw {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        // the same in all processes of one build
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let id = hasher.finish().cast_signed();
        let mut used = self.stack.take(async || Ok(self.options.connect().await?)).await?;
        if wait.is_zero() {
            let query = sqlx::query("SELECT pg_try_advisory_lock($1)").bind(id);
            let granted: bool = query.fetch_one(&mut used.conn).await?.try_get(0)?;
            if !granted {
                used.put_back();
                return Ok(None);
            }
        } else {
            let query = sqlx::query("SELECT pg_advisory_lock($1)").bind(id);
            match timeout(wait, query.execute(&mut used.conn)).await {
                Ok(done) => _ = done?,
                // the statement goes on: the connection goes with it
                Err(_) => return Ok(None),
            }
        }
        Ok(Some(Box::new(Lock { id, used })))
    }
}

struct Lock {
    id: i64,
    used: Used<PgConnection>,
}

#[async_trait]
impl Held for Lock {
    async fn release(mut self: Box<Self>) -> Outcome {
        let query = sqlx::query("SELECT pg_advisory_unlock($1)").bind(self.id);
        let released: bool = query.fetch_one(&mut self.used.conn).await?.try_get(0)?;
        self.used.put_back();
        released.then_some(()).ok_or_else(|| "it was held".into())
    }
}
