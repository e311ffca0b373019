//! What only Redis and Valkey have: faults of real servers, tokens, claims, clusters, users.
//!
//! `B…` in a doc comment is the number of a public failure report that the test is about.

#[path = "../support/mod.rs"]
mod support;

mod acl;
mod checks;
mod claims;
mod cluster;
mod dedupe;
mod diagnose;
mod failover;
mod faults;
mod inspect;
mod keyspace;
mod lab;
mod locks;
mod quorum;
#[cfg(feature = "rustls")]
mod tls;
mod tokens;
mod wakes;
