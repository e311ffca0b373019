//! A lock that is lost while the job runs.

use super::support::{Place, runs, until};
use leasehold_conformance::servers::{Kind, Server};
use nix::sys::signal::Signal;

/// Servers of their own, that may be killed, and flags of `run`.
const WAYS: [(&str, Kind, &[&str]); 3] = [
    ("postgres", Kind::Postgres15, &[]),
    ("postgres", Kind::Postgres15, &["--kind", "lease", "--ttl", "2s"]),
    ("redis", Kind::Redis7, &["--kind", "lease", "--ttl", "2s"]),
];

fn own(name: &'static str, kind: Kind) -> (Server, Place) {
    let server = Server::start(kind).expect("the server starts");
    let place = Place::at(name, &server.url());
    place.ends(&["migrate"]).code_is(0);
    (server, place)
}

#[test]
fn the_job_is_told_to_end_and_the_code_says_why() {
    for (name, kind, flags) in WAYS {
        let (server, place) = own(name, kind);
        let script = "trap 'echo told; exit 3' TERM; echo up; read line"; // it starts no process
        let run = |code: &'static [&'static str]| {
            [&["run"], flags, code, &["x", "--", "sh", "-c", script]].concat()
        };
        let mut job = place.starts(&run(&[]));
        let mut other = place.starts(&run(&["--lost-code", "8", "--namespace", "other"]));
        job.says("up");
        other.says("up");
        server.kill().expect("it can be killed");
        job.complains("lost: ");
        job.says("told");
        assert_eq!(job.code(), 76, "{name} {flags:?}");
        other.says("told");
        assert_eq!(other.code(), 8, "{name} {flags:?}");
    }
}

#[test]
fn a_job_that_does_not_end_is_killed_after_the_grace() {
    let (server, place) = own("postgres", Kind::Postgres15);
    let script = "trap '' TERM; sh -c 'echo pid $$; while :; do sleep 0.02; done'";
    let mut job = place.starts(&["run", "--grace", "500ms", "x", "--", "sh", "-c", script]);
    let pid = job.says("pid ");
    let pid = pid.trim_start_matches("pid ");
    assert!(runs(pid));
    server.kill().expect("it can be killed");
    job.complains("lost: ");
    job.complains("is killed");
    assert_eq!(job.code(), 76);
    until("the grandchild is gone", || !runs(pid));
}

#[test]
fn a_job_that_is_stopped_ends_too() {
    let (server, place) = own("postgres", Kind::Postgres15);
    let mut job = place.starts(&["run", "x", "--", "sh", "-c", "echo pid $$; exec sleep 600"]);
    let pid = job.says("pid ");
    let pid = pid.trim_start_matches("pid ");
    let raw = nix::unistd::Pid::from_raw(pid.parse().expect("a pid"));
    nix::sys::signal::kill(raw, Signal::SIGSTOP).expect("it runs");
    server.kill().expect("it can be killed");
    assert_eq!(job.code(), 76);
    until("the job is gone", || !runs(pid));
}
