//! The metrics: exact counts, and a gauge that comes back to zero whatever happens.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;

use common::{key, millis, pair, poll_times, secs, until};
use leasehold_core::memory::{MemoryBackend, MemoryStore};
use leasehold_core::{
    Admission, Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Inspect, Keys, Kind, Lease,
    LeaseOptions, LockOptions, NamedLock,
};
use metrics::Unit;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::runtime::{Builder, Runtime};

/// What was counted so far.
struct Meter {
    snapshotter: Snapshotter,
    /// By name and labels, e.g. `leasehold_held{memory,lock}`: a sum, or how many samples.
    values: BTreeMap<String, i64>,
    samples: BTreeMap<String, Vec<f64>>,
    described: BTreeMap<String, (Option<Unit>, bool)>,
}

impl Meter {
    /// A snapshot sets everything back to zero.
    fn read(&mut self) {
        for (id, unit, description, value) in self.snapshotter.snapshot().into_vec() {
            let name = id.key().name().to_owned();
            let labels: Vec<_> = id.key().labels().map(metrics::Label::value).collect();
            let full = format!("{name}{{{}}}", labels.join(","));
            self.described.insert(name, (unit, description.is_some()));
            let value = match value {
                DebugValue::Counter(count) => i64::try_from(count).unwrap(),
                DebugValue::Gauge(change) => change.0 as i64,
                DebugValue::Histogram(samples) => {
                    let samples = samples.into_iter().map(f64::from);
                    let all = self.samples.entry(full.clone()).or_default();
                    let before = all.len();
                    all.extend(samples);
                    i64::try_from(all.len() - before).unwrap()
                }
            };
            *self.values.entry(full).or_default() += value;
        }
    }

    fn get(&mut self, name: &str) -> i64 {
        self.read();
        self.values.get(name).copied().unwrap_or_default()
    }

    /// All that is not zero and starts with `prefix`, without it.
    fn all(&mut self, prefix: &str) -> Vec<(String, u32)> {
        self.read();
        let found = self.values.iter().filter(|(_, value)| **value != 0);
        found
            .filter_map(|(name, value)| {
                Some((name.strip_prefix(prefix)?.to_owned(), *value as u32))
            })
            .collect()
    }

    #[track_caller]
    fn expect(&mut self, prefix: &str, expected: &[(&str, u32)]) {
        let found = self.all(prefix);
        let found: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(found, expected, "{prefix}");
    }
}

fn paused() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Runs a test with a recorder of its own.
fn measured<F: Future<Output = ()>>(test: impl FnOnce(Meter) -> F) {
    let recorder = DebuggingRecorder::new();
    let meter = Meter {
        snapshotter: recorder.snapshotter(),
        values: BTreeMap::new(),
        samples: BTreeMap::new(),
        described: BTreeMap::new(),
    };
    metrics::with_local_recorder(&recorder, || paused().block_on(test(meter)));
}

const ONCE: fn() -> LockOptions = LockOptions::try_once;

#[test]
fn locks_are_counted() {
    measured(async |mut meter| {
        let (one, two) = pair();
        let first = one.lock(&key("a"), ONCE()).await.unwrap().unwrap();
        let second = one.lock(&key("b"), ONCE()).await.unwrap().unwrap();
        assert!(two.lock(&key("a"), ONCE()).await.unwrap().is_none());
        assert!(two.lock(&key("a"), ONCE().wait(secs(2))).await.unwrap().is_none());
        assert!(poll_times(two.lock(&key("a"), LockOptions::default()), 3).await.is_none());
        assert_eq!(meter.get("leasehold_held{memory,lock}"), 2);
        tokio::time::sleep(secs(3)).await;
        first.release().await.unwrap();
        assert_eq!(meter.get("leasehold_held{memory,lock}"), 1);
        drop(second);
        assert_eq!(meter.get("leasehold_held{memory,lock}"), 0, "not at once");
        let lost = one.lock(&key("b"), LockOptions::default()).await.unwrap().unwrap();
        one.link().end_sessions();
        lost.lost().wait().await;
        assert_eq!(meter.get("leasehold_held{memory,lock}"), 0, "not at once");
        assert!(lost.release().await.is_err());
        two.link().silence();
        assert!(two.lock(&key("a"), ONCE().wait(secs(1))).await.is_err());

        let acquisitions = "leasehold_acquisitions_total{memory,lock,";
        let calls = [("acquired}", 3), ("busy}", 2), ("cancelled}", 1), ("error}", 1)];
        meter.expect(acquisitions, &calls);
        meter.expect("leasehold_wait_seconds{memory,lock,", &calls);
        meter.expect("leasehold_releases_total{memory,lock,", &[("dropped}", 1), ("released}", 1)]);
        meter.expect("leasehold_losses_total{memory,lock,", &[("session_ended}", 1)]);
        meter.expect("leasehold_held", &[]);
        let waits = &meter.samples["leasehold_wait_seconds{memory,lock,busy}"];
        assert!(waits[0] < 0.1 && (2.0..2.2).contains(&waits[1]), "{waits:?}");
        let holds = &meter.samples["leasehold_hold_seconds{memory,lock}"];
        assert!(holds.len() == 3 && (5.0..5.5).contains(&holds[0]), "{holds:?}");
        let described = |name: &str| meter.described[name];
        assert_eq!(described("leasehold_hold_seconds"), (Some(Unit::Seconds), true));
        assert_eq!(described("leasehold_wait_seconds"), (Some(Unit::Seconds), true));
        assert!(meter.described.values().all(|(unit, text)| unit.is_some() && *text));
    });
}

