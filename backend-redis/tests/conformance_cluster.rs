//! The suite on a cluster of three masters.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;

fn main() -> ExitCode {
    leasehold_conformance::main(Setup {
        start: || support::RedisHarness::cluster(support::kind()),
        join: Some(support::RedisHarness::join),
    })
}
