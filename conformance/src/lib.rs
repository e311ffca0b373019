//! The suite that proves a leasehold backend, with throwaway real servers to run it on.

mod harness;

pub use harness::{Handle, Harness, Link, Need};