#[test]
fn leases_and_their_renewals_are_counted() {
    measured(async |mut meter| {
        let (one, two) = pair();
        let opts = LeaseOptions::default().ttl(secs(9));
        let lease = one.lease(&key("a"), opts).await.unwrap().unwrap();
        tokio::time::sleep(secs(1)).await;
        // the subscription for wake-ups may have asked for one when it began
        let begun = meter.get("leasehold_renewals_total{memory,renewed}") as u32;
        tokio::time::sleep(secs(9)).await;
        meter.expect("leasehold_renewals_total{memory,", &[("renewed}", begun + 3)]);
        lease.renew().await.unwrap();
        meter.expect("leasehold_renewals_total{memory,", &[("renewed}", begun + 4)]);
        lease.release().await.unwrap();

        let lease = one.lease(&key("a"), opts).await.unwrap().unwrap();
        one.link().silence();
        lease.lost().wait().await;
        until("it counts as lost", || meter.get("leasehold_held{memory,lease}") == 0).await;
        assert!(meter.get("leasehold_renewals_total{memory,error}") > 0);
        one.link().heal();
        drop(lease);
        // a renewal that was under way is answered late, or given up after a quarter of the ttl
        tokio::time::sleep(secs(3)).await;
        let late = meter.get("leasehold_renewals_total{memory,lost}") as u32;

        let lease = one.lease(&key("b"), opts).await.unwrap().unwrap();
        one.store().delete_lease("test", &key("b"));
        lease.lost().wait().await;
        meter.expect("leasehold_renewals_total{memory,l", &[("ost}", late + 1)]);
        let forced = two.lease(&key("c"), opts).await.unwrap().unwrap();
        assert!(one.force_release(Kind::Lease, &key("c")).await.unwrap().is_some());
        assert!(forced.release().await.is_err(), "the release finds it out");
        let closed = two.lease(&key("c"), opts).await.unwrap().unwrap();
        two.close().await.unwrap();
        meter.expect(
            "leasehold_losses_total{memory,lease,",
            &[("closed}", 1), ("expired}", 1), ("taken}", 2)],
        );
        drop((lease, closed));
        meter.expect("leasehold_losses_total{memory,lease,e", &[("xpired}", 1)]);
        meter.expect("leasehold_releases_total", &[("{memory,lease,released}", 1)]);
        meter.expect("leasehold_acquisitions_total", &[("{memory,lease,acquired}", 5)]);
        meter.expect("leasehold_held", &[]);
        meter.expect("leasehold_hold_seconds", &[("{memory,lease}", 5)]);
    });
}

#[test]
fn a_lease_that_ended_before_anybody_looked_is_a_loss() {
    measured(async |mut meter| {
        let (one, _) = pair();
        let opts = LeaseOptions::default().ttl(secs(1)).manual_renewal();
        let (dropped, released) = (key("a"), key("b"));
        let dropped = one.lease(&dropped, opts).await.unwrap().unwrap();
        let released = one.lease(&released, opts).await.unwrap().unwrap();
        // no other task runs in between
        tokio::time::advance(secs(2)).await;
        drop(dropped);
        assert!(released.release().await.is_err());
        meter.expect("leasehold_losses_total", &[("{memory,lease,expired}", 2)]);
        meter.expect("leasehold_releases_total", &[]);
        meter.expect("leasehold_held", &[]);
    });
}

