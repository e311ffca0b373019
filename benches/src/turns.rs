//! Measuring two sides that take turns.
//!
//! On a small machine most of a round trip is waking up the other side's core, and whether that is
//! needed is a matter of where the scheduler put a connection's two ends: they may stay on one core
//! for seconds (a third of the time of two cores), so that the same statements differ threefold
//! between two connections. So what is timed one by one has its client on one core and the server
//! on another, as if they were two machines; the sides take turns of a few; and the CPU time of
//! client and server, which does not depend on any of that, is printed as well.

use std::fs;
use std::process::Command;
use std::time::Duration;

use leasehold_conformance::servers::Server;

/// Turns that only warm up.
const WARM_UP: usize = 3;

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

/// What one side did.
#[derive(Debug, Default)]
struct Side {
    /// The median of each turn, in microseconds.
    turns: Vec<f64>,
    /// All runs, in microseconds.
    runs: Vec<f64>,
    cpu: Cpu,
}

/// Two sides.
#[derive(Debug, Default)]
pub struct Both {
    ours: Side,
    raw: Side,
}

impl Both {
    /// Adds a turn: its times, and the CPU times before and after.
    ///
    /// # Panics
    /// If it has no times.
    pub fn add(&mut self, round: usize, ours: bool, mut times: Vec<Duration>, cpu: [Cpu; 2]) {
        if round < WARM_UP {
            return;
        }
        let side = if ours { &mut self.ours } else { &mut self.raw };
        times.sort_unstable();
        side.turns.push(times[times.len() / 2].as_secs_f64() * 1e6);
        side.runs.extend(times.iter().map(|time| time.as_secs_f64() * 1e6));
        side.cpu.client += cpu[1].client.saturating_sub(cpu[0].client);
        side.cpu.server += cpu[1].server.saturating_sub(cpu[0].server);
    }

    /// The middle of our turns, in microseconds.
    ///
    /// # Panics
    /// If there were none.
    pub fn ours(&self) -> f64 {
        at(self.ours.turns.clone(), 0.5)
    }

    /// A line: the medians of the turns with the quartiles, the CPU time of client and server, and
    /// the median and quartiles of the ratios of neighbouring turns.
    ///
    /// # Panics
    /// If there were no turns.
    pub fn print(&self, what: &str, bound: &str) {
        self.print_many(what, bound, 1);
    }

    /// As [`print`](Self::print), where a run was of so many, and its time that of one.
    ///
    /// # Panics
    /// If there were no turns.
    pub fn print_many(&self, what: &str, bound: &str, many: usize) {
        let ratios = self.ours.turns.iter().zip(&self.raw.turns).map(|(ours, raw)| ours / raw);
        let [low, ratio, high] = quartiles(ratios.collect());
        println!("  {what}: ratio {ratio:.2} [{low:.2} .. {high:.2}] ({bound})");
        for (name, side) in [("ours", &self.ours), ("raw ", &self.raw)] {
            let [low, half, high] = quartiles(side.turns.clone());
            let each = |time: u64| time as f64 / 1e3 / (side.runs.len() * many) as f64;
            let (client, server) = (each(side.cpu.client), each(side.cpu.server));
            println!(
                "      {name} {half:7.1} us [{low:.1} .. {high:.1}] in {} turns, 99 % within \
                 {:.1} us, CPU {client:.1} us here and {server:.1} us on the server",
                side.turns.len(),
                at(side.runs.clone(), 0.99)
            );
        }
    }
}

/// The quartiles.
///
/// # Panics
/// If there are no numbers.
pub fn quartiles(mut numbers: Vec<f64>) -> [f64; 3] {
    numbers.sort_unstable_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| numbers[(numbers.len() - 1) * quarter / 4])
}

/// The number below which a share of them is.
///
/// # Panics
/// If there are no numbers.
pub fn at(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[((numbers.len() - 1) as f64 * share) as usize]
}

/// Has two blocks take turns of so many runs each, who begins changing; each gives what it took.
#[macro_export]
macro_rules! turns {
    ($meter:expr, $turns:expr, $runs:expr, ours $ours:block raw $raw:block) => {{
        let mut both = $crate::turns::Both::default();
        for round in 0..$turns {
            for ours in [round % 2 == 0, round % 2 == 1] {
                let before = $meter.read();
                let mut times = Vec::with_capacity($runs);
                for _ in 0..$runs {
                    let time = if ours { $ours } else { $raw };
                    times.push(time);
                }
                both.add(round, ours, times, [before, $meter.read()]);
            }
        }
        both
    }};
}
