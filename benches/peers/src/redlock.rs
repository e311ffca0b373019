//! redlock: Redlock without async, here with one server.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redlock::{Lock, RedLock};
use async_trait::async_trait;
use tokio::task::spawn_blocking;

use crate::{Contender, Held, Locker, Outcome, TTL};

/// redlock 2 with one server. Its calls block, so each runs on a thread for such work. It asks
/// three times, each after a random time of up to 200 ms, and then anew until the wait is over,
/// as its documentation's loop does.
///
/// Every command opens a connection of its own. Nothing renews a lock by itself, a holder is not
/// told that it is over, and there is no fencing token.
pub(crate) struct Redlock {
    url: String,
}

impl Redlock {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Redlock")
    }
}

#[async_trait]
impl Contender for Redlock {
    fn name(&self) -> &'static str {
        "redlock 2.0.0"
    }

    fn notes(&self) -> &'static str {
        "blocks a thread, opens a connection for each command, asks again after 0 to 200 ms; no \
         renewal by itself, no notice of loss, no fencing token"
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let waits = RedLock::new(vec![self.url.as_str()]);
        let mut once = waits.clone();
        once.set_retry(1, 1);
        Ok(Arc::new(Managers { waits: Arc::new(waits), once: Arc::new(once) }))
    }
}

struct Managers {
    waits: Arc<RedLock>,
    once: Arc<RedLock>,
}

#[async_trait]
impl Locker for Managers {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let manager = if wait.is_zero() { self.once.clone() } else { self.waits.clone() };
        let name = name.to_owned();
        let lock = spawn_blocking(move || {
            let until = Instant::now() + wait;
            loop {
                if let Some(lock) = manager.lock(name.as_bytes(), TTL.as_millis() as usize)? {
                    let (resource, val) = (lock.resource, lock.val);
                    return Outcome::Ok(Some(Guard { manager, resource, val }));
                }
                if Instant::now() >= until {
                    return Ok(None);
                }
            }
        });
        Ok(lock.await??.map(|guard| Box::new(guard) as Box<dyn Held>))
    }
}

struct Guard {
    manager: Arc<RedLock>,
    resource: Vec<u8>,
    val: Vec<u8>,
}

#[async_trait]
impl Held for Guard {
    async fn release(self: Box<Self>) -> Outcome {
        let unlock = spawn_blocking(move || {
            let Guard { manager, resource, val } = *self;
            // the documented lock borrows its manager, which an async caller can't keep
            manager.unlock(&Lock { lock_manager: &manager, resource, val, validity_time: 0 });
        });
        Ok(unlock.await?)
    }
}
