//! [`ClaimEngine`]: local queue, then the driver's transaction, off the caller's cancellation.

use std::any::TypeId;
use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::oneshot;
use tracing::Instrument;

use super::gate::{Gate, Turn};
use super::{closed, limited};
use crate::backend::ClaimDriver;
use crate::claim::{Claim, ClaimLock};
use crate::error::Result;
use crate::inspect::Kind;
use crate::key::Keys;
use crate::observe::{Name, Observer};
use crate::options::{ClaimOptions, Deadline};
use crate::steer::steered;

/// Makes a [`ClaimLock`] of a [`ClaimDriver`].
///
/// Callers of one process queue locally for each key first, in the order of the ids, so that
/// contention within a process never eats the pool; then one transaction is begun.
#[derive(Debug)]
pub struct ClaimEngine<D: ClaimDriver> {
    driver: Arc<D>,
    gate: Gate<Turn<D::Id>>,
    observer: Observer,
}

impl<D: ClaimDriver> ClaimEngine<D> {
    /// An engine over `driver`.
    pub fn new(driver: D) -> Self {
        let observer = Observer::new(driver.backend(), Kind::Claim);
        Self { driver: Arc::new(driver), gate: Gate::new(), observer }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    async fn begin(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        let deadline = Deadline::after(opts.wait);
        let ids: BTreeSet<D::Id> = keys.iter().map(|key| self.driver.id(key)).collect();
        let mut permits = Vec::with_capacity(ids.len());
        let mut waits = false;
        for id in &ids {
            let queues = || {
                if !std::mem::replace(&mut waits, true) {
                    self.observer.waiting(Name::Keys(keys));
                }
            };
            match self.gate.acquire(id, deadline, queues).await {
                Some(permit) => permits.push(permit),
                None => return Ok(None),
            }
        }
        let ids: Vec<D::Id> = ids.into_iter().collect();
        let limit = deadline.remaining().saturating_add(self.driver.answer_limit());
        let (driver, keys) = (self.driver.clone(), keys.clone());
        let (mut reply, answer) = oneshot::channel();
        let begin = async move {
            let begun = tokio::select! {
                biased;
                begun = limited(limit, driver.begin(&ids, deadline)) => begun,
                () = reply.closed() => return, // the driver leaves nothing behind
            };
            let claim = begun.map(|begun| {
                begun.map(|tx| Claim::new(driver.backend(), keys, tx, Box::new(permits)))
            });
            // a claim that nobody receives rolls back by its drop
            drop(reply.send(claim));
        };
        tokio::spawn(steered(begin.in_current_span()));
        answer.await.unwrap_or_else(|_| Err(closed()))
    }
}

#[async_trait]
impl<D: ClaimDriver> ClaimLock for ClaimEngine<D> {
    fn tx_type(&self) -> TypeId {
        self.driver.tx_type()
    }

    async fn claim(&self, keys: &Keys, opts: ClaimOptions) -> Result<Option<Claim>> {
        let call = self.observer.call(Name::Keys(keys));
        let begun = self.begin(keys, opts).instrument(call.span()).await;
        call.end(begun.map_err(|error| error.at(self.driver.backend(), "claim").on(keys)))
    }
}
