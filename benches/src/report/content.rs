//! What the report says.

use super::document::{Block, Document, Table};
use super::plot;
use super::{Machine, Report};
use crate::compare::{Change, Line};
use crate::record::{Against, Better, Record, Role, Series, Unit};
use crate::stats::Spread;
use crate::verdict::{Outcome, Verdict, verdicts};

const HOW: &str = "Each number is the median of rounds in which all contenders took turns, in one \
    run, on one machine, against the same server. Ratios are medians of the ratios within rounds, \
    with the middle half of them in brackets: below 1 leasehold takes less time, or does less. \
    Compare numbers of one run only. \"To the floor\" is to the raw driver doing the least that \
    this takes on this store.";

pub(super) fn document(report: &Report, changes: Option<&[Line]>) -> Document {
    let mut document = Document::default();
    document.heading(1, "leasehold's benchmarks");
    document.paragraph(HOW);
    document.push(Block::Code(report.command.clone()));
    machine(&mut document, report);
    if let Some(changes) = changes {
        document.heading(2, "Changes since the saved run");
        document.paragraph(told(changes));
        document.table(changed(changes));
    }
    document.heading(2, "What was promised");
    promised(&mut document, report);
    for (store, version) in &report.servers {
        document.heading(2, format!("{store} {version}"));
        let records: Vec<&Record> =
            report.records.iter().filter(|record| record.store == *store).collect();
        document.table(overview(&records));
        for record in records {
            details(&mut document, record);
        }
    }
    if !report.failures.is_empty() {
        document.heading(2, "What could not be played");
        let mut table = Table::new(&["store", "<scenario", "<why"]);
        for (store, scenario, why) in &report.failures {
            table.row([store, scenario, why]);
        }
        document.table(table);
    }
    if !report.notes.is_empty() {
        document.heading(2, "The contenders");
        let mut table = Table::new(&["contender", "<on", "<what has to be known"]);
        for note in &report.notes {
            table.row([&note.contender, &note.stores.join(", "), &note.note]);
        }
        document.table(table);
    }
    document
}

pub(super) fn machine(document: &mut Document, report: &Report) {
    let Machine { cpu, cores, memory, kernel, compiler } = &report.machine;
    let list = |list: &[(String, String)]| {
        let words: Vec<_> =
            list.iter().map(|(name, version)| format!("{name} {version}")).collect();
        words.join(", ")
    };
    document.paragraph(format!(
        "{cores} cores of {cpu}, {memory} MiB of memory, {kernel}, {compiler}. Client and server \
         on the same machine, over loopback. Servers: {}. Crates: {}. The run took {} s.",
        list(&report.servers),
        list(&report.crates),
        report.seconds
    ));
}

pub(super) fn promised(document: &mut Document, report: &Report) {
    let mut all: Vec<(&Record, Verdict)> = report
        .records
        .iter()
        .flat_map(|record| verdicts(record).into_iter().map(move |verdict| (record, verdict)))
        .filter(|(_, verdict)| verdict.outcome != Outcome::Unknown)
        .collect();
    let count = |outcome| all.iter().filter(|(_, verdict)| verdict.outcome == outcome).count();
    document.paragraph(format!(
        "{} promises: {} met, {} within the spread (the median misses the bound, which is within \
         the middle half of the rounds), {} not met.",
        all.len(),
        count(Outcome::Met),
        count(Outcome::Close),
        count(Outcome::Missed)
    ));
    // what is missed first; the sort is stable, so that stores and scenarios keep their order
    all.sort_by_key(|(_, verdict)| match verdict.outcome {
        Outcome::Missed => 0,
        Outcome::Close => 1,
        _ => 2,
    });
    let mut table =
        Table::new(&["store", "<measure", "<of", "<compared with", "bound", "found", "<"]);
    for (record, verdict) in all {
        let sign = match record.better {
            Better::Lower => "≤",
            Better::Higher => "≥",
        };
        let unit = match verdict.target.against {
            Against::Nothing => with_unit(verdict.target.bound, record.unit),
            _ => format!("{} ×", number(verdict.target.bound)),
        };
        let outcome = match verdict.outcome {
            Outcome::Missed => format!("**{}**", verdict.outcome),
            outcome => outcome.to_string(),
        };
        table.row([
            record.store.clone(),
            record.title.clone(),
            verdict.ours,
            verdict.other.unwrap_or_else(|| "–".into()),
            format!("{sign} {unit}"),
            verdict.found.as_ref().map_or_else(|| "–".into(), ratio),
            outcome,
        ]);
    }
    document.table(table);
}

