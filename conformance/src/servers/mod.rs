//! Real database servers for tests, without Docker.
//!
//! [`Server::start`] gives a throw-away server of its own, which the test may
//! [kill](Server::kill), [pause](Server::pause) and [restart](Server::restart).
//! [`Server::shared`] gives one to be shared by many tests: that of the
//! environment's URL where one is set (see [`Kind::variable`]), else one started
//! for this process.
//!
//! A server's program is looked for, in this order:
//!
//! 1. on this machine, when it is of the wanted version;
//! 2. in Debian's archive, by way of this machine's `apt` and the mirror it is set
//!    to use. The packages and all that they depend on are unpacked below
//!    `target/servers` and run from there; the system is not touched.
//!
//! What can't be had either way is an [`Error`] that says what to do: a missing
//! server must never turn a test into one that passes.
//!
//! | variable | meaning |
//! |---|---|
//! | `LEASEHOLD_TEST_POSTGRES_URL` and the others of [`Kind::variable`] | use this server for [`Server::shared`] |
//! | `LEASEHOLD_SERVERS_DIR` | where programs and data are kept, instead of `target/servers` |
//! | `LEASEHOLD_DEBIAN_MIRROR` | the Debian mirror to fetch from, instead of the one `apt` uses |
//! | `LEASEHOLD_SERVERS_FETCH` | `1`: never use a server that is installed on this machine |
//!
//! Every server ends with the process that started it, however that ends, and its
//! data goes with it. They listen on 127.0.0.1 only and are tuned for speed, not
//! for durability: what a test wants otherwise it passes to [`Server::start_with`].
//!
//! Signals and `/proc` make this a module for Linux; with URLs it works on any Unix.

pub mod certificates;
mod error;
mod fetch;
mod instance;
mod kind;
mod mysql;
mod paths;
mod pgbouncer;
mod postgres;
mod process;
mod program;
mod protocol;
pub mod redis;
mod server;
mod supervisor;
mod url;

pub use error::Error;
pub use kind::Kind;
pub use pgbouncer::PgBouncer;
pub use server::Server;

/// Fetches a kind's program if this machine has none, and starts nothing.
///
/// # Errors
/// When it is neither on this machine nor to be had from Debian's archive.
pub fn fetch(kind: Kind) -> Result<(), Error> {
    program::Program::find(kind).map(drop)
}

/// Says what is being done, past the capture of a test's output: fetching takes
/// long enough that a silent test looks like one that hangs.
pub(crate) fn say(message: &str) {
    use std::io::Write as _;
    // A closed standard error is no reason to fail.
    let _ = writeln!(std::io::stderr(), "servers: {message}");
}
