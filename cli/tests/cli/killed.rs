//! `leasehold` itself is killed: its job ends, and what it held is free long before its ttl.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::support::{
    Place, Running, mariadb, mysql, postgres, redis, runs, sqlite, until, valkey,
};
use leasehold_conformance::servers::{Kind, Server};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

type Stores = [fn() -> Place; 6];
const STORES: Stores = [sqlite, postgres, mysql, mariadb, redis, valkey];

/// A ttl that no test waits for.
const TTL: &str = "10m";

/// Ways to hold something that outlives its holder by that ttl.
fn ways() -> Vec<(Place, &'static [&'static str])> {
    let leases = STORES.map(|store| (store(), &["run", "--kind", "lease", "--ttl", TTL][..]));
    let locks = [redis, valkey].map(|store| (store(), &["run"][..]));
    leases.into_iter().chain(locks).map(|(place, run)| (lasting(&place), run)).collect()
}

/// The same store with locks of that ttl, where they have one.
fn lasting(place: &Place) -> Place {
    let option = match place.name {
        "redis" | "valkey" => format!("?lock_ttl={TTL}"),
        _ => String::new(),
    };
    Place { url: format!("{}{option}", place.url), ..place.clone() }
}

/// The pids that a job has told in a line of this beginning.
fn pids(job: &mut Running) -> Vec<String> {
    job.says("pid ").split(' ').skip(1).map(str::to_owned).collect()
}

/// The process beside a `leasehold` that runs a job.
fn warden_of(job: &Running) -> Pid {
    let parent = job.pid().to_string();
    let wards = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let (_, rest) = stat.rsplit_once(')').unwrap_or_default();
        rest.split_whitespace().nth(1) == Some(&parent)
            && command_line(pid).starts_with("lh-warden ")
    };
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let pid = pids.find(|pid| wards(pid)).expect("a warden");
    Pid::from_raw(pid.parse().expect("a pid"))
}

fn command_line(pid: &str) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

#[test]
fn its_lock_is_anothers_at_once_and_its_whole_job_ends() {
    let locks = STORES.map(|store| (lasting(&store()), &["run"][..]));
    let leases = ways().into_iter().filter(|(_, run)| run.len() > 1);
    for (place, run) in locks.into_iter().chain(leases) {
        // a grandchild, whose pid it tells
        let script = "sleep 600 & echo pid $! $$; wait";
        let mut first = place.starts(&[run, &["x", "--", "sh", "-c", script]].concat());
        let pids = pids(&mut first);
        assert!(pids.iter().all(|pid| runs(pid)));
        let mut second = place.starts(&[run, &["x", "--", "echo", "mine"]].concat());
        second.complains("waiting for ");
        first.signal(Signal::SIGKILL);
        first.status();
        second.says("mine");
        assert_eq!(second.finish(), 0, "{} {run:?}", place.name);
        until("the killed one's job ends", || !pids.iter().any(|pid| runs(pid)));
    }
}

#[test]
fn a_job_that_does_not_end_is_protected_until_it_was_killed() {
    for (place, run) in ways() {
        // the first process ends at once, the other one never by itself
        let script = "trap '' TERM; sh -c 'echo pid $$; while :; do sleep 0.05; done' & \
                      trap - TERM; wait";
        let flags = ["--grace", "1s", "x", "--", "sh", "-c", script];
        let mut first = place.starts(&[run, &flags].concat());
        let stubborn = pids(&mut first);
        first.signal(Signal::SIGKILL);
        first.status();
        until("somebody else gets it", || {
            let other = place.ends(&[run, &["--try", "x", "--", "true"]].concat());
            assert!([0, 75].contains(&other.code), "{other:?}");
            if other.code == 0 {
                let alone = !runs(&stubborn[0]);
                assert!(alone, "{} {run:?}: it was free while the job ran", place.name);
            }
            other.code == 0
        });
    }
}

