//! The local queue: per key, at most one caller of this process at a time, in order.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Who waits in a [`Gate`].
pub(super) trait Waiter: Sized + Send + 'static {
    type Id: Clone + Debug + Eq + Hash + Send + 'static;

    /// Hands the right to the waiter; gives it back if the waiter is gone.
    fn turn(self, permit: Permit<Self>) -> Result<(), Permit<Self>>;
}

/// Per-key FIFO queues. An entry exists while somebody has the key's [`Permit`].
pub(super) struct Gate<W: Waiter>(Arc<Mutex<Queues<W>>>);

struct Queues<W: Waiter> {
    queues: HashMap<W::Id, BTreeMap<u64, W>>,
    next_place: u64,
}

/// The right of being the one local contender or holder of a key. Dropping it passes it on to the
/// next waiter.
pub(super) struct Permit<W: Waiter> {
    gate: Gate<W>,
    id: Option<W::Id>,
}

/// A place in a queue. Dropping it leaves the queue.
pub(super) struct Place<W: Waiter> {
    gate: Gate<W>,
    id: W::Id,
    place: u64,
}

/// The outcome of [`Gate::enter`].
pub(super) enum Entry<W: Waiter> {
    /// Nobody was there.
    Free(Permit<W>, W),
    /// The waiter is in the queue.
    Queued(Place<W>),
    /// It would have had to queue.
    Busy,
}

impl<W: Waiter> Gate<W> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Queues { queues: HashMap::new(), next_place: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, Queues<W>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters, or queues if `may_queue`.
    pub(super) fn enter(&self, id: &W::Id, waiter: W, may_queue: bool) -> Entry<W> {
        let mut queues = self.lock();
        let place = queues.next_place;
        match queues.queues.get_mut(id) {
            None => {
                queues.queues.insert(id.clone(), BTreeMap::new());
                Entry::Free(Permit { gate: self.clone(), id: Some(id.clone()) }, waiter)
            }
            Some(_) if !may_queue => Entry::Busy,
            Some(queue) => {
                queue.insert(place, waiter);
                queues.next_place += 1;
                Entry::Queued(Place { gate: self.clone(), id: id.clone(), place })
            }
        }
    }

    /// How many keys are held or contended for.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().queues.len()
    }
}

impl<W: Waiter> Permit<W> {
    pub(super) fn id(&self) -> &W::Id {
        // only `drop` empties it
        self.id.as_ref().expect("a permit has its id until it is dropped")
    }

    /// Takes the next waiter out of the queue without giving it the permit.
    pub(super) fn next(&self) -> Option<W> {
        let mut queues = self.gate.lock();
        Some(queues.queues.get_mut(self.id())?.pop_first()?.1)
    }

    /// Takes the next one out of the queue if it is still there and is one that is wanted.
    pub(super) fn next_if(
        &self,
        is_gone: impl Fn(&W) -> bool,
        wanted: impl Fn(&W) -> bool,
    ) -> Option<W> {
        let mut queues = self.gate.lock();
        let queue = queues.queues.get_mut(self.id())?;
        while let Some(first) = queue.first_entry() {
            match (is_gone(first.get()), wanted(first.get())) {
                (true, _) => drop(first.remove()),
                (false, true) => return Some(first.remove()),
                (false, false) => return None,
            }
        }
        None
    }

    /// Whether nobody waits for it.
    pub(super) fn is_last(&self) -> bool {
        let queues = self.gate.lock();
        queues.queues.get(self.id()).is_none_or(BTreeMap::is_empty)
    }
}

impl<W: Waiter> Drop for Permit<W> {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        loop {
            let waiter = {
                let mut queues = self.gate.lock();
                let next = queues.queues.get_mut(&id).and_then(BTreeMap::pop_first);
                if next.is_none() {
                    queues.queues.remove(&id);
                }
                next
            };
            let Some((_, waiter)) = waiter else { return };
            match waiter.turn(Self { gate: self.gate.clone(), id: Some(id.clone()) }) {
                Ok(()) => return,
                // that waiter is gone: the permit that came back must not pass itself on
                Err(mut back) => back.id = None,
            }
        }
    }
}

