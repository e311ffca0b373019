//! Patterns that services need, written once over the traits, so that each works on every backend.
//!
//! | recipe | for | over |
//! |---|---|---|
//! | [`Leader`] | one process leads until it goes away | [`NamedLock`](crate::NamedLock) or [`Lease`](crate::Lease) |
//! | [`Poller`] | a periodic job, ticked by whoever gets the lease | [`Lease`](crate::Lease) |
//! | [`SingleFlight`] | one does it, the others wait and read what it stored | [`Lease`](crate::Lease) |
//! | [`Semaphore`] | at most n at a time | [`NamedLock`](crate::NamedLock) or [`Lease`](crate::Lease) |
//! | [`OneTimeTokens`] | a secret that is accepted once | [`Dedupe`](crate::Dedupe) |
//! | [`Schedule`] | each tick fires once across the fleet | [`Dedupe`](crate::Dedupe) |
//! | [`Housekeeper`] | sweeps, run by one process at a time | [`Backend`](crate::Backend) |
//! | [`Limit`] | count and take in one transaction | [`ClaimLock`](crate::ClaimLock) |
//! | [`Takeover`] | work whose process died is picked up by exactly one | [`Dedupe`](crate::Dedupe) |
//! | [`Turns`] | the same for work that is renewed, and for rows not written yet | [`Lease`](crate::Lease) |
//!
//! What holds for all of them:
//!
//! - Nothing runs without the lock, lease, claim or entry, and what runs is stopped (its future
//!   dropped) when that is lost. A future that blocks its thread cannot be stopped.
//! - A lock is not a fence: a process that is paused between a check and a write may write late.
//!   Every closure gets the guard or its token, to check the write with.
//! - Only the store's clock decides when something expires or is due; waits are measured by the
//!   local monotonic clock. A wall clock never matters.
//! - Futures may be dropped at any moment and leave nothing behind.
//! - Keys are the recipe's own: two recipes of different types must not be given the same key, for
//!   the two would meet.

#[cfg(feature = "cron")]
mod cron;
mod exclusion;
mod housekeeper;
mod leader;
mod limit;
mod one_time_token;
mod poller;
mod schedule;
mod semaphore;
mod single_flight;
mod store_clock;
mod takeover;
mod timetable;
mod turns;

#[cfg(feature = "cron")]
pub use cron::Cron;
pub use housekeeper::{Housekeeper, Sweep, SweepReport};
pub use leader::{Campaign, Leader, LeaderHealth, Standing, Term};
pub use limit::{Limit, PerKey, Taken};
pub use one_time_token::{OneTimeToken, OneTimeTokens, Redemption};
pub use poller::Poller;
pub use schedule::{MissedTicks, Schedule, Tick};
pub use semaphore::{Permit, Semaphore};
pub use single_flight::SingleFlight;
pub use takeover::{Pickup, Takeover};
pub use timetable::{Every, Timetable};
pub use turns::{Recovery, Turns};

use std::fmt::Display;
use std::future::Future;

use crate::{Error, ErrorKind, Key, LossReason, Lost, Result};

/// The key of a part of `key`.
fn part(key: &Key, part: impl Display) -> Result<Key> {
    Key::new(format!("{key}/{part}"))
}

/// Does the work until it ends or what it needs is lost; then it is dropped.
async fn unless_lost<T>(lost: &Lost, key: &Key, work: impl Future<Output = T>) -> Result<T> {
    lost.run_until_lost(work).await.map_err(|reason| lost_error(key, reason))
}

fn lost_error(key: &Key, reason: LossReason) -> Error {
    Error::new(ErrorKind::Lost, format!("the work was stopped: {}", reason.as_str())).on(key)
}

/// After the work: a loss counts, another failed release is only logged.
fn released(released: Result<()>) -> Result<()> {
    match released {
        Err(error) if error.kind() != ErrorKind::Lost => {
            tracing::warn!(%error, "release failed after the work was done");
            Ok(())
        }
        other => other,
    }
}
