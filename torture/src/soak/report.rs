//! What a soak run says at its end.

use std::fmt;
use std::time::Duration;

use super::Options;
use super::grown::{Grown, Sample};
use crate::check::Violation;
use crate::store::StoreKind;

/// The outcome of a soak run.
#[derive(Clone, Debug)]
pub struct Report {
    /// On which store.
    pub store: StoreKind,
    /// For how long the one client worked and rested.
    pub length: Duration,
    /// The client's operations, and how many events they recorded.
    pub operations: (u64, u64),
    /// What was counted.
    pub grown: Vec<Grown>,
    /// What must never be.
    pub violations: Vec<Violation>,
    /// The parts about scale.
    pub parts: Vec<Part>,
    /// What else went wrong.
    pub wrong: Vec<String>,
}

/// A part of the run about scale.
#[derive(Clone, Debug)]
pub struct Part {
    /// What was done.
    pub name: String,
    /// How long that took.
    pub took: Duration,
    /// Figures.
    pub figures: String,
    /// What went wrong.
    pub wrong: Vec<String>,
}

impl Report {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            store: options.store,
            length: options.length,
            operations: (0, 0),
            grown: Vec::new(),
            violations: Vec::new(),
            parts: Vec::new(),
            wrong: Vec::new(),
        }
    }

    pub(super) fn samples(&mut self, samples: &[Sample], events: u64) {
        self.operations = (samples.last().map_or(0, |sample| sample.operations), events);
        self.grown = Grown::all(samples);
    }

    pub(super) fn wrong(&mut self, what: String) {
        self.wrong.push(what);
    }

    pub(super) fn add(
        &mut self,
        name: String,
        took: Duration,
        done: Result<String, String>,
        left: Vec<String>,
    ) {
        let (figures, wrong) = match done {
            Ok(figures) => (figures, None),
            Err(wrong) => (String::new(), Some(wrong)),
        };
        let wrong = wrong.into_iter().chain(left).collect();
        self.parts.push(Part { name, took, figures, wrong });
    }

    /// Nothing grew, no promise was broken and nothing was left.
    pub fn is_sound(&self) -> bool {
        let grew = self.grown.iter().any(Grown::is_wrong);
        let parts = self.parts.iter().all(|part| part.wrong.is_empty());
        !grew && parts && self.violations.is_empty() && self.wrong.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operations, events) = self.operations;
        writeln!(
            f,
            "soak {}: {} tasks for {:?}, {operations} operations, {events} events checked",
            self.store,
            crate::client::steady::TASKS,
            self.length,
        )?;
        writeln!(
            f,
            "  {:<28}{:>10}{:>10}{:>10}{:>10}",
            "at rest", "warmed up", "most", "end", "bound"
        )?;
        for grown in &self.grown {
            let Grown { what, warm, most, end, bound } = grown;
            let verdict = if grown.is_wrong() { "   GREW" } else { "" };
            writeln!(f, "  {what:<28}{warm:>10}{most:>10}{end:>10}{bound:>10}{verdict}")?;
        }
        for part in &self.parts {
            let Part { name, took, figures, wrong } = part;
            writeln!(f, "  {name}: {figures}, in {:.1} s", took.as_secs_f64())?;
            wrong.iter().try_for_each(|wrong| writeln!(f, "    WRONG: {wrong}"))?;
        }
        for violation in &self.violations {
            writeln!(f, "  VIOLATION: {}: {}", violation.rule, violation.what)?;
        }
        self.wrong.iter().try_for_each(|wrong| writeln!(f, "  WRONG: {wrong}"))
    }
}
