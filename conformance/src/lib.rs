//! The suite that proves a leasehold backend, with throwaway real servers to run it on.

mod harness;
mod proxy;

pub use harness::{Handle, Harness, Link, Need};
pub use proxy::Proxy;
