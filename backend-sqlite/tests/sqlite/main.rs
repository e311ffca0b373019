//! What holds on SQLite only: processes that die, foreign writers, files that go away.

#[path = "../support/mod.rs"]
mod support;

mod busy;
mod claims;
mod files;
mod lab;
mod leases;
mod processes;
mod sessions;
mod set_up;
