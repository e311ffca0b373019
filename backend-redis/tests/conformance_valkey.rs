//! The suite on Valkey.

mod support;

use std::process::ExitCode;

use leasehold_conformance::Setup;
use leasehold_conformance::servers::Kind;

fn main() -> ExitCode {
    if !support::wanted(Kind::Valkey) {
        return ExitCode::SUCCESS;
    }
    leasehold_conformance::main(Setup {
        start: || support::RedisHarness::one(Kind::Valkey),
        join: Some(support::RedisHarness::join),
    })
}
