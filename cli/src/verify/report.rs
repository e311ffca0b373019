//! What `verify` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_conformance::{Case, Outcome as Verdict};
use serde_json::{Value, json};

use super::Done;
use crate::duration;
use crate::style;
use crate::table::{Cell, Table, printable};
use crate::ui::Ui;

/// The cases and their promises.
pub(super) fn list(ui: Ui, cases: &[&Case]) {
    if ui.is_json() {
        let rows: Vec<Value> =
            cases.iter().map(|case| json!({"name": case.name, "about": case.about})).collect();
        return ui.print_json(&json!(rows));
    }
    let mut table = Table::new(&["CASE", "PROMISE"]);
    for case in cases {
        table.row(vec![Cell::styled(case.name, style::NAME), case.about.into()]);
    }
    ui.print_table(&table);
}

/// The outcome of all cases.
pub(super) fn report(ui: Ui, name: &str, url: &str, done: &[Done], took: Duration) {
    let counts = Counts::of(done);
    if ui.is_json() {
        let cases: Vec<Value> = done.iter().map(to_json).collect();
        ui.print_json(&json!({
            "store": url, "backend": name, "passed": counts.passed, "failed": counts.failed,
            "ignored": counts.ignored, "seconds": took.as_secs_f64(), "cases": cases,
        }));
    } else if ui.is_terminal() {
        for_people(ui, name, done, took);
    } else {
        let mut table = Table::new(&[]);
        for done in done {
            let (word, detail) = told(&done.verdict);
            let seconds = format!("{:.2}", done.time.as_secs_f64());
            table.row(vec![word.into(), done.case.name.into(), seconds.into(), detail.into()]);
        }
        ui.print_table(&table);
    }
}

/// How many cases ended how.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Counts {
    fn of<'a>(done: impl IntoIterator<Item = &'a Done>) -> Self {
        let mut counts = Self::default();
        for done in done {
            match done.verdict {
                Verdict::Passed => counts.passed += 1,
                Verdict::Failed(_) => counts.failed += 1,
                Verdict::Ignored(_) => counts.ignored += 1,
            }
        }
        counts
    }
}

fn for_people(ui: Ui, name: &str, done: &[Done], took: Duration) {
    let area = |done: &Done| done.case.name.split("::").next().unwrap_or_default();
    let mut areas: BTreeMap<&str, Vec<&Done>> = BTreeMap::new();
    for done in done {
        areas.entry(area(done)).or_default().push(done);
    }
    let mut table = Table::new(&["AREA", "PASSED", "FAILED", "NOT RUN"]);
    let number = |count: usize, style| match count {
        0 => Cell::styled("-", style::DIM),
        count => Cell::styled(count.to_string(), style),
    };
    let row = |table: &mut Table, title: &str, counts: Counts| {
        table.row(vec![
            Cell::styled(title, style::NAME),
            number(counts.passed, style::GOOD),
            number(counts.failed, style::BAD),
            number(counts.ignored, style::WARN),
        ]);
    };
    for (area, done) in areas {
        row(&mut table, area, Counts::of(done));
    }
    let counts = Counts::of(done);
    row(&mut table, "all", counts);
    ui.print_table(&table);
    for done in done {
        if let Verdict::Failed(message) = &done.verdict {
            let bad = style::BAD;
            let (name, about) = (done.case.name, done.case.about);
            ui.print(&format!("\n{bad}failed{bad:#} {name}: {about}\n  {}\n", printable(message)));
        }
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for done in done {
        if let Verdict::Ignored(reason) = &done.verdict {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    for (reason, count) in reasons {
        ui.print(&format!("\n{count} not run: {}", printable(reason)));
    }
    let took = duration::human(took);
    let (passed, failed) = (counts.passed, counts.failed);
    ui.print(&format!("\n{name}: {passed} passed, {failed} failed, in {took}\n"));
}

fn told(verdict: &Verdict) -> (&'static str, &str) {
    match verdict {
        Verdict::Passed => ("passed", ""),
        Verdict::Failed(message) => ("failed", message),
        Verdict::Ignored(reason) => ("ignored", reason),
    }
}

fn to_json(done: &Done) -> Value {
    let (outcome, detail) = told(&done.verdict);
    json!({
        "name": done.case.name, "about": done.case.about, "outcome": outcome, "detail": detail,
        "seconds": done.time.as_secs_f64(),
    })
}
