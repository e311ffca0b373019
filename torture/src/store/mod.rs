//! The store under torture: how clients open it, the numbers that they write on it, and what the
//! controller does behind their backs.

mod memory;
mod mysql;
mod postgres;
mod redis;
mod sqlite;

use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold::{Backend, Claim, Error, ErrorKind, LeaseGuard, Result};
use leasehold_conformance::servers::{Kind, Server};
use serde::{Deserialize, Serialize};

pub use memory::MemoryLab;

/// The namespace of everything.
pub const NAMESPACE: &str = "torture";
/// A session that gave no sign of life for so long counts as lost: the sum of the two is the bound.
pub(crate) const KEEPALIVE: Duration = Duration::from_millis(500);
/// See [`KEEPALIVE`].
pub(crate) const ANSWER: Duration = Duration::from_secs(2);
/// The ttl of named locks and claims where the store has no sessions.
pub(crate) const LOCK_TTL: Duration = Duration::from_secs(4);

/// Which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum StoreKind {
    Memory,
    Sqlite,
    Postgres,
    Mysql,
    Mariadb,
    Redis,
    Valkey,
}

impl StoreKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Memory,
        Self::Sqlite,
        Self::Postgres,
        Self::Mysql,
        Self::Mariadb,
        Self::Redis,
        Self::Valkey,
    ];

    /// How long after its loss a named lock may be believed in: `keepalive + answer`; none where
    /// it has a deadline, which the holder keeps to.
    pub fn loss_bound(self) -> Duration {
        match self {
            Self::Memory | Self::Sqlite | Self::Postgres | Self::Mysql | Self::Mariadb => {
                KEEPALIVE + ANSWER
            }
            Self::Redis | Self::Valkey => Duration::ZERO,
        }
    }

    fn server(self) -> Option<Kind> {
        Some(match self {
            Self::Memory | Self::Sqlite => return None,
            Self::Postgres => Kind::Postgres15,
            Self::Mysql => Kind::MySql,
            Self::Mariadb => Kind::MariaDb,
            Self::Redis => Kind::Redis7,
            Self::Valkey => Kind::Valkey,
        })
    }
}

impl Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Mysql => "mysql",
            Self::Mariadb => "mariadb",
            Self::Redis => "redis",
            Self::Valkey => "valkey",
        })
    }
}

/// What a client does on a store that other processes share.
#[async_trait]
pub trait Shop: fmt::Debug + Send + Sync + 'static {
    /// Opens a handle, as this client.
    async fn open(&self, client: &str) -> Result<Arc<dyn Backend>>;

    /// Reads a number on a claim's transaction; 0 if it was never written.
    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64>;

    /// Verifies a lease on a claim's transaction.
    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()>;

    /// Writes a number on a claim's transaction.
    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()>;
}

/// What the controller does on it.
#[async_trait]
pub trait Lab: fmt::Debug + Send + Sync + 'static {
    /// The store as a client sees it.
    fn shop(&self) -> Arc<dyn Shop>;

    /// Creates the tables, and the numbers of these names.
    async fn prepare(&self, names: &[String]) -> Result<()>;

    /// The server, if there is one that can be killed and paused.
    fn server(&self) -> Option<&Server> {
        None
    }

    /// Where clients find it; none if they must live in this process.
    fn url(&self) -> Option<String> {
        self.server().map(Server::url)
    }

    /// Ends the sessions of a client, as an administrator would. False: this store cannot.
    async fn end_sessions(&self, client: &str) -> Result<bool>;

    /// What clients that are gone have left behind: locks, sessions, transactions, leases that
    /// live, keys without a ttl.
    async fn leftovers(&self) -> Result<Vec<String>>;

    /// How much is there of what may not grow, by the server's own account.
    async fn census(&self) -> Result<Census>;

    /// Kills the store and starts it again. Blocks.
    ///
    /// # Errors
    /// If it does not come back.
    fn restart(&self) -> Result<()> {
        if let Some(server) = self.server() {
            server.kill().and_then(|()| server.restart()).map_err(failed)?;
        }
        Ok(())
    }
}

/// How much there is on a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Connections of clients, the controller's left out; none where there is no server.
    pub connections: Option<u64>,
    /// The library's keys or rows; none where the store is in the clients' memory.
    pub entries: Option<u64>,
}

/// Joins the store at a URL, as a client.
///
/// # Errors
/// If it lives in another process's memory.
pub fn join(kind: StoreKind, url: &str) -> Result<Arc<dyn Shop>> {
    Ok(match kind {
        StoreKind::Memory => return Err(failed("a store in memory has no url")),
        StoreKind::Sqlite => Arc::new(sqlite::SqliteShop::new(url)),
        StoreKind::Postgres => Arc::new(postgres::PgShop::new(url)),
        StoreKind::Mysql | StoreKind::Mariadb => Arc::new(mysql::MySqlShop::new(url)),
        StoreKind::Redis | StoreKind::Valkey => Arc::new(redis::RedisShop::new(url)),
    })
}

/// Starts a private server, or a store in memory. Blocks.
///
/// # Errors
/// If the server is not to be had, or does not start.
pub fn start(kind: StoreKind) -> Result<Arc<dyn Lab>> {
    start_with(kind, &[])
}

/// As [`start`], with further arguments for a server's program.
///
/// # Errors
/// As [`start`].
pub fn start_with(kind: StoreKind, more: &[&str]) -> Result<Arc<dyn Lab>> {
    let Some(server) = kind.server() else {
        return Ok(match kind {
            StoreKind::Sqlite => Arc::new(sqlite::SqliteLab::new()?),
            _ => Arc::new(MemoryLab::default()),
        });
    };
    // what the store promises to keep is kept across a kill
    let arguments: &[&str] = match kind {
        StoreKind::Memory | StoreKind::Sqlite | StoreKind::Postgres => &[],
        StoreKind::Mysql | StoreKind::Mariadb => &mysql::ARGUMENTS,
        StoreKind::Redis | StoreKind::Valkey => &["--appendonly", "yes", "--appendfsync", "always"],
    };
    let arguments = [arguments, more].concat();
    let server = Server::start_with(server, &arguments).map_err(failed)?;
    Ok(match kind {
        StoreKind::Memory | StoreKind::Sqlite | StoreKind::Postgres => {
            Arc::new(postgres::PgLab::new(server))
        }
        StoreKind::Mysql | StoreKind::Mariadb => Arc::new(mysql::MySqlLab::new(server)),
        StoreKind::Redis | StoreKind::Valkey => Arc::new(redis::RedisLab::new(server)),
    })
}

/// An error of the run's own.
#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
pub(crate) fn failed(error: impl ToString) -> Error {
    Error::new(ErrorKind::Backend, error.to_string())
}
