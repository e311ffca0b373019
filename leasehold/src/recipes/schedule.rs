//! [`Schedule`]: each tick fires once across the fleet.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::part;
use super::store_clock::{GOOD_FOR, StoreClock, first_seen_at};
use super::timetable::Timetable;
use crate::{Dedupe, DedupeOptions, Error, ErrorKind, Key, MAX_RETAIN, Result};

/// A tick is remembered for so long after it can fire.
const MARGIN: Duration = Duration::from_secs(24 * 60 * 60);
/// The pause after a failure of the store.
const RETRY: Duration = Duration::from_secs(1);

/// What becomes of ticks at whose time no process was there to fire them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MissedTicks {
    /// They are skipped: only the latest fires, if it is not later than
    /// [`grace`](Schedule::grace).
    #[default]
    Skip,
    /// The latest fires, for all of them.
    FireOnce,
    /// Each fires, in order.
    All,
}

/// One firing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tick {
    /// When it was due.
    pub due: SystemTime,
    /// How much later it fires, by the store's clock.
    pub late: Duration,
    /// How many earlier ones this process passed over for it, by [`MissedTicks`].
    pub passed_over: u64,
}

/// A schedule that every process runs, and of which each tick fires in one of them.
///
/// Whoever records a tick first fires it. When a tick is due is told by the store's clock: the
/// clocks of the processes may be apart as far as they like.
///
/// **Guaranteed:** a tick fires at most once across all processes, and never before its time by the
/// store's clock (as well as a monotonic clock keeps time for a minute). The ticks of before the
/// schedule was first run by anybody are none of it. A tick is recorded *before* it fires.
///
/// **Not guaranteed:** that a tick's work is done: a process that dies, is cancelled or does not get
/// the store's answer between the record and the work has consumed the tick. For work that must not
/// be lost let the tick start a [`Takeover`](super::Takeover). A process that was stopped for longer
/// than a day between two instructions may fire a tick that is forgotten by then.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::{Every, MissedTicks, Schedule};
/// use leasehold::Key;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let often = Every::new(Duration::from_millis(50))?;
/// let schedule = Schedule::new(Arc::new(MemoryBackend::new()), Key::new("report")?, often)
///     .missed(MissedTicks::FireOnce);
/// # let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
/// # tokio::select! {
/// #     ended =
/// schedule.run(async |tick| {
///     println!("the report of {:?}", tick.due);
/// #     tell.send(tick).unwrap_or_default();
/// })
/// #     => ended?,
/// #     fired = told.recv() => assert!(fired.is_some()),
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    dedupe: Arc<dyn Dedupe>,
    key: Key,
    timetable: Arc<dyn Timetable>,
    missed: MissedTicks,
    grace: Duration,
    catch_up: Duration,
}

impl Schedule {
    /// A schedule that skips missed ticks.
    pub fn new(dedupe: Arc<dyn Dedupe>, key: Key, timetable: impl Timetable) -> Self {
        Self {
            dedupe,
            key,
            timetable: Arc::new(timetable),
            missed: MissedTicks::default(),
            grace: Duration::from_secs(60),
            catch_up: Duration::from_secs(60 * 60),
        }
    }

    /// What becomes of missed ticks.
    #[must_use]
    pub fn missed(self, missed: MissedTicks) -> Self {
        Self { missed, ..self }
    }

    /// How late a tick still counts as on time, under [`MissedTicks::Skip`]; default 1 min.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// How late a tick still fires, under the other policies; default 1 h. A process looks so far
    /// back when it starts.
    #[must_use]
    pub fn catch_up(self, catch_up: Duration) -> Self {
        Self { catch_up, ..self }
    }

    /// Fires the ticks that this process is the first to record, until it is dropped or the
    /// timetable ends. Work that takes longer than to the next tick delays this process, and others
    /// fire meanwhile: spawn it where that is not wanted. Failures of the store are logged.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a time of several years, [`ErrorKind::InvalidKey`] if the
    /// ticks' keys get too long.
    ///
    /// # Cancel safety
    /// A tick may be recorded and not fired; otherwise as safe as `work`.
    pub async fn run<F>(&self, mut work: impl FnMut(Tick) -> F) -> Result<()>
    where
        F: Future<Output = ()>,
    {
        let opts = DedupeOptions::default().retain(self.retain()?).done_at_once();
        let mut clock = StoreClock::new(self.dedupe.clone(), &self.key)?;
        let mut seen = None;
        loop {
            match self.step(&mut clock, &mut seen, opts).await {
                Ok(Step::Fire(tick)) => work(tick).await,
                Ok(Step::Wait(time)) => tokio::time::sleep(time).await,
                Ok(Step::GoOn) => {}
                Ok(Step::End) => return Ok(()),
                Err(error) => match error.kind() {
                    ErrorKind::InvalidOptions | ErrorKind::InvalidKey => return Err(error),
                    _ => {
                        tracing::warn!(key = %self.key, %error, "the schedule is held up");
                        tokio::time::sleep(RETRY).await;
                    }
                },
            }
        }
    }

    /// How long a tick is remembered.
    fn retain(&self) -> Result<Duration> {
        let retain = self.reach().saturating_add(MARGIN);
        if retain > MAX_RETAIN {
            let detail = format!("ticks cannot be fired {:?} late", self.reach());
            return Err(Error::new(ErrorKind::InvalidOptions, detail).on(&self.key));
        }
        Ok(retain)
    }

    /// How late a tick may fire.
    fn reach(&self) -> Duration {
        match self.missed {
            MissedTicks::Skip => self.grace,
            MissedTicks::FireOnce | MissedTicks::All => self.catch_up,
        }
    }

    /// Looks at what is due after `seen`.
    async fn step(
        &self,
        clock: &mut StoreClock,
        seen: &mut Option<SystemTime>,
        opts: DedupeOptions,
    ) -> Result<Step> {
        let now = clock.now().await?;
        if seen.is_none() {
            let key = part(&self.key, "since")?;
            *seen = Some(first_seen_at(&*self.dedupe, &key, MAX_RETAIN).await?.0);
        }
        let oldest = now.checked_sub(self.reach()).unwrap_or(UNIX_EPOCH);
        let after = seen.map_or(oldest, |seen| seen.max(oldest));
        let Some(mut due) = self.timetable.next(after) else {
            return Ok(Step::End);
        };
        if let Ok(wait) = due.duration_since(now)
            && !wait.is_zero()
        {
            // the store's clock is read anew before it could be told wrong
            return Ok(Step::Wait(wait.min(GOOD_FOR)));
        }
        let mut passed_over = 0;
        if self.missed != MissedTicks::All {
            while let Some(later) = self.timetable.next(due).filter(|later| *later <= now) {
                due = later;
                passed_over += 1;
            }
        }
        let first = self.dedupe.admit(&self.tick(due)?, opts).await?.is_first();
        *seen = Some(due);
        let late = now.duration_since(due).unwrap_or_default();
        Ok(if first { Step::Fire(Tick { due, late, passed_over }) } else { Step::GoOn })
    }

    fn tick(&self, due: SystemTime) -> Result<Key> {
        let nanos = due.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        part(&self.key, format_args!("tick/{nanos}"))
    }
}

enum Step {
    Fire(Tick),
    Wait(Duration),
    GoOn,
    /// There are no more ticks.
    End,
}
