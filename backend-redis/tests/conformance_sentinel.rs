//! The suite on a sentinel with one replica.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;

fn main() -> ExitCode {
    leasehold_conformance::main(Setup {
        start: || support::RedisHarness::sentinel(support::kind()),
        join: Some(support::RedisHarness::join),
    })
}
