//! The program, played once with next to no rounds on a real server.

use std::path::Path;
use std::process::{Command, Output};

use leasehold_benches::contenders;
use leasehold_benches::record::Role;
use leasehold_benches::report::Report;
use leasehold_benches::{scenarios, special};
use leasehold_conformance::servers::Kind;

fn bench(arguments: &[&str], out: &Path) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(arguments)
        .arg("--out")
        .arg(out)
        .output()
        .expect("the program is there");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    output
}

#[test]
fn the_report_has_every_contender_of_every_scenario() {
    let folder = tempfile::tempdir().unwrap();
    let scenarios = scenarios::ALL.iter().flat_map(|scenario| ["-s", scenario.name]);
    let arguments: Vec<&str> =
        ["redis", "--smoke", "--save", "first"].into_iter().chain(scenarios).collect();
    bench(&arguments, folder.path());
    let report = Report::read(&folder.path().join("report.json")).unwrap();
    assert_eq!(report.failures, []);
    let entrants = contenders::of(Kind::Redis7, "redis://127.0.0.1:1/0").unwrap();
    let expected: Vec<&str> =
        entrants.iter().map(leasehold_benches::scene::Entrant::name).collect();
    for scenario in scenarios::ALL {
        let of = |record: &&_| -> bool {
            let record: &leasehold_benches::record::Record = record;
            record.scenario == scenario.name
        };
        assert!(report.records.iter().any(|record| of(&record)), "{} is missing", scenario.name);
    }
    for record in &report.records {
        let mut found: Vec<&str> =
            record.series.iter().map(|series| series.contender.as_str()).collect();
        found.sort_unstable();
        let mut expected = expected.clone();
        expected.sort_unstable();
        assert_eq!(found, expected, "{record}");
        for series in &record.series {
            // one or the other: nobody is left out silently, and nothing half done is shown
            assert_eq!(series.rounds.is_empty(), series.cannot.is_some(), "{record}: {series:?}");
            if series.role == Role::Leasehold {
                assert_eq!(series.cannot, None, "{record}: {}", series.contender);
            }
        }
        // the barest way can't wait, where the next one can
        assert!(record.first(Role::Floor).is_some(), "{record}");
    }
    let markdown = std::fs::read_to_string(folder.path().join("report.md")).unwrap();
    let html = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
    for name in expected {
        assert!(markdown.contains(name) && html.contains(name), "{name}");
    }

    // the same run has not changed since it was saved
    let out = folder.path();
    let output = bench(&["--render", "first", "--compare", "first"], out);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(" 0 better, 0 worse, 0 new, 0 gone"), "{text}");
}

/// On one store of each family, as the statements differ.
#[test]
fn what_is_special_to_a_store_has_numbers_of_leasehold() {
    for store in ["postgres", "mariadb", "redis"] {
        let folder = tempfile::tempdir().unwrap();
        let scenarios = special::ALL.iter().flat_map(|scenario| ["-s", scenario.name]);
        let arguments: Vec<&str> = [store, "--smoke"].into_iter().chain(scenarios).collect();
        bench(&arguments, folder.path());
        let report = Report::read(&folder.path().join("report.json")).unwrap();
        assert_eq!(report.failures, [], "{store}");
        for scenario in special::ALL {
            let records = report.records.iter().filter(|record| record.scenario == scenario.name);
            let records: Vec<_> = records.collect();
            assert!(!records.is_empty(), "{store}: {} is missing", scenario.name);
            for record in records {
                let ours = record.series.iter().filter(|series| series.role == Role::Leasehold);
                let ours: Vec<_> = ours.collect();
                assert!(!ours.is_empty(), "{record}");
                for series in ours {
                    assert_eq!(series.cannot, None, "{record}: {}", series.contender);
                    let numbers = &series.rounds;
                    assert!(numbers.iter().all(|number| number.is_finite()), "{record}");
                    assert!(!numbers.is_empty(), "{record}: {}", series.contender);
                }
            }
        }
    }
}
