//! Connections of a raw contender: one for each lock that is held or waited for.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_peers::Outcome;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections of one handle at most.
const MOST: usize = 64;

/// A stack of connections, without anything that a real pool checks: this is a floor.
#[derive(Debug)]
pub(super) struct Stack<C> {
    idle: Arc<Mutex<Vec<C>>>,
    room: Arc<Semaphore>,
}

/// A connection in use; dropped instead of put back, it is closed.
#[derive(Debug)]
pub(super) struct Used<C> {
    pub(super) conn: C,
    idle: Arc<Mutex<Vec<C>>>,
    _room: OwnedSemaphorePermit,
}

impl<C> Stack<C> {
    /// With one connection.
    pub(super) fn new(conn: C) -> Self {
        Self { idle: Arc::new(Mutex::new(vec![conn])), room: Arc::new(Semaphore::new(MOST)) }
    }

    /// One that is idle, or a new one.
    pub(super) async fn take<F>(&self, connect: impl FnOnce() -> F) -> Outcome<Used<C>>
    where
        F: Future<Output = Outcome<C>>,
    {
        let room = self.room.clone().acquire_owned().await?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let conn = match idle {
            Some(conn) => conn,
            None => connect().await?,
        };
        Ok(Used { conn, idle: self.idle.clone(), _room: room })
    }
}

impl<C> Used<C> {
    /// For the next one.
    pub(super) fn put_back(self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.conn);
    }
}
