//! The torture run, tested: it finds what is broken on purpose, and nothing in what is sound.
//!
//! On other backends: `./test torture --backend B --mutant M`.

use std::path::PathBuf;
use std::time::Duration;

use leasehold_torture::mutant::Mutant;
use leasehold_torture::report::Report;
use leasehold_torture::run::{Options, run};
use leasehold_torture::store::StoreKind;

/// A mutant must be found within this time; a run ends when it is.
const BOUND: Duration = Duration::from_secs(110);

fn torture(store: StoreKind, mutant: Option<Mutant>, length: Duration) -> Report {
    let record = tempfile::tempdir().expect("a temporary folder");
    let options = Options {
        store,
        length,
        seed: 7,
        clients: 4,
        mutant,
        hosts: false,
        program: PathBuf::from(env!("CARGO_BIN_EXE_torture")),
        record: record.path().to_owned(),
    };
    run(&options).expect("the run can be made")
}

/// Found, and by the promise that it breaks.
fn is_found(store: StoreKind, mutant: Mutant, rules: &[&str]) {
    let report = torture(store, Some(mutant), BOUND);
    let found: Vec<_> = report.violations.iter().map(|violation| violation.rule).collect();
    assert!(found.iter().any(|rule| rules.contains(rule)), "{mutant:?}: {found:?}\n{report}");
    // with the history around it
    let text = report.to_string();
    assert!(text.lines().filter(|line| line.starts_with("  >")).count() >= 2, "{text}");
}

#[test]
fn a_sound_backend_breaks_nothing() {
    let report = torture(StoreKind::Memory, None, Duration::from_secs(10));
    assert!(report.violations.is_empty(), "{report}");
}

#[test]
fn a_lease_that_never_tells_its_loss_is_found() {
    is_found(StoreKind::Memory, Mutant::SilentLoss, &["two holders"]);
}

#[test]
fn a_release_that_frees_a_successor_is_found() {
    is_found(StoreKind::Memory, Mutant::StaleRelease, &["two holders"]);
}

#[test]
fn tokens_that_repeat_are_found() {
    is_found(StoreKind::Memory, Mutant::RepeatingTokens, &["tokens"]);
}

#[test]
fn a_claim_that_commits_without_its_lock_is_found() {
    let rules = ["guarded writes", "count and claim", "first seen"];
    is_found(StoreKind::Memory, Mutant::UnlockedCommit, &rules);
}

#[test]
fn a_dedupe_entry_that_is_admitted_twice_is_found() {
    is_found(StoreKind::Memory, Mutant::AdmitsTwice, &["dedupe"]);
}

#[test]
fn a_lock_that_is_handed_to_two_is_found() {
    is_found(StoreKind::Memory, Mutant::TwoHolders, &["two holders"]);
}

#[test]
fn mutants_over_real_processes_and_a_real_server_are_found() {
    is_found(StoreKind::Redis, Mutant::SilentLoss, &["two holders"]);
    let rules = ["guarded writes", "count and claim", "first seen"];
    is_found(StoreKind::Redis, Mutant::UnlockedCommit, &rules);
    is_found(StoreKind::Redis, Mutant::TwoHolders, &["two holders"]);
}
