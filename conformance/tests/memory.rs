//! The memory backend, certified.

use std::process::ExitCode;
use std::sync::Arc;

use leasehold_conformance::{MemoryHarness, Setup};

fn main() -> ExitCode {
    leasehold_conformance::main(Setup { start: || Ok(Arc::new(MemoryHarness::new())), join: None })
}
