//! Benchmarks of leasehold next to the raw drivers.

pub mod turns;
