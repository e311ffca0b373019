//! The suite that proves a leasehold backend, with throwaway real servers to run it on.

#[cfg(all(feature = "servers", unix))]
pub mod servers;
