//! Signals reach the whole group of a job.
//!
//! A script that is signalled waits by `read`, and runs others in a subshell: dash loses a signal
//! that comes between its `vfork` and the `exec`.

use super::support::{postgres, runs, until};
use nix::sys::signal::Signal;

#[test]
fn a_grandchild_gets_what_the_command_gets() {
    let place = postgres();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
    ] {
        let name = signal.as_str().trim_start_matches("SIG");
        let inner =
            format!("trap 'echo inner; exit 5' {name}; echo up; while read line; do :; done");
        let script =
            format!("trap 'echo outer' {name}; (exec sh -c \"$INNER\"); echo code $?; exit 6");
        let mut command = place.leasehold(&["run", "x", "--", "sh", "-c", &script]);
        let mut job = super::support::Running::start(command.env("INNER", inner));
        job.says("up");
        job.signal(signal);
        job.says("inner");
        job.says("outer");
        job.says("code 5");
        assert_eq!(job.finish(), 6, "{signal}");
    }
}

#[test]
fn who_dies_of_the_signal_is_told_by_the_code() {
    let place = postgres();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut job = place.holds(&["run", "x"]);
        job.signal(signal);
        assert_eq!(job.code(), 128 + signal as i32);
        place.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
    }
}

#[test]
fn the_lock_is_held_until_the_last_process_of_the_group_has_ended() {
    let place = postgres();
    // the first process dies of the signal at once; the other cleans up for a while
    let script = "exec 3<&0; (trap 'echo cleaning; read line <&3; echo cleaned; exit' TERM; \
                  echo pid; read line <&3) & wait";
    let mut job = place.starts(&["run", "--grace", "20s", "x", "--", "sh", "-c", script]);
    job.says("pid");
    job.signal(Signal::SIGTERM);
    job.says("cleaning");
    place.ends(&["run", "--try", "x", "--", "true"]).code_is(75);
    job.hears("go on");
    job.says("cleaned");
    assert_eq!(job.finish(), 143);
    place.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
}

#[test]
fn one_that_does_not_end_with_its_group_is_killed_after_the_grace() {
    let place = postgres();
    let script = "(trap '' TERM; echo pid $(exec sh -c 'echo $PPID'); \
                  while :; do sleep 0.02; done) & wait";
    let mut job = place.starts(&["run", "--grace", "300ms", "x", "--", "sh", "-c", script]);
    let pid = job.says("pid ");
    let pid = pid.trim_start_matches("pid ");
    job.signal(Signal::SIGTERM);
    job.complains("is killed");
    assert_eq!(job.code(), 143);
    until("the stubborn one is gone", || !runs(pid));
}
