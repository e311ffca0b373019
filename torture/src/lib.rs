//! Torture: several processes on one store, mixed operations of all four traits on few keys, random
//! faults from a seeded plan, and a check of everything that was recorded.
//!
//! `torture --help` tells how to run it; [`run::run`] is the same as a function. What must be true
//! of a record is in [`check`]. Without faults, for long and at scale: [`soak`].

pub mod check;
pub mod client;
pub mod event;
pub mod mutant;
pub mod report;
pub mod run;
pub mod soak;
pub mod store;