/// A row a measure: the floor, leasehold, the best peer.
pub(super) fn overview(records: &[&Record]) -> Table {
    let mut table = Table::new(&[
        "measure",
        "raw driver",
        "leasehold",
        "best peer",
        "<who",
        "to the floor",
        "to the best peer",
    ]);
    for record in records {
        let ours = record.series.iter().filter(|series| series.role == Role::Leasehold);
        let several = ours.clone().count() > 1;
        for ours in ours {
            let which = if several { format!(" ({})", ours.contender) } else { String::new() };
            let (floor, peer) = (best(record, Role::Floor), best(record, Role::Peer));
            let to = |other: Option<&Series>| {
                other
                    .and_then(|other| Spread::of_ratios(&ours.rounds, &other.rounds))
                    .map_or_else(|| "–".into(), |spread| ratio(&spread))
            };
            let median = |series: Option<&Series>| {
                series
                    .and_then(|series| Spread::of(&series.rounds))
                    .map_or_else(|| "–".into(), |spread| with_unit(spread.median, record.unit))
            };
            table.row([
                format!("{}{which}", record.title),
                median(floor),
                median(Some(ours)),
                median(peer),
                peer.map_or_else(|| "–".into(), |peer| peer.contender.clone()),
                to(floor),
                to(peer),
            ]);
        }
    }
    table
}

pub(super) fn best(record: &Record, role: Role) -> Option<&Series> {
    let of = record.series.iter().filter(|series| series.role == role);
    let medians = of.filter_map(|series| Some((Spread::of(&series.rounds)?.median, series)));
    let by_median = |a: &(f64, _), b: &(f64, _)| a.0.total_cmp(&b.0);
    let best = match record.better {
        Better::Lower => medians.min_by(by_median),
        Better::Higher => medians.max_by(by_median),
    };
    best.map(|best| best.1)
}

/// All contenders of a measure.
fn details(document: &mut Document, record: &Record) {
    document.heading(3, record.title.clone());
    if !record.note.is_empty() {
        document.paragraph(record.note.clone());
    }
    if let Some(svg) = plot::bars(record) {
        let what = format!("{record}, by contender");
        document.push(Block::Plot(slug(&record.to_string()), what, svg));
    }
    let mut table =
        Table::new(&["contender", "median", "middle half", "to the floor", "leasehold to it"]);
    let (floor, ours) = (best(record, Role::Floor), record.first(Role::Leasehold));
    for series in &record.series {
        let against = |above: Option<&Series>, below: Option<&Series>| {
            let spread =
                above.zip(below).filter(|(above, below)| above.contender != below.contender);
            spread
                .and_then(|(above, below)| Spread::of_ratios(&above.rounds, &below.rounds))
                .map_or_else(|| "–".into(), |spread| ratio(&spread))
        };
        let Some(spread) = Spread::of(&series.rounds) else {
            let why = series.cannot.as_deref().unwrap_or("not measured");
            let why = format!("can't: {}", why.replace('\n', " "));
            table.row([series.contender.clone(), why, "–".into(), "–".into(), "–".into()]);
            continue;
        };
        table.row([
            series.contender.clone(),
            with_unit(spread.median, record.unit),
            format!("{} … {}", number(spread.low), number(spread.high)),
            against(Some(series), floor),
            against(ours, Some(series)),
        ]);
    }
    document.table(table);
}

fn told(changes: &[Line]) -> String {
    let count = |change| changes.iter().filter(|line| line.change == change).count();
    format!(
        "{} numbers compared: {} better, {} worse, {} new, {} gone; of the others, the middle \
         halves of both runs overlap or the medians differ by less than 3 %, which is noise.",
        changes.len(),
        count(Change::Better),
        count(Change::Worse),
        count(Change::New),
        count(Change::Gone)
    )
}

fn changed(changes: &[Line]) -> Table {
    let mut table = Table::new(&["store", "<measure", "<of", "before", "now", "change", "<"]);
    for line in changes {
        let spread = |spread: Option<Spread>| {
            spread.map_or_else(
                || "–".into(),
                |Spread { low, median, high }| {
                    let median = with_unit(median, line.unit);
                    format!("{median} [{} … {}]", number(low), number(high))
                },
            )
        };
        let change = match line.change {
            Change::Noise => "noise",
            Change::Better => "better",
            Change::Worse => "**worse**",
            Change::Gone => "gone",
            Change::New => "new",
        };
        table.row([
            line.store.clone(),
            line.title.clone(),
            line.contender.clone(),
            spread(line.before),
            spread(line.now),
            line.ratio().map_or_else(|| "–".into(), |ratio| format!("{} ×", number(ratio))),
            change.into(),
        ]);
    }
    table
}

/// What the program prints at its end: what was promised and does not hold, and what changed.
pub fn summary(report: &Report, changes: Option<&[Line]>) -> String {
    let mut document = Document::default();
    promised(&mut document, report);
    for (store, scenario, why) in &report.failures {
        document.paragraph(format!("could not be played: {store}, {scenario}: {why}"));
    }
    if let Some(changes) = changes {
        document.paragraph(told(changes));
        let no_noise: Vec<Line> =
            changes.iter().filter(|line| line.change != Change::Noise).cloned().collect();
        document.table(changed(&no_noise));
    }
    document.markdown("plots")
}

