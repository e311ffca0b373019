//! Times on the command line and on the screen.

use std::time::Duration;

/// A time such as `30s`, `5m` or `1h 30m`; a plain number is seconds.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; e.g. 30s, 5m, 1h 30m"))
}

/// The same, or `forever`.
pub(crate) fn parse_wait(text: &str) -> Result<Duration, String> {
    match text {
        "forever" => Ok(Duration::MAX),
        _ => parse(text).map_err(|error| format!("{error} or forever")),
    }
}

/// A time for people: two units at most.
pub(crate) fn human(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600, seconds / 60);
    match () {
        () if days > 0 => format!("{days}d {}h", hours % 24),
        () if hours > 0 => format!("{hours}h {}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () if seconds > 9 => format!("{seconds}s"),
        () if time >= Duration::from_millis(100) => format!("{:.1}s", time.as_secs_f64()),
        () if time >= Duration::from_millis(1) => format!("{}ms", time.as_millis()),
        () => format!("{}µs", time.as_micros()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, seconds) in [("0", 0.0), ("30", 30.0), ("250ms", 0.25), ("1h 30m", 5400.0)] {
            assert_eq!(parse(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        assert_eq!(parse_wait("forever"), Ok(Duration::MAX));
        for text in ["", "-1", "soon", "1.5"] {
            assert!(parse_wait(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_told_in_two_units() {
        for (millis, told) in [
            (0, "0µs"),
            (5, "5ms"),
            (1_240, "1.2s"),
            (59_000, "59s"),
            (61_000, "1m 1s"),
            (3_660_000, "1h 1m"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(human(Duration::from_millis(millis)), told);
        }
    }
}
