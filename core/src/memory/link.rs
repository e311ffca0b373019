//! [`MemoryLink`]: the way from one handle to its store, and the faults on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use super::store::{LinkId, MemoryStore};
use crate::error::{Error, ErrorKind, Result};
use crate::holder::Holder;

/// The way to the store. Faults concern one handle only.
#[derive(Clone, Debug)]
pub struct MemoryLink {
    store: MemoryStore,
    id: LinkId,
    holder: Arc<Holder>,
    faults: Arc<watch::Sender<Faults>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Faults {
    silent: bool,
    delay: Duration,
    lose_next: bool,
}

impl MemoryLink {
    pub(super) fn new(store: MemoryStore, holder: Holder) -> Self {
        let id = store.new_link();
        let faults = Arc::new(watch::Sender::new(Faults::default()));
        Self { store, id, holder: Arc::new(holder), faults }
    }

    pub(super) fn holder(&self) -> &Arc<Holder> {
        &self.holder
    }

    pub(super) fn id(&self) -> LinkId {
        self.id
    }

    /// The store ends all sessions of this handle, open claims included.
    pub fn end_sessions(&self) {
        self.store.end_sessions(|link| link == self.id);
    }

    /// Nothing arrives in either direction, and nothing is refused, until [`heal`](Self::heal).
    pub fn silence(&self) {
        self.faults.send_modify(|faults| faults.silent = true);
    }

    /// Ends silence and delay. What was under way arrives now; sessions that were dropped meanwhile
    /// end now.
    pub fn heal(&self) {
        self.faults.send_replace(Faults::default());
        self.store.end_vanished(self.id);
    }

    /// Each request and each answer takes so long.
    pub fn delay(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }

    /// The next request is carried out, and instead of its answer the connection is cut.
    pub fn lose_next_answer(&self) {
        self.faults.send_modify(|faults| faults.lose_next = true);
    }

    pub(super) fn is_silent(&self) -> bool {
        self.faults.borrow().silent
    }

    /// The time that a message takes, silence included.
    pub(super) async fn pass(&self) {
        let mut faults = self.faults.subscribe();
        let delay = faults.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        // the sender lives in `self`
        drop(faults.wait_for(|faults| !faults.silent).await);
    }

    /// Whether the answer to what was just done is lost.
    pub(super) fn loses_answer(&self) -> bool {
        self.faults.send_if_modified(|faults| std::mem::take(&mut faults.lose_next))
    }

    /// A request to the store and its answer. With faults on the way the request goes on also
    /// when its future is dropped, as on a network.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        request: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        if *self.faults.borrow() == Faults::default() {
            return Ok(request());
        }
        let link = self.clone();
        let (reply, answer) = oneshot::channel();
        tokio::spawn(async move {
            link.pass().await;
            let done = request();
            if link.loses_answer() {
                return;
            }
            link.pass().await;
            drop(reply.send(done)); // the caller did not wait for it
        });
        answer.await.map_err(|_| cut())
    }
}

pub(super) fn cut() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection was cut")
}
