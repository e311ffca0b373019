//! What processes use, as Linux tells it.

use std::fs;

/// The memory that is a process's own, in KiB: pages that it shares count by their share.
pub(super) fn memory(pids: &[u32]) -> f64 {
    pids.iter().filter_map(|pid| field(*pid, "smaps_rollup", "Pss:")).sum()
}

/// The memory that this process has written to and not given back, in KiB.
pub(super) fn own_memory() -> f64 {
    field(std::process::id(), "status", "RssAnon:").unwrap_or_default()
}

fn field(pid: u32, file: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The time that processes were on a CPU, in ms; what has ended is not in it.
pub(super) fn on_cpu(pids: &[u32]) -> f64 {
    let tasks = pids.iter().filter_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok());
    let time = |task: fs::DirEntry| -> Option<f64> {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    tasks.flatten().flatten().filter_map(time).sum::<f64>() / 1e6
}
