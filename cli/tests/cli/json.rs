//! `--output json`, and the plain output of pipes.

use super::support::{ALL_STORES, TELLING_STORES, postgres, until};
use serde_json::json;

#[test]
fn who_holds_what_has_stable_fields() {
    for store in TELLING_STORES {
        let place = store();
        let mut lock = place.holds(&["run", "--app", "one", "a-lock"]);
        let mut lease = place.holds(&["run", "--app", "two", "--kind", "lease", "a-lease"]);
        let ended = place.ends(&["show", "-o", "json", "a-lock"]).code_is(0);
        let shown = &ended.json()[0];
        assert_eq!(shown["kind"], "lock", "{} {shown}", place.name);
        assert_eq!(shown["holder"]["app"], "one");
        assert_eq!(shown["holder"]["pid"], json!(lock.pid().as_raw()));
        assert_eq!(shown["done"], false);
        let ended = place.ends(&["list", "-o", "json", "--kind", "lease", "a-"]).code_is(0);
        let listed = ended.json();
        assert_eq!(listed.as_array().map(Vec::len), Some(1), "{} {listed}", place.name);
        assert_eq!(listed[0]["key"], "a-lease");
        assert_eq!(listed[0]["holder"]["app"], "two");
        let expires = listed[0]["expires_in_s"].as_f64().expect("a lease expires");
        assert!(expires > 0.0 && expires < 31.0, "{expires}");
        for field in ["kind", "key", "hash", "holder", "session", "held_for_s", "expires_in_s"] {
            assert!(listed[0].get(field).is_some(), "{field} is missing");
        }
        let plain = place.ends(&["list", "--kind", "lease"]).code_is(0).out;
        let cells: Vec<&str> = plain.trim_end().split('\t').collect();
        assert_eq!((cells[0], cells[1], cells.len()), ("lease", "a-lease", 7), "{plain}");
        assert!(!plain.contains('\x1b') && plain.lines().count() == 1, "{plain:?}");
        assert_eq!((lock.finish(), lease.finish()), (0, 0));
        assert_eq!(place.ends(&["list", "-o", "json"]).code_is(0).json(), json!([]));
        assert_eq!(place.ends(&["list"]).code_is(0).out, "");
        place.ends(&["show", "a-lock"]).code_is(1);
    }
}

#[test]
fn a_run_tells_events_on_its_standard_error() {
    let place = postgres();
    let mut first = place.holds(&["run", "x"]);
    let busy = place.ends(&["run", "-o", "json", "--try", "x", "--", "true"]).code_is(75);
    let news = busy.news();
    assert_eq!((news.len(), &news[0]["event"]), (1, &json!("busy")));
    assert_eq!((&news[0]["kind"], &news[0]["key"]), (&json!("lock"), &json!("x")));
    assert_eq!(news[0]["holding"]["holder"]["app"], "sh");
    assert_eq!(first.finish(), 0);
}

#[test]
fn errors_are_json_with_advice() {
    let place = postgres();
    let ended = place.ends(&["show", "-o", "json", ""]).code_is(2);
    assert_eq!(ended.news()[0]["error"]["kind"], "invalid-key");
    let mut nowhere = place.leasehold(&["list", "-o", "json"]);
    nowhere.env("LEASEHOLD_URL", "redis://127.0.0.1:1/0?command_limit=300ms");
    let ended = super::support::ended(&mut nowhere).code_is(69);
    let error = &ended.news()[0]["error"];
    assert_eq!((&error["kind"], &error["code"]), (&json!("unavailable"), &json!(69)));
    assert!(error["advice"].as_str().is_some_and(|advice| advice.len() > 20), "{error}");
}

#[test]
fn a_name_is_first_once() {
    for store in ALL_STORES {
        let place = store();
        let first = place.ends(&["dedupe", "-o", "json", "delivery-1"]).code_is(0).json();
        assert_eq!(first["first"], true, "{}", place.name);
        let second = place.ends(&["dedupe", "-o", "json", "delivery-1"]).code_is(1).json();
        assert_eq!((&second["first"], &second["key"]), (&json!(false), &json!("delivery-1")));
        assert!(second["seen_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{second}");
        place.ends(&["dedupe", "delivery-2", "--retain", "200ms"]).code_is(0);
        until("it is forgotten after its time", || {
            place.ends(&["dedupe", "delivery-2", "--retain", "1h"]).code == 0
        });
        place.ends(&["dedupe", "delivery-2"]).code_is(1);
    }
}

#[test]
fn force_takes_away_and_tells_from_whom() {
    for store in TELLING_STORES {
        let place = store();
        for kind in ["lock", "lease"] {
            let script = "trap 'echo told; exit 3' TERM; echo up; read line";
            let run = ["run", "--kind", kind, "x", "--", "sh", "-c", script];
            let run = match kind {
                "lease" => [&run[..3], &["--ttl", "2s"], &run[3..]].concat(),
                _ => run.to_vec(),
            };
            let mut job = place.starts(&run);
            job.says("up");
            place.ends(&["release", "--kind", kind, "x"]).code_is(2);
            let ended = place.ends(&["release", "-o", "json", "--force", "--kind", kind, "x"]);
            let released = ended.code_is(0).json();
            assert_eq!(released["released"]["holder"]["app"], "sh", "{} {kind}", place.name);
            job.complains("lost: ");
            assert_eq!(job.code(), 76, "{} {kind}", place.name);
            let free = place.ends(&["release", "-o", "json", "--force", "--kind", kind, "x"]);
            assert_eq!(free.code_is(1).json(), json!({"released": null}));
        }
        place.ends(&["dedupe", "y"]).code_is(0);
        place.ends(&["release", "--force", "--kind", "dedupe", "y"]).code_is(0);
        place.ends(&["dedupe", "y"]).code_is(0);
    }
}

#[test]
fn a_watcher_sees_what_comes_and_goes() {
    let place = postgres();
    place.ends(&["migrate"]).code_is(0);
    let mut watch = place.starts(&["watch", "-o", "json", "--interval", "50ms", "w-"]);
    let mut job = place.holds(&["run", "--kind", "lease", "w-1"]);
    let held: serde_json::Value = serde_json::from_str(&watch.says("w-1")).expect("JSON");
    assert_eq!((&held["event"], &held["kind"]), (&json!("held"), &json!("lease")));
    assert_eq!(job.finish(), 0);
    watch.says("\"free\"");
    watch.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(watch.code(), 0);
}

#[test]
fn upkeep_says_what_it_did() {
    for store in ALL_STORES {
        let place = store();
        let migrated = place.ends(&["migrate", "-o", "json"]).code_is(0).json();
        assert!(migrated["migrated"].is_string());
        place.ends(&["dedupe", "gone", "--retain", "100ms"]).code_is(0);
        let deleted = place.ends(&["housekeep", "-o", "json"]).code_is(0).json();
        assert!(deleted["deleted"]["dedupe"].is_u64(), "{deleted}");
        assert_eq!(place.ends(&["migrate"]).code_is(0).out, "", "quiet in a pipe");
    }
}

#[test]
fn a_bench_counts() {
    for store in ALL_STORES {
        let place = store();
        let bench = ["bench", "-o", "json", "--time", "100ms", "--tasks", "3"];
        let rows = place.ends(&bench).code_is(0).json();
        let rows = rows["measurements"].as_array().expect("rows").clone();
        assert_eq!(rows.len(), 8, "{}", place.name);
        for row in rows {
            assert!(row["count"].as_u64() > Some(0) && row["p50_us"].as_u64() > Some(0), "{row}");
        }
    }
}