fn ratio(spread: &Spread) -> String {
    let Spread { low, median, high } = spread;
    format!("{} [{} … {}]", number(*median), number(*low), number(*high))
}

pub(super) fn with_unit(value: f64, unit: Unit) -> String {
    match unit.symbol() {
        "" => number(value),
        symbol @ "/s" => format!("{}{symbol}", number(value)),
        symbol => format!("{} {symbol}", number(value)),
    }
}

/// Three digits, and all of those before the point.
pub fn number(value: f64) -> String {
    if value.is_nan() {
        return "–".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "∞" } else { "−∞" }.into();
    }
    let size = value.abs();
    let digits = match size {
        _ if value == 0.0 || size >= 99.95 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.1 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let (whole, fraction) = text
        .split_once('.')
        .map_or((text.as_str(), None), |(whole, fraction)| (whole, Some(fraction)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("−", whole));
    let mut grouped = String::from(sign);
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match fraction {
        Some(fraction) => format!("{grouped}.{fraction}"),
        None => grouped,
    }
}

/// As a file's name.
fn slug(text: &str) -> String {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;
    use crate::report::Note;

    fn report() -> Report {
        let mut record = Record::new("lock", "lock & release, p50", Unit::Micros, Better::Lower)
            .target(Against::Floor, 1.15)
            .target(Against::Peers, 1.0)
            .note("One task.");
        record.store = "postgres".into();
        for round in 0..3 {
            let slower = f64::from(round);
            record.add(Role::Floor, "raw sqlx", 100.0 + slower);
            record.add(Role::Leasehold, "leasehold", 130.0 + slower);
            record.add(Role::Peer, "peer 1", 250.0 + slower);
        }
        record.cannot(Role::Peer, "peer 2", "too many connections");
        Report {
            command: "./bench postgres".into(),
            servers: vec![("postgres".into(), "15.1".into())],
            records: vec![record],
            notes: vec![Note {
                contender: "peer 1".into(),
                stores: vec!["postgres".into()],
                note: "It polls.".into(),
            }],
            failures: vec![("postgres".into(), "dedupe".into(), "the server was gone".into())],
            ..Report::default()
        }
    }

    #[test]
    fn the_report_has_every_contender_and_verdict() {
        let markdown = document(&report(), None).markdown("plots");
        for part in [
            "2 promises: 1 met, 0 within the spread",
            "| postgres | lock & release, p50 | leasehold | raw sqlx | ≤ 1.15 × | 1.30 [1.30 … 1.30] \
             | **not met** |",
            "| peer 2 | can't: too many connections |",
            "| lock & release, p50 | 101 µs | 131 µs | 251 µs | peer 1 | 1.30 [1.30 … 1.30] | 0.52 ",
            "![postgres: lock & release, p50, by contender](plots/postgres-lock-release-p50.svg)",
            "It polls.",
            "the server was gone",
            "./bench postgres",
            "One task.",
        ] {
            assert!(markdown.contains(part), "{part}\nis not in\n{markdown}");
        }
        // what is missed comes first
        assert!(markdown.find("not met**") < markdown.find("| met |"), "{markdown}");
    }

    #[test]
    fn all_forms_come_from_the_same_text() {
        let html = document(&report(), None).html();
        assert!(
            html.contains("<svg")
                && html.contains("lock &amp; release")
                && html.contains("<b>not met</b>")
        );
        let json = serde_json::to_string(&report()).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report());
    }

    #[test]
    fn files_are_written_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = report().write(folder.path(), None).unwrap();
        assert_eq!(files.len(), 3);
        assert_eq!(Report::read(&files[0]).unwrap(), report());
        assert!(folder.path().join("plots/postgres-lock-release-p50.svg").exists());
        let refusal = Report::read(&files[1]).unwrap_err().to_string();
        assert!(refusal.contains("report.md is no saved run"), "{refusal}");
    }

    #[test]
    fn changes_are_shown_and_noise_only_in_the_report() {
        let before = report();
        let mut now = report();
        for number in &mut now.records[0].series[1].rounds {
            *number *= 2.0;
        }
        let lines = compare(&before, &now);
        let all = document(&now, Some(&lines)).markdown("plots");
        assert!(all.contains("| **worse** |") && all.contains("| noise |"), "{all}");
        let short = summary(&now, Some(&lines));
        assert!(short.contains("| **worse** |") && !short.contains("| noise |"), "{short}");
    }

    #[test]
    fn numbers_have_three_digits() {
        let shown = [0.0, 0.0123, 0.456, 1.0, 12.34, 123.4, 1_234.5, 1_234_567.0, -5.0]
            .map(number)
            .join(" ");
        assert_eq!(shown, "0 0.012 0.46 1.00 12.3 123 1,234 1,234,567 −5.00");
        assert_eq!([f64::INFINITY, f64::NAN].map(number), ["∞", "–"]);
    }
}