#[test]
fn claims_and_commits_are_counted() {
    measured(async |mut meter| {
        let (one, two) = pair();
        let keys = Keys::new(["a", "b"]).unwrap();
        let open = || async { one.claim(&keys, ClaimOptions::default()).await.unwrap().unwrap() };
        let claim = open().await;
        assert_eq!(meter.get("leasehold_held{memory,claim}"), 1, "one, whatever its keys");
        assert!(two.claim(&keys, ClaimOptions::default().wait(secs(1))).await.unwrap().is_none());
        claim.commit().await.unwrap();
        open().await.rollback().await.unwrap();
        drop(open().await);
        let claim = open().await;
        one.link().lose_next_answer();
        assert!(claim.commit().await.is_err());
        // one whose caller leaves goes on, and counts when it is through
        let claim = open().await;
        one.link().delay(millis(50));
        assert!(poll_times(claim.commit(), 2).await.is_none());
        assert_eq!(meter.get("leasehold_held{memory,claim}"), 1);
        until("it is committed", || meter.get("leasehold_held{memory,claim}") == 0).await;
        meter.expect("leasehold_commits_total{memory,", &[("committed}", 2), ("unknown}", 1)]);
        meter.expect(
            "leasehold_releases_total{memory,claim,",
            &[("committed}", 2), ("dropped}", 1), ("rolled_back}", 1), ("unconfirmed}", 1)],
        );
        meter.expect(
            "leasehold_acquisitions_total",
            &[("{memory,claim,acquired}", 5), ("{memory,claim,busy}", 1)],
        );
        meter.expect("leasehold_losses_total", &[]);
    });
}

#[test]
fn admissions_are_counted() {
    measured(async |mut meter| {
        let (one, two) = pair();
        let opts = DedupeOptions::default().in_progress(secs(5));
        let first = one.admit(&key("a"), opts).await.unwrap().first().unwrap();
        assert!(matches!(two.admit(&key("a"), opts).await.unwrap(), Admission::InProgress { .. }));
        first.complete().await.unwrap();
        assert!(matches!(two.admit(&key("a"), opts).await.unwrap(), Admission::Done { .. }));
        let many = one.admit_many(&[key("b"), key("c"), key("d")], opts).await.unwrap();
        let mut many = many.into_iter().map(|admission| admission.first().unwrap());
        many.next().unwrap().abandon().await.unwrap();
        drop(many.next());
        assert_eq!(meter.get("leasehold_held{memory,dedupe}"), 1);
        tokio::time::sleep(secs(6)).await;
        let taken = two.admit(&key("d"), opts).await.unwrap().first().unwrap();
        assert!(many.next().unwrap().complete().await.is_err());
        taken.complete().await.unwrap();
        let once = one.admit(&key("e"), DedupeOptions::default().done_at_once()).await.unwrap();
        assert!(once.is_first());
        meter.expect("leasehold_held", &[]);
        one.link().silence();
        assert!(one.admit(&key("f"), opts).await.is_err());
        meter.expect(
            "leasehold_admissions_total{memory,",
            &[("done}", 1), ("error}", 1), ("first}", 6), ("in_progress}", 1)],
        );
        meter.expect(
            "leasehold_releases_total{memory,dedupe,",
            &[("abandoned}", 1), ("completed}", 2), ("dropped}", 1)],
        );
        meter.expect("leasehold_losses_total{memory,dedupe,", &[("expired}", 1)]);
        meter.expect("leasehold_held", &[]);
    });
}

#[test]
fn what_outlives_its_runtime_is_held_no_more() {
    let recorder = DebuggingRecorder::new();
    let mut meter = Meter {
        snapshotter: recorder.snapshotter(),
        values: BTreeMap::new(),
        samples: BTreeMap::new(),
        described: BTreeMap::new(),
    };
    metrics::with_local_recorder(&recorder, || {
        let (one, _) = pair();
        let runtime = paused();
        let kept = runtime.block_on(async {
            std::mem::forget(one.lock(&key("a"), ONCE()).await.unwrap());
            std::mem::forget(one.lease(&key("a"), LeaseOptions::try_once()).await.unwrap());
            let lock = one.lock(&key("b"), ONCE()).await.unwrap();
            let lease = one.lease(&key("b"), LeaseOptions::try_once()).await.unwrap();
            let keys = Keys::new(["a"]).unwrap();
            let claim = one.claim(&keys, ClaimOptions::default()).await.unwrap();
            let first = one.admit(&key("a"), DedupeOptions::default()).await.unwrap();
            (lock, lease, claim, first)
        });
        assert_eq!(meter.all("leasehold_held").len(), 4);
        drop(runtime);
        meter.expect("leasehold_held", &[("{memory,claim}", 1), ("{memory,dedupe}", 1)]);
        drop(kept);
        meter.expect("leasehold_held", &[]);
        meter.expect("leasehold_losses_total{memory,lease,", &[("runtime_ended}", 2)]);
        meter.expect("leasehold_losses_total{memory,lock,", &[("session_ended}", 2)]);
    });
}

