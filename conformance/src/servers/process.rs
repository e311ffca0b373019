//! What `/proc` tells of processes and ports, and the signals to a whole server.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{self, Signal},
    unistd::Pid,
};

use super::Error;

const POLL: Duration = Duration::from_millis(5);

/// Calls `condition` until it holds; false when it did not within `limit`.
pub(super) fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Whether the process runs; one that ended but was not waited for does not.
pub(super) fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// The process and all that descend from it, itself first.
pub(super) fn family(pid: u32) -> Vec<u32> {
    let mut children = BTreeMap::<u32, Vec<u32>>::new();
    for process in numeric_entries(Path::new("/proc")) {
        if let Some((_, parent)) = stat(process) {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next) {
        found.extend(children.remove(parent).unwrap_or_default());
        next += 1;
    }
    found
}

/// Sends a signal; a process that is gone is no error.
pub(super) fn send(pid: u32, signal: Signal) -> Result<(), Error> {
    let target = Pid::from_raw(pid.cast_signed());
    match signal::kill(target, signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(errno) => {
            Err(Error::Io { what: format!("send {signal} to process {pid}"), source: errno.into() })
        }
    }
}

/// Stops the process and its descendants where they stand; false when that took
/// longer than `limit`.
pub(super) fn freeze(pid: u32, limit: Duration) -> Result<bool, Error> {
    let mut failure = None;
    // The parent first, so that it starts no more children; then again until a
    // look finds all of them stopped, as a child may have come in between.
    let stopped = wait_until(limit, || {
        let mut all = true;
        for member in family(pid) {
            match stat(member) {
                Some(('T' | 't' | 'Z' | 'X', _)) | None => {}
                Some(_) => {
                    all = false;
                    if let Err(error) = send(member, Signal::SIGSTOP) {
                        failure = Some(error);
                    }
                }
            }
        }
        all || failure.is_some()
    });
    failure.map_or(Ok(stopped), Err)
}

/// Lets the process and its descendants go on.
pub(super) fn thaw(pid: u32) -> Result<(), Error> {
    // Children first: a parent that finds one hanging might take it for dead.
    family(pid).into_iter().rev().try_for_each(|member| send(member, Signal::SIGCONT))
}

/// Ends the process and its descendants at once, as a power cut would; false when
/// some of them are still there after `limit`.
pub(super) fn slay(pid: u32, limit: Duration) -> Result<bool, Error> {
    // Stopped first: the children of a killed parent go to another one, and would
    // not be found any more.
    send(pid, Signal::SIGSTOP)?;
    let members = family(pid);
    for member in &members {
        send(*member, Signal::SIGKILL)?;
    }
    Ok(wait_until(limit, || !members.iter().any(|member| alive(*member))))
}

/// Whether the process itself listens on the loopback port: what answers there
/// might be another server that was quicker to take it.
pub(super) fn listens(pid: u32, port: u16) -> bool {
    let sockets = listeners(port);
    let process = format!("/proc/{pid}");
    match open_files(&process) {
        Ok(files) => {
            files.iter().any(|file| sockets.iter().any(|socket| file == Path::new(&socket.file)))
        }
        // Another user's files are hidden even from root in a container that may not
        // trace; who owns the socket is shown to all.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => fs::metadata(process)
            .is_ok_and(|process| sockets.iter().any(|socket| socket.owner == process.uid())),
        Err(_) => false,
    }
}

/// What the links in a process's `fd` point to.
fn open_files(process: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for file in fs::read_dir(format!("{process}/fd"))? {
        match fs::read_link(file?.path()) {
            Ok(file) => files.push(file),
            // Closed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

struct Socket {
    owner: u32,
    /// What a link in `/proc/PID/fd` to it says.
    file: String,
}

fn listeners(port: u16) -> Vec<Socket> {
    const LISTENING: &str = "0A";
    let address = format!("0100007F:{port:04X}");
    let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let socket = |line: &str| {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        (*fields.get(1)? == address && *fields.get(3)? == LISTENING).then_some(())?;
        Some(Socket {
            owner: fields.get(7)?.parse().ok()?,
            file: format!("socket:[{}]", fields.get(9)?),
        })
    };
    table.lines().filter_map(socket).collect()
}

/// A loopback port that is free now, and that no outgoing connection takes.
///
/// The system hands the ports of its ephemeral range to connections. A server that
/// was killed could find its own port taken by one of them when it comes back, and
/// a client that retries in the meantime could even connect to itself.
pub(super) fn free_port() -> Result<u16, Error> {
    const LOWEST: u16 = 10_000;
    let ephemeral = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_ascii_whitespace().next()?.parse::<u16>().ok())
        .unwrap_or(32_768);
    let span = ephemeral.saturating_sub(LOWEST);
    if span > 1_000 {
        for _ in 0..200 {
            let port = LOWEST + (random() % u64::from(span)) as u16;
            if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                return Ok(port);
            }
        }
    }
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(Error::io("find a free port"))
}

/// The standard library's hash seed, which is random and costs no dependency.
fn random() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0)
}

/// State and parent. The name before them is in brackets and may contain anything.
fn stat(pid: u32) -> Option<(char, u32)> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = line.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

fn numeric_entries(folder: &Path) -> Vec<u32> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    #[test]
    fn a_process_is_found_below_its_parent() {
        let mut child = process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(family(process::id()).contains(&child.id()));
        assert!(alive(child.id()));
        assert!(slay(child.id(), Duration::from_secs(10)).unwrap());
        // It was not waited for, so that its entry is still there.
        assert!(!alive(child.id()));
        child.wait().unwrap();
    }

    #[test]
    fn a_listener_is_told_from_others() {
        let mut other = process::Command::new("sleep").arg("60").spawn().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(process::id(), port));
        assert!(!listens(other.id(), port));
        drop(listener);
        assert!(!listens(process::id(), port));
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
