//! Tasks that take and release locks as fast as they get them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold_peers::{Locker, Outcome};
use tokio::task::JoinSet;

/// For whoever waits when the time is over.
const GRACE: Duration = Duration::from_secs(3);

/// What some tasks did in a time.
#[derive(Debug)]
pub struct Done {
    /// How often each task had its lock.
    pub by_task: Vec<u64>,
    /// How long taking and releasing took each time, in nanoseconds.
    pub times: Histogram<u64>,
}

impl Done {
    /// By all tasks.
    pub fn total(&self) -> u64 {
        self.by_task.iter().sum()
    }
}

/// An empty histogram of nanoseconds, with three digits.
///
/// # Panics
/// Never: it has a valid number of digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are allowed")
}

/// A quantile in microseconds.
pub fn micros(times: &Histogram<u64>, share: f64) -> f64 {
    times.value_at_quantile(share) as f64 / 1e3
}

/// The clock's nanoseconds; what a histogram takes.
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The most as a multiple of the least; of a least of nothing, as if it were one.
pub fn unfairness(counts: &[u64]) -> f64 {
    let (most, least) = (counts.iter().max(), counts.iter().min());
    let of = |count: Option<&u64>| count.copied().unwrap_or_default().max(1) as f64;
    of(most) / of(least)
}

/// Whether others want what a task locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Nobody does: it must be free whenever it is asked for.
    Alone,
    /// Other tasks do, here or elsewhere.
    Together,
}

/// A task for each of these names, which holds it for no time, again and again, from now on for
/// `time`. What is not finished by then does not count.
///
/// # Errors
/// What the lock says; that a lock with a name of its own is not free; that two hold one name.
pub async fn crowd(
    handle: &Arc<dyn Locker>,
    names: Vec<String>,
    wanted: Wanted,
    time: Duration,
) -> Outcome<Done> {
    let end = Instant::now() + time;
    let held: Vec<Arc<AtomicBool>> = share(&names);
    let alone = wanted == Wanted::Alone;
    let mut tasks = JoinSet::new();
    for (task, (name, held)) in names.into_iter().zip(held).enumerate() {
        let handle = handle.clone();
        tasks.spawn(async move {
            let (mut done, mut times) = (0, histogram());
            loop {
                let start = Instant::now();
                let Some(left) = end.checked_duration_since(start).filter(|left| !left.is_zero())
                else {
                    return Outcome::Ok((task, done, times));
                };
                // Waits given up cost connections with some, which the next turn would pay for.
                let wait = if alone { Duration::ZERO } else { left + GRACE };
                let Some(lock) = handle.lock(&name, wait).await? else {
                    // the time is over for who waits
                    if alone {
                        return Err("a lock that nobody holds was not to be had".into());
                    }
                    continue;
                };
                if held.swap(true, Ordering::SeqCst) {
                    return Err("two held one lock at the same time".into());
                }
                held.store(false, Ordering::SeqCst);
                lock.release().await?;
                if Instant::now() <= end {
                    done += 1;
                    times.record(nanos(start.elapsed()))?;
                }
            }
        });
    }
    let mut all = Done { by_task: vec![0; tasks.len()], times: histogram() };
    while let Some(task) = tasks.join_next().await {
        let (task, done, times) = task??;
        all.by_task[task] = done;
        all.times.add(times)?;
    }
    Ok(all)
}

/// A flag for each name, the same one for the same name.
fn share(names: &[String]) -> Vec<Arc<AtomicBool>> {
    let mut known = std::collections::HashMap::<&str, Arc<AtomicBool>>::new();
    names.iter().map(|name| known.entry(name).or_default().clone()).collect::<Vec<_>>()
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // these are exact
mod tests {
    use super::*;

    #[test]
    fn fairness_is_most_to_least() {
        assert_eq!(unfairness(&[10, 20, 5]), 4.0);
        assert_eq!(unfairness(&[7, 7]), 1.0);
        assert_eq!(unfairness(&[0, 50]), 50.0);
        assert_eq!(unfairness(&[0, 0]), 1.0);
    }
}
