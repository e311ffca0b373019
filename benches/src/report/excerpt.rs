//! The parts of a report that pages of the documentation show, between marks that stay there.

use leasehold_peers::Outcome;

use super::content::{best, number, overview, promised};
use super::document::{Block, Document, Table};
use super::{Report, content};
use crate::record::{Record, Role};
use crate::stats::Spread;

/// The measures that say most, by the ends and beginnings of their titles.
const HEADLINES: [(&str, &str); 4] = [
    ("uncontended", "uncontended, lock and release, p50"),
    ("64 tasks, a key each", "64 tasks with a key each, locks a second"),
    ("64 tasks, one key", "64 tasks of one process, one key, locks a second"),
    ("hand-off, p50", "hand-off, 1 waiter, p50"),
];

/// Puts the excerpts where a page has marks for them: `<!-- bench:short -->` a row a store,
/// `<!-- bench:figures -->` all measures and promises; each ends at `<!-- bench:end -->`.
///
/// # Errors
/// If the page has no mark, or one without an end.
pub fn insert(page: &str, report: &Report) -> Outcome<String> {
    const END: &str = "<!-- bench:end -->";
    let mut text = page.to_owned();
    let mut marks = 0;
    for (mark, excerpt) in [
        ("<!-- bench:short -->", short as fn(&Report) -> Document),
        ("<!-- bench:figures -->", figures),
    ] {
        let Some((before, rest)) = text.split_once(mark) else { continue };
        let (_, after) = rest.split_once(END).ok_or_else(|| format!("{mark} has no {END}"))?;
        text = format!("{before}{mark}\n\n{}\n{END}{after}", excerpt(report).markdown("plots"));
        marks += 1;
    }
    if marks == 0 { Err("it has no mark such as <!-- bench:figures -->".into()) } else { Ok(text) }
}

/// A row a store: leasehold's number, and in brackets the raw driver's and the best peer's.
fn short(report: &Report) -> Document {
    let mut head = vec!["store"];
    head.extend(HEADLINES.iter().map(|headline| headline.0));
    let mut table = Table::new(&head);
    for (store, version) in &report.servers {
        let mut row = vec![format!("{store} {version}")];
        for (_, title) in HEADLINES {
            let found = |record: &&Record| record.store == *store && record.title == title;
            row.push(report.records.iter().find(found).map_or_else(|| "–".into(), cell));
        }
        table.row(row);
    }
    let mut document = Document::default();
    document.table(table);
    document.push(Block::Code(report.command.clone()));
    document
}

fn cell(record: &Record) -> String {
    let median = |role| Some(Spread::of(&best(record, role)?.rounds)?.median);
    let shown = |role| median(role).map_or_else(|| "–".into(), number);
    let ours = median(Role::Leasehold);
    let ours = ours.map_or_else(|| "–".into(), |ours| content::with_unit(ours, record.unit));
    format!("**{ours}** ({}, {})", shown(Role::Floor), shown(Role::Peer))
}

fn figures(report: &Report) -> Document {
    let mut document = Document::default();
    document.push(Block::Code(report.command.clone()));
    content::machine(&mut document, report);
    for (store, version) in &report.servers {
        document.heading(3, format!("{store} {version}"));
        let records: Vec<&Record> =
            report.records.iter().filter(|record| record.store == *store).collect();
        document.table(overview(&records));
    }
    document.heading(3, "What was promised");
    promised(&mut document, report);
    document
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Better, Unit};

    fn report() -> Report {
        let mut record = Record::new("x", HEADLINES[0].1, Unit::Micros, Better::Lower);
        record.store = "redis".into();
        record.add(Role::Floor, "raw", 100.0);
        record.add(Role::Leasehold, "leasehold", 110.0);
        record.add(Role::Peer, "slow", 900.0);
        record.add(Role::Peer, "fast", 300.0);
        Report {
            servers: vec![("redis".into(), "7.0".into())],
            records: vec![record],
            command: "./bench redis".into(),
            ..Report::default()
        }
    }

    #[test]
    fn excerpts_take_the_place_of_older_ones() {
        let page = "# a\n<!-- bench:short -->\nstale\n<!-- bench:end -->\nb\n\
            <!-- bench:figures -->\n<!-- bench:end -->\n";
        let once = insert(page, &report()).unwrap();
        assert!(once.contains("| redis 7.0 | **110 µs** (100, 300) | – |"), "{once}");
        assert!(once.contains("### redis 7.0") && !once.contains("stale"), "{once}");
        assert!(once.starts_with("# a\n") && once.contains("\nb\n"), "{once}");
        assert_eq!(insert(&once, &report()).unwrap(), once);
    }

    #[test]
    fn a_page_without_marks_is_refused() {
        assert!(insert("# a\n", &report()).is_err());
        let refusal = insert("<!-- bench:short -->\n", &report()).unwrap_err().to_string();
        assert!(refusal.contains("has no <!-- bench:end -->"), "{refusal}");
    }
}
