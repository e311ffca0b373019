//! leasehold.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Backend, Key, LeaseGuard, LeaseOptions, LockGuard, LockOptions};
use leasehold_mysql::MySqlBackend;
use leasehold_peers::{Contender, Held, Locker, Outcome};
use leasehold_postgres::PostgresBackend;
use leasehold_redis::RedisBackend;
use tokio::sync::OnceCell;

/// Handles of one namespace share their locks.
const NAMESPACE: &str = "bench";

/// Where the locks are.
#[derive(Clone, Debug)]
pub enum Opener {
    /// In a server, by its URL.
    Postgres(String),
    /// In a server, by its URL.
    MySql(String),
    /// In a server, by its URL.
    Redis(String),
}

impl Opener {
    /// A handle, as a service opens it.
    ///
    /// # Errors
    /// Those of connecting.
    pub async fn open(&self) -> Outcome<Arc<dyn Backend>> {
        Ok(match self {
            Self::Postgres(url) => {
                Arc::new(PostgresBackend::builder().namespace(NAMESPACE).connect(url).await?)
            }
            Self::MySql(url) => {
                Arc::new(MySqlBackend::builder().namespace(NAMESPACE).connect(url).await?)
            }
            Self::Redis(url) => {
                Arc::new(RedisBackend::builder().namespace(NAMESPACE).connect(url).await?)
            }
        })
    }
}

/// Which of the two kinds of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Of a session.
    Lock,
    /// With a ttl, renewed.
    Lease,
}

/// leasehold with its defaults.
#[derive(Debug)]
pub struct Leasehold {
    opener: Opener,
    which: Which,
    /// The tables are there.
    ready: OnceCell<()>,
}

impl Leasehold {
    /// Named locks, or leases.
    pub fn new(opener: Opener, which: Which) -> Self {
        Self { opener, which, ready: OnceCell::new() }
    }
}

#[async_trait]
impl Contender for Leasehold {
    fn name(&self) -> &'static str {
        match self.which {
            Which::Lock => concat!("leasehold ", env!("CARGO_PKG_VERSION"), " lock"),
            Which::Lease => concat!("leasehold ", env!("CARGO_PKG_VERSION"), " lease"),
        }
    }

    fn notes(&self) -> &'static str {
        match (self.which, &self.opener) {
            (Which::Lease, _) => {
                "ttl 30 s, all leases of a handle renewed together every 10 s; notice of loss; \
                 fencing token"
            }
            (Which::Lock, Opener::Postgres(_) | Opener::MySql(_)) => {
                "one connection for all locks, one for each key that is waited for; notice of \
                 loss; fencing token"
            }
            (Which::Lock, _) => "notice of loss; fencing token",
        }
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let backend = self.opener.open().await?;
        self.ready.get_or_try_init(|| backend.migrate()).await?;
        Ok(match self.which {
            Which::Lock => Arc::new(Locks(backend)),
            Which::Lease => Arc::new(Leases(backend)),
        })
    }
}

struct Locks(Arc<dyn Backend>);

#[async_trait]
impl Locker for Locks {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let guard = self.0.lock(&Key::new(name)?, LockOptions::default().wait(wait)).await?;
        Ok(guard.map(|guard| Box::new(Lock(guard)) as Box<dyn Held>))
    }
}

struct Lock(LockGuard);

#[async_trait]
impl Held for Lock {
    async fn release(self: Box<Self>) -> Outcome {
        Ok(self.0.release().await?)
    }
}

struct Leases(Arc<dyn Backend>);

#[async_trait]
impl Locker for Leases {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let guard = self.0.lease(&Key::new(name)?, LeaseOptions::default().wait(wait)).await?;
        Ok(guard.map(|guard| Box::new(HeldLease(guard)) as Box<dyn Held>))
    }
}

struct HeldLease(LeaseGuard);

#[async_trait]
impl Held for HeldLease {
    async fn release(self: Box<Self>) -> Outcome {
        Ok(self.0.release().await?)
    }
}
