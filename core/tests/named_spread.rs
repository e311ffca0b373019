//! Locks that are spread over several sessions, under a paused clock.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use common::{key, millis, nothing_left, secs};
use leasehold_core::backend::{Batch, Session, SessionDriver, SessionId, SessionLimits};
use leasehold_core::engine::SessionEngine;
use leasehold_core::memory::{MemoryBackend, MemoryDriver, MemoryStore};
use leasehold_core::{
    ErrorKind, FencingToken, Key, LockGuard, LockOptions, LossReason, NamedLock, Result,
};
use tokio::task::JoinSet;

/// Remembers which sessions were opened, and can end one.
#[derive(Clone, Debug)]
struct Driver {
    inner: MemoryDriver,
    opened: Arc<Mutex<Vec<SessionId>>>,
}

#[async_trait]
impl SessionDriver for Driver {
    type Id = Key;
    type Session = <MemoryDriver as SessionDriver>::Session;

    fn backend(&self) -> &'static str {
        "memory"
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn open(&self) -> Result<Self::Session> {
        let session = self.inner.open().await?;
        self.opened.lock().unwrap().push(Session::id(&session));
        Ok(session)
    }

    fn limits(&self) -> SessionLimits {
        SessionDriver::limits(&self.inner)
    }
}

impl Driver {
    fn opened(&self) -> Vec<SessionId> {
        self.opened.lock().unwrap().clone()
    }

    async fn end(&self, session: SessionId) {
        let mut other = self.inner.open().await.unwrap();
        other.exchange(&Batch { kill: vec![session], ..Batch::default() }).await.unwrap();
    }
}

/// Holds ten locks, four a session.
fn small(store: &MemoryStore) -> SessionEngine<Driver> {
    let mut limits = SessionLimits::default();
    (limits.max_held, limits.max_per_session, limits.max_waiters) = (10, 4, 2);
    let builder = MemoryBackend::builder().store(store).namespace("test").session_limits(limits);
    SessionEngine::new(Driver { inner: builder.driver(), opened: Arc::default() })
}

async fn tried(locks: &impl NamedLock, name: impl ToString) -> Result<Option<LockGuard>> {
    locks.lock(&key(&name.to_string()), LockOptions::try_once()).await
}

async fn ten(locks: &impl NamedLock) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for i in 0..10 {
        guards.push(tried(locks, i).await.unwrap().unwrap());
    }
    guards
}

#[tokio::test(start_paused = true)]
async fn more_locks_than_a_session_may_hold_go_on_further_ones() {
    let store = MemoryStore::new();
    let (one, two) = (small(&store), small(&store));
    let mut guards = ten(&one).await;
    assert_eq!(one.driver().opened().len(), 3, "four, four and two");
    let error = tried(&one, "one more").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().contains("10 locks"), "{error}");
    let mut tokens: Vec<FencingToken> = Vec::new();
    for (i, guard) in guards.iter().enumerate() {
        assert!(guard.is_held());
        assert!(tried(&one, i).await.unwrap().is_none(), "{i} was given twice");
        assert!(tried(&two, i).await.unwrap().is_none(), "{i} was given to somebody else");
        tokens.push(guard.token().await.unwrap());
    }
    assert!(tokens.is_sorted(), "{tokens:?}");
    // what was freed on the first session is filled again, on whichever session the rest is
    guards.remove(0).release().await.unwrap();
    let again = tried(&one, "one more").await.unwrap().unwrap();
    assert_eq!(one.driver().opened().len(), 3);
    again.release().await.unwrap();
    for guard in guards {
        guard.release().await.unwrap();
    }
    nothing_left(&store).await;
}

#[tokio::test(start_paused = true)]
async fn a_session_that_ends_loses_only_what_it_held() {
    let store = MemoryStore::new();
    let (one, two) = (small(&store), small(&store));
    let guards = ten(&one).await;
    let sessions = one.driver().opened();
    for (round, held) in [4..8, 0..4, 8..10].into_iter().enumerate() {
        let ended = [1, 0, 2][round];
        one.driver().end(sessions[ended]).await;
        for i in held.clone() {
            assert_eq!(guards[i].lost().wait().await, LossReason::SessionEnded);
            assert!(!guards[i].is_held());
            let theirs = tried(&two, i).await.unwrap().expect("freed by the store");
            theirs.release().await.unwrap();
        }
        let lost = guards.iter().filter(|guard| guard.lost().is_set()).count();
        assert_eq!(lost, [4, 8, 10][round], "a lock was lost with another session");
    }
    for guard in guards {
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    }
    let guards = ten(&one).await;
    assert!(guards.iter().all(LockGuard::is_held));
}

#[tokio::test(start_paused = true)]
async fn a_further_session_is_closed_when_idle_and_opened_again() {
    let store = MemoryStore::new();
    let one = small(&store);
    for round in 1..4 {
        let guards = ten(&one).await;
        // the main session, and two further ones each time
        assert_eq!(one.driver().opened().len(), 1 + 2 * round);
        tokio::time::sleep(secs(3_600)).await;
        assert!(guards.iter().all(LockGuard::is_held), "closed while it held something");
        drop(guards);
        tokio::time::sleep(SessionLimits::default().waiter_idle * 2).await;
    }
    let few = tried(&one, 0).await.unwrap().unwrap();
    assert_eq!(one.driver().opened().len(), 7, "the main session was closed as well");
    few.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn silence_loses_the_locks_of_all_sessions_within_the_bound() {
    let store = MemoryStore::new();
    let one = small(&store);
    let guards = ten(&one).await;
    one.driver().inner.link().silence();
    let limits = SessionLimits::default();
    tokio::time::sleep(limits.keepalive + limits.answer + millis(1)).await;
    assert!(guards.iter().all(|guard| guard.lost().is_set() && !guard.is_held()));
    one.driver().inner.link().heal();
    drop(guards);
    let (wait, mut again) = (LockOptions::default().wait(secs(30)), Vec::new());
    for i in 0..10 {
        again.push(one.lock(&key(&i.to_string()), wait).await.unwrap().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_is_dropped_or_closed_ends_its_further_sessions() {
    let store = MemoryStore::new();
    let (one, two) = (small(&store), small(&store));
    let mut guards = ten(&one).await;
    let last = guards.pop().unwrap();
    drop((one, guards));
    tokio::time::sleep(secs(60)).await;
    assert!(last.is_held(), "a guard on a further session keeps it");
    assert!(tried(&two, 9).await.unwrap().is_none());
    last.release().await.unwrap();
    nothing_left(&store).await;
    let guards = ten(&two).await;
    two.close().await;
    assert!(guards.iter().all(|guard| guard.lost().is_set()));
    nothing_left(&store).await;
}

#[tokio::test(start_paused = true)]
async fn contended_keys_come_through_on_any_session() {
    let store = MemoryStore::new();
    let handles = [Arc::new(small(&store)), Arc::new(small(&store))];
    let inside = Arc::new(Mutex::new(vec![false; 6]));
    let mut tasks = JoinSet::new();
    for task in 0..60 {
        let (locks, inside) = (handles[task % 2].clone(), inside.clone());
        tasks.spawn(async move {
            for round in 0..10 {
                let number = (task + round) % 6;
                let wait = LockOptions::default().wait(Duration::MAX);
                let guard = locks.lock(&key(&number.to_string()), wait).await.unwrap().unwrap();
                let was = std::mem::replace(&mut inside.lock().unwrap()[number], true);
                assert!(!was, "two hold {number}");
                tokio::time::sleep(millis(1)).await;
                inside.lock().unwrap()[number] = false;
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    nothing_left(&store).await;
}
