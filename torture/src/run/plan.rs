//! The faults of a run, decided by its seed alone.

use std::fmt;
use std::time::Duration;

use leasehold::Kind;
use leasehold_conformance::proxy::{Direction, End, Strike, Weather};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::client::KEYS;

/// Two restarts of the server are at least so far apart, so that there is work between them.
const BETWEEN_RESTARTS: Duration = Duration::from_secs(8);
/// No fault lasts longer.
const LONGEST: Duration = Duration::from_secs(6);

/// A fault.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The network of a client.
    Weather {
        /// Whose.
        client: u32,
        /// In this direction, or both.
        direction: Option<Direction>,
        /// How it is.
        weather: Weather,
        /// For so long.
        time: Duration,
    },
    /// Something happens to connections of a client.
    Strike {
        /// Whose.
        client: u32,
        /// What.
        strike: Strike,
        /// To which of them.
        target: Target,
        /// A black hole is closed after so long, as the kernel's keepalive would.
        time: Duration,
    },
    /// `kill -9`, and a new life after this time.
    Kill(u32, Duration),
    /// The process is stopped for this time.
    Stop(u32, Duration),
    /// The administrator ends a client's sessions.
    EndSessions(u32),
    /// Somebody's hold is released by force.
    Force(Kind, String),
    /// The server is killed and started again.
    Restart,
    /// The server is stopped for this time.
    Pause(Duration),
    /// The link between a client's host and the server's is down for this time.
    Partition(u32, Duration),
    /// So many of a hundred packets on it are lost, in both directions, for this time.
    Loss(u32, u32, Duration),
}

/// Which connections of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// All that are open.
    All,
    /// The one on which the next request arrives.
    Next,
    /// One that is open, by this number modulo how many there are.
    One(usize),
}

/// A fault and when it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// After the start.
    pub at: Duration,
    /// What.
    pub fault: Fault,
}

/// What can be done to a store.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Clients are processes.
    pub processes: bool,
    /// There is a network in between.
    pub network: bool,
    /// It is one between hosts.
    pub hosts: bool,
}

impl Fault {
    /// Its name in the summary.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Weather { weather, direction: None, .. } if weather.silent => "silence",
            Self::Weather { weather, .. } if weather.silent => "silence of one direction",
            Self::Weather { weather, .. } if weather.trickle.is_some() => "trickle",
            Self::Weather { .. } => "delay and jitter",
            Self::Strike { strike: Strike::End(End::Close), .. } => "cut",
            Self::Strike { strike: Strike::End(End::Reset), .. } => "reset",
            Self::Strike { strike: Strike::End(End::BlackHole), .. } => "black hole",
            Self::Strike { strike: Strike::HalfClose(_), .. } => "half close",
            Self::Strike { strike: Strike::After { direction, .. }, .. } => match direction {
                Direction::Requests => "cut within a request",
                Direction::Answers => "cut within an answer",
            },
            Self::Kill(..) => "kill -9 of a client",
            Self::Stop(..) => "stop of a client",
            Self::EndSessions(_) => "sessions ended by the administrator",
            Self::Force(..) => "release by force",
            Self::Restart => "kill and restart of the server",
            Self::Pause(_) => "pause of the server",
            Self::Partition(..) => "partition of the hosts",
            Self::Loss(..) => "loss of packets",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weather { client, direction, weather, time } => {
                let direction = match direction {
                    None => "network",
                    Some(Direction::Requests) => "requests",
                    Some(Direction::Answers) => "answers",
                };
                write!(f, "{direction} of c{client}: {weather}, for {time:?}")
            }
            Self::Strike { client, strike, target, time } => {
                write!(f, "{target:?} of the connections of c{client}: {strike}")?;
                write!(f, ", a black hole closes after {time:?}")
            }
            Self::Kill(client, time) => write!(f, "kill -9 of c{client}, back after {time:?}"),
            Self::Stop(client, time) => write!(f, "stop of c{client} for {time:?}"),
            Self::EndSessions(client) => write!(f, "the sessions of c{client} are ended"),
            Self::Force(kind, key) => write!(f, "the {kind} {key} is released by force"),
            Self::Restart => f.write_str("kill and restart of the server"),
            Self::Pause(time) => write!(f, "pause of the server for {time:?}"),
            Self::Partition(client, time) => {
                write!(f, "the link of c{client} is down for {time:?}")
            }
            Self::Loss(client, percent, time) => {
                write!(f, "{percent} % of the packets of c{client} are lost for {time:?}")
            }
        }
    }
}

