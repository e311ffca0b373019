//! The suite without user-level locks, on MariaDB: claims by row locks, named locks by leases.

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
            start: || Ok(Arc::new(MySqlHarness::start(Kind::MariaDb)?.without_user_locks())),
            join: Some(MySqlHarness::join),
        },
    )
}
