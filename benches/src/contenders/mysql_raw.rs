//! `mysql_async` by hand: `GET_LOCK` on a connection.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_peers::{Contender, Held, Locker, Outcome};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};

use super::pool::{Stack, Used};
use super::tcp;

/// The driver alone: a prepared statement to lock, on a connection that is then the lock's, and one
/// to unlock. It waits on the server, in its queue.
#[derive(Debug)]
pub struct RawMySql {
    opts: Opts,
}

impl RawMySql {
    /// On the server at `url`.
    ///
    /// # Errors
    /// If it is no URL of a MySQL.
    pub fn new(url: &str) -> Outcome<Self> {
        Ok(Self { opts: Opts::from_url(&tcp(url))? })
    }
}

#[async_trait]
impl Contender for RawMySql {
    fn name(&self) -> &'static str {
        "raw mysql_async 0.37"
    }

    fn notes(&self) -> &'static str {
        "GET_LOCK, prepared, on a connection for each lock that is held or waited for, of which it \
         has 64"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let stack = Stack::new(Conn::new(self.opts.clone()).await?);
        Ok(Arc::new(Raw { opts: self.opts.clone(), stack }))
    }
}

struct Raw {
    opts: Opts,
    stack: Stack<Conn>,
}

#[async_trait]
impl Locker for Raw {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let mut used = self.stack.take(async || Ok(Conn::new(self.opts.clone()).await?)).await?;
        // whole seconds, as MySQL has them
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        let granted: Option<Option<u8>> =
            used.conn.exec_first("SELECT GET_LOCK(?, ?)", (name, seconds)).await?;
        match granted.flatten() {
            Some(1) => Ok(Some(Box::new(Lock { name: name.to_owned(), used }))),
            Some(_) => {
                used.put_back();
                Ok(None)
            }
            None => Err("the server ended the wait".into()),
        }
    }
}

struct Lock {
    name: String,
    used: Used<Conn>,
}

#[async_trait]
impl Held for Lock {
    async fn release(mut self: Box<Self>) -> Outcome {
        let released: Option<Option<u8>> =
            self.used.conn.exec_first("SELECT RELEASE_LOCK(?)", (&self.name,)).await?;
        self.used.put_back();
        (released.flatten() == Some(1)).then_some(()).ok_or_else(|| "it was held".into())
    }
}
