//! What must be true of a record, whatever the faults were.

mod dedupe;
mod exclusion;
mod sequence;
mod time;
mod tokens;
mod world;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::event::{Event, Kind, Micros};
use crate::store::StoreKind;

pub use world::{Op, Return, World};

/// Something that must never be.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The promise that it breaks, in a word or two.
    pub rule: &'static str,
    /// What happened.
    pub what: String,
    /// To what.
    pub subject: Option<(Kind, String)>,
    /// When it was certain.
    pub at: Micros,
    /// The operations in question, as places in [`World::ops`].
    pub ops: Vec<usize>,
}

/// What was seen after the end of the run.
#[derive(Clone, Debug)]
pub struct Ends {
    /// The last committed place of each sequence.
    pub last: Option<BTreeMap<String, i64>>,
    /// What could not be acquired again, what was left, who did not end.
    pub wrong: Vec<String>,
}

impl Ends {
    /// In the middle of a run.
    pub fn unknown() -> Self {
        Self { last: None, wrong: Vec::new() }
    }
}

/// What is no violation and worth telling.
#[derive(Clone, Debug, Default)]
pub struct Notable {
    /// Times that a lost hold was still believed in, within the bound, with the longest.
    pub overlaps: BTreeMap<Kind, (u64, Duration)>,
    /// The longest time beyond its wait that an acquisition took.
    pub overruns: BTreeMap<Kind, Duration>,
}

/// Checks everything.
pub fn check(store: StoreKind, events: &[Event], ends: &Ends) -> Vec<Violation> {
    check_all(store, events, ends).0
}

/// As [`check`], with what is worth telling.
pub fn check_all(store: StoreKind, events: &[Event], ends: &Ends) -> (Vec<Violation>, Notable) {
    let world = World::of(events);
    let (mut violations, mut notable) = (Vec::new(), Notable::default());
    exclusion::check(store, &world, &mut violations, &mut notable);
    tokens::check(&world, &mut violations);
    sequence::check(&world, ends.last.as_ref(), &mut violations);
    dedupe::check(&world, &mut violations);
    time::check(&world, &mut violations, &mut notable);
    let at = events.last().map_or(0, |event| event.at);
    violations.extend(ends.wrong.iter().map(|wrong| Violation {
        rule: "the end",
        what: wrong.clone(),
        subject: None,
        at,
        ops: Vec::new(),
    }));
    violations.sort_by_key(|violation| violation.at);
    (violations, notable)
}
