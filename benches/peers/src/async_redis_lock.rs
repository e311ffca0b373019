//! async-redis-lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::async_redis_lock::{Error, Lock, Locker as Handle, Options};
use async_trait::async_trait;

use crate::{Contender, Held, Locker, Outcome, TTL};

/// async-redis-lock 0.4: one connection, Lua for each step, and asking again every 100 ms, its
/// default. A task a lock renews it at a third of the ttl, as its documentation recommends.
///
/// `is_lost` is to be asked, it does not tell; there is no fencing token.
pub(crate) struct AsyncRedisLock {
    url: String,
}

impl AsyncRedisLock {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

impl fmt::Debug for AsyncRedisLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AsyncRedisLock")
    }
}

#[async_trait]
impl Contender for AsyncRedisLock {
    fn name(&self) -> &'static str {
        "async-redis-lock 0.4.0"
    }

    fn notes(&self) -> &'static str {
        "asks again every 100 ms; a task and a request a lock for its renewal; loss is to be asked \
         for, no fencing token"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        Ok(Arc::new(One(Handle::from_redis_url(&self.url).await?)))
    }
}

struct One(Handle);

#[async_trait]
impl Locker for One {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let options = Options::new().ttl(TTL).extend(TTL / 3).timeout(Some(wait));
        match self.0.acquire_with_options(&options, name).await {
            Ok(lock) => Ok(Some(Box::new(Guard(lock)))),
            Err(Error::Timeout) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

struct Guard(Lock);

#[async_trait]
impl Held for Guard {
    async fn release(self: Box<Self>) -> Outcome {
        Ok(self.0.release().await?)
    }
}