#[test]
fn a_successors_is_not_touched() {
    for (place, run) in ways() {
        let mut first =
            place.starts(&[run, &["x", "--", "sh", "-c", "echo pid $$; read x"]].concat());
        let job = pids(&mut first);
        let warden = warden_of(&first);
        kill(warden, Signal::SIGSTOP).expect("it runs");
        first.signal(Signal::SIGKILL);
        first.status();
        let kind = if run.len() > 1 { "lease" } else { "lock" };
        place.ends(&["release", "--force", "--kind", kind, "x"]).code_is(0);
        let mut second = place.holds(&[run, &["x"]].concat());
        kill(warden, Signal::SIGCONT).expect("it runs");
        until("the warden has done its work", || !runs(&warden.to_string()));
        assert!(!runs(&job[0]), "{} {run:?}: the job still runs", place.name);
        place.ends(&[run, &["--try", "x", "--", "true"]].concat()).code_is(75);
        second.hears("go");
        second.says("done");
        assert_eq!(second.finish(), 0, "{} {run:?}: it was lost", place.name);
    }
}

#[test]
fn it_is_free_also_where_the_job_has_just_ended() {
    for (place, run) in ways() {
        let mut first = place.holds(&[run, &["x"]].concat());
        // it does not see its job end
        first.signal(Signal::SIGSTOP);
        first.hears("go");
        first.says("done");
        first.signal(Signal::SIGKILL);
        first.status();
        let other = place.ends(&[run, &["--wait", "60s", "x", "--", "echo", "mine"]].concat());
        let all = first.all();
        assert_eq!(other.out, "mine\n", "{} {run:?}: {other:?} {all:?}", place.name);
    }
}

#[test]
fn a_store_that_is_away_is_asked_again() {
    let server = Server::start(Kind::Postgres15).expect("the server starts");
    let place = Place::at("postgres", &server.url());
    let run = ["run", "--kind", "lease", "--ttl", TTL];
    let script = ["x", "--", "sh", "-c", "echo pid $$; read x"];
    place.ends(&["migrate"]).code_is(0);
    let mut first = place.starts(&[&run[..], &script].concat());
    let job = pids(&mut first);
    server.kill().expect("it can be killed");
    first.signal(Signal::SIGKILL);
    first.status();
    until("the job ends", || !runs(&job[0]));
    server.restart().expect("it starts again");
    let other = place.ends(&[&run[..], &["--wait", "60s", "x", "--", "echo", "mine"]].concat());
    assert_eq!(other.code_is(0).out, "mine\n");
}

#[test]
fn its_job_ends_also_where_nobody_hears_of_it() {
    let place = redis();
    let script = "trap '' TERM; echo pid $$; while :; do sleep 0.05; done";
    let mut command = place.leasehold(&["run", "--grace", "1s", "x", "--", "sh", "-c", script]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut first = command.spawn().expect("it starts");
    drop(first.stderr.take()); // whoever read it has gone
    let mut line = String::new();
    let mut out = BufReader::new(first.stdout.take().expect("it is piped"));
    out.read_line(&mut line).expect("it says its pid");
    let pid = line.trim().trim_start_matches("pid ").to_owned();
    assert!(runs(&pid), "{line}");
    first.kill().expect("it runs");
    first.wait().expect("it can be waited for");
    until("the job ends", || !runs(&pid));
}

#[test]
fn who_looks_at_the_processes_sees_no_password() {
    let server = postgres();
    let url = server.url.replace("postgres@", "postgres:s3cr3t-w0rd@");
    let place = Place { url, ..server };
    let mut job = place.holds(&["run", "--kind", "lease", "x"]);
    let warden = warden_of(&job);
    let line = command_line(&warden.to_string());
    assert!(line.contains(" __ward ") && !line.contains("s3cr3t"), "{line}");
    assert_eq!(job.finish(), 0);
    until("it ends with its job", || !runs(&warden.to_string()));
}
