//! The suite that proves a leasehold backend, with throwaway real servers to run it on.

mod harness;
#[cfg(all(feature = "servers", unix))]
pub mod servers;

pub use harness::{Handle, Harness, Link, Need};