/// One call of any kind, its hold, and one of its ends.
async fn operation(store: &MemoryBackend, rng: &mut StdRng) {
    let name = key(["a", "b", "c"][rng.random_range(0..3)]);
    let wait = [millis(0), millis(3), millis(40)][rng.random_range(0..3)];
    let (held, end) = (millis(rng.random_range(0..30)), rng.random_range(0..4));
    match rng.random_range(0..4) {
        0 => {
            let opts = LockOptions::default().wait(wait);
            let Ok(Some(guard)) = store.lock(&name, opts).await else { return };
            tokio::time::sleep(held).await;
            match end {
                0 => drop(guard.release().await),
                1 => drop(guard.token().await),
                _ => drop(guard),
            }
        }
        1 => {
            let opts = LeaseOptions::default().wait(wait).ttl(secs(1));
            let Ok(Some(guard)) = store.lease(&name, opts).await else { return };
            tokio::time::sleep(held * if end == 3 { 60 } else { 1 }).await;
            match end {
                0 => drop(guard.release().await),
                1 => drop(guard.renew().await),
                _ => drop(guard),
            }
        }
        2 => {
            let keys = Keys::new([name.as_str(), "b"]).unwrap();
            let opts = ClaimOptions::default().wait(wait);
            let Ok(Some(claim)) = store.claim(&keys, opts).await else { return };
            tokio::time::sleep(held).await;
            match end {
                0 => drop(claim.commit().await),
                1 => drop(claim.rollback().await),
                _ => drop(claim),
            }
        }
        _ => {
            let opts = DedupeOptions::default().in_progress(millis(500)).retain(secs(1));
            let admitted = store.admit_many(&[name, key("d")], opts).await;
            let Ok(admitted) = admitted else { return };
            tokio::time::sleep(held).await;
            for guard in admitted.into_iter().filter_map(Admission::first) {
                match end {
                    0 => drop(guard.complete().await),
                    1 => drop(guard.abandon().await),
                    _ => drop(guard),
                }
            }
        }
    }
}

#[test]
fn after_a_thousand_random_operations_nothing_is_held() {
    const TASKS: u64 = 8;
    const EACH: u32 = 125;
    let seed: u64 = rand::random();
    println!("seed {seed}");
    measured(async |mut meter| {
        let store = MemoryStore::new();
        let open = || MemoryBackend::builder().store(&store).namespace("test").build();
        let stores = &[open(), open()];
        for store in stores {
            store.link().delay(millis(1));
        }
        let work = |task: u64| async move {
            let mut rng = StdRng::seed_from_u64(seed ^ task);
            let store = &stores[(task % 2) as usize];
            for _ in 0..EACH {
                let polls = rng.random_range(0..12);
                match rng.random_range(0..20) {
                    0 => store.link().end_sessions(),
                    1 => store.link().lose_next_answer(),
                    2 => store.store().delete_lease("test", &key("a")),
                    _ => {}
                }
                if rng.random_bool(0.5) {
                    poll_times(operation(store, &mut rng), polls).await;
                } else {
                    operation(store, &mut rng).await;
                }
            }
        };
        let all = futures_util::future::join_all((0..TASKS).map(&work));
        let mut seen = BTreeSet::new();
        let look = async {
            loop {
                seen.extend(meter.all("leasehold_held").into_iter().map(|found| found.0));
                tokio::time::sleep(millis(5)).await;
            }
        };
        tokio::select! {
            _ = all => {}
            () = look => {}
        }
        assert_eq!(seen.len(), 4, "held meanwhile: {seen:?}");
        let held: i64 = ["lock", "lease", "claim", "dedupe"]
            .iter()
            .map(|kind| meter.get(&format!("leasehold_held{{memory,{kind}}}")).abs())
            .sum();
        assert_eq!(held, 0, "the guards are gone");
        for kind in ["lock", "lease", "claim"] {
            let sum = |meter: &mut Meter, name: &str| -> u32 {
                meter
                    .all(&format!("leasehold_{name}_total{{memory,{kind},"))
                    .iter()
                    .map(|found| found.1)
                    .sum()
            };
            let ended = sum(&mut meter, "releases") + sum(&mut meter, "losses");
            let acquired =
                meter.get(&format!("leasehold_acquisitions_total{{memory,{kind},acquired}}"));
            assert!(acquired > 10, "{kind}: too few acquisitions to mean anything");
            assert_eq!(acquired, i64::from(ended), "{kind}");
        }
        assert!(meter.get("leasehold_losses_total{memory,lock,session_ended}") > 0);
    });
}
