//! The suite on Redis 7, the default one.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;

fn main() -> ExitCode {
    if !support::wanted(Kind::Redis7) {
        return ExitCode::SUCCESS;
    }
    leasehold_conformance::main(Setup {
        start: || support::RedisHarness::one(Kind::Redis7),
        join: Some(support::RedisHarness::join),
    })
}
