//! [`Timetable`]: when the ticks of a schedule are.

use std::fmt::Debug;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{Error, ErrorKind, Result};

/// When the ticks are. The same for all processes of a schedule: it must depend on nothing but its
/// argument.
pub trait Timetable: Debug + Send + Sync + 'static {
    /// The first tick later than `time`; none if there are no more.
    fn next(&self, time: SystemTime) -> Option<SystemTime>;
}

/// A tick in every interval, aligned to 1970-01-01T00:00:00Z: every 10 min is at :00, :10, :20.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every(Duration);

impl Every {
    /// The shortest interval.
    pub const SHORTEST: Duration = Duration::from_millis(10);

    /// A tick in every `interval`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for an interval below [`SHORTEST`](Self::SHORTEST).
    pub fn new(interval: Duration) -> Result<Self> {
        if interval < Self::SHORTEST {
            let shortest = Self::SHORTEST;
            let detail = format!("an interval is {shortest:?} at least, not {interval:?}");
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        Ok(Self(interval))
    }
}

impl Timetable for Every {
    fn next(&self, time: SystemTime) -> Option<SystemTime> {
        // before 1970 the first tick is in 1970
        let Ok(since) = time.duration_since(UNIX_EPOCH) else {
            return Some(UNIX_EPOCH);
        };
        let past = since.as_nanos() % self.0.as_nanos();
        let to_go = self.0.as_nanos() - past;
        let (seconds, nanos) = (to_go / 1_000_000_000, to_go % 1_000_000_000);
        time.checked_add(Duration::new(seconds.try_into().ok()?, nanos.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn an_interval_is_aligned_to_the_epoch() {
        let every = Every::new(Duration::from_secs(600)).unwrap();
        assert_eq!(every.next(at(0.0)), Some(at(600.0)));
        assert_eq!(every.next(at(599.5)), Some(at(600.0)));
        assert_eq!(every.next(at(600.0)), Some(at(1200.0)));
        assert_eq!(every.next(UNIX_EPOCH - Duration::from_secs(5)), Some(UNIX_EPOCH));
        let odd = Every::new(Duration::from_millis(1500)).unwrap();
        assert_eq!(odd.next(at(1_700_000_001.0)), Some(at(1_700_000_002.5)));
        assert!(Every::new(Duration::from_millis(9)).is_err());
    }
}
