//! Options of the four traits, and the limits that they are checked against.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};

/// The shortest ttl of a lease: below it a renewal has no time to arrive.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// The longest ttl of a lease.
pub const MAX_TTL: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// The longest time that a dedupe entry is kept.
pub const MAX_RETAIN: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);
/// The wait where none is given: finite, so that a deadlock between waits ends.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(10);

/// How long to wait for a [`NamedLock`](crate::NamedLock).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockOptions {
    /// Bounds everything: local queue, connection, store. [`Duration::ZERO`] tries once and never
    /// waits; [`Duration::MAX`] waits for ever.
    pub wait: Duration,
}

impl Default for LockOptions {
    fn default() -> Self {
        Self { wait: DEFAULT_WAIT }
    }
}

impl LockOptions {
    /// Tries once.
    pub fn try_once() -> Self {
        Self { wait: Duration::ZERO }
    }

    /// Waits at most so long.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait }
    }
}

/// How long a [`Lease`](crate::Lease) lasts and how long to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseOptions {
    /// How long the store keeps the lease without a renewal; default 30 s.
    pub ttl: Duration,
    /// As [`LockOptions::wait`].
    pub wait: Duration,
    /// Whether the handle's heartbeat renews it; default true. Otherwise call
    /// [`LeaseGuard::renew`](crate::LeaseGuard::renew).
    pub auto_renew: bool,
    /// Stops the heartbeat's renewals after this time, so that a stuck holder does not hold for
    /// ever; default none.
    pub max_hold: Option<Duration>,
}

impl Default for LeaseOptions {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(30), wait: DEFAULT_WAIT, auto_renew: true, max_hold: None }
    }
}

impl LeaseOptions {
    /// Tries once.
    pub fn try_once() -> Self {
        Self::default().wait(Duration::ZERO)
    }

    /// Lasts so long without a renewal.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Waits at most so long.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Leaves the renewals to the caller.
    #[must_use]
    pub fn manual_renewal(self) -> Self {
        Self { auto_renew: false, ..self }
    }

    /// Ends the automatic renewals after this time.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        Self { max_hold: Some(max_hold), ..self }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a ttl outside [`MIN_TTL`] to [`MAX_TTL`].
    pub fn check(&self) -> Result<()> {
        within("ttl", self.ttl, MIN_TTL, MAX_TTL)
    }
}

/// How long to wait for a [`ClaimLock`](crate::ClaimLock).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimOptions {
    /// As [`LockOptions::wait`]; it covers all keys together.
    pub wait: Duration,
}

impl Default for ClaimOptions {
    fn default() -> Self {
        Self { wait: DEFAULT_WAIT }
    }
}

impl ClaimOptions {
    /// Tries once.
    pub fn try_once() -> Self {
        Self { wait: Duration::ZERO }
    }

    /// Waits at most so long.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait }
    }
}

/// How long [`Dedupe`](crate::Dedupe) remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DedupeOptions {
    /// How long a completed entry is kept; default 24 h.
    pub retain: Duration,
    /// After this time an entry that was neither completed nor abandoned can be taken over;
    /// default 10 min. `None` records it as done at once, in one step.
    pub in_progress: Option<Duration>,
}

impl Default for DedupeOptions {
    fn default() -> Self {
        Self {
            retain: Duration::from_secs(24 * 60 * 60),
            in_progress: Some(Duration::from_secs(10 * 60)),
        }
    }
}

impl DedupeOptions {
    /// Keeps a completed entry so long.
    #[must_use]
    pub fn retain(self, retain: Duration) -> Self {
        Self { retain, ..self }
    }

    /// Lets an unfinished entry be taken over after so long.
    #[must_use]
    pub fn in_progress(self, in_progress: Duration) -> Self {
        Self { in_progress: Some(in_progress), ..self }
    }

    /// Records the key as done when it is admitted.
    #[must_use]
    pub fn done_at_once(self) -> Self {
        Self { in_progress: None, ..self }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a `retain` or `in_progress` outside [`MIN_TTL`] to
    /// [`MAX_RETAIN`].
    pub fn check(&self) -> Result<()> {
        within("retain", self.retain, MIN_TTL, MAX_RETAIN)?;
        match self.in_progress {
            Some(time) => within("in_progress", time, MIN_TTL, MAX_RETAIN),
            None => Ok(()),
        }
    }
}

fn within(what: &str, value: Duration, min: Duration, max: Duration) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidOptions,
        format!("{what} is {value:?}, it must be from {min:?} to {max:?}"),
    ))
}

/// The moment at which a wait ends; never overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Now plus `wait`; a wait too long for the clock is for ever.
    pub fn after(wait: Duration) -> Self {
        Self(Instant::now().checked_add(wait).filter(|_| wait < Duration::MAX))
    }

    /// No end.
    pub fn never() -> Self {
        Self(None)
    }

    /// The time that is left: zero once it has passed, [`Duration::MAX`] for ever.
    pub fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether it has passed.
    pub fn has_passed(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }

    /// Waits until it passes; for ever if it never does.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn passed(self) {
        match self.0 {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// The earlier of this and `at`.
    #[must_use]
    pub fn or_at(self, at: Instant) -> Instant {
        self.0.map_or(at, |own| own.min(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked() {
        for ttl in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
            let error = LeaseOptions::default().ttl(ttl).check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOptions, "{ttl:?}");
            assert!(DedupeOptions::default().retain(ttl).check().is_err());
            assert!(DedupeOptions::default().in_progress(ttl).check().is_err());
        }
        assert!(LeaseOptions::default().ttl(MIN_TTL).check().is_ok());
        assert!(DedupeOptions::default().done_at_once().check().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_never_overflows() {
        assert!(Deadline::after(Duration::ZERO).has_passed());
        for wait in [Duration::MAX, Duration::from_secs(u64::MAX)] {
            let deadline = Deadline::after(wait);
            assert!(!deadline.has_passed());
            assert_eq!(deadline.remaining(), Duration::MAX);
        }
        let month = Duration::from_secs(40 * 24 * 3600);
        assert_eq!(Deadline::after(month).remaining(), month);
    }
}
