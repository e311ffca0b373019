//! Benchmarks of leasehold next to the raw drivers and to the libraries that one could take instead.
//!
//! The program `bench` plays [scenarios](scene::Scenario) on real servers. Those that every
//! [`Contender`](leasehold_peers::Contender) can play are in `scenarios`, with
//! `contenders::of(kind, url) -> Outcome<Vec<Entrant>>` for who takes part (by kind and URL, as the
//! processes that take part have no [`Server`](leasehold_conformance::servers::Server)); those that
//! are about something else are in `special`, as `special::ALL: &[Scenario]`.

pub mod cli;
pub mod compare;
pub mod contenders;
pub mod load;
pub mod players;
mod process;
pub mod record;
pub mod report;
pub mod run;
pub mod scenarios;
pub mod scene;
pub mod special;
pub mod stats;
pub mod turns;
pub mod verdict;
