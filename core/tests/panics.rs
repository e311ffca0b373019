//! A driver that panics, as a decoder may that is given nonsense: the engine goes on.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use common::{key, secs};
use leasehold_core::backend::{
    Batch, BatchAnswer, Session, SessionDriver, SessionId, SessionLimits, Try,
};
use leasehold_core::engine::SessionEngine;
use leasehold_core::memory::{MemoryBackend, MemoryDriver, MemoryLink};
use leasehold_core::{Error, Key, LockOptions, NamedLock, Result};

/// Panics in the next call of a sort.
#[derive(Clone, Debug, Default)]
struct Panics(Arc<Mutex<Option<&'static str>>>);

impl Panics {
    fn arm(&self, call: &'static str) {
        *self.0.lock().expect("not poisoned") = Some(call);
    }

    fn panic_if_armed(&self, call: &'static str) {
        let armed = self.0.lock().expect("not poisoned").take_if(|armed| *armed == call);
        assert!(armed.is_none(), "planted: attempt to subtract with overflow");
    }
}

#[derive(Debug)]
struct Frail {
    driver: MemoryDriver,
    panics: Panics,
}

#[derive(Debug)]
struct FrailSession {
    session: <MemoryDriver as SessionDriver>::Session,
    panics: Panics,
}

#[async_trait]
impl SessionDriver for Frail {
    type Id = Key;
    type Session = FrailSession;

    fn backend(&self) -> &'static str {
        "frail"
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn open(&self) -> Result<FrailSession> {
        self.panics.panic_if_armed("open");
        let session = SessionDriver::open(&self.driver).await?;
        Ok(FrailSession { session, panics: self.panics.clone() })
    }

    fn limits(&self) -> SessionLimits {
        SessionDriver::limits(&self.driver)
    }
}

#[async_trait]
impl Session for FrailSession {
    type Id = Key;

    fn id(&self) -> SessionId {
        Session::id(&self.session)
    }

    async fn exchange(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        self.panics.panic_if_armed("exchange");
        self.session.exchange(batch).await
    }

    async fn wait(&mut self, key: &Key, wait: Duration) -> Result<Try> {
        self.panics.panic_if_armed("wait");
        self.session.wait(key, wait).await
    }

    async fn closed(&mut self) -> Error {
        let error = self.session.closed().await;
        self.panics.panic_if_armed("closed");
        error
    }

    async fn close(self) {
        self.session.close().await;
    }
}

/// An engine with a driver that can be made to panic, and another handle on the same store.
fn frail() -> (SessionEngine<Frail>, Panics, MemoryLink, MemoryBackend) {
    let panics = Panics::default();
    let backend = MemoryBackend::new();
    let driver = MemoryBackend::builder().store(backend.store()).driver();
    let link = driver.link().clone();
    let engine = SessionEngine::new(Frail { driver, panics: panics.clone() });
    (engine, panics, link, backend)
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_an_exchange_is_a_lost_session() {
    let (engine, panics, ..) = frail();
    let opts = LockOptions::default().wait(secs(10));
    let held = engine.lock(&key("a"), opts).await.unwrap().unwrap();
    panics.arm("exchange");
    held.token().await.unwrap_err();
    held.lost().wait().await;
    let again = engine.lock(&key("a"), opts).await.unwrap().expect("the handle goes on");
    again.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_panic_at_the_end_of_a_session_or_in_opening_the_next_is_survived() {
    let (engine, panics, link, _) = frail();
    let opts = LockOptions::default().wait(secs(10));
    let held = engine.lock(&key("a"), opts).await.unwrap().unwrap();
    panics.arm("closed");
    link.end_sessions();
    held.lost().wait().await;
    panics.arm("open"); // in opening the next
    let again = engine.lock(&key("a"), opts).await.unwrap().expect("the handle goes on");
    again.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_wait_is_survived() {
    let (engine, panics, _, backend) = frail();
    let held = backend.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
    let waiter = tokio::spawn(async move {
        let locked = engine.lock(&key("a"), LockOptions::default().wait(secs(60))).await;
        locked.unwrap().expect("the wait goes on").release().await
    });
    tokio::time::sleep(secs(1)).await; // virtual: it waits on the store for slices of ten seconds
    panics.arm("wait");
    tokio::time::sleep(secs(12)).await;
    held.release().await.unwrap();
    waiter.await.unwrap().unwrap();
}
