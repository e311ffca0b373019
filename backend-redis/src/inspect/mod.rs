//! [`Inspect`]: who holds what, and taking it away.

mod diagnose;
mod found;
mod look;
mod node;
mod rights;

use async_trait::async_trait;
use leasehold_core::backend::{log_released, no_token};
use leasehold_core::{
    Error, ErrorKind, FencingToken, Finding, Holding, HoldingQuery, Inspect, Key, Kind, Result,
};

use crate::backend::RedisBackend;
use crate::conn::{Conn, NAME};

pub(crate) use diagnose::{of_server, unreached};

#[async_trait]
impl Inspect for RedisBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let asked = async {
            open(&self.conn)?;
            self.conn.holdings(query).await
        };
        asked.await.map_err(|error: Error| error.at(NAME, "holdings"))
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let forced = async {
            open(&self.conn)?;
            self.conn.displace(kind, key).await
        };
        let displaced = forced.await.map_err(|error| error.at(NAME, "force_release").on(key))?;
        if let Some(displaced) = &displaced {
            displaced.log_displaced(NAME);
        }
        Ok(displaced)
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        let released = async {
            open(&self.conn)?;
            match kind {
                Kind::Lock | Kind::Lease => self.conn.release_held(kind, key, token).await,
                // a claim has one token for all of its keys, and would be left with some
                Kind::Claim | Kind::Dedupe => Err(no_token(kind)),
            }
        };
        let released =
            released.await.map_err(|error| error.at(NAME, "release_by_token").on(key))?;
        if released {
            log_released(NAME, kind, key, token);
        }
        Ok(released)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let looked = async {
            open(&self.conn)?;
            self.conn.diagnose().await
        };
        looked.await.map_err(|error| error.at(NAME, "diagnose"))
    }
}

fn open(conn: &Conn) -> Result<()> {
    if conn.closing.is_cancelled() {
        return Err(Error::new(ErrorKind::Unavailable, "the handle is closed"));
    }
    Ok(())
}
