#![doc = include_str!("../README.md")]

mod alive;
mod backend;
mod builder;
mod clock;
mod drivers;
mod error;
mod file;
mod inspect;
mod place;
mod schema;
mod store;

pub use backend::SqliteBackend;
pub use builder::{DEFAULT_WRITER_WAIT, SqliteBuilder};
