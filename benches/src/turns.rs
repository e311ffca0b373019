//! Measuring sides that take turns.
//!
//! On a small machine most of a round trip is waking up the other side's core, and whether that is
//! needed is a matter of where the scheduler put a connection's two ends: they may stay on one core
//! for seconds (a third of the time of two cores), so that the same statements differ threefold
//! between two connections. So what is timed one by one has its client on one core and the server
//! on another, as if they were two machines; the sides take turns of a few; and the CPU time of
//! client and server, which does not depend on any of that, is reported as well.

use std::fs;
use std::process::Command;

use leasehold_conformance::servers::Server;

/// Nanoseconds on a CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// In this process.
    pub client: u64,
    /// In the server.
    pub server: u64,
}

/// Reads the CPU times of this process and of a server.
#[derive(Clone, Debug)]
pub struct Meter {
    server: Server,
}

impl Meter {
    /// For this server; one that was given by its URL is nowhere to be seen.
    pub fn of(server: &Server) -> Self {
        Self { server: server.clone() }
    }

    /// The times until now; zero where the system does not tell.
    pub fn read(&self) -> Cpu {
        let server = self.server.pids().iter().map(|pid| on_cpu(&pid.to_string())).sum();
        Cpu { client: on_cpu("self"), server }
    }

    /// The client on the first core, the server on the second, with the processes that it has and
    /// will have for its sessions; says whether that could be done.
    pub fn pin(&self) -> bool {
        let servers = self.server.pids();
        let own = pinned("0", std::process::id());
        own && !servers.is_empty() && servers.into_iter().all(|pid| pinned("1", pid))
    }

    /// Both on any core.
    pub fn unpin(&self) {
        for pid in self.server.pids().into_iter().chain([std::process::id()]) {
            pinned("0-", pid);
        }
    }
}

/// All threads of a process.
fn pinned(cores: &str, pid: u32) -> bool {
    let last = std::thread::available_parallelism().map_or(1, usize::from);
    // the list of all cores
    let cores = if cores == "0-" { format!("0-{}", online().max(last) - 1) } else { cores.into() };
    let output =
        Command::new("taskset").args(["-a", "-c", "-p", &cores, &pid.to_string()]).output();
    output.is_ok_and(|output| output.status.success())
}

fn online() -> usize {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().filter(|line| line.starts_with("processor")).count()
}

/// All threads that live; what an ended one used is not in it.
fn on_cpu(process: &str) -> u64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else {
        return 0;
    };
    let time = |task: fs::DirEntry| -> Option<u64> {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    tasks.flatten().filter_map(time).sum()
}

/// The number below which a share of them is.
///
/// # Panics
/// If there are no numbers.
pub fn at(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[((numbers.len() - 1) as f64 * share) as usize]
}
