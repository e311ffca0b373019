//! Coordination between copies of a service, on the store that it already runs.

pub use leasehold_core::*;

pub mod recipes;
