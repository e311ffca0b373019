//! What the benchmarks compare, behind one interface: a [`Contender`] opens handles as the
//! processes of a service have them, and a handle locks names.
//!
//! The libraries that a user could take instead are implemented here, each as its documentation
//! says; the raw drivers and leasehold itself are in `leasehold-benches`. Nothing that a user of
//! leasehold depends on depends on this crate.

mod async_redis_lock;
mod distributed_lock;
mod redlock;
mod rslock;
mod sqlx_advisory;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use self::async_redis_lock::AsyncRedisLock;
use self::distributed_lock::DistributedLock;
use self::redlock::Redlock;
use self::rslock::RsLock;
use self::sqlx_advisory::SqlxAdvisory;

/// The result of what may fail at any step of a benchmark.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A way to lock names on one store.
#[async_trait]
pub trait Contender: Debug + Send + Sync {
    /// As the report prints it, with the version: `distributed-lock 0.2.0`.
    fn name(&self) -> &'static str;

    /// What a reader of the figures must know: how it waits, what it costs the server, what it
    /// does not promise. One or two short sentences, or nothing.
    fn notes(&self) -> &'static str {
        ""
    }

    /// A handle as one process of a service has it, with connections of its own.
    async fn open(&self) -> Outcome<Arc<dyn Locker>>;
}

/// A handle that locks names.
#[async_trait]
pub trait Locker: Send + Sync {
    /// Takes `name`, waiting for at most `wait`; [`Duration::ZERO`] asks once. `None` if it is
    /// still held by somebody else.
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>>;
}

/// A name that is held.
#[async_trait]
pub trait Held: Send {
    /// Gives it back: others can have it when this returns.
    async fn release(self: Box<Self>) -> Outcome;
}

/// What kind of server a peer must speak with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// PostgreSQL.
    Postgres,
    /// MySQL or MariaDB.
    MySql,
    /// Redis or Valkey.
    Redis,
}

/// The libraries that can lock names on the server at `url`, each set as its documentation says.
pub fn peers(store: Store, url: &str) -> Vec<Box<dyn Contender>> {
    let mut peers: Vec<Box<dyn Contender>> = vec![Box::new(DistributedLock::new(store, url))];
    match store {
        Store::Postgres => peers.push(Box::new(SqlxAdvisory::new(url))),
        Store::MySql => {}
        Store::Redis => {
            peers.push(Box::new(RsLock::new(url)));
            peers.push(Box::new(AsyncRedisLock::new(url)));
            peers.push(Box::new(Redlock::new(url)));
        }
    }
    peers
}

/// Connections of a peer's pool: what the pools hold by default.
const POOL: u32 = 10;

/// How long a peer's lock with a ttl lives: as long as leasehold's by default.
const TTL: Duration = Duration::from_secs(30);
