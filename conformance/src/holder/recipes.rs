//! What a holder does with the recipes.

use std::any::Any;
use std::time::{Duration, UNIX_EPOCH};

use leasehold::recipes::{Every, Leader, MissedTicks, Schedule, Semaphore};
use leasehold_core::{Admission, DedupeOptions, Error, Key};
use serde::{Deserialize, Serialize};

use super::{Held, Holder, Order, Reply, done, nothing, unexpected};
use crate::ctx::PATIENCE;
use crate::fault::{Fault, Verdict};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum RecipeOrder {
    /// Campaign until elected, and lead.
    Lead { key: String },
    /// Take all permits.
    TakePermits { key: String, permits: usize },
    /// Begin a piece of work, and be at it.
    BeginWork { key: String, id: String, after: Duration },
    /// Run a schedule, and report what it fired.
    Tick { key: String, every: Duration, time: Duration },
}

impl Holder {
    /// Leads, and gives the token.
    pub(crate) async fn leads(&mut self, key: &str) -> Result<u64, Fault> {
        match self.carries_out(RecipeOrder::Lead { key: key.to_owned() }).await? {
            Reply::Taken(token) => Ok(token),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn takes_permits(&mut self, key: &str, permits: usize) -> Verdict {
        let key = key.to_owned();
        done(self.carries_out(RecipeOrder::TakePermits { key, permits }).await?)
    }

    pub(crate) async fn begins_work(&mut self, key: &str, id: &str, after: Duration) -> Verdict {
        let (key, id) = (key.to_owned(), id.to_owned());
        done(self.carries_out(RecipeOrder::BeginWork { key, id, after }).await?)
    }

    /// Runs a schedule for so long, and gives when what it fired was due, since 1970.
    pub(crate) async fn ticks(
        &mut self,
        key: &str,
        every: Duration,
        time: Duration,
    ) -> Result<Vec<Duration>, Fault> {
        let key = key.to_owned();
        match self.carries_out(RecipeOrder::Tick { key, every, time }).await? {
            Reply::Ticks(ticks) => Ok(ticks),
            other => Err(unexpected(&other)),
        }
    }

    async fn carries_out(&mut self, order: RecipeOrder) -> Result<Reply, Fault> {
        self.ask(&Order::Recipe(order)).await
    }
}

impl Held {
    pub(super) async fn recipe(&mut self, order: RecipeOrder) -> Result<Reply, Error> {
        let backend = self.handle.backend.clone();
        match order {
            RecipeOrder::Lead { key } => {
                let leader = Leader::over_locks(backend, Key::new(key)?).start();
                let elected = tokio::time::timeout(PATIENCE, leader.elected()).await;
                let term = elected.map_err(|_| nothing("the leadership"))?;
                self.keep(leader);
                Ok(Reply::Taken(term.token().value()))
            }
            RecipeOrder::TakePermits { key, permits } => {
                let semaphore = Semaphore::over_locks(backend, &Key::new(key)?, permits)?;
                for _ in 0..permits {
                    let permit = semaphore.acquire(PATIENCE).await?;
                    self.keep(permit.ok_or_else(|| nothing("a permit"))?);
                }
                Ok(Reply::Done)
            }
            RecipeOrder::BeginWork { key, id, after } => {
                let opts = DedupeOptions::default().in_progress(after);
                match backend.admit(&Key::new(format!("{key}/{id}"))?, opts).await? {
                    Admission::First(claim) => self.keep(claim),
                    _ => return Ok(Reply::Busy),
                }
                Ok(Reply::Done)
            }
            RecipeOrder::Tick { key, every, time } => {
                let schedule = Schedule::new(backend, Key::new(key)?, Every::new(every)?);
                let schedule = schedule.missed(MissedTicks::All);
                let mut ticks = Vec::new();
                let run = schedule.run(|tick| {
                    ticks.push(tick.due.duration_since(UNIX_EPOCH).unwrap_or_default());
                    std::future::ready(())
                });
                if let Ok(ended) = tokio::time::timeout(time, run).await {
                    ended?;
                }
                Ok(Reply::Ticks(ticks))
            }
        }
    }

    fn keep(&mut self, held: impl Any + Send) {
        self.recipes.push(Box::new(held));
    }
}
