//! The bounded set of sessions that wait on the store for keys that others hold.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;

use super::super::backoff::Backoff;
use super::super::gate::Permit;
use super::{Command, Request, Shared, worker};
use crate::backend::SessionDriver;
use crate::steer::steered;

/// The waiter sessions: how many there are, and which are idle.
pub(super) struct Waiters<D: SessionDriver>(Mutex<State<D>>);

struct State<D: SessionDriver> {
    count: usize,
    idle: Vec<mpsc::UnboundedSender<Command<D>>>,
}

impl<D: SessionDriver> Waiters<D> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { count: 0, idle: Vec::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State<D>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A waiter has nothing to do.
    pub(super) fn rest(&self, waiter: mpsc::UnboundedSender<Command<D>>) {
        self.lock().idle.push(waiter);
    }

    /// An idle waiter wants to end; false if a request is on its way to it.
    pub(super) fn retire(&self, waiter: &mpsc::UnboundedSender<Command<D>>) -> bool {
        let idle = &mut self.lock().idle;
        let place = idle.iter().position(|other| other.same_channel(waiter));
        place.map(|place| idle.swap_remove(place)).is_some()
    }

    /// A waiter has ended.
    pub(super) fn ended(&self) {
        self.lock().count -= 1;
    }
}

/// Has the request wait on the store, or tries it again later if all waiters are in use.
pub(super) fn dispatch<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
    permit: Permit<Request<D>>,
    request: Request<D>,
) {
    let waiter = {
        let mut state = shared.waiters.lock();
        match state.idle.pop() {
            Some(waiter) => Some(waiter),
            None if state.count < shared.limits.max_waiters => {
                state.count += 1;
                None
            }
            None => {
                drop(state);
                return later(permit, request);
            }
        }
    };
    let waiter = waiter.unwrap_or_else(|| worker::start_waiter(shared));
    if let Err(mpsc::error::SendError(Command::Acquire(permit, request))) =
        waiter.send(Command::Acquire(permit, request))
    {
        later(permit, request); // it ended with the runtime or the handle
    }
}

/// Tries again on the main session after a growing, jittered pause.
pub(super) fn later<D: SessionDriver>(permit: Permit<Request<D>>, mut request: Request<D>) {
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(250));
    let pause = (0..=request.attempts.min(8)).map(|_| backoff.next()).last().unwrap_or_default();
    request.attempts += 1;
    tokio::spawn(steered(async move {
        tokio::select! {
            biased;
            () = tokio::time::sleep(pause.min(request.deadline.remaining())) => {}
            () = request.reply.closed() => {}
        }
        let main = request.main.clone();
        // a main worker that has ended drops both: the caller sees that
        drop(main.send(Command::Acquire(permit, request)));
    }));
}

impl<D: SessionDriver> Debug for Waiters<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Waiters")
            .field("count", &state.count)
            .field("idle", &state.idle.len())
            .finish()
    }
}
