//! What a scenario gets: a server, how much time it may take, and who takes part.

use std::fmt::{self, Debug};
use std::future::Future;
use std::io::{IsTerminal, Write};
use std::pin::Pin;
use std::sync::Arc;

use leasehold_conformance::servers::{Kind, Server};
use leasehold_peers::{Contender, Outcome};

use crate::record::{Record, Role};

/// One who takes part.
#[derive(Clone, Debug)]
pub struct Entrant {
    /// What it is in the comparison.
    pub role: Role,
    /// The way to lock.
    pub contender: Arc<dyn Contender>,
}

impl Entrant {
    /// One of these.
    pub fn new(role: Role, contender: impl Contender + 'static) -> Self {
        Self { role, contender: Arc::new(contender) }
    }

    /// A library that one could take instead.
    pub fn from_peer(peer: Box<dyn Contender>) -> Self {
        Self { role: Role::Peer, contender: Arc::from(peer) }
    }

    /// Its name, with the version.
    pub fn name(&self) -> &'static str {
        self.contender.name()
    }
}

/// How thorough a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The least that goes through everything, for tests.
    Smoke,
    /// Few rounds.
    Quick,
    /// As long as it takes to tell small differences.
    Full,
}

/// Where a scenario is played.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The server: one of our own, or one that was given by its URL, which can't be restarted.
    pub server: Server,
    /// How thorough the run is.
    pub effort: Effort,
}

impl Scene {
    /// Which server it is.
    pub fn kind(&self) -> Kind {
        self.server.kind()
    }

    /// Tells how far a scenario has come: to a terminal in one line that changes, else not at all,
    /// as logs have no use for it.
    pub fn progress(&self, what: &str, round: usize, rounds: usize) {
        let mut out = std::io::stderr();
        if out.is_terminal() {
            let what = format!("{}: {what}: round {round} of {rounds}", self.kind());
            // nobody to tell is no failure
            let _ = write!(out, "\r\x1b[K{what}");
        }
    }

    /// Leaves the line to others.
    pub fn progress_over(&self) {
        let mut out = std::io::stderr();
        if out.is_terminal() {
            let _ = write!(out, "\r\x1b[K");
        }
    }

    /// One of three numbers, by the effort.
    pub fn pick<T>(&self, smoke: T, quick: T, full: T) -> T {
        match self.effort {
            Effort::Smoke => smoke,
            Effort::Quick => quick,
            Effort::Full => full,
        }
    }
}

/// A future that is passed on.
pub type Playing<'a> = Pin<Box<dyn Future<Output = Outcome<Vec<Record>>> + Send + 'a>>;

/// A scenario of a server, for whoever takes part in it.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// The name for the filter of the command line.
    pub name: &'static str,
    /// What it measures, in a line.
    pub about: &'static str,
    /// Plays it. Its records are without the store, which the program adds.
    pub play: for<'a> fn(&'a Scene) -> Playing<'a>,
}

impl Debug for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scenario").field("name", &self.name).finish_non_exhaustive()
    }
}
