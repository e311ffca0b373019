//! `mysql://user:password@host:port/database`, or `mariadb://`.

use std::sync::Arc;

use leasehold_core::{Backend, Result};
use leasehold_mysql::MySqlBackend;

use crate::url::StoreUrl;

pub(super) const OURS: &[&str] = &[
    "table_prefix",
    "user_locks",
    "leased_lock_ttl",
    "own_connections",
    "keepalive",
    "answer",
    "max_held",
    "max_waiters",
];
/// Those of `mysql_async`.
const DRIVERS: &[&str] = &[
    "pool_min",
    "pool_max",
    "inactive_connection_ttl",
    "ttl_check_interval",
    "conn_ttl",
    "abs_conn_ttl",
    "abs_conn_ttl_jitter",
    "tcp_keepalive",
    "max_allowed_packet",
    "wait_timeout",
    "enable_cleartext_plugin",
    "reset_connection",
    "tcp_nodelay",
    "stmt_cache_size",
    "prefer_socket",
    "secure_auth",
    "client_found_rows",
    "socket",
    "compression",
    "require_ssl",
    "verify_ca",
    "verify_identity",
    "built_in_roots",
];

pub(super) async fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    url.check(OURS, DRIVERS)?;
    let mut builder = MySqlBackend::builder();
    if let Some(namespace) = url.text("namespace") {
        builder = builder.namespace(namespace);
    }
    if url.text("app").is_some() {
        builder = builder.holder(url.holder());
    }
    if let Some(prefix) = url.text("table_prefix") {
        builder = builder.table_prefix(prefix);
    }
    if url.value("user_locks", "true or false")? == Some(false) {
        builder = builder.without_user_locks();
    }
    if let Some(ttl) = url.duration("leased_lock_ttl")? {
        builder = builder.leased_lock_ttl(ttl);
    }
    if let Some(connections) = url.value("own_connections", "a number")? {
        builder = builder.own_connections(connections);
    }
    if let Some(keepalive) = url.duration("keepalive")? {
        builder = builder.keepalive(keepalive);
    }
    if let Some(answer) = url.duration("answer")? {
        builder = builder.answer(answer);
    }
    if let Some(locks) = url.value("max_held", "a number")? {
        builder = builder.max_held(locks);
    }
    if let Some(waiters) = url.value("max_waiters", "a number")? {
        builder = builder.max_waiters(waiters);
    }
    Ok(Arc::new(builder.connect(&url.for_driver("mysql", DRIVERS)).await?))
}
