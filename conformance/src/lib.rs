//! The suite that proves a leasehold backend, with throwaway real servers to run it on.
//!
//! Every backend makes the same promises: those in the documentation of the four traits of
//! [`leasehold_core`]. Each [`Case`] of [`CASES`] puts one of them to the test, on a real store,
//! in real time, with faults on the way. A backend that passes is certified; nobody has to take
//! its author's word.
//!
//! # To certify a backend
//!
//! 1. Implement [`Harness`] for your store: how a handle is opened (a fresh connection, as another
//!    process of the service would), how a number is read and written on your transaction, what is
//!    left of a namespace. [`MemoryHarness`] is the smallest example.
//! 2. Give each handle a [`Link`], its own way to the store, on which faults are made. On a network
//!    put each handle behind a [`Proxy`] of its own. What your store cannot do is said by
//!    [`Harness::lacks`], with the reason; such cases are printed as ignored.
//! 3. Add a test without Rust's own harness that hands it to [`main`]:
//!
//!    ```toml
//!    [[test]]
//!    name = "conformance"
//!    harness = false
//!    ```
//!
//!    ```no_run
//!    // tests/conformance.rs
//!    use std::process::ExitCode;
//!    use std::sync::Arc;
//!
//!    use leasehold_conformance::{MemoryHarness, Setup};
//!
//!    fn main() -> ExitCode {
//!        leasehold_conformance::main(Setup {
//!            start: || Ok(Arc::new(MemoryHarness::new())),
//!            // joins the store at an address, in another process; none for one that lives in here
//!            join: None,
//!        })
//!    }
//!    ```
//!
//! 4. `cargo test --test conformance`, or `cargo nextest run`. It takes the arguments of Rust's test
//!    harness: a filter (`named::`, `claim::limit`), `--list`, `--exact`, `--skip`,
//!    `--test-threads` (8 by default: cases mostly wait), `--format json`. It ends with the counts
//!    of passed, failed and ignored cases.
//!
//! A new case reaches every backend by itself. A single case can be run from any test:
//!
//! ```
//! use std::sync::Arc;
//! use leasehold_conformance::{CASES, Harness, MemoryHarness, Outcome, run_case};
//!
//! let harness: Arc<dyn Harness> = Arc::new(MemoryHarness::new());
//! let case = CASES.iter().find(|case| case.name == "lease::excludes").expect("it is there");
//! assert_eq!(run_case(case, &harness), Outcome::Passed);
//! ```
//!
//! # How it works
//!
//! - Each case runs in a namespace of its own and on a tokio runtime of its own, several side by
//!   side, for at most [`CASE_LIMIT`]. After each the store is asked for what was left behind:
//!   a lock, a queue place or an open transaction fails the case.
//! - Two handles stand for two processes. Where it matters, there are real ones: the runner starts
//!   its own executable again (see [`Setup::join`]), kills it, stops it, changes its clock. (On
//!   unix only.)
//! - Nothing is asserted about time that a busy machine could break: what must come is awaited with
//!   a generous limit, what must not come too early is compared with its ttl.
//! - Concurrent runs write a [`History`], which is checked: holds never overlap, tokens rise.
//! - Sequences of operations are compared with a sequential [`model`].
//! - The suite is tested by deliberately broken backends, each of which must fail the case that
//!   names its fault (`cargo test -p leasehold-conformance --test mutants`).

pub mod any_key;
mod cancel;
mod case;
mod cases;
mod ctx;
mod fault;
pub mod garbled;
mod harness;
mod history;
mod holder;
mod memory;
pub mod model;
pub mod mutants;
pub mod proxy;
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
pub use runner::{CASE_LIMIT, Join, Setup, Start, main, run_case};
