//! [`Docs`]: the services' own data, small texts by name, on the same store as the locks.
//!
//! A real service has its own tables and writes its own SQL in `claim.tx::<…>()`; these two have
//! one table, so that each backend takes a page.

mod memory;
mod mysql;
mod postgres;
mod redis;
mod sqlite;

use std::fmt::Debug;

use async_trait::async_trait;
use leasehold::{Claim, ClaimOptions, Error, ErrorKind, Keys, LeaseGuard, Result, Store};

/// Small texts by name, read and written on the transaction of a claim.
#[async_trait]
pub trait Docs: Debug + Send + Sync + 'static {
    /// Makes the table, and ends the claim.
    async fn create(&self, claim: Claim) -> Result<()>;
    /// A text.
    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>>;
    /// Those whose names begin with `prefix`, in order. On Redis before the first write only.
    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>>;
    /// Writes a text.
    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()>;
    /// Fails unless the lease is held, and keeps it until the transaction ends.
    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()>;
}

/// The data on a store; its table is made if it is missing.
///
/// # Errors
/// Those of the store, and [`ErrorKind::Unsupported`] for a store that is not known here.
///
/// # Cancel safety
/// Safe.
pub async fn open(store: &Store) -> Result<Box<dyn Docs>> {
    let docs: Box<dyn Docs> = match store.name() {
        "memory" => Box::new(memory::MemoryDocs),
        "postgres" => Box::new(postgres::PostgresDocs),
        "mysql" => Box::new(mysql::MySqlDocs),
        "redis" => Box::new(redis::RedisDocs),
        "sqlite" => Box::new(sqlite::SqliteDocs),
        other => {
            let detail = format!("the examples keep no data on {other} yet");
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
    };
    docs.create(claim(store, &["create the table"]).await?).await?;
    Ok(docs)
}

/// Claims names that must be to be had within the usual wait; none of them is a plain transaction.
///
/// # Errors
/// [`ErrorKind::Unavailable`] if others held one for so long.
///
/// # Cancel safety
/// Safe.
pub async fn claim(store: &Store, names: &[&str]) -> Result<Claim> {
    let claimed = store.claim(&Keys::new(names)?, ClaimOptions::default()).await?;
    claimed.ok_or_else(|| {
        Error::new(ErrorKind::Unavailable, format!("others hold {names:?} for too long"))
    })
}

pub(crate) fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Backend, "the service's own statement failed").with_source(error)
}
