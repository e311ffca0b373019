//! The soak run, tested: what grows is found, by its name, and nothing where nothing does.
//!
//! On other backends: `./test soak BACKEND --leak LEAK`.

use std::path::PathBuf;
use std::time::Duration;

use leasehold_torture::client::leak::Leak;
use leasehold_torture::soak::{Options, Report, What, soak};
use leasehold_torture::store::StoreKind;

fn run(store: StoreKind, leak: Option<Leak>) -> Report {
    let record = tempfile::tempdir().expect("a temporary folder");
    let options = Options {
        store,
        length: Duration::from_secs(18),
        short: true,
        steady_only: leak.is_some(),
        leak,
        program: PathBuf::from(env!("CARGO_BIN_EXE_torture")),
        record: record.path().to_owned(),
    };
    soak(&options).expect("the run can be made")
}

/// It grows, and nothing does that has nothing to do with it.
fn is_found(store: StoreKind, leak: Leak, grows: What, as_well: &[What]) {
    let report = run(store, Some(leak));
    let grown = report.grown.iter().filter(|grown| grown.is_wrong());
    let grown: Vec<What> = grown.map(|grown| grown.what).collect();
    assert!(grown.contains(&grows), "{leak:?} was not found:\n{report}");
    let others = grown.iter().filter(|what| **what != grows && !as_well.contains(what));
    assert_eq!(others.count(), 0, "{leak:?}:\n{report}");
    assert!(report.to_string().contains("GREW"), "{report}");
    assert!(!report.is_sound());
}

#[test]
fn nothing_grows_where_nothing_is_left() {
    let report = run(StoreKind::Memory, None);
    assert!(report.is_sound(), "{report}");
    assert!(report.operations.0 > 0 && report.operations.1 > report.operations.0, "{report}");
    assert!(report.parts.iter().all(|part| !part.figures.is_empty()), "{report}");
}

#[test]
fn memory_that_grows_is_found() {
    is_found(StoreKind::Memory, Leak::Memory, What::Memory, &[]);
}

#[test]
fn tasks_that_never_end_are_found() {
    is_found(StoreKind::Memory, Leak::Tasks, What::Tasks, &[]);
}

#[test]
fn files_that_stay_open_are_found() {
    is_found(StoreKind::Memory, Leak::Descriptors, What::Descriptors, &[]);
}

#[test]
fn connections_that_stay_open_are_found_on_the_server() {
    let as_well = What::ALL; // a handle has some of each
    is_found(StoreKind::Redis, Leak::Connections, What::Connections, &as_well);
}

#[test]
fn entries_that_stay_are_found_on_the_server() {
    is_found(StoreKind::Redis, Leak::Rows, What::Entries, &[]);
}
