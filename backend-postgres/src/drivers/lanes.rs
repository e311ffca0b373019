//! Connections of the handle's own pool that stand ready for the next claim.
//!
//! A claim hands out a [`Transaction`] of sqlx, which alone can make one, by a round trip that
//! drops what the server answers. So it is made once and kept: the next claim begins with one
//! message of plain text, which brings the locks and the token, and ends with one.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::Postgres;
use sqlx::{PgPool, Transaction};
use tokio::time::Instant;

use crate::sever::Severed;

/// What a claim gives out.
pub(super) type Tx = Transaction<'static, Postgres>;

/// So many are kept; the pool's other connections are for everything else.
const MOST: usize = 4;
/// One that nobody used for so long goes.
const IDLE: Duration = Duration::from_secs(10);
/// One that is as old as this goes: the pool's other connections do not live longer either.
const OLDEST: Duration = Duration::from_secs(30 * 60);

/// A transaction object between two transactions of the server: none is open there.
pub(super) struct Lane {
    pub(super) tx: Severed<Tx>,
    pub(super) made: Instant,
}

/// The lanes that stand ready.
pub(super) struct Lanes {
    idle: Mutex<Idle>,
    pool: PgPool,
}

#[derive(Default)]
struct Idle {
    lanes: Vec<(Instant, Lane)>,
    swept: bool,
    closed: bool,
}

impl Lanes {
    pub(super) fn new(pool: PgPool) -> Arc<Self> {
        Arc::new(Self { idle: Mutex::default(), pool })
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one that was used last.
    pub(super) fn take(&self) -> Option<Lane> {
        self.lock().lanes.pop().map(|(_, lane)| lane)
    }

    /// Whether one more may stand ready: the pool has connections left for others.
    pub(super) fn has_room(&self, made: Instant) -> bool {
        let idle = self.lock();
        let spare = self.pool.size() < self.pool.options().get_max_connections()
            || self.pool.num_idle() > 0;
        !idle.closed && idle.lanes.len() < MOST && made.elapsed() < OLDEST && spare
    }

    /// Keeps one for the next claim.
    pub(super) fn keep(self: &Arc<Self>, lane: Lane) {
        let mut idle = self.lock();
        if idle.closed || idle.lanes.len() >= MOST {
            drop(idle);
            return drop(lane);
        }
        idle.lanes.push((Instant::now(), lane));
        if !std::mem::replace(&mut idle.swept, true) {
            let lanes = Arc::downgrade(self);
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(IDLE / 2).await;
                    match lanes.upgrade() {
                        Some(lanes) if lanes.sweep() => {}
                        _ => return,
                    }
                }
            });
        }
    }

    /// Drops those that were idle for long; false when none is left to look after.
    fn sweep(&self) -> bool {
        let mut idle = self.lock();
        let old = |(since, _): &mut (Instant, Lane)| since.elapsed() >= IDLE;
        let old: Vec<_> = idle.lanes.extract_if(.., old).collect();
        idle.swept = !idle.lanes.is_empty();
        let goes_on = idle.swept;
        drop(idle);
        drop(old);
        goes_on
    }

    /// Drops all, and keeps none any more.
    pub(super) fn close(&self) {
        let mut idle = self.lock();
        idle.closed = true;
        let lanes = std::mem::take(&mut idle.lanes);
        drop(idle);
        drop(lanes);
    }
}

impl Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("idle", &self.lock().lanes.len()).finish_non_exhaustive()
    }
}
