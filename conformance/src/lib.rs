//! The suite that proves a leasehold backend, with throwaway real servers to run it on.

mod cancel;
mod case;
mod cases;
mod ctx;
mod fault;
mod harness;
mod history;
mod holder;
mod memory;
mod proxy;
mod report;
mod runner;
#[cfg(all(feature = "servers", unix))]
pub mod servers;

pub use case::{Case, Subject};
pub use cases::CASES;
pub use ctx::Ctx;
pub use fault::{Fault, Verdict};
pub use harness::{Handle, Harness, Link, Need};
pub use history::{History, Interval, monotonic};
pub use memory::MemoryHarness;
pub use proxy::Proxy;
pub use report::Outcome;
pub use runner::{CASE_LIMIT, Setup, main, run_case};
