//! What may not grow, and by how much it may differ.

use std::fmt;
use std::fs;
use std::io;

use crate::client::steady::Rested;
use crate::store::Census;

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// The client's resident memory, in KiB.
    Memory,
    /// Tasks of its runtime.
    Tasks,
    /// Its threads.
    Threads,
    /// Its open files and sockets.
    Descriptors,
    /// Its connections, by the server's account.
    Connections,
    /// The library's keys or rows on the server.
    Entries,
}

impl What {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Memory,
        Self::Tasks,
        Self::Threads,
        Self::Descriptors,
        Self::Connections,
        Self::Entries,
    ];

    /// How much more of it there may be at the end than after the warm-up. Sessions that wait on
    /// the store, and connections of pools, come and go with the load, each with a task or two, a
    /// socket and (on SQLite) a thread. On Redis there is a key for each hundredth of all keys, for
    /// its tokens, and marks of releases live for seconds.
    fn slack(self, warm: u64) -> u64 {
        match self {
            Self::Memory => (8 * 1024).max(warm / 10),
            Self::Tasks | Self::Descriptors => 24,
            Self::Threads | Self::Connections => 12,
            Self::Entries => 200,
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory, KiB",
            Self::Tasks => "tasks",
            Self::Threads => "threads",
            Self::Descriptors => "descriptors",
            Self::Connections => "connections on the server",
            Self::Entries => "keys or rows on the server",
        })
    }
}

/// Everything that is counted, at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) operations: u64,
    memory: u64,
    tasks: u64,
    threads: u64,
    descriptors: u64,
    connections: Option<u64>,
    entries: Option<u64>,
}

impl Sample {
    /// Of a process that is at rest.
    pub(super) fn of(process: u32, rested: Rested, census: Census) -> io::Result<Self> {
        let folder = |name: &str| fs::read_dir(format!("/proc/{process}/{name}"));
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let memory = memory.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        Ok(Self {
            operations: rested.operations,
            memory: memory.ok_or_else(|| io::Error::other("the process has no VmRSS"))?,
            tasks: rested.tasks,
            threads: folder("task")?.count() as u64,
            descriptors: folder("fd")?.count() as u64,
            connections: census.connections,
            entries: census.entries.or(rested.entries),
        })
    }

    fn get(&self, what: What) -> Option<u64> {
        match what {
            What::Memory => Some(self.memory),
            What::Tasks => Some(self.tasks),
            What::Threads => Some(self.threads),
            What::Descriptors => Some(self.descriptors),
            What::Connections => self.connections,
            What::Entries => self.entries,
        }
    }
}

/// How something was after the warm-up and at the end.
#[derive(Clone, Copy, Debug)]
pub struct Grown {
    /// What.
    pub what: What,
    /// The most of it after the warm-up: the first fifth of the samples.
    pub warm: u64,
    /// The most that there was.
    pub most: u64,
    /// What there was at the end.
    pub end: u64,
    /// What there may be at the end.
    pub bound: u64,
}

impl Grown {
    /// There is too much of it.
    pub fn is_wrong(&self) -> bool {
        self.end > self.bound
    }

    pub(super) fn all(samples: &[Sample]) -> Vec<Self> {
        What::ALL.into_iter().filter_map(|what| Self::of(what, samples)).collect()
    }

    fn of(what: What, samples: &[Sample]) -> Option<Self> {
        let counts: Vec<u64> = samples.iter().filter_map(|sample| sample.get(what)).collect();
        let warm = *counts.iter().take(samples.len().div_ceil(5)).max()?;
        let (most, end) = (*counts.iter().max()?, *counts.last()?);
        Some(Self { what, warm, most, end, bound: warm + what.slack(warm) })
    }
}
