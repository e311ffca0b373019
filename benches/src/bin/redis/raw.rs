//! What one would write with fred and without a library.

use std::time::Duration;

use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use leasehold_redis::fred::types::config::UnresponsiveConfig;
use leasehold_redis::fred::types::scripts::Script;

use crate::{Outcome, TTL_MS};

/// Compare and delete, as everybody writes it.
const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";
/// The same, telling a waiter.
const UNLOCK_AND_TELL: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
     redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '1') return 1 end return 0";

/// A client that does not wait for ever, as the handle's own: a command has a time limit, and a
/// connection on which nothing is answered is given up.
pub(crate) async fn client(url: &str) -> Outcome<Client> {
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

/// What one would write without a library.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) client: Client,
    unlock: Script,
    tell: Script,
}

impl Raw {
    pub(crate) async fn connect(url: &str) -> Outcome<Self> {
        let client = client(url).await?;
        let (unlock, tell) = (Script::from_lua(UNLOCK), Script::from_lua(UNLOCK_AND_TELL));
        unlock.load(&client).await?;
        tell.load(&client).await?;
        Ok(Self { client, unlock, tell })
    }

    pub(crate) async fn try_lock(&self, key: &str, owner: &str) -> Outcome<bool> {
        let expire = Some(Expiration::PX(TTL_MS));
        let set = self.client.set(key, owner, expire, Some(SetOptions::NX), false);
        let set: Option<String> = set.await?;
        Ok(set.is_some())
    }

    pub(crate) async fn unlock(&self, key: &str, owner: &str) -> Outcome {
        let freed: i64 = self.unlock.evalsha(&self.client, key, owner).await?;
        assert_eq!(freed, 1, "it was ours");
        Ok(())
    }

    pub(crate) async fn unlock_and_tell(&self, key: &str, owner: &str) -> Outcome {
        let freed: i64 = self.tell.evalsha(&self.client, key, owner).await?;
        assert_eq!(freed, 1, "it was ours");
        Ok(())
    }

    pub(crate) async fn cycle(&self, key: &str) -> Outcome {
        let owner = format!("{:032x}", leasehold_core::backend::Owner::fresh().0);
        assert!(self.try_lock(key, &owner).await?, "it was free");
        self.unlock(key, &owner).await
    }
}