impl<W: Waiter> Place<W> {
    /// Leaves the queue; false if the waiter is not in it any more, because its turn has come.
    pub(super) fn leave(&self) -> bool {
        let mut queues = self.gate.lock();
        queues.queues.get_mut(&self.id).is_some_and(|queue| queue.remove(&self.place).is_some())
    }
}

impl<W: Waiter> Drop for Place<W> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl<W: Waiter> Clone for Gate<W> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<W: Waiter> Debug for Gate<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("keys", &self.lock().queues.len()).finish()
    }
}

impl<W: Waiter> Debug for Permit<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Permit").field(&self.id).finish()
    }
}

/// A waiter that is told its turn and then acts for itself.
pub(super) struct Turn<Id: Clone + Debug + Eq + Hash + Send + 'static>(
    tokio::sync::oneshot::Sender<Permit<Turn<Id>>>,
);

impl<Id: Clone + Debug + Eq + Hash + Send + 'static> Waiter for Turn<Id> {
    type Id = Id;
    fn turn(self, permit: Permit<Self>) -> Result<(), Permit<Self>> {
        self.0.send(permit)
    }
}

impl<Id: Clone + Debug + Eq + Hash + Send + 'static> Gate<Turn<Id>> {
    /// Waits for the permit of `id` until the deadline; `None` if others had it until then. Calls
    /// `queues` if it begins to wait.
    pub(super) async fn acquire(
        &self,
        id: &Id,
        deadline: crate::Deadline,
        queues: impl FnOnce(),
    ) -> Option<Permit<Turn<Id>>> {
        let (tell, told) = tokio::sync::oneshot::channel();
        self.wait(id, Turn(tell), told, deadline, queues).await
    }
}

impl<W: Waiter> Gate<W> {
    /// Waits until the deadline for what `waiter` is told when its turn has come, or for the permit
    /// that it can have at once; `None` if others had it until then. Calls `queues` if it begins to
    /// wait.
    pub(super) async fn wait<T: From<Permit<W>>>(
        &self,
        id: &W::Id,
        waiter: W,
        mut told: tokio::sync::oneshot::Receiver<T>,
        deadline: crate::Deadline,
        queues: impl FnOnce(),
    ) -> Option<T> {
        match self.enter(id, waiter, !deadline.has_passed()) {
            Entry::Free(permit, _) => Some(permit.into()),
            Entry::Busy => None,
            Entry::Queued(place) => {
                queues();
                tokio::select! {
                    biased;
                    turn = &mut told => turn.ok(),
                    () = deadline.passed() => {
                        drop(place);
                        told.try_recv().ok()
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Deadline;
    use futures_util::FutureExt;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn permits_pass_in_order_past_those_who_left() {
        let gate: Gate<Turn<u8>> = Gate::new();
        let first = gate.acquire(&1, Deadline::never(), || ()).await.unwrap();
        assert!(gate.acquire(&1, Deadline::after(Duration::ZERO), || ()).await.is_none());
        let queue: Vec<_> = (0..4)
            .map(|_| {
                let gate = gate.clone();
                tokio::spawn(async move { gate.acquire(&1, Deadline::never(), || ()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        queue[0].abort();
        tokio::task::yield_now().await;
        drop(first);
        let mut queue = queue.into_iter();
        assert!(queue.next().unwrap().await.unwrap_err().is_cancelled());
        for next in queue {
            drop(next.await.unwrap().unwrap());
        }
        assert_eq!(gate.len(), 0, "a queue was left behind");
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_that_nobody_received_passes_on() {
        let gate: Gate<Turn<u8>> = Gate::new();
        let first = gate.acquire(&1, Deadline::never(), || ()).await.unwrap();
        let mut unread = Box::pin(gate.acquire(&1, Deadline::never(), || ()));
        assert!(unread.as_mut().now_or_never().is_none());
        drop(first);
        assert_eq!(gate.len(), 1, "the queued one has the permit now");
        drop(unread);
        assert_eq!(gate.len(), 0);
    }
}
