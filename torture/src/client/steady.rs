//! A client of a soak run: many tasks that work and rest in turn, so that what is there when they
//! rest can be compared.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Error, HoldingQuery};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::leak::Leak;
use super::{CLOSE, Ctx, Order, ROUND, operate};
use crate::store::{Shop, StoreKind, failed};

/// Operations at once.
pub const TASKS: u64 = 24;
/// What is done or first seen is remembered for so long: for longer than the round in which
/// somebody asks for it.
const RETAIN: Duration = ROUND.saturating_add(Duration::from_secs(1));
/// After so long nothing of what was acquired before lives: longer than each ttl of a client.
pub(crate) const SETTLE: Duration = RETAIN.saturating_add(Duration::from_millis(500));
/// The longest pause of a task.
const IDLE: Duration = Duration::from_millis(30);
/// The share of operations on keys that nobody ever uses again.
const FRESH: f64 = 0.75;

/// A client at rest.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rested {
    /// Operations so far.
    pub operations: u64,
    /// Tasks of its runtime.
    pub tasks: u64,
    /// Entries in its memory, where the store is there.
    pub entries: Option<u64>,
}

/// Works when it is told so, and rests when it is told so, in turn; answers when it has come to
/// rest, everything that it acquired is over, and the store's housekeeping is done. Each time of
/// work has a record of its own: that of the next life.
///
/// # Errors
/// If it cannot open its handle, record, or keep house.
pub async fn steady(
    order: &Order,
    shop: Arc<dyn Shop>,
    leak: Option<Leak>,
    mut told: mpsc::UnboundedReceiver<()>,
    answer: impl Fn(Rested),
) -> Result<(), Error> {
    let backend = shop.open(&order.name()).await?;
    let (mut order, mut operations) = (order.clone(), 0);
    while told.recv().await.is_some() {
        order.life += 1;
        let ctx = Ctx {
            shop: shop.clone(),
            backend: backend.clone(),
            log: order.log().map_err(failed)?,
            retain: RETAIN,
            fresh: FRESH,
            idle: IDLE,
        };
        let stalls = super::watch_for_stalls(ctx.log.clone());
        let (stop, stopped) = watch::channel(false);
        let rest = async {
            told.recv().await;
            stop.send_replace(true);
        };
        let (done, ()) = tokio::join!(operate(ctx, &order, TASKS, stopped, leak), rest);
        operations += done?;
        stalls.abort();
        tokio::time::sleep(SETTLE).await;
        backend.housekeep().await?;
        let entries = match order.store {
            StoreKind::Memory => {
                let held = backend.holdings(&HoldingQuery::default()).await?;
                Some(held.len() as u64)
            }
            _ => None,
        };
        let tasks = Handle::current().metrics().num_alive_tasks() as u64;
        answer(Rested { operations, tasks, entries });
    }
    drop(tokio::time::timeout(CLOSE, backend.close()).await);
    Ok(())
}
