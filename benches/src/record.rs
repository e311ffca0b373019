//! What a scenario found out: for each contender one number a round, and what was hoped for.
//!
//! A [`Record`] is one measure of one scenario on one store, such as the p99 of a hand-off: a
//! scenario gives as many records as it has measures. Numbers of the same round belong together, as
//! the contenders took turns in it: what is compared are the ratios within rounds.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

/// What the numbers of a record are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Microseconds.
    Micros,
    /// Milliseconds.
    Millis,
    /// So many a second.
    PerSecond,
    /// 1,024 bytes.
    KiB,
    /// A number of things.
    Count,
    /// A ratio of two numbers of the same contender.
    Times,
}

impl Unit {
    /// As it is written behind a number.
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Micros => "µs",
            Self::Millis => "ms",
            Self::PerSecond => "/s",
            Self::KiB => "KiB",
            Self::Count => "",
            Self::Times => "×",
        }
    }
}

/// Which of two numbers is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// The lower, as of a time.
    Lower,
    /// The higher, as of a throughput.
    Higher,
}

/// What a contender is in the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The raw driver: the least that this takes on this store.
    Floor,
    /// This library.
    Leasehold,
    /// A library that one could take instead.
    Peer,
    /// Something else that is worth seeing next to them, such as another way to do it by hand.
    Other,
}

/// What leasehold's numbers are held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Against {
    /// The raw driver.
    Floor,
    /// Each peer that can do it, so that the best one decides.
    Peers,
    /// Nothing: the number itself is meant.
    Nothing,
}

/// What was promised of leasehold: its number, or its ratio to another's, is at most (where lower
/// is better) or at least (where higher is better) this.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// The other side of the ratio.
    pub against: Against,
    /// In the record's unit if it is against nothing, else a ratio.
    pub bound: f64,
}

/// One measure of one scenario on one store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The store's name, such as `postgres`; the program fills it in.
    pub store: String,
    /// The scenario's name, as the filter of the command line has it: `hand-off`.
    pub scenario: String,
    /// What was measured, as a heading: `hand-off, 50 waiters, p99`.
    pub title: String,
    /// What the numbers are.
    pub unit: Unit,
    /// Which are the better ones.
    pub better: Better,
    /// What was promised.
    pub targets: Vec<Target>,
    /// What each contender did, in the order of the report.
    pub series: Vec<Series>,
    /// What a reader has to know of this measure, in a sentence or two.
    pub note: String,
}

/// What one contender did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// The contender's name, with its version.
    pub contender: String,
    /// What it is in the comparison.
    pub role: Role,
    /// A number a round.
    pub rounds: Vec<f64>,
    /// Why it has no numbers.
    pub cannot: Option<String>,
}

impl Record {
    /// A record without numbers.
    pub fn new(scenario: &str, title: impl Into<String>, unit: Unit, better: Better) -> Self {
        Self {
            store: String::new(),
            scenario: scenario.into(),
            title: title.into(),
            unit,
            better,
            targets: Vec::new(),
            series: Vec::new(),
            note: String::new(),
        }
    }

    /// Promises something of leasehold.
    #[must_use]
    pub fn target(mut self, against: Against, bound: f64) -> Self {
        self.targets.push(Target { against, bound });
        self
    }

    /// Says what a reader has to know.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    /// Adds a contender's number of the next round.
    pub fn add(&mut self, role: Role, contender: &str, number: f64) {
        self.of(role, contender).rounds.push(number);
    }

    /// Says why a contender has no number; what it has is dropped, so that nothing half done is
    /// shown as a result.
    pub fn cannot(&mut self, role: Role, contender: &str, why: impl Display) {
        let series = self.of(role, contender);
        series.rounds.clear();
        series.cannot = Some(why.to_string());
    }

    /// A contender's series; a new one if there is none yet.
    pub fn of(&mut self, role: Role, contender: &str) -> &mut Series {
        let known = self.series.iter().position(|series| series.contender == contender);
        let at = known.unwrap_or_else(|| {
            let (contender, rounds) = (contender.to_owned(), Vec::new());
            self.series.push(Series { contender, role, rounds, cannot: None });
            self.series.len() - 1
        });
        &mut self.series[at]
    }

    /// The first series of this role that has numbers.
    pub fn first(&self, role: Role) -> Option<&Series> {
        self.series.iter().find(|series| series.role == role && !series.rounds.is_empty())
    }
}

impl Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.store, self.title)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contender_that_fails_half_way_has_no_numbers() {
        let mut record = Record::new("x", "x", Unit::Micros, Better::Lower);
        record.add(Role::Peer, "a", 1.0);
        record.add(Role::Peer, "b", 2.0);
        record.cannot(Role::Peer, "a", "too many connections");
        assert_eq!(record.series[0].rounds, Vec::<f64>::new());
        assert_eq!(record.series[0].cannot.as_deref(), Some("too many connections"));
        assert_eq!(record.first(Role::Peer).map(|peer| peer.contender.as_str()), Some("b"));
    }
}
