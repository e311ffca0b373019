#![doc = include_str!("../README.md")]

pub use leasehold_core::*;

mod backends;
pub mod recipes;
mod store;
mod url;

pub use store::{Store, connect};
pub use url::redacted;

#[cfg(feature = "mysql")]
pub use leasehold_mysql as mysql;
#[cfg(feature = "postgres")]
pub use leasehold_postgres as postgres;
#[cfg(feature = "redis")]
pub use leasehold_redis as redis;
#[cfg(feature = "sqlite")]
pub use leasehold_sqlite as sqlite;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
