//! What changed since a saved run.

use crate::record::{Better, Record, Role, Unit};
use crate::report::Report;
use crate::stats::Spread;

/// Medians that differ by less than this are the same.
const LEAST: f64 = 0.03;

/// What a difference is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The middle halves of both runs have something in common, or there is next to no difference.
    Noise,
    /// It got better.
    Better,
    /// It got worse.
    Worse,
    /// Only the saved run has numbers of it.
    Gone,
    /// Only this run has.
    New,
}

/// One contender's measure in both runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The store.
    pub store: String,
    /// The measure.
    pub title: String,
    /// The contender.
    pub contender: String,
    /// Its unit.
    pub unit: Unit,
    /// In the saved run.
    pub before: Option<Spread>,
    /// In this run.
    pub now: Option<Spread>,
    /// What that is.
    pub change: Change,
}

impl Line {
    /// The new median as a multiple of the old one.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.now?.median / self.before?.median)
    }
}

/// Every measure that both runs played, or that one of them could not: the numbers of each
/// contender, and leasehold's ratios to the floor, which are the same on machines that differ.
pub fn compare(before: &Report, now: &Report) -> Vec<Line> {
    let mut lines = Vec::new();
    for record in &now.records {
        let same = |old: &&Record| old.store == record.store && old.title == record.title;
        let Some(old) = before.records.iter().find(same) else { continue };
        let mut names: Vec<&str> =
            record.series.iter().map(|series| series.contender.as_str()).collect();
        for series in &old.series {
            if !names.contains(&series.contender.as_str()) {
                names.push(&series.contender);
            }
        }
        for name in names {
            let spread = |record: &Record| {
                let series = record.series.iter().find(|series| series.contender == name)?;
                Spread::of(&series.rounds)
            };
            lines.extend(line(record, name, record.unit, spread(old), spread(record)));
        }
        lines.extend(line(
            record,
            "leasehold to the floor",
            Unit::Times,
            to_floor(old),
            to_floor(record),
        ));
    }
    lines
}

fn to_floor(record: &Record) -> Option<Spread> {
    let (ours, floor) = (record.first(Role::Leasehold)?, record.first(Role::Floor)?);
    Spread::of_ratios(&ours.rounds, &floor.rounds)
}

fn line(
    record: &Record,
    contender: &str,
    unit: Unit,
    before: Option<Spread>,
    now: Option<Spread>,
) -> Option<Line> {
    let change = match (&before, &now) {
        (None, None) => return None,
        (None, Some(_)) => Change::New,
        (Some(_), None) => Change::Gone,
        (Some(before), Some(now)) => change(record.better, before, now),
    };
    let (store, title) = (record.store.clone(), record.title.clone());
    Some(Line { store, title, contender: contender.into(), unit, before, now, change })
}

fn change(better: Better, before: &Spread, now: &Spread) -> Change {
    let small = (now.median - before.median).abs() <= LEAST * before.median.abs();
    if small || before.overlaps(now) {
        return Change::Noise;
    }
    let lower = now.median < before.median;
    if lower == (better == Better::Lower) { Change::Better } else { Change::Worse }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Role;
    use crate::report::Report;

    fn run(better: Better, series: &[(&str, &[f64])]) -> Report {
        let mut record = Record::new("x", "x", Unit::Micros, better);
        for (name, numbers) in series {
            let role = if *name == "raw" { Role::Floor } else { Role::Leasehold };
            record.of(role, name);
            for number in *numbers {
                record.add(role, name, *number);
            }
        }
        Report { records: vec![record], ..Report::default() }
    }

    fn changes(better: Better, before: &[f64], now: &[f64]) -> Change {
        let (before, now) = (run(better, &[("a", before)]), run(better, &[("a", now)]));
        compare(&before, &now)[0].change
    }

    #[test]
    fn only_what_is_outside_the_spread_is_a_change() {
        let old = [9.0, 10.0, 11.0];
        assert_eq!(changes(Better::Lower, &old, &[10.0, 10.6, 12.0]), Change::Noise);
        assert_eq!(changes(Better::Lower, &old, &[19.0, 20.0, 21.0]), Change::Worse);
        assert_eq!(changes(Better::Higher, &old, &[19.0, 20.0, 21.0]), Change::Better);
        assert_eq!(changes(Better::Lower, &old, &[4.0, 5.0, 6.0]), Change::Better);
        assert_eq!(changes(Better::Lower, &[10.0], &[10.2]), Change::Noise);
    }

    #[test]
    fn what_one_of_the_runs_lacks_is_told() {
        assert_eq!(changes(Better::Lower, &[], &[1.0]), Change::New);
        assert_eq!(changes(Better::Lower, &[1.0], &[]), Change::Gone);
        let (before, now) = (run(Better::Lower, &[("old", &[1.0])]), run(Better::Lower, &[]));
        assert_eq!(compare(&before, &now)[0].change, Change::Gone);
        assert_eq!(compare(&run(Better::Lower, &[("a", &[])]), &run(Better::Lower, &[])), []);
    }

    #[test]
    fn a_slower_machine_leaves_the_ratio_to_the_floor() {
        let before = run(Better::Lower, &[("raw", &[10.0]), ("ours", &[12.0])]);
        let now = run(Better::Lower, &[("raw", &[20.0]), ("ours", &[24.0])]);
        let lines = compare(&before, &now);
        let found: Vec<_> =
            lines.iter().map(|line| (line.contender.as_str(), line.change)).collect();
        assert_eq!(
            found,
            [
                ("raw", Change::Worse),
                ("ours", Change::Worse),
                ("leasehold to the floor", Change::Noise)
            ]
        );
        assert_eq!(lines[2].ratio(), Some(1.0));
    }
}
