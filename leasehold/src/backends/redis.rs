//! `redis://user:password@host:port/database`, with `s`, `-cluster`, `-sentinel`; or `valkey`.

use std::sync::Arc;

use leasehold_core::{Backend, Result};
use leasehold_redis::RedisBackend;

use crate::url::StoreUrl;

pub(super) const OURS: &[&str] = &[
    "cluster_tag",
    "connections",
    "wait_replicas",
    "allow_eviction",
    "lock_ttl",
    "claim_ttl",
    "command_limit",
    "keyspace_events",
];
/// Those of fred.
const DRIVERS: &[&str] = &["node", "sentinelServiceName", "sentinelUsername", "sentinelPassword"];

pub(super) async fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    url.check(OURS, DRIVERS)?;
    let mut builder = RedisBackend::builder();
    if let Some(namespace) = url.text("namespace") {
        builder = builder.namespace(namespace);
    }
    if url.text("app").is_some() {
        builder = builder.holder(url.holder());
    }
    if let Some(tag) = url.text("cluster_tag") {
        builder = builder.cluster_tag(tag);
    }
    if let Some(connections) = url.value("connections", "a number")? {
        builder = builder.connections(connections);
    }
    if let Some(replicas) = url.value("wait_replicas", "a number")? {
        builder = builder.wait_replicas(replicas);
    }
    if let Some(allow) = url.value("allow_eviction", "true or false")? {
        builder = builder.allow_eviction(allow);
    }
    if let Some(ttl) = url.duration("lock_ttl")? {
        builder = builder.lock_ttl(ttl);
    }
    if let Some(ttl) = url.duration("claim_ttl")? {
        builder = builder.claim_ttl(ttl);
    }
    if let Some(limit) = url.duration("command_limit")? {
        builder = builder.command_limit(limit);
    }
    if let Some(listen) = url.value("keyspace_events", "true or false")? {
        builder = builder.keyspace_events(listen);
    }
    let scheme = url.scheme.replace("valkey", "redis");
    Ok(Arc::new(builder.connect(&url.for_driver(&scheme, DRIVERS)).await?))
}
