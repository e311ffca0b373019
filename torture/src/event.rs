//! What is recorded: an [`Event`] a line, written at once, so that a killed process loses nothing
//! that matters.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::{Error, ErrorKind};
use leasehold_conformance::monotonic;
use serde::{Deserialize, Serialize};

/// Microseconds of the machine's monotonic clock, which all its processes share.
pub type Micros = u64;

/// The time now.
pub fn now() -> Micros {
    monotonic().as_micros() as u64
}

/// Which of the four traits, and what kinds of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A named lock.
    Lock,
    /// A lease.
    Lease,
    /// A claim.
    Claim,
    /// A dedupe entry.
    Dedupe,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lock => "lock",
            Self::Lease => "lease",
            Self::Claim => "claim",
            Self::Dedupe => "dedupe",
        })
    }
}

/// How an operation was ended by its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Part {
    /// Released.
    Release,
    /// The guard was dropped.
    Drop,
    /// Committed.
    Commit,
    /// Rolled back.
    Rollback,
    /// A dedupe entry was completed.
    Complete,
    /// A dedupe entry was abandoned.
    Abandon,
}

/// The outcome of a call that gives nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It was done.
    Done,
    /// What it belonged to was lost.
    Lost,
    /// The answer to a commit was lost.
    Unknown,
    /// Another error.
    Failed(String),
}

impl From<Result<(), Error>> for Outcome {
    fn from(result: Result<(), Error>) -> Self {
        match result {
            Ok(()) => Self::Done,
            Err(error) => match error.kind() {
                ErrorKind::Lost => Self::Lost,
                ErrorKind::CommitUnknown => Self::Unknown,
                _ => Self::Failed(format!("{:?}: {error}", error.kind())),
            },
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::Lost => f.write_str("lost"),
            Self::Unknown => f.write_str("outcome unknown"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Do {
    /// An acquisition was called.
    Begin {
        /// Of this kind.
        kind: Kind,
        /// Of these keys.
        keys: Vec<String>,
        /// With this wait, in microseconds.
        wait: Micros,
        /// A lease's ttl or a dedupe entry's time in progress, in microseconds; none: at once.
        ttl: Option<Micros>,
    },
    /// It is held.
    Got {
        /// The token, where it came with it.
        token: Option<u64>,
    },
    /// Others have it; of a dedupe entry: whether it is done.
    Busy {
        /// It is done.
        done: bool,
    },
    /// An error.
    Failed(String),
    /// The future was dropped before it was ready.
    Cancelled,
    /// The token was fetched.
    Token(u64),
    /// It was believed to be held at this time.
    Held(Micros),
    /// The loss was told.
    Lost(String),
    /// The holder begins to part with it.
    Part(Part),
    /// That has an outcome.
    Parted(Outcome),
    /// A guarded write begins.
    Write,
    /// It has an outcome.
    Wrote {
        /// What became of it; the fence's rejection of a smaller token is a loss.
        outcome: Outcome,
        /// The place in the sequence of writes that it had; none if it did not get so far.
        seq: Option<i64>,
        /// The token of the write before.
        before: i64,
    },
    /// The claim's transaction wrote.
    Note {
        /// The sequence.
        name: String,
        /// The place in it.
        seq: i64,
        /// The token of the one before.
        before: i64,
    },
    /// The claim's transaction counted slots.
    Slot {
        /// The round's name.
        name: String,
        /// So many were taken before.
        used: i64,
    },
    /// The claim's transaction asked whether a key is first seen.
    Seen {
        /// Which.
        key: String,
        /// The answer.
        first: bool,
    },
    /// The process did not run between these times: it was stopped, or the machine is busy.
    Stall {
        /// From.
        from: Micros,
        /// To.
        to: Micros,
    },
    /// The client has begun.
    Hello,
    /// The client has ended in order.
    Bye,
    /// A client in memory vanishes with its runtime, which drops its guards.
    Vanish,
    /// The controller made a fault, or ended one.
    Fault {
        /// In words.
        what: String,
        /// What was released by force, if anything.
        forced: Option<(Kind, String)>,
    },
}

/// A line of the record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When it was written.
    pub at: Micros,
    /// By which client; none: the controller.
    pub client: Option<u32>,
    /// Which process of that client, after so many kills.
    pub life: u32,
    /// Which operation of that process; 0: none.
    pub op: u64,
    /// What.
    #[serde(rename = "do")]
    pub what: Do,
}

/// The record of one process.
#[derive(Clone, Debug)]
pub struct Log(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    client: Option<u32>,
    life: u32,
    ops: AtomicU64,
}

impl Log {
    /// Writes to a file, behind what is in it.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path, client: Option<u32>, life: u32) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self(Arc::new(Inner { file, client, life, ops: AtomicU64::new(0) })))
    }

    /// A new operation.
    pub fn op(&self) -> u64 {
        self.0.ops.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records it, now.
    ///
    /// # Panics
    /// If it cannot be written: a run without a record proves nothing.
    pub fn put(&self, op: u64, what: Do) {
        let Inner { client, life, .. } = *self.0;
        let event = Event { at: now(), client, life, op, what };
        let mut line = serde_json::to_vec(&event).expect("an event is plain data");
        line.push(b'\n');
        // one write: lines of several threads never mix, and a kill leaves whole lines
        (&self.0.file).write_all(&line).expect("the record can be written");
    }
}

/// Reads what all processes recorded, in the order of time.
///
/// # Errors
/// If a file cannot be read, or a line that is not the last is none of ours.
pub fn read(folder: &Path) -> io::Result<Vec<Event>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        let mut lines = BufReader::new(File::open(&path)?).lines().peekable();
        while let Some(line) = lines.next() {
            match serde_json::from_str(&line?) {
                Ok(event) => all.push(event),
                Err(_) if lines.peek().is_none() => {} // a process died while it wrote
                Err(error) => {
                    return Err(io::Error::other(format!("{}: {error}", path.display())));
                }
            }
        }
    }
    all.sort_by_key(|event: &Event| event.at);
    Ok(all)
}
