//! [`Cron`]: ticks by a cron expression.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::DateTime;

use super::timetable::Timetable;
use crate::{Error, ErrorKind, Result};

/// Ticks by a cron expression, in UTC: `0 3 * * MON-FRI` is at three in the morning on workdays.
/// With six fields the first is the second.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
/// use leasehold::recipes::{Cron, Timetable};
///
/// let nightly = Cron::new("0 3 * * *")?;
/// let three = UNIX_EPOCH + Duration::from_secs(3 * 3600);
/// assert_eq!(nightly.next(UNIX_EPOCH), Some(three));
/// assert_eq!(nightly.next(three), Some(three + Duration::from_secs(24 * 3600)));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct Cron(croner::Cron);

impl fmt::Debug for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cron").field(&self.0.as_str()).finish()
    }
}

impl Cron {
    /// Reads an expression, as [croner](https://docs.rs/croner) understands it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] if it is not one.
    pub fn new(expression: &str) -> Result<Self> {
        expression.parse().map(Self).map_err(|error: croner::errors::CronError| {
            let detail = format!("{expression:?} is not a cron expression");
            Error::new(ErrorKind::InvalidOptions, detail).with_source(error)
        })
    }
}

impl Timetable for Cron {
    fn next(&self, time: SystemTime) -> Option<SystemTime> {
        // before 1970 the first tick is in 1970
        let (since, inclusive) = match time.duration_since(UNIX_EPOCH) {
            Ok(since) => (since, false),
            Err(_) => (Duration::ZERO, true),
        };
        let seconds = since.as_secs().try_into().ok()?;
        let time = DateTime::from_timestamp(seconds, since.subsec_nanos())?;
        let next = self.0.find_next_occurrence(&time, inclusive).ok()?;
        UNIX_EPOCH.checked_add(Duration::from_secs(next.timestamp().try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_later_than_the_time() {
        let cron = Cron::new("*/10 * * * * *").unwrap();
        let at = |seconds: f64| UNIX_EPOCH + Duration::from_secs_f64(seconds);
        assert_eq!(cron.next(at(0.0)), Some(at(10.0)));
        assert_eq!(cron.next(at(9.999)), Some(at(10.0)));
        assert_eq!(cron.next(at(10.0)), Some(at(20.0)));
        assert_eq!(cron.next(at(10.001)), Some(at(20.0)));
        assert_eq!(cron.next(UNIX_EPOCH - Duration::from_secs(5)), Some(UNIX_EPOCH));
        assert_eq!(format!("{cron:?}").matches("*/10").count(), 1);
    }

    #[test]
    fn what_is_no_expression_is_refused_and_what_never_comes_ends() {
        for wrong in ["", "x", "61 * * * *", "* * *"] {
            assert_eq!(Cron::new(wrong).unwrap_err().kind(), ErrorKind::InvalidOptions, "{wrong}");
        }
        assert_eq!(Cron::new("0 0 31 2 *").unwrap().next(UNIX_EPOCH), None);
    }
}
