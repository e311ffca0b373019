//! [`Inspect`]: who holds what, as the server shows it, and taking it away.

mod diagnose;
mod locks;
mod rows;
mod settings;

use async_trait::async_trait;
use leasehold_core::backend::{log_released, no_token};
use leasehold_core::{
    Error, ErrorKind, FencingToken, Finding, Holding, HoldingQuery, Inspect, Key, Kind, Result,
};

use crate::backend::PostgresBackend;
use crate::error::NAME;
use crate::store::Store;

#[async_trait]
impl Inspect for PostgresBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let store = self.store();
        let asked = async {
            open(store)?;
            let mut holdings = Vec::new();
            if query.wants(Kind::Lock) || query.wants(Kind::Claim) {
                holdings.extend(locks::held(store, query).await?);
            }
            if query.wants(Kind::Lease) {
                holdings.extend(rows::leases(store, query).await?);
            }
            if query.wants(Kind::Dedupe) {
                holdings.extend(rows::entries(store, query).await?);
            }
            Ok(query.arrange(holdings))
        };
        asked.await.map_err(|error: Error| error.at(NAME, "holdings"))
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let store = self.store();
        let forced = async {
            open(store)?;
            match kind {
                Kind::Lock | Kind::Claim => locks::end_holder(store, kind, key).await,
                Kind::Lease => rows::delete_lease(store, key).await,
                Kind::Dedupe => rows::delete_entry(store, key).await,
            }
        };
        let displaced = forced.await.map_err(|error| error.at(NAME, "force_release").on(key))?;
        if let Some(displaced) = &displaced {
            displaced.log_displaced(NAME);
        }
        Ok(displaced)
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        let store = self.store();
        let released = async {
            open(store)?;
            match kind {
                Kind::Lease => rows::release_lease(store, key, token).await,
                Kind::Lock | Kind::Claim | Kind::Dedupe => Err(no_token(kind)),
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
        let store = self.store();
        let looked = async {
            open(store)?;
            diagnose::look(store).await
        };
        looked.await.map_err(|error| error.at(NAME, "diagnose"))
    }
}

fn open(store: &Store) -> Result<()> {
    if *store.closed.borrow() {
        return Err(Error::new(ErrorKind::Unavailable, "the handle is closed"));
    }
    Ok(())
}
