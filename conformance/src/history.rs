//! [`History`]: who held what when, and the check that it was never two at once.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::fault::{Verdict, ensure};

/// A time of the machine's monotonic clock, which all its processes share.
///
/// # Panics
/// If the machine has no such clock.
pub fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every unix has a monotonic clock");
    now.into()
}

/// One stretch of holding: from after the acquisition was answered until before the release was
/// asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// What was held.
    pub key: String,
    /// By whom.
    pub holder: String,
    /// Since when, by [`monotonic`].
    pub from: Duration,
    /// Until when.
    pub to: Duration,
    /// The fencing token.
    pub token: u64,
}

/// What many holders recorded.
#[derive(Debug, Default)]
pub struct History(Mutex<Vec<Interval>>);

impl History {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an interval.
    pub fn record(&self, interval: Interval) {
        self.extend([interval]);
    }

    /// Adds many, e.g. those of another process.
    pub fn extend(&self, intervals: impl IntoIterator<Item = Interval>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(intervals);
    }

    /// How many intervals.
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that no two intervals of a key overlap, and that its tokens rise in the order of
    /// holding.
    ///
    /// # Errors
    /// The first pair of intervals that breaks it.
    pub fn check(&self) -> Verdict {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.sort_by(|a, b| (&a.key, a.from, a.to).cmp(&(&b.key, b.from, b.to)));
        for pair in all.windows(2).filter(|pair| pair[0].key == pair[1].key) {
            let (earlier, later) = (&pair[0], &pair[1]);
            ensure!(
                earlier.to <= later.from,
                "expected one holder at a time, but two held {:?} at once:\n  {}\n  {}",
                earlier.key,
                line(earlier),
                line(later)
            );
            ensure!(
                earlier.token < later.token,
                "expected tokens to rise in the order of holding {:?}, but:\n  {}\n  {}",
                earlier.key,
                line(earlier),
                line(later)
            );
        }
        Ok(())
    }

    /// As [`check`](Self::check), and at least so many intervals must have been recorded: a run in
    /// which nobody ever held anything proves nothing.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_at_least(&self, count: usize) -> Verdict {
        ensure!(self.len() >= count, "expected at least {count} holds, there were {}", self.len());
        self.check()
    }
}

fn line(interval: &Interval) -> String {
    let Interval { holder, from, to, token, .. } = interval;
    format!("{holder} from {from:?} to {to:?} with token {token}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(intervals: &[(&str, u64, u64, u64)]) -> History {
        let history = History::new();
        history.extend(intervals.iter().map(|(key, from, to, token)| Interval {
            key: (*key).to_owned(),
            holder: format!("holder {token}"),
            from: Duration::from_millis(*from),
            to: Duration::from_millis(*to),
            token: *token,
        }));
        history
    }

    #[test]
    fn holding_one_after_another_is_fine() {
        let good = history(&[("a", 5, 9, 2), ("a", 1, 5, 1), ("b", 2, 8, 1)]);
        good.check_at_least(3).unwrap();
        assert!(good.check_at_least(4).is_err());
    }

    #[test]
    fn an_overlap_is_found_and_told() {
        let fault = history(&[("a", 1, 6, 1), ("a", 5, 9, 2)]).check().unwrap_err();
        assert!(fault.message().contains("two held \"a\" at once"), "{fault}");
        assert!(history(&[("a", 1, 9, 1), ("a", 2, 3, 2)]).check().is_err(), "nested");
    }

    #[test]
    fn a_token_that_falls_or_repeats_is_found() {
        for token in [1, 2] {
            let fault = history(&[("a", 1, 2, 2), ("a", 3, 4, token)]).check().unwrap_err();
            assert!(fault.message().contains("tokens to rise"), "{fault}");
        }
    }

    #[test]
    fn the_clock_is_monotonic() {
        let before = monotonic();
        assert!(monotonic() >= before);
    }
}
