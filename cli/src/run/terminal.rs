//! The terminal, and to which process group it belongs: what a shell does for its jobs.

use std::io::{IsTerminal, stdin};

use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::{Pid, getpgrp, getpid, getsid, tcgetpgrp, tcsetpgrp};

/// Whether the standard input is a terminal.
pub(super) fn is_there() -> bool {
    stdin().is_terminal()
}

/// Whether the standard input is a terminal that listens to this process's group.
pub(super) fn is_ours() -> bool {
    is_there() && tcgetpgrp(stdin()) == Ok(getpgrp())
}

/// Whether this process is a job of a shell, rather than the first of its terminal (in a container,
/// say), which nobody would wake after a stop.
pub(super) fn is_shells() -> bool {
    getsid(None) != Ok(getpid())
}

/// Gives the terminal to a group. It fails where there is none, which is no harm.
pub(super) fn give(group: Pid) {
    // from the background the kernel would stop this process for it
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTTOU);
    let blocked = stop.thread_block().is_ok();
    if let Err(error) = tcsetpgrp(stdin(), group) {
        tracing::debug!(%error, "the terminal was not handed over");
    }
    if blocked {
        let _ = stop.thread_unblock();
    }
}

/// Takes it back, if it belongs to that group.
pub(super) fn take_from(group: Pid) {
    if is_there() && tcgetpgrp(stdin()) == Ok(group) {
        give(getpgrp());
    }
}

/// Stops this process as its job stopped, so that the shell notices; returns when it goes on.
pub(super) fn stop_too() {
    if let Err(error) = killpg(getpgrp(), Signal::SIGTSTP) {
        tracing::debug!(%error, "could not stop");
    }
}