/// The faults of a run of this length.
pub fn plan(seed: u64, clients: u32, length: Duration, reach: Reach) -> Vec<Planned> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut at, mut restarts) = (Duration::from_millis(500), BETWEEN_RESTARTS / 2);
    let mut planned = Vec::new();
    loop {
        at += Duration::from_millis(rng.random_range(100..1200));
        if at >= length {
            return planned;
        }
        let fault = loop {
            let fault = match reach.hosts && rng.random_bool(0.3) {
                true => between_hosts(&mut rng, clients),
                false => fault(&mut rng, clients),
            };
            let possible = match &fault {
                Fault::Weather { .. } | Fault::Strike { .. } | Fault::EndSessions(_) => {
                    reach.network || !reach.processes
                }
                Fault::Stop(..) => reach.processes,
                Fault::Pause(_) => reach.network,
                Fault::Restart => (reach.network || !reach.processes) && at >= restarts,
                Fault::Partition(..) | Fault::Loss(..) => reach.hosts,
                Fault::Kill(..) | Fault::Force(..) => true,
            };
            if possible {
                break fault;
            }
        };
        if fault == Fault::Restart {
            restarts = at + BETWEEN_RESTARTS;
        }
        planned.push(Planned { at, fault });
    }
}

fn between_hosts(rng: &mut StdRng, clients: u32) -> Fault {
    let client = rng.random_range(0..clients);
    let time = Duration::from_millis(rng.random_range(200..LONGEST.as_millis() as u64));
    match rng.random_bool(0.5) {
        true => Fault::Partition(client, time),
        false => Fault::Loss(client, rng.random_range(5..60), time),
    }
}

fn fault(rng: &mut StdRng, clients: u32) -> Fault {
    let client = rng.random_range(0..clients);
    let millis = |rng: &mut StdRng, range: std::ops::Range<u64>| {
        Duration::from_millis(rng.random_range(range))
    };
    let direction = |rng: &mut StdRng| Direction::BOTH[rng.random_range(0..Direction::BOTH.len())];
    let longest = LONGEST.as_millis() as u64;
    match rng.random_range(0..100) {
        0..14 => {
            let (delay, jitter) = (millis(rng, 0..300), millis(rng, 0..300));
            let weather = Weather::clear().delay(delay).jitter(jitter);
            let direction = rng.random_bool(0.5).then(|| direction(rng));
            Fault::Weather { client, direction, weather, time: millis(rng, 200..longest) }
        }
        14..20 => {
            let weather = Weather::clear().trickle(rng.random_range(1..40), millis(rng, 1..20));
            let direction = rng.random_bool(0.5).then(|| direction(rng));
            Fault::Weather { client, direction, weather, time: millis(rng, 200..longest) }
        }
        20..34 => {
            let direction = rng.random_bool(0.4).then(|| direction(rng));
            let weather = Weather::silent();
            Fault::Weather { client, direction, weather, time: millis(rng, 50..longest) }
        }
        34..64 => {
            let ends = [End::Close, End::Reset, End::BlackHole];
            let end = ends[rng.random_range(0..ends.len())];
            let strike = match rng.random_range(0..4) {
                0 => Strike::End(end),
                1 => Strike::HalfClose(direction(rng)),
                _ => {
                    let bytes = [0, 0, 1, 7, 40, 150];
                    let bytes = bytes[rng.random_range(0..bytes.len())];
                    Strike::After { direction: direction(rng), bytes, end }
                }
            };
            let target = match rng.random_range(0..3) {
                0 => Target::All,
                1 => Target::Next,
                _ => Target::One(rng.random_range(0..16)),
            };
            Fault::Strike { client, strike, target, time: millis(rng, 200..longest) }
        }
        64..74 => Fault::Kill(client, millis(rng, 0..1500)),
        74..84 => Fault::Stop(client, millis(rng, 100..longest)),
        84..90 => Fault::EndSessions(client),
        90..94 => {
            let kind = Kind::ALL[rng.random_range(0..3)];
            Fault::Force(kind, KEYS[rng.random_range(0..KEYS.len())].to_owned())
        }
        94..97 => Fault::Restart,
        _ => Fault::Pause(millis(rng, 100..4000)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_everything() {
        let reach = Reach { processes: true, network: true, hosts: true };
        let long = Duration::from_secs(300);
        let first = plan(7, 4, long, reach);
        assert_eq!(first, plan(7, 4, long, reach));
        assert_ne!(first, plan(8, 4, long, reach));
        let labels: std::collections::BTreeSet<_> =
            first.iter().map(|planned| planned.fault.label()).collect();
        assert!(labels.len() >= 16, "{labels:?}");
    }

    #[test]
    fn what_a_store_cannot_do_is_not_planned() {
        let reach = Reach { processes: true, network: false, hosts: false };
        for planned in plan(7, 4, Duration::from_secs(300), reach) {
            let fault = planned.fault;
            let known = matches!(fault, Fault::Kill(..) | Fault::Stop(..) | Fault::Force(..));
            assert!(known, "{fault}");
        }
    }
}
