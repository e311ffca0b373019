//! Benchmarks of leasehold next to the raw drivers.
