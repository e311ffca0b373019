//! [`Schedule`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use leasehold::recipes::{Every, MissedTicks, Schedule, Tick};
use tokio::task::JoinSet;

use crate::case::cases;
use crate::ctx::{Ctx, PATIENCE, eventually, key};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    schedule_fires_each_tick_once = "each tick of a schedule fires in one of the processes, and none is left out";
    schedule_goes_on_after_a_fault = "a schedule whose sessions end goes on, and fires no tick twice" [EndSessions];
    schedule_catches_up = "ticks that nobody was there to fire go by the policy, each at most once";
});

const EVERY: Duration = Duration::from_millis(250);

fn schedule(handle: &Handle, missed: MissedTicks) -> Result<Schedule, Fault> {
    let schedule = Schedule::new(handle.backend.clone(), key("x"), Every::new(EVERY)?);
    Ok(schedule.missed(missed))
}

/// The ticks that were fired, by all.
#[derive(Clone, Debug, Default)]
struct Fired(Arc<Mutex<BTreeMap<SystemTime, Vec<Tick>>>>);

impl Fired {
    fn add(&self, tick: Tick) {
        let mut fired = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        fired.entry(tick.due).or_default().push(tick);
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn runs(&self, tasks: &mut JoinSet<leasehold_core::Result<()>>, schedule: Schedule) {
        let fired = self.clone();
        tasks.spawn(async move {
            schedule
                .run(|tick| {
                    fired.add(tick);
                    std::future::ready(())
                })
                .await
        });
    }

    /// Waits until so many have fired.
    async fn reaches(&self, count: usize) -> Verdict {
        let what = format!("{count} ticks to fire");
        eventually(&what, || async { Ok(self.count() >= count) }).await
    }

    fn each_once(&self) -> Verdict {
        let fired = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ticks in fired.values() {
            ensure!(ticks.len() == 1, "expected each tick to fire once: {ticks:?}");
        }
        Ok(())
    }

    /// How much there is between each and the next.
    fn gaps(&self) -> Vec<Duration> {
        let fired = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = fired.keys().zip(fired.keys().skip(1));
        pairs.map(|(one, two)| two.duration_since(*one).unwrap_or_default()).collect()
    }
}

async fn schedule_fires_each_tick_once(ctx: Ctx) -> Verdict {
    let (fired, mut tasks) = (Fired::default(), JoinSet::new());
    for _ in 0..3 {
        fired.runs(&mut tasks, schedule(&ctx.open().await?, MissedTicks::All)?);
    }
    fired.reaches(12).await?;
    tasks.shutdown().await;
    fired.each_once()?;
    // at the very end each process may have recorded one that it did not fire any more
    let gaps = fired.gaps();
    let whole = gaps.len() - 3;
    ensure!(
        gaps[..whole].iter().all(|gap| *gap == EVERY),
        "expected a tick every {EVERY:?}, the gaps are {gaps:?}"
    );
    Ok(())
}

async fn schedule_goes_on_after_a_fault(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (fired, mut tasks) = (Fired::default(), JoinSet::new());
    for handle in [&a, &b] {
        fired.runs(&mut tasks, schedule(handle, MissedTicks::All)?);
    }
    fired.reaches(3).await?;
    for handle in [&a, &b, &a] {
        handle.link.end_sessions().await?;
        fired.reaches(fired.count() + 3).await?;
    }
    tasks.shutdown().await;
    fired.each_once()
}

async fn schedule_catches_up(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for missed in [MissedTicks::Skip, MissedTicks::FireOnce, MissedTicks::All] {
        let key = key(&format!("{missed:?}"));
        let of = |handle: &Handle| {
            let every = Every::new(EVERY)?;
            let schedule = Schedule::new(handle.backend.clone(), key.clone(), every);
            Ok::<_, Fault>(schedule.missed(missed).catch_up(PATIENCE * 6).grace(PATIENCE * 6))
        };
        let (fired, mut tasks) = (Fired::default(), JoinSet::new());
        fired.runs(&mut tasks, of(&a)?);
        fired.reaches(2).await?;
        tasks.shutdown().await;
        let before = fired.count();
        tokio::time::sleep(EVERY * 5).await; // nobody is there
        let mut tasks = JoinSet::new();
        for handle in [&a, &b] {
            fired.runs(&mut tasks, of(handle)?);
        }
        fired.reaches(before + 2).await?;
        tasks.shutdown().await;
        fired.each_once()?;
        let longest = fired.gaps().into_iter().max().unwrap_or_default();
        if missed == MissedTicks::All {
            // the last of the first run, or of the second, may be recorded and not fired
            ensure!(longest <= EVERY * 2, "expected all to be caught up, a gap is {longest:?}");
        } else {
            ensure!(
                longest >= EVERY * 4,
                "expected the latest to fire for all by {missed:?}, the longest gap is {longest:?}"
            );
        }
    }
    Ok(())
}
