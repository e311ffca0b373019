//! fred by hand: `SET NX PX`, compare and delete, and a message for who waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_peers::{Contender, Held, Locker, Outcome};
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use leasehold_redis::fred::types::config::UnresponsiveConfig;
use leasehold_redis::fred::types::scripts::Script;
use tokio::time::{Instant, timeout_at};

/// The ttl of all contenders, in milliseconds.
const TTL_MS: i64 = 30_000;
/// Compare and delete, as everybody writes it.
const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";
/// The same, telling a waiter.
const UNLOCK_AND_TELL: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
     redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '1') return 1 end return 0";

/// The driver alone, on one pipelined connection: `SET NX PX`, and a script that compares and
/// deletes. Nothing renews a lock.
#[derive(Debug)]
pub struct RawFred {
    url: String,
    tells: bool,
}

impl RawFred {
    /// As few commands as can be: nobody can wait.
    pub fn silent(url: &str) -> Self {
        Self { url: url.to_owned(), tells: false }
    }

    /// A release publishes; who waits subscribes, on a second connection.
    pub fn telling(url: &str) -> Self {
        Self { url: url.to_owned(), tells: true }
    }
}

#[async_trait]
impl Contender for RawFred {
    fn name(&self) -> &'static str {
        if self.tells { "raw fred 10.1 with publish/subscribe" } else { "raw fred 10.1" }
    }

    fn notes(&self) -> &'static str {
        if self.tells {
            "as raw fred; a release publishes, and all who wait ask again"
        } else {
            "SET NX PX, compare and delete by a script, one pipelined connection; nobody can wait"
        }
    }

    async fn open(&self) -> Outcome<Arc<dyn Locker>> {
        let client = client(&self.url).await?;
        let script = Script::from_lua(if self.tells { UNLOCK_AND_TELL } else { UNLOCK });
        script.load(&client).await?;
        let ears = if self.tells {
            let listener = self::client(&self.url).await?;
            Some(Arc::new(Ears { listener, waiting: Mutex::default() }))
        } else {
            None
        };
        Ok(Arc::new(Raw { client, script, ears }))
    }
}

/// A client that does not wait for ever, as leasehold's own: a command has a time limit, and a
/// connection on which nothing is answered is given up.
async fn client(url: &str) -> Outcome<Client> {
    let limit = Duration::from_secs(5);
    let client = Builder::from_config(Config::from_url(url)?)
        .with_performance_config(|performance| performance.default_command_timeout = limit)
        .with_connection_config(|connection| {
            connection.unresponsive =
                UnresponsiveConfig { max_timeout: Some(limit), interval: Duration::from_secs(1) };
        })
        .build()?;
    client.init().await?;
    Ok(client)
}

struct Raw {
    client: Client,
    script: Script,
    ears: Option<Arc<Ears>>,
}

impl Raw {
    async fn set(&self, name: &str, owner: &str) -> Outcome<bool> {
        let expire = Some(Expiration::PX(TTL_MS));
        let set = self.client.set(name, owner, expire, Some(SetOptions::NX), false);
        let set: Option<String> = set.await?;
        Ok(set.is_some())
    }

    /// Whether it was had within the wait.
    async fn set_when_told(
        &self,
        ears: &Ears,
        name: &str,
        owner: &str,
        wait: Duration,
    ) -> Outcome<bool> {
        let until = Instant::now() + wait;
        let mut messages = ears.listener.message_rx();
        loop {
            if self.set(name, owner).await? {
                return Ok(true);
            }
            loop {
                match timeout_at(until, messages.recv()).await {
                    Ok(message) if message.as_ref().is_ok_and(|it| it.channel != name) => {}
                    // where messages were missed, one of them may have been ours
                    Ok(_) => break,
                    Err(_) => return Ok(false),
                }
            }
        }
    }
}

#[async_trait]
impl Locker for Raw {
    async fn lock(&self, name: &str, wait: Duration) -> Outcome<Option<Box<dyn Held>>> {
        let owner = format!("{:032x}", rand::random::<u128>());
        let mut had = self.set(name, &owner).await?;
        if !had && !wait.is_zero() {
            let ears = self.ears.as_ref().ok_or("nobody can wait without publish/subscribe")?;
            ears.open(name).await?;
            let told = self.set_when_told(ears, name, &owner, wait).await;
            ears.shut(name).await?;
            had = told?;
        }
        Ok(had.then(|| {
            let (client, script) = (self.client.clone(), self.script.clone());
            Box::new(Lock { client, script, name: name.to_owned(), owner }) as Box<dyn Held>
        }))
    }
}

/// Who listens to what.
struct Ears {
    listener: Client,
    /// How many wait, by channel.
    waiting: Mutex<HashMap<String, usize>>,
}

impl Ears {
    async fn open(&self, name: &str) -> Outcome {
        *self.lock().entry(name.to_owned()).or_default() += 1;
        // again for each who waits: when it has answered, it listens
        Ok(self.listener.subscribe(name).await?)
    }

    async fn shut(&self, name: &str) -> Outcome {
        let last = {
            let mut waiting = self.lock();
            let count = waiting.get_mut(name).ok_or("somebody waits")?;
            *count -= 1;
            *count == 0 && waiting.remove(name).is_some()
        };
        if last {
            self.listener.unsubscribe(name).await?;
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Lock {
    client: Client,
    script: Script,
    name: String,
    owner: String,
}

#[async_trait]
impl Held for Lock {
    async fn release(self: Box<Self>) -> Outcome {
        let freed: i64 = self.script.evalsha(&self.client, &self.name, &self.owner).await?;
        (freed == 1).then_some(()).ok_or_else(|| "it was held".into())
    }
}
