//! PostgreSQL 18, certified.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;
use support::PgHarness;

fn main() -> ExitCode {
    leasehold_conformance::main(Setup {
        start: || PgHarness::shared(Kind::Postgres18),
        join: Some(PgHarness::join),
    })
}
