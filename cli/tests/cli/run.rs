//! `leasehold run`: who runs, who waits, and the exit codes.

use std::collections::BTreeSet;
use std::process::Command;

use super::support::{ALL_STORES, Place, postgres};
use nix::sys::signal::Signal;

#[test]
fn it_prints_a_token_that_rises() {
    for store in ALL_STORES {
        let place = store();
        let token = |kind: &str| -> u64 {
            let job = ["sh", "-c", "echo $LEASEHOLD_TOKEN $LEASEHOLD_KEY"];
            let ended = place.ends(&[&["run", "--kind", kind, "hello", "--"], &job[..]].concat());
            let (token, key) = ended.out.trim().split_once(' ').expect("a token and a key");
            assert_eq!((key, ended.code), ("hello", 0), "{}: {ended:?}", place.name);
            token.parse().expect("a number")
        };
        for kind in ["lock", "lease"] {
            let (first, second) = (token(kind), token(kind));
            assert!(first < second, "{} {kind}: {first} {second}", place.name);
        }
    }
}

#[test]
fn a_second_waits_says_for_whom_and_runs_when_the_first_has_ended() {
    for store in ALL_STORES {
        let place = store();
        for kind in ["lock", "lease"] {
            let run = ["run", "--kind", kind, "hello"];
            let mut first = place.holds(&run);
            let mut second = place.starts(&[&run[..], &["--", "echo", "second"]].concat());
            let said = second.complains(&format!("waiting for {kind} hello, held by"));
            let (app, pid) = ("sh@", format!(":{}", first.pid()));
            assert!(!place.tells() || said.contains(app) && said.contains(&pid), "{said}");
            first.hears("go");
            first.says("done");
            assert_eq!(first.finish(), 0);
            second.says("second");
            assert_eq!(second.finish(), 0);
        }
    }
}

#[test]
fn one_that_is_busy_has_a_code_of_its_own() {
    for store in ALL_STORES {
        let place = store();
        let mut first = place.holds(&["run", "x"]);
        let job = ["x", "--", "echo", "never"];
        for (flags, code) in [
            (&["--try"][..], 75),
            (&["--wait", "0"], 75),
            (&["--wait", "300ms"], 75),
            (&["--try", "--busy-code", "9"], 9),
            (&["--try", "--busy-code", "0"], 0),
        ] {
            let ended = place.ends(&[&["run"], flags, &job].concat()).code_is(code);
            assert_eq!(ended.out, "");
            let holder = if place.tells() { "sh@" } else { "" };
            let told = format!("busy: lock x, held by {holder}");
            assert!(ended.err.contains(&told), "{}: {}", place.name, ended.err);
        }
        // another kind and another namespace are others
        let ended = place.ends(&["run", "--kind", "lease", "--try", "x", "--", "echo", "lease"]);
        assert_eq!((ended.out.as_str(), ended.code), ("lease\n", 0));
        let other = Place::at(place.name, &place.url);
        other.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
        assert_eq!(first.finish(), 0);
    }
}

#[test]
fn the_jobs_code_is_passed_on() {
    let place = postgres();
    let job = |script: &str| place.ends(&["run", "x", "--", "sh", "-c", script]).code;
    for code in [0, 1, 7, 75, 255] {
        assert_eq!(job(&format!("exit {code}")), code);
    }
    for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGSEGV] {
        assert_eq!(job(&format!("kill -{} $$", signal as i32)), 128 + signal as i32);
    }
    let missing = place.ends(&["run", "x", "--", "no-such-program"]).code_is(127);
    assert!(missing.err.contains("cannot run no-such-program"), "{}", missing.err);
    assert!(missing.err.contains("next: "), "{}", missing.err);
    place.ends(&["run", "x", "--", "/etc/passwd"]).code_is(126);
    // and all of them have freed it
    place.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
}

#[test]
fn what_the_command_line_gets_wrong_runs_nothing() {
    let place = postgres();
    for args in [
        &["run", "x"][..],
        &["run", "--ttl", "5s", "x", "--", "echo", "no"],
        &["run", "--kind", "lease", "--ttl", "1ms", "x", "--", "echo", "no"],
        &["run", "--kind", "claim", "x", "--", "echo", "no"],
        &["run", "", "--", "echo", "no"],
        &["run", "--wait", "soon", "x", "--", "echo", "no"],
        &["run", "--try", "--wait", "1s", "x", "--", "echo", "no"],
    ] {
        let ended = place.ends(args).code_is(2);
        assert_eq!(ended.out, "", "{args:?}");
        assert!(!ended.err.is_empty());
    }
}

#[test]
fn the_first_run_makes_the_tables_once_and_says_so() {
    // a schema of its own is a store that nobody has migrated
    let place = postgres();
    let schema = format!("s{:016x}", rand::random::<u64>());
    let place = Place::at("postgres", &format!("{}?schema={schema}", place.url));
    let first = place.ends(&["run", "x", "--", "echo", "ran"]).code_is(0);
    assert_eq!(first.out, "ran\n");
    assert!(first.err.contains("made the tables"), "{}", first.err);
    let second = place.ends(&["run", "x", "--", "echo", "ran"]).code_is(0);
    assert_eq!((second.out.as_str(), second.err.as_str()), ("ran\n", ""));
}

#[test]
fn a_job_inherits_what_leasehold_did_and_no_pipe_of_its_own() {
    let pipes = |listed: &str| -> BTreeSet<String> {
        let fields = listed.lines().map(|line| line.split_whitespace().rev());
        // … 3 -> pipe:[77]
        let named = fields.filter_map(|mut words| Some((words.next()?.to_owned(), words.nth(1)?)));
        let beyond =
            named.filter(|(link, fd)| link.starts_with("pipe:") && !["0", "1", "2"].contains(fd));
        beyond.map(|(link, _)| link).collect()
    };
    let plain = super::support::ended(Command::new("ls").args(["-l", "/proc/self/fd"]));
    let ended = postgres().ends(&["run", "x", "--", "ls", "-l", "/proc/self/fd"]).code_is(0);
    assert!(ended.out.contains("/fd"), "{ended:?}");
    assert_eq!(pipes(&ended.out), pipes(&plain.out), "{ended:?} {plain:?}");
}

#[test]
fn what_the_job_leaves_behind_is_told_of() {
    let place = postgres();
    let script = "sleep 600 >&- 2>&- & echo $!";
    let ended = place.ends(&["run", "x", "--", "sh", "-c", script]).code_is(0);
    assert!(ended.err.contains("processes of the command still run"), "{}", ended.err);
    let left = ended.out.trim().parse().expect("a pid");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), Signal::SIGKILL).expect("it runs");
}

#[test]
fn a_wait_is_given_up_by_a_signal() {
    let place = postgres();
    let mut first = place.holds(&["run", "x"]);
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut second = place.starts(&["run", "x", "--", "echo", "never"]);
        second.complains("waiting for");
        second.signal(signal);
        assert_eq!(second.code(), code);
    }
    assert_eq!(first.finish(), 0);
    place.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
}
