//! Whether what was promised holds.

use std::fmt::{self, Display};

use crate::record::{Against, Better, Record, Role, Series, Target};
use crate::stats::Spread;

/// How a target was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The median keeps to the bound.
    Met,
    /// The median does not, but the bound is within the middle half of the rounds.
    Close,
    /// It does not.
    Missed,
    /// There is nothing to compare with.
    Unknown,
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Met => "met",
            Self::Close => "within the spread",
            Self::Missed => "not met",
            Self::Unknown => "nothing to compare with",
        })
    }
}

/// What became of one target for one of leasehold's series.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The target.
    pub target: Target,
    /// The series it was asked of.
    pub ours: String,
    /// The other side of the ratio: of several peers the one that is best off.
    pub other: Option<String>,
    /// The ratio, or the number if it is against nothing.
    pub found: Option<Spread>,
    /// Whether that is as promised.
    pub outcome: Outcome,
}

/// What became of all targets of a record.
pub fn verdicts(record: &Record) -> Vec<Verdict> {
    let ours = record.series.iter().filter(|series| series.role == Role::Leasehold);
    ours.flat_map(|ours| record.targets.iter().map(move |&target| verdict(record, ours, target)))
        .collect()
}

fn verdict(record: &Record, ours: &Series, target: Target) -> Verdict {
    let (other, found) = match target.against {
        Against::Nothing => (None, Spread::of(&ours.rounds)),
        Against::Floor => against(record, ours, Role::Floor),
        Against::Peers => against(record, ours, Role::Peer),
    };
    let outcome = match found {
        None if ours.rounds.is_empty() => Outcome::Missed,
        None => Outcome::Unknown,
        Some(found) if keeps(record.better, found.median, target.bound) => Outcome::Met,
        Some(found) if found.contains(target.bound) => Outcome::Close,
        Some(_) => Outcome::Missed,
    };
    Verdict { target, ours: ours.contender.clone(), other, found, outcome }
}

/// The ratio to the best of these: the one that makes us look worst.
fn against(record: &Record, ours: &Series, role: Role) -> (Option<String>, Option<Spread>) {
    let others = record.series.iter().filter(|series| series.role == role);
    let ratios = others.filter_map(|other| {
        let ratio = Spread::of_ratios(&ours.rounds, &other.rounds)?;
        Some((other.contender.clone(), ratio))
    });
    let by_median = |a: &(_, Spread), b: &(_, Spread)| a.1.median.total_cmp(&b.1.median);
    let worst = match record.better {
        Better::Lower => ratios.max_by(by_median),
        Better::Higher => ratios.min_by(by_median),
    };
    worst.map_or((None, None), |(name, ratio)| (Some(name), Some(ratio)))
}

fn keeps(better: Better, number: f64, bound: f64) -> bool {
    match better {
        Better::Lower => number <= bound,
        Better::Higher => number >= bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Unit;

    fn record(better: Better, against: Against, bound: f64) -> Record {
        let mut record = Record::new("x", "x", Unit::Micros, better).target(against, bound);
        for (ours, floor, peer) in [(11.0, 10.0, 20.0), (12.0, 10.0, 20.0), (13.0, 10.0, 10.0)] {
            record.add(Role::Floor, "raw", floor);
            record.add(Role::Leasehold, "leasehold", ours);
            record.add(Role::Peer, "slow", peer * 2.0);
            record.add(Role::Peer, "fast", peer);
        }
        record
    }

    fn outcome(better: Better, against: Against, bound: f64) -> Outcome {
        verdicts(&record(better, against, bound))[0].outcome
    }

    #[test]
    fn a_bound_is_met_missed_or_too_close_to_tell() {
        assert_eq!(outcome(Better::Lower, Against::Floor, 1.3), Outcome::Met);
        assert_eq!(outcome(Better::Lower, Against::Floor, 1.2), Outcome::Met);
        assert_eq!(outcome(Better::Lower, Against::Floor, 1.16), Outcome::Close);
        assert_eq!(outcome(Better::Lower, Against::Floor, 1.1), Outcome::Missed);
        assert_eq!(outcome(Better::Higher, Against::Floor, 1.1), Outcome::Met);
        assert_eq!(outcome(Better::Higher, Against::Floor, 1.3), Outcome::Missed);
        assert_eq!(outcome(Better::Lower, Against::Nothing, 12.0), Outcome::Met);
    }

    #[test]
    fn the_best_peer_decides() {
        for better in [Better::Lower, Better::Higher] {
            let verdict = verdicts(&record(better, Against::Peers, 1.0)).remove(0);
            let best = if better == Better::Lower { "fast" } else { "slow" };
            assert_eq!(verdict.other.as_deref(), Some(best), "{better:?}");
        }
    }

    #[test]
    fn who_cannot_play_is_no_peer_and_we_must() {
        let mut others_cannot = record(Better::Lower, Against::Peers, 1.0);
        others_cannot.cannot(Role::Peer, "fast", "no");
        others_cannot.cannot(Role::Peer, "slow", "no");
        assert_eq!(verdicts(&others_cannot)[0].outcome, Outcome::Unknown);
        let mut we_cannot = record(Better::Lower, Against::Peers, 1.0);
        we_cannot.cannot(Role::Leasehold, "leasehold", "no");
        assert_eq!(verdicts(&we_cannot)[0].outcome, Outcome::Missed);
    }
}
