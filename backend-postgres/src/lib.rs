#![doc = include_str!("../README.md")]

mod backend;
mod builder;
mod dial;
mod drivers;
mod error;
mod hashtext;
mod inspect;
mod keys;
mod lanes;
mod schema;
mod server;
mod sever;
mod sql;
mod store;

pub use backend::PostgresBackend;
pub use builder::{DEFAULT_LOCK_TABLE_SHARE, PostgresBuilder};
pub use hashtext::hashtext;
pub use keys::LockKind;
