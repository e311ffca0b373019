//! [`Journal`]: what a service did, for the tests to read.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Something that a service did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, by the machine's monotonic clock, which its processes share.
    pub at: Duration,
    /// Which server.
    pub server: String,
    /// What.
    pub what: String,
    /// To what.
    pub subject: String,
    /// Under which fencing token.
    pub token: u64,
}

/// Where events go. Cloning gives another reference to it.
#[derive(Clone)]
pub struct Journal {
    server: Arc<str>,
    sink: Arc<dyn Fn(Event) + Send + Sync>,
}

impl Journal {
    /// Gives each event to `sink`.
    pub fn new(server: &str, sink: impl Fn(Event) + Send + Sync + 'static) -> Self {
        Self { server: server.into(), sink: Arc::new(sink) }
    }

    /// Prints each event as a line of JSON.
    pub fn to_stdout(server: &str) -> Self {
        Self::new(server, |event| {
            let mut out = std::io::stdout().lock();
            if let Ok(line) = serde_json::to_string(&event) {
                // nobody may be reading any more
                drop(writeln!(out, "{line}").and_then(|()| out.flush()));
            }
        })
    }

    /// The server that it is about.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Tells an event.
    pub fn tell(&self, what: &str, subject: &str, token: u64) {
        (self.sink)(Event {
            at: monotonic(),
            server: self.server.to_string(),
            what: what.to_owned(),
            subject: subject.to_owned(),
            token,
        });
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("server", &self.server).finish_non_exhaustive()
    }
}

/// The machine's monotonic clock.
fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}
