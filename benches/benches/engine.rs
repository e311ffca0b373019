//! What the engine itself takes, without a store's round trips: on the memory backend.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use leasehold_core::memory::MemoryBackend;
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Key, Keys, Lease, LeaseOptions, LockOptions,
    NamedLock,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn key(name: &str) -> Key {
    Key::new(name).expect("a key")
}

/// Acquire and release what nobody else wants, with each of the four traits.
fn alone(criterion: &mut Criterion) {
    let runtime = runtime();
    let store = MemoryBackend::new();
    let (one, set) = (key("one"), Keys::new(["one"]).expect("a key"));
    let mut group = criterion.benchmark_group("alone");
    group.bench_function("lock", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = store.lock(&one, LockOptions::try_once()).await.expect("a lock");
            guard.expect("it is free").release().await.expect("a release");
        });
    });
    group.bench_function("lease", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = store.lease(&one, LeaseOptions::try_once()).await.expect("a lease");
            guard.expect("it is free").release().await.expect("a release");
        });
    });
    group.bench_function("claim", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let claim = store.claim(&set, ClaimOptions::default()).await.expect("a claim");
            claim.expect("it is free").commit().await.expect("a commit");
        });
    });
    group.bench_function("dedupe of a duplicate", |bencher| {
        let seen = key("seen");
        runtime.block_on(async {
            let first = store.admit(&seen, DedupeOptions::default()).await.expect("an answer");
            first.first().expect("it is new").complete().await.expect("an end");
        });
        bencher.to_async(&runtime).iter(async || {
            black_box(store.admit(&seen, DedupeOptions::default()).await.expect("an answer"));
        });
    });
    group.finish();
}

/// Names into keys.
fn keys(criterion: &mut Criterion) {
    let long = "orders/".to_owned() + &"x".repeat(150);
    let mut group = criterion.benchmark_group("key");
    for (what, name) in [("short", "orders/17"), ("long", long.as_str())] {
        group.throughput(Throughput::Bytes(name.len() as u64));
        group.bench_function(what, |bencher| bencher.iter(|| key(black_box(name))));
    }
    group.finish();
}

/// Tasks of one handle hand one key on.
fn hand_on(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("hand on");
    for tasks in [2_usize, 64] {
        group.bench_function(format!("{tasks} tasks"), |bencher| {
            bencher.to_async(&runtime).iter_custom(|times| async move {
                let store = Arc::new(MemoryBackend::new());
                let each = times.div_ceil(tasks as u64);
                let start = Instant::now();
                let mut all = JoinSet::new();
                for _ in 0..tasks {
                    let store = store.clone();
                    all.spawn(async move {
                        let one = key("one");
                        for _ in 0..each {
                            let guard = store.lock(&one, LockOptions::default()).await;
                            let guard = guard.expect("a lock").expect("it comes free");
                            guard.release().await.expect("a release");
                        }
                    });
                }
                all.join_all().await;
                // the time for as many as were asked for
                let done = each * tasks as u64;
                start.elapsed().mul_f64(times as f64 / done as f64)
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = engine;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = alone, keys, hand_on
}
criterion_main!(engine);
