//! leasehold on Redis and Valkey.

mod backend;
mod builder;
mod check;
mod claim;
mod conn;
mod dedupe;
mod error;
mod keys;
mod lease;
mod locks;
mod script;
mod tx;
mod wake;
mod writes;

pub use backend::RedisBackend;
pub use builder::Builder;
pub use fred;
pub use tx::RedisTx;

/// The commands that the server's user needs, for an `ACL SETUSER … +command`.
pub const LEAST_COMMANDS: &[&str] = &[
    "evalsha",
    "eval",
    "mget",
    "get",
    "set",
    "del",
    "pexpire",
    "pttl",
    "time",
    "type",
    "publish",
    "subscribe",
    "ping",
    "info",
    "client|id",
];
