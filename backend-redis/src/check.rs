//! The look at a server before it is trusted with locks.

use std::collections::HashMap;
use std::time::Duration;

use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::config::{Options, Server};
use fred::types::{ClusterHash, CustomCommand, Value};
use leasehold_core::{Error, ErrorKind, Result};

use crate::error::{mapped, strange};
use crate::locks::number;

/// Older servers run scripts without flags, and have no sharded publish.
pub(crate) const OLDEST: u32 = 7;
/// 2025-01-01 in µs since 1970: a clock before it was never set.
pub(crate) const SANE: u64 = 1_735_689_600_000_000;

/// Refuses a server that cannot keep the promises.
pub(crate) async fn check(client: &Client, limit: Duration, evicting: bool) -> Result<()> {
    if !client.is_clustered() {
        return check_one(client, limit, evicting, None).await;
    }
    for server in client.active_connections() {
        check_one(client, limit, evicting, Some(server)).await?;
    }
    Ok(())
}

async fn check_one(
    client: &Client,
    limit: Duration,
    evicting: bool,
    server: Option<Server>,
) -> Result<()> {
    let at = server.as_ref().map(|server| format!(" at {server}")).unwrap_or_default();
    let clustered = server.is_some();
    let unsupported = |detail: String| Err(Error::new(ErrorKind::Unsupported, detail));
    let client = client.with_options(&Options {
        max_attempts: Some(1),
        timeout: Some(limit),
        cluster_node: server,
        ..Options::default()
    });
    let ask = |name: &'static str, args: Vec<Value>| {
        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        client.custom::<Value, Value>(command, args)
    };
    match ask("INFO", Vec::new()).await {
        Ok(info) => {
            let info = info.as_string().unwrap_or_default();
            let info: HashMap<&str, &str> =
                info.lines().filter_map(|line| line.trim_end().split_once(':')).collect();
            let said = |what: &str| info.get(what).copied().unwrap_or_default();
            let version = said("redis_version");
            let major = version.split('.').next().and_then(|major| major.parse().ok());
            if major.is_some_and(|major: u32| major < OLDEST) {
                return unsupported(format!(
                    "the server{at} is {version}, it must be {OLDEST}.0 or later"
                ));
            }
            // Valkey calls the mode by another name than Redis
            if !clustered && said("cluster_enabled") == "1" {
                return unsupported(
                    "the server is part of a cluster: connect to redis-cluster://".to_owned(),
                );
            }
            if said("role") == "slave" {
                return unsupported(format!("the server{at} is a replica: connect to the primary"));
            }
            let policy = said("maxmemory_policy");
            if !evicting && !policy.is_empty() && policy != "noeviction" {
                return unsupported(format!(
                    "the server{at} evicts keys (maxmemory-policy {policy}), so it may drop a \
                     lock that is held: set noeviction, or allow eviction and bear it"
                ));
            }
        }
        Err(error) if error.details().starts_with("NOPERM") => {
            tracing::warn!("the user may not run INFO: version, role and eviction are unchecked");
        }
        Err(error) => return Err(mapped(error)),
    }
    let time = ask("TIME", Vec::new()).await.map_err(mapped)?;
    let Value::Array(parts) = &time else {
        return Err(strange(&time));
    };
    let (Some(seconds), Some(micros)) = (number(parts.first()), number(parts.get(1))) else {
        return Err(strange(&time));
    };
    if seconds.saturating_mul(1_000_000).saturating_add(micros) < SANE {
        return unsupported(format!(
            "the clock of the server{at} is at {seconds} s since 1970: set it, tokens are made of it"
        ));
    }
    Ok(())
}
