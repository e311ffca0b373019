//! distributed-lock: its three stores share the traits of `distributed-lock-core`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use distributed_lock_core::error::LockError;
use distributed_lock_core::traits::{DistributedLock as Lock, LockHandle, LockProvider};
use distributed_lock_mysql::MySqlLockProvider;
use distributed_lock_postgres::PostgresLockProvider;
use distributed_lock_redis::RedisLockProvider;
use tokio::time::{Instant, sleep};

use crate::{Contender, Held, Locker, Outcome, Store};

/// How soon the Redis one is asked again: its documentation has no recommendation, and this is
/// ten times as often as the other libraries ask.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// distributed-lock 0.2, each store with the defaults of its builder: a pool of ten connections
/// on Postgres and MySQL, one connection on Redis.
///
/// On Postgres and MySQL it waits on the server, a connection a lock and a waiter, and a lock on
/// Postgres is five statements (`BEGIN`, `SAVEPOINT`, `SET LOCAL lock_timeout`, the lock,
/// `COMMIT`) unless it asks once. On Redis a lock lives 30 s and is renewed at once and then every
/// 10 s, each by a task of its own, and `acquire` with a timeout does not wait: it answers
/// "timed out" after the first refusal. There are no fencing tokens; `lost_token` never changes
/// on Postgres, nor on MySQL without a keepalive.
pub(crate) struct DistributedLock {
    store: Store,
    url: String,
}

impl DistributedLock {
    pub(crate) fn new(store: Store, url: &str) -> Self {
        Self { store, url: url.to_owned() }
    }
}

impl fmt::Debug for DistributedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedLock").field("store", &self.store).finish()
    }
}

#[async_trait]
impl Contender for DistributedLock {
    fn name(&self) -> &'static str {
        "distributed-lock 0.2.0"
    }

    fn notes(&self) -> &'static str {
        match self.store {
            Store::Postgres => {
                "a connection of its pool of 10 for each lock that is held or waited for, five \
                 statements for a lock that may wait; no notice of loss, no fencing token"
            }
            Store::MySql => {
                "a connection of its pool of 10 for each lock that is held or waited for; no \
                 notice of loss unless a keepalive is set, no fencing token"
            }
            Store::Redis => {
                "ttl 30 s, a renewal right after each acquisition and then every 10 s, by a task \
                 and a request a lock; its acquire does not wait, so it is asked again here every \
                 10 ms; no fencing token"
            }
        }
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let url = self.url.as_str();
        Ok(match self.store {
            Store::Postgres => {
                let builder = PostgresLockProvider::builder().connection_string(url);
                Arc::new(Waits(builder.build().await?))
            }
            Store::MySql => {
                let builder = MySqlLockProvider::builder().connection_string(url);
                Arc::new(Waits(builder.build().await?))
            }
            Store::Redis => {
                Arc::new(AsksAgain(RedisLockProvider::builder().url(url).build().await?))
            }
        })
    }
}

/// A provider whose locks wait by themselves.
struct Waits<P>(P);

#[async_trait]
impl<P> Locker for Waits<P>
where
    P: LockProvider + Send + Sync,
    P::Lock: Send + Sync,
    <P::Lock as Lock>::Handle: 'static,
{
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let lock = self.0.create_lock(name);
        if wait.is_zero() {
            return Ok(held(lock.try_acquire().await?));
        }
        match lock.acquire(Some(wait)).await {
            Ok(handle) => Ok(held(Some(handle))),
            Err(LockError::Timeout(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A provider whose locks do not.
struct AsksAgain<P>(P);

#[async_trait]
impl<P> Locker for AsksAgain<P>
where
    P: LockProvider + Send + Sync,
    P::Lock: Send + Sync,
    <P::Lock as Lock>::Handle: 'static,
{
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let until = Instant::now() + wait;
        let lock = self.0.create_lock(name);
        loop {
            if let Some(handle) = lock.try_acquire().await? {
                return Ok(held(Some(handle)));
            }
            if Instant::now() + ASK_AGAIN > until {
                return Ok(None);
            }
            sleep(ASK_AGAIN).await;
        }
    }
}

fn held<H: LockHandle + 'static>(handle: Option<H>) -> Option<Box<dyn Held>> {
    handle.map(|handle| Box::new(Handle(handle)) as Box<dyn Held>)
}

struct Handle<H>(H);

#[async_trait]
impl<H: LockHandle> Held for Handle<H> {
    async fn release(self: Box<Self>) -> Outcome {
        Ok(self.0.release().await?)
    }
}
