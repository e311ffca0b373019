//! The local turn of a named lock, when callers are told that others hold it: it has passed on
//! before they hear of it, so that none who tries again is in its own way.

mod common;

use common::{key, millis, nothing_left, pair};
use futures_util::FutureExt;
use leasehold_core::memory::MemoryBackend;
use leasehold_core::{LockGuard, LockOptions, NamedLock, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;
use tokio::time::sleep;

type Call = Pin<Box<dyn Future<Output = Result<Option<LockGuard>>> + Send>>;

/// As a caller on another core: from when it listens it tries again within the wake-up of its
/// answer.
struct Caller {
    backend: Arc<MemoryBackend>,
    listens: AtomicBool,
    woken: AtomicBool,
    in_its_own_way: AtomicBool,
}

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        if !self.listens.swap(false, Ordering::SeqCst) {
            return;
        }
        self.woken.store(true, Ordering::SeqCst);
        // an answer at once is that of the local queue; else the store is asked
        let again = self.backend.lock(&key("a"), LockOptions::try_once()).now_or_never();
        self.in_its_own_way.store(again.is_some(), Ordering::SeqCst);
    }
}

impl Caller {
    fn begin(backend: &Arc<MemoryBackend>, wait: Duration) -> (Arc<Self>, Call) {
        let caller = Arc::new(Self {
            backend: backend.clone(),
            listens: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            in_its_own_way: AtomicBool::new(false),
        });
        let handle = backend.clone();
        let call = async move { handle.lock(&key("a"), LockOptions::default().wait(wait)).await };
        let mut call: Call = Box::pin(call);
        let waker = Waker::from(caller.clone());
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        (caller, call)
    }
}

/// Three callers of one handle wait so long for what others hold, over a way that takes `delay`
/// each; one of them tries again as soon as it hears, which happens after `before`.
async fn late(waits: [Duration; 3], delay: Duration, before: Duration) {
    for listener in 0..waits.len() {
        let (one, two) = pair();
        let held = two.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
        drop(one.lock(&key("warm-up"), LockOptions::try_once()).await.unwrap().unwrap());
        one.link().delay(delay);
        let one = Arc::new(one);
        let calls = waits.map(|wait| Caller::begin(&one, wait));
        sleep(before).await;
        calls[listener].0.listens.store(true, Ordering::SeqCst);
        sleep(millis(20)).await;
        for (number, (caller, call)) in calls.into_iter().enumerate() {
            let woken = caller.woken.load(Ordering::SeqCst);
            assert_eq!(woken, number == listener, "caller {number} at the time of its answer");
            let in_its_way = caller.in_its_own_way.load(Ordering::SeqCst);
            assert!(!in_its_way, "caller {number} was in its own way");
            assert!(matches!(call.now_or_never(), Some(Ok(None))), "caller {number}'s answer");
        }
        held.release().await.unwrap();
        let free = one.lock(&key("a"), LockOptions::default().wait(millis(500))).await.unwrap();
        drop(free.expect("nobody has it"));
        nothing_left(one.store()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn who_is_late_after_a_try_is_not_in_its_own_way() {
    // all three are late when the answer to the try of the first has come
    late([millis(0), millis(5), millis(6)], millis(10), millis(10)).await;
}

#[tokio::test(start_paused = true)]
async fn who_is_late_after_a_wait_on_the_store_is_not_in_its_own_way() {
    late([millis(50), millis(20), millis(30)], millis(0), millis(40)).await;
}
