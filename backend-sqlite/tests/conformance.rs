//! SQLite, certified.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;
use support::SqliteHarness;

fn main() -> ExitCode {
    leasehold_conformance::main(Setup {
        start: SqliteHarness::shared,
        join: Some(SqliteHarness::join),
    })
}
