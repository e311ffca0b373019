//! The suite on MySQL.

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;
use support::MySqlHarness;

fn main() -> ExitCode {
    support::certify(
        Kind::MySql,
        Setup {
            start: || Ok(Arc::new(MySqlHarness::start(Kind::MySql)?)),
            join: Some(MySqlHarness::join),
        },
    )
}
