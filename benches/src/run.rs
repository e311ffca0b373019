//! A run: the stores, one after the other, and on each the scenarios.

use std::fs;
use std::time::{Instant, SystemTime};

use leasehold_conformance::servers::{Kind, Server};
use leasehold_peers::Outcome;

use crate::cli::Cli;
use crate::compare::compare;
use crate::report::{Machine, Note, Report, insert, summary};
use crate::scene::{Effort, Scenario, Scene};
use crate::{contenders, scenarios, special};

/// For all contenders' connections at the same time; a hundred, which is usual, are not enough for
/// six contenders with fifty handles each.
const CONNECTIONS: &str = "1000";

/// All scenarios, in the order of the report.
pub fn all() -> impl Iterator<Item = &'static Scenario> {
    scenarios::ALL.iter().chain(special::ALL)
}

/// Does what the command line says.
///
/// # Errors
/// When a server can't be had, or a file can't be read or written. A scenario that fails does not
/// end the run: the report has it.
pub async fn run(cli: &Cli) -> Outcome<Report> {
    if cli.list {
        for scenario in all() {
            println!("{:<14} {}", scenario.name, scenario.about);
        }
        return Ok(Report::default());
    }
    // before minutes are spent on what can't be compared
    let before = cli.compare.as_ref().map(|saved| Report::read(&cli.file(saved))).transpose()?;
    let report = match &cli.render {
        Some(saved) => Report::read(&cli.file(saved))?,
        None => play(cli).await?,
    };
    let changes = before.map(|before| compare(&before, &report));
    let files = report.write(&cli.out, changes.as_deref())?;
    println!("{}", summary(&report, changes.as_deref()));
    for file in files {
        println!("written: {}", file.display());
    }
    for page in &cli.into {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", page.display());
        let text = fs::read_to_string(page).map_err(|error| told(&error))?;
        fs::write(page, insert(&text, &report).map_err(|error| told(&error))?)?;
    }
    if let Some(name) = &cli.save {
        let file = cli.file(name);
        report.save(&file)?;
        println!("saved: {}", file.display());
    }
    Ok(report)
}

async fn play(cli: &Cli) -> Outcome<Report> {
    let start = Instant::now();
    if !all().any(|scenario| cli.wants(scenario)) {
        return Err("no scenario has such a name; --list shows them".into());
    }
    let mut report = Report {
        command: command(cli),
        machine: Machine::this(),
        crates: crate::report::crates(),
        ..Report::default()
    };
    for kind in cli.stores() {
        // a blocking start, on a thread that tasks don't need
        let server = tokio::task::spawn_blocking(move || server(kind)).await??;
        let version = server.version()?;
        say(start, &format!("{kind} {version}"));
        report.servers.push((kind.name().into(), version));
        note(&mut report, kind, &server)?;
        let scene = Scene { server, effort: cli.effort() };
        for scenario in all().filter(|scenario| cli.wants(scenario)) {
            let began = Instant::now();
            let played = (scenario.play)(&scene).await;
            let took = began.elapsed().as_secs_f64();
            match played {
                Ok(records) => {
                    say(start, &format!("{kind}: {} ({took:.1} s)", scenario.name));
                    for mut record in records {
                        record.store = kind.name().into();
                        record.series.sort_by_key(|series| series.role);
                        report.records.push(record);
                    }
                }
                Err(error) => {
                    say(start, &format!("{kind}: {} failed: {error}", scenario.name));
                    let (store, name) = (kind.name().into(), scenario.name.into());
                    report.failures.push((store, name, error.to_string()));
                }
            }
        }
        report.seconds = start.elapsed().as_secs();
        // a date for the reader, by which nothing is decided
        #[allow(clippy::disallowed_methods)]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        report.at = now.unwrap_or_default().as_secs();
        // a run that is broken off has what it has
        report.save(&cli.out.join("report.json"))?;
    }
    Ok(report)
}

/// One of our own, unless it is given by its URL.
fn server(kind: Kind) -> Outcome<Server> {
    let given = std::env::var(kind.variable()).is_ok_and(|url| !url.is_empty());
    if given {
        return Ok(Server::shared(kind)?);
    }
    let limit = format!("max_connections={CONNECTIONS}");
    let dashed = format!("--max-connections={CONNECTIONS}");
    // tests' servers forgo durability, which those of a service have
    Ok(match kind {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
            let mut arguments = vec!["-c", limit.as_str()];
            for setting in ["fsync=on", "synchronous_commit=on", "full_page_writes=on"] {
                arguments.extend(["-c", setting]);
            }
            Server::start_with(kind, &arguments)?
        }
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
            Server::start_with(kind, &[&dashed, "--innodb-flush-log-at-trx-commit=1"])?
        }
        _ => Server::start(kind)?,
    })
}

/// What has to be known of who takes part.
fn note(report: &mut Report, kind: Kind, server: &Server) -> Outcome {
    for entrant in contenders::of(kind, &server.url())? {
        let (contender, note) = (entrant.name().to_owned(), entrant.contender.notes().to_owned());
        if note.is_empty() {
            continue;
        }
        let same = |known: &&mut Note| known.contender == contender && known.note == note;
        let store = kind.name().to_owned();
        match report.notes.iter_mut().find(same) {
            Some(known) => known.stores.push(store),
            None => report.notes.push(Note { contender, stores: vec![store], note }),
        }
    }
    Ok(())
}

fn command(cli: &Cli) -> String {
    let mut words = vec!["./bench".to_owned()];
    words.extend(cli.stores.iter().map(|kind| kind.name().to_owned()));
    words.extend(cli.scenarios.iter().map(|name| format!("--scenario {name}")));
    match cli.effort() {
        Effort::Smoke => words.push("--smoke".into()),
        Effort::Quick => words.push("--quick".into()),
        Effort::Full => {}
    }
    words.join(" ")
}

fn say(start: Instant, what: &str) {
    eprintln!("[{:>4} s] {what}", start.elapsed().as_secs());
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn the_command_repeats_the_run() {
        let words = ["bench", "mysql", "--quick", "-s", "hand-off", "--save", "x"];
        let cli = Cli::try_parse_from(words).unwrap();
        assert_eq!(command(&cli), "./bench mysql --scenario hand-off --quick");
    }

    #[test]
    fn scenarios_have_names_of_their_own() {
        let mut names: Vec<_> = all().map(|scenario| scenario.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
