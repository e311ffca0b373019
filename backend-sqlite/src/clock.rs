//! The clock of leases: the monotonic one of the machine, which all its processes share.
//!
//! No step of the wall clock moves it. It is the clock of the holders' own deadlines as well, and
//! like these it stands still while the machine sleeps: with one that goes on, a lease would have
//! expired at the wake-up that its holder still believes in. After a restart of the machine it
//! begins anew, under another id: the holders of before have died with it.

use leasehold_core::{Error, ErrorKind, Result};

/// A moment, in a life of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// Which life.
    pub(crate) boot: &'static str,
    /// Microseconds since its start.
    pub(crate) micros: i64,
}

#[cfg(target_os = "linux")]
pub(crate) fn now() -> Result<Moment> {
    use std::sync::OnceLock;

    use rustix::time::{ClockId, clock_gettime};

    static BOOT: OnceLock<String> = OnceLock::new();
    if BOOT.get().is_none() {
        let path = "/proc/sys/kernel/random/boot_id";
        let id = std::fs::read_to_string(path).map_err(|error| {
            Error::new(ErrorKind::Unsupported, format!("{path} cannot be read")).with_source(error)
        })?;
        drop(BOOT.set(id.trim().to_owned())); // another thread read the same
    }
    let time = clock_gettime(ClockId::Monotonic);
    let boot = BOOT.get().map_or("", String::as_str);
    Ok(Moment { boot, micros: time.tv_sec * 1_000_000 + time.tv_nsec / 1_000 })
}

/// Where there is no such clock the wall clock has to do: the machine's life has one id.
#[cfg(not(target_os = "linux"))]
#[allow(clippy::disallowed_methods)]
pub(crate) fn now() -> Result<Moment> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let since = since.map_err(|error| {
        let detail = "the machine's clock is before 1970";
        Error::new(ErrorKind::Unsupported, detail).with_source(error)
    })?;
    Ok(Moment { boot: "wall clock", micros: i64::try_from(since.as_micros()).unwrap_or(i64::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_forward_in_one_life() {
        let (one, two) = (now().unwrap(), now().unwrap());
        assert!(one.boot == two.boot && !one.boot.is_empty());
        assert!(one.micros > 0 && two.micros >= one.micros);
    }
}
