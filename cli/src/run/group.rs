//! The process group of a job.

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Whether a group has any process that runs.
pub(super) fn lives(group: Pid) -> bool {
    // as the first process of a container this one inherits those that nobody waits for
    let any = Pid::from_raw(-group.as_raw());
    while let Ok(status) = waitpid(any, Some(WaitPidFlag::WNOHANG))
        && status != WaitStatus::StillAlive
    {}
    killpg(group, None::<Signal>) != Err(Errno::ESRCH) && runs(group)
}

/// Whether one of its processes has not ended: where nobody waits for the dead, they stay.
fn runs(group: Pid) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    let group = group.to_string();
    let mut known = false;
    for process in processes.flatten() {
        let Ok(stat) = std::fs::read_to_string(process.path().join("stat")) else { continue };
        // pid (name) state parent group …; a name may have anything in it
        let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
        let (state, of) = (fields.next(), fields.nth(1));
        known |= state.is_some();
        if of == Some(&group) && !matches!(state, Some("Z" | "X")) {
            return true;
        }
    }
    !known
}
