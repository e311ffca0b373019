//! The engine of named locks over a store that counts: what goes out together, how soon a handle is
//! back after an outage, and how often it tries meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{Batch, BatchAnswer, Session, SessionDriver, SessionId, Try};
use leasehold_core::engine::SessionEngine;
use leasehold_core::{Error, ErrorKind, Key, LockOptions, NamedLock, Result};
use tokio::time::Instant;

mod common;

use common::{key, millis, secs};

/// A store where every lock is free.
#[derive(Debug)]
struct Store {
    /// It refuses all sessions until then.
    back: Instant,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    attempts: AtomicUsize,
    exchanges: AtomicUsize,
}

#[derive(Debug)]
struct Open(Arc<Counts>);

#[async_trait]
impl SessionDriver for Store {
    type Id = String;
    type Session = Open;

    fn backend(&self) -> &'static str {
        "test"
    }

    fn id(&self, key: &Key) -> String {
        key.to_string()
    }

    async fn open(&self) -> Result<Open> {
        self.counts.attempts.fetch_add(1, Ordering::Relaxed);
        match Instant::now() < self.back {
            true => Err(Error::new(ErrorKind::Unavailable, "refused")),
            false => Ok(Open(self.counts.clone())),
        }
    }
}

#[async_trait]
impl Session for Open {
    type Id = String;

    fn id(&self) -> SessionId {
        1
    }

    async fn exchange(&mut self, batch: &Batch<String>) -> Result<BatchAnswer> {
        self.0.exchanges.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(millis(1)).await;
        let tries = batch.tries.iter().map(|_| Try::Granted(None)).collect();
        let released = vec![true; batch.release.len()];
        Ok(BatchAnswer { released, tries, ..BatchAnswer::default() })
    }

    async fn wait(&mut self, _: &String, _: Duration) -> Result<Try> {
        Ok(Try::Granted(None))
    }

    async fn close(self) {}
}

/// An engine over a store that is down for `outage`.
fn engine(outage: Duration) -> (SessionEngine<Store>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let back = Instant::now() + outage;
    (SessionEngine::new(Store { back, counts: counts.clone() }), counts)
}

/// With one thread, so that the worker is woken right after the first of those who ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn those_who_were_answered_together_ask_together() {
    const TASKS: usize = 16;
    const ROUNDS: usize = 20;
    let (engine, counts) = engine(Duration::ZERO);
    let engine = Arc::new(engine);
    let tasks = (0..TASKS).map(|task| {
        let (engine, name) = (engine.clone(), key(&task.to_string()));
        tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let guard = engine.lock(&name, LockOptions::try_once()).await.unwrap().unwrap();
                guard.release().await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    // one for all tries of a round, one for all releases; a few until the tasks have met
    let exchanges = counts.exchanges.load(Ordering::Relaxed);
    assert!(exchanges <= 3 * ROUNDS, "{exchanges} exchanges");
}

#[tokio::test(start_paused = true)]
async fn who_waits_has_the_lock_soon_after_the_store_is_back() {
    for outage in [millis(3), millis(100), secs(1), secs(10), secs(60)] {
        let (engine, counts) = engine(outage);
        let start = Instant::now();
        let guard = engine.lock(&key("x"), LockOptions::default().wait(secs(3_600))).await;
        let late = start.elapsed().saturating_sub(outage);
        assert!(guard.unwrap().is_some());
        let bound = (outage / 16).clamp(millis(5), millis(250)) + millis(3);
        assert!(late <= bound, "{late:?} after an outage of {outage:?}");
        // 16 to 32 for each doubling of the outage until they are 250 ms apart
        let most = 256 + (outage.as_millis() / 125) as usize;
        let tried = counts.attempts.load(Ordering::Relaxed);
        assert!(tried <= most, "{tried} attempts in an outage of {outage:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_nobody_uses_tries_seldom_and_is_back_when_it_is_used() {
    let (engine, counts) = engine(secs(60));
    let tried = engine.lock(&key("x"), LockOptions::try_once()).await;
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::Unavailable);
    tokio::time::sleep(millis(59_990)).await;
    let count = counts.attempts.load(Ordering::Relaxed);
    assert!(count <= 70, "{count} attempts in a minute without a caller");
    // Each call is told at once that it is down, and the first after that finds it back.
    let start = Instant::now();
    loop {
        match engine.lock(&key("x"), LockOptions::try_once()).await {
            Ok(guard) => break assert!(guard.is_some()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable),
        }
        assert!(start.elapsed() < millis(300), "still not back");
        tokio::time::sleep(millis(1)).await;
    }
}
