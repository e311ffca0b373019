//! rslock: Redlock, here with one server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::rslock::{Lock, LockError, LockManager};
use async_trait::async_trait;
use tokio::time::timeout;

use crate::{Contender, Held, Locker, Outcome, TTL};

/// rslock 0.10 with one server and the retries of its defaults: three, after a random time of up
/// to 200 ms, and then anew, as its `acquire` does.
///
/// Nothing renews a lock by itself, a holder is not told that it is over, and there is no fencing
/// token. A refused attempt sends the unlock script as well.
pub(crate) struct RsLock {
    url: String,
}

impl RsLock {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

impl fmt::Debug for RsLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RsLock")
    }
}

#[async_trait]
impl Contender for RsLock {
    fn name(&self) -> &'static str {
        "rslock 0.10.0"
    }

    fn notes(&self) -> &'static str {
        "asks again after 0 to 200 ms, with an unlock after each refusal; no renewal by itself, \
         no notice of loss, no fencing token"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let waits = LockManager::new(vec![self.url.as_str()]);
        let mut once = waits.clone();
        once.set_retry(1, Duration::ZERO);
        Ok(Arc::new(Managers { waits, once }))
    }
}

/// Both share a connection.
struct Managers {
    waits: LockManager,
    once: LockManager,
}

#[async_trait]
impl Locker for Managers {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let lock = if wait.is_zero() {
            match self.once.lock(name, TTL).await {
                Ok(lock) => lock,
                Err(LockError::Unavailable) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        } else {
            match timeout(wait, self.waits.acquire(name, TTL)).await {
                Ok(guard) => guard?.lock,
                Err(_) => return Ok(None),
            }
        };
        Ok(Some(Box::new(Guard(lock))))
    }
}

struct Guard(Lock);

#[async_trait]
impl Held for Guard {
    async fn release(self: Box<Self>) -> Outcome {
        self.0.release().await;
        Ok(())
    }
}
