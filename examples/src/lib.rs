//! Two services that run as several copies, on any store that leasehold knows.
//!
//! - [`tasks`]: pods that take in webhooks and run tasks under limits, with a schedule, tokens that
//!   are good once, a refresh that serves all, and housekeeping.
//! - [`pipelines`]: each pipeline is driven by one server at a time; sticky locks, a sweep, and a
//!   take-over when a server dies.
//!
//! What a service keeps itself is in [`docs`], on the same store, written in the transactions of
//! claims. What it does is told to a [`Journal`], from which the tests see what really happened.

pub mod docs;
pub mod journal;
pub mod pipelines;
pub mod process;
pub mod tasks;

pub use docs::Docs;
pub use journal::{Event, Journal};
pub use process::Process;
