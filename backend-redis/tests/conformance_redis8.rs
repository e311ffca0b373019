//! The suite on Redis 8.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;

fn main() -> ExitCode {
    if !support::wanted(Kind::Redis8) {
        return ExitCode::SUCCESS;
    }
    leasehold_conformance::main(Setup {
        start: || support::RedisHarness::one(Kind::Redis8),
        join: Some(support::RedisHarness::join),
    })
}
