use std::{io, time::Duration};

use super::Kind;

/// Why a server could not be had, or not be made to do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such server on this machine, and it could not be fetched.
    #[error(
        "no {kind} server: {reason}; install it, or set {} to the URL of one: \
         `docker compose up -d` starts one, and compose.yaml names its URL",
        kind.variable()
    )]
    Unavailable {
        /// What was looked for.
        kind: Kind,
        /// Why it was not found.
        reason: String,
    },

    /// The server was given by a URL, so it is not ours to start and stop.
    #[error("can't {action} the {kind} server at {url}: it was given by its URL, not started here")]
    NotOurs {
        /// What was asked for.
        action: &'static str,
        /// The server's kind.
        kind: Kind,
        /// The URL that was given.
        url: String,
    },

    /// The server ended, or said no, while it was being prepared or started.
    #[error("{kind}: {what}{}", end_of_log(log))]
    Failed {
        /// The server's kind.
        kind: Kind,
        /// What failed.
        what: String,
        /// The end of what the server wrote to its log.
        log: String,
    },

    /// The server did not do something in time.
    #[error("{kind} did not {what} within {limit:?}{}", end_of_log(log))]
    Slow {
        /// The server's kind.
        kind: Kind,
        /// What was waited for.
        what: &'static str,
        /// How long was waited.
        limit: Duration,
        /// The end of what the server wrote to its log.
        log: String,
    },

    /// The server's answer was not one of its protocol, or was a refusal.
    #[error("{0}")]
    Protocol(String),

    /// A name or URL that means no server.
    #[error("{0}")]
    Name(String),

    /// A program that was needed failed.
    #[error("{0}")]
    Command(String),

    /// The operating system said no.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the operating system said.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: names what was tried.
    pub(super) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

fn end_of_log(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; the end of its log:\n{log}") }
}
