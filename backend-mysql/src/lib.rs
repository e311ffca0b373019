//! leasehold on `MySQL` and `MariaDB`.

mod backend;
mod builder;
mod claim;
mod dedupe;
mod error;
mod flavour;
mod lease;
mod names;
mod rows;
mod schema;
mod session;
mod store;
mod wake;
mod watch;

pub use backend::MySqlBackend;
pub use builder::MySqlBuilder;
pub use flavour::{Flavour, ServerInfo};
pub use schema::SCHEMA;
