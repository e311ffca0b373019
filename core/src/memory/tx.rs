//! [`MemoryTx`]: the transaction of a claim, over a small key-value map.

use std::any::Any;
use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;

use super::driver::MemorySession;
use super::link::{MemoryLink, cut};
use super::store::{Kind, MemoryStore, Name, Namespace};
use crate::backend::Owner;
use crate::claim::ClaimTx;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::options::Deadline;
use crate::token::FencingToken;

/// A transaction on the store's map: reads see what is committed and its own writes.
#[derive(Debug)]
pub struct MemoryTx {
    store: MemoryStore,
    writes: BTreeMap<String, Option<String>>,
    pins: Vec<Name>,
}

impl MemoryTx {
    pub(super) fn new(store: MemoryStore) -> Self {
        Self { store, writes: BTreeMap::new(), pins: Vec::new() }
    }

    /// The value of `name`.
    pub fn read(&self, name: &str) -> Option<String> {
        match self.writes.get(name) {
            Some(own) => own.clone(),
            None => self.store.read(name),
        }
    }

    /// The names that begin with `prefix`, with their values, in order.
    pub fn list(&self, prefix: &str) -> BTreeMap<String, String> {
        let mut found = self.store.list(prefix);
        for (name, value) in self.writes.iter().filter(|(name, _)| name.starts_with(prefix)) {
            match value {
                Some(value) => drop(found.insert(name.clone(), value.clone())),
                None => drop(found.remove(name)),
            }
        }
        found
    }

    /// Sets `name`, at the commit.
    pub fn write(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.writes.insert(name.into(), Some(value.into()));
    }

    /// Removes `name`, at the commit.
    pub fn remove(&mut self, name: impl Into<String>) {
        self.writes.insert(name.into(), None);
    }

    pub(super) fn verify(&mut self, name: Name, owner: Owner) -> Result<()> {
        if !self.store.pin(&name, owner) {
            return Err(Error::new(ErrorKind::Lost, "the lease is held no longer"));
        }
        self.pins.push(name);
        Ok(())
    }
}

impl Drop for MemoryTx {
    fn drop(&mut self) {
        self.pins.iter().for_each(|name| self.store.unpin(name));
    }
}

/// An open claim: a session that holds the locks, and what it will write.
#[derive(Debug)]
pub(super) struct MemoryClaim {
    pub(super) token: FencingToken,
    pub(super) session: MemorySession,
    pub(super) link: MemoryLink,
    pub(super) namespace: Namespace,
    pub(super) tx: MemoryTx,
    pub(super) seen: Vec<(Name, Duration)>,
}

#[async_trait]
impl ClaimTx for MemoryClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        &mut self.tx
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let name = (self.namespace.clone(), key.clone());
        if self.seen.iter().any(|(seen, _)| *seen == name) {
            return Ok(false);
        }
        self.session.lock(Kind::Seen, &name, Deadline::never()).await?;
        let unseen = self.tx.store.is_unseen(&name);
        if unseen {
            self.seen.push((name, retain));
        }
        Ok(unseen)
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        let writes = std::mem::take(&mut self.tx.writes);
        let seen = std::mem::take(&mut self.seen);
        let (store, session) = (self.tx.store.clone(), self.session.id());
        let commit = move || {
            let applied = store.apply(session, writes, seen);
            store.end_session(session);
            applied
        };
        let applied = self.link.call(commit).await.map_err(|error| {
            Error::new(ErrorKind::CommitUnknown, "the answer to the commit was lost")
                .with_source(error)
        })?;
        if applied {
            return Ok(());
        }
        let detail = "the session of the claim has ended, nothing was written";
        Err(Error::new(ErrorKind::Lost, detail).with_source(cut()))
    }

    async fn rollback(self: Box<Self>) -> Result<()> {
        let (store, session) = (self.tx.store.clone(), self.session.id());
        self.link.call(move || store.end_session(session)).await
    }
}
