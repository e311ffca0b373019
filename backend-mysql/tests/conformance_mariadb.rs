//! The suite on MariaDB.

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;
use support::MySqlHarness;

fn main() -> ExitCode {
    support::certify(
        Kind::MariaDb,
        Setup {
            start: || Ok(Arc::new(MySqlHarness::start(Kind::MariaDb)?)),
            join: Some(MySqlHarness::join),
        },
    )
}
