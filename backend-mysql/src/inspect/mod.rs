//! [`Inspect`]: who holds what, as the server shows it, and taking it away.

mod diagnose;
mod locks;
mod privileges;
mod rows;
mod settings;

use async_trait::async_trait;
use leasehold_core::backend::{log_released, no_token};
use leasehold_core::{
    Error, FencingToken, Finding, HeldName, Holding, HoldingQuery, Inspect, Key, Kind, NameQuery,
    Result,
};

use crate::backend::{Locks, MySqlBackend};
use crate::error::BACKEND;
use crate::names;
use crate::threads::Threads;

#[async_trait]
impl Inspect for MySqlBackend {
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        self.check_open()?;
        let held = self.held(query).await;
        held.map(|held| query.arrange(held)).map_err(|error| error.at(BACKEND, "holdings"))
    }

    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        self.check_open()?;
        let store = &self.store;
        let displaced = match (kind, self.has_user_locks()) {
            (Kind::Lock | Kind::Claim, true) => locks::end_holder(store, kind, key).await,
            (Kind::Lock, false) => rows::free(store, names::Kind::LeasedLock, key, None).await,
            (Kind::Claim, false) => rows::end_claim(store, key).await,
            (Kind::Lease, _) => rows::free(store, names::Kind::Lease, key, None).await,
            (Kind::Dedupe, _) => rows::free(store, names::Kind::Dedupe, key, None).await,
        };
        let displaced =
            displaced.map_err(|error: Error| error.at(BACKEND, "force_release").on(key))?;
        if let Some(displaced) = &displaced {
            displaced.log_displaced(BACKEND);
        }
        Ok(displaced)
    }

    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        self.check_open()?;
        let of = match (kind, self.has_user_locks()) {
            (Kind::Lease, _) => Ok(names::Kind::Lease),
            (Kind::Lock, false) => Ok(names::Kind::LeasedLock),
            (Kind::Lock, true) | (Kind::Claim | Kind::Dedupe, _) => Err(no_token(kind)),
        };
        let freed = match of {
            Ok(of) => rows::free(&self.store, of, key, Some(token)).await,
            Err(error) => Err(error),
        };
        let freed = freed.map_err(|error| error.at(BACKEND, "release_by_token").on(key))?;
        if freed.is_some() {
            log_released(BACKEND, kind, key, token);
        }
        Ok(freed.is_some())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.check_open()?;
        let looked = diagnose::look(&self.store, self.has_user_locks()).await;
        looked.map_err(|error| error.at(BACKEND, "diagnose"))
    }
}

impl MySqlBackend {
    fn has_user_locks(&self) -> bool {
        matches!(self.locks, Locks::User(_))
    }

    async fn held(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let store = &self.store;
        let mut held = Vec::new();
        if self.has_user_locks() {
            if query.wants(Kind::Lock) || query.wants(Kind::Claim) {
                held.extend(match &query.names {
                    NameQuery::Key(key) => locks::of_key(store, query, key).await?,
                    NameQuery::Prefix(_) => locks::list(store, query).await?,
                });
            }
        } else {
            if query.wants(Kind::Lock) {
                held.extend(rows::list(store, query, names::Kind::LeasedLock).await?);
            }
            if query.wants(Kind::Claim) {
                held.extend(rows::claims(store, query).await?);
            }
        }
        if query.wants(Kind::Lease) {
            held.extend(rows::list(store, query, names::Kind::Lease).await?);
        }
        if query.wants(Kind::Dedupe) {
            held.extend(rows::list(store, query, names::Kind::Dedupe).await?);
        }
        Ok(held)
    }
}

/// What a session or transaction holds.
fn of_connection(
    kind: Kind,
    name: HeldName,
    connection: u64,
    holder: Option<Vec<u8>>,
    threads: &Threads,
) -> Holding {
    let mut holding = Holding::new(kind, name);
    holding.holder = rows::holder(holder);
    holding.session = Some(threads.describe(connection));
    holding
}
