//! Connections of the handle's own pool that stand ready for the next call.
//!
//! The pool asks a connection for a sign of life when it gives it out, and again when it gets it
//! back: two round trips around each one that does something. What was used a moment ago needs
//! neither.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::PgPool;
use tokio::time::Instant;

use crate::sever::Severed;

/// So many are kept; the pool's other connections are for everything else.
const MOST: usize = 4;
/// One that is as old as this goes: the pool's other connections do not live longer either.
const OLDEST: Duration = Duration::from_secs(30 * 60);

/// A connection between two calls, or something that owns one.
pub(crate) struct Lane<C> {
    pub(crate) conn: Severed<C>,
    pub(crate) made: Instant,
}

impl<C> Lane<C> {
    pub(crate) fn new(conn: Severed<C>) -> Self {
        Self { conn, made: Instant::now() }
    }
}

/// The lanes that stand ready.
pub(crate) struct Lanes<C> {
    idle: Mutex<Idle<C>>,
    pool: PgPool,
    /// One that nobody used for so long goes.
    patience: Duration,
    /// What becomes of it.
    retire: fn(Severed<C>),
}

struct Idle<C> {
    lanes: Vec<(Instant, Lane<C>)>,
    swept: bool,
    closed: bool,
}

impl<C: Send + 'static> Lanes<C> {
    pub(crate) fn new(pool: PgPool, patience: Duration, retire: fn(Severed<C>)) -> Arc<Self> {
        let idle = Mutex::new(Idle { lanes: Vec::new(), swept: false, closed: false });
        Arc::new(Self { idle, pool, patience, retire })
    }

    fn lock(&self) -> MutexGuard<'_, Idle<C>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one that was used last.
    pub(crate) fn take(&self) -> Option<Lane<C>> {
        self.lock().lanes.pop().map(|(_, lane)| lane)
    }

    /// Whether one more may stand ready: the pool has connections left for others.
    pub(crate) fn has_room(&self, made: Instant) -> bool {
        let idle = self.lock();
        let spare = self.pool.size() < self.pool.options().get_max_connections()
            || self.pool.num_idle() > 0;
        !idle.closed && idle.lanes.len() < MOST && made.elapsed() < OLDEST && spare
    }

    /// Keeps one for the next call.
    pub(crate) fn keep(self: &Arc<Self>, lane: Lane<C>) {
        let mut idle = self.lock();
        if idle.closed || idle.lanes.len() >= MOST {
            drop(idle);
            return (self.retire)(lane.conn);
        }
        idle.lanes.push((Instant::now(), lane));
        if !std::mem::replace(&mut idle.swept, true) {
            let (lanes, pause) = (Arc::downgrade(self), self.patience / 2);
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(pause).await;
                    match lanes.upgrade() {
                        Some(lanes) if lanes.sweep() => {}
                        _ => return,
                    }
                }
            });
        }
    }

    /// Retires those that were idle for long; false when none is left to look after.
    fn sweep(&self) -> bool {
        let mut idle = self.lock();
        let old = |(since, _): &mut (Instant, Lane<C>)| since.elapsed() >= self.patience;
        let old: Vec<_> = idle.lanes.extract_if(.., old).collect();
        idle.swept = !idle.lanes.is_empty();
        let goes_on = idle.swept;
        drop(idle);
        for (_, lane) in old {
            (self.retire)(lane.conn);
        }
        goes_on
    }

    /// Closes all: one of them was cut, so that the others may be as well.
    pub(crate) fn clear(&self) {
        let lanes = std::mem::take(&mut self.lock().lanes);
        drop(lanes);
    }

    /// Closes all, and keeps none any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.clear();
    }
}

impl<C: Send + 'static> Debug for Lanes<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("idle", &self.lock().lanes.len()).finish_non_exhaustive()
    }
}
