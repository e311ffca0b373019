//! Guards dropped where they should not be: outside a runtime, in a panic, after its shut-down.

mod common;

use common::{key, pair, secs};
use leasehold_core::memory::MemoryBackend;
use leasehold_core::{
    Claim, ClaimLock, ClaimOptions, Dedupe, DedupeGuard, DedupeOptions, Keys, Lease, LeaseGuard,
    LeaseOptions, LockGuard, LockOptions, NamedLock,
};
use tokio::runtime::{Builder, Runtime};

type Guards = (LockGuard, LeaseGuard, Claim, DedupeGuard);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

async fn all_guards(backend: &MemoryBackend) -> Guards {
    let a = key("a");
    let opts = DedupeOptions::default();
    (
        backend.lock(&a, LockOptions::default()).await.unwrap().unwrap(),
        backend.lease(&a, LeaseOptions::default()).await.unwrap().unwrap(),
        backend.claim(&Keys::from(a.clone()), ClaimOptions::default()).await.unwrap().unwrap(),
        backend.admit(&a, opts).await.unwrap().first().unwrap(),
    )
}

/// Everything can be had within a bound.
async fn all_free(backend: &MemoryBackend) {
    let start = tokio::time::Instant::now();
    let guards = loop {
        let admitted = backend.admit(&key("a"), DedupeOptions::default()).await.unwrap();
        if admitted.is_first() {
            break admitted;
        }
        assert!(start.elapsed() < secs(30), "the dedupe entry was not abandoned");
        tokio::time::sleep(secs(1) / 100).await;
    };
    drop(guards);
    tokio::time::sleep(secs(1) / 100).await;
    assert!(backend.lock(&key("a"), LockOptions::default()).await.unwrap().is_some());
    assert!(backend.lease(&key("a"), LeaseOptions::default()).await.unwrap().is_some());
    let claim = backend.claim(&Keys::from(key("a")), ClaimOptions::default()).await;
    assert!(claim.unwrap().is_some());
}

#[test]
fn outside_of_the_runtime() {
    let runtime = runtime();
    let (one, two) = pair();
    let guards = runtime.block_on(all_guards(&one));
    drop(guards);
    runtime.block_on(all_free(&two));
}

#[test]
fn on_a_thread_of_its_own_that_panics() {
    let runtime = runtime();
    let (one, two) = pair();
    let guards = runtime.block_on(all_guards(&one));
    let thread = std::thread::spawn(move || {
        let _guards = guards;
        panic!("with the guards in hand");
    });
    assert!(thread.join().is_err());
    runtime.block_on(all_free(&two));
}

#[test]
fn in_a_task_that_panics() {
    let runtime = runtime();
    let (one, two) = pair();
    runtime.block_on(async move {
        let task = tokio::spawn(async move {
            let _guards = all_guards(&one).await;
            panic!("with the guards in hand");
        });
        assert!(task.await.unwrap_err().is_panic());
        all_free(&two).await;
    });
}

#[test]
fn after_the_runtime_has_shut_down() {
    let (one, two) = pair();
    let first = runtime();
    let guards = first.block_on(all_guards(&one));
    let more = first.block_on(async { two.lock(&key("b"), LockOptions::default()).await });
    first.shutdown_timeout(secs(5));
    assert!(!guards.0.is_held(), "its session went with the runtime");
    assert!(guards.0.lost().is_set());
    let _ = guards.1.is_held();
    drop(guards);
    drop(more);
    drop((one, two));
}

#[test]
fn by_a_runtime_that_shuts_down() {
    let (one, two) = pair();
    let first = runtime();
    first.spawn(async move {
        let _guards = all_guards(&one).await;
        std::future::pending::<()>().await;
    });
    first.block_on(async {
        while two.lock(&key("a"), LockOptions::try_once()).await.unwrap().is_some() {
            tokio::task::yield_now().await;
        }
    });
    first.shutdown_timeout(secs(5));
}
