//! [`SessionEngine`]: the caller's side of the named locks. The sessions are in [`worker`], the
//! ones that wait on the store in [`waiters`].

mod waiters;
mod worker;

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{Instrument, Span};

use self::waiters::Waiters;
use super::closed;
use super::gate::{Entry, Gate, Permit, Waiter};
use crate::backend::{SessionDriver, SessionId, SessionLimits};
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Kind;
use crate::key::Key;
use crate::lost::LossReason;
use crate::named::{LockGuard, LockHold, NamedLock, lost_error};
use crate::observe::{Name, Observer};
use crate::options::{Deadline, LockOptions};
use crate::token::FencingToken;

/// Makes a [`NamedLock`] of a [`SessionDriver`].
///
/// One main session, owned by one task, holds the locks: requests that arrive while a statement is
/// under way go out together in the next one, as in group commit. A key that is busy elsewhere is
/// waited for on the store by one of a few waiter sessions, and stays on the session that was
/// granted it, since a session's lock cannot be moved to another session; past their number the
/// engine polls with jitter. Callers of one process queue locally per key; a release may hand the
/// lock to the next of them a bounded number of times before other processes get their turn.
///
/// Where [`SessionLimits::max_per_session`] bounds what a session holds, the main session passes
/// what it has no room for on to a further one, which may do the same; a further session is closed
/// when it has held nothing for [`SessionLimits::waiter_idle`].
///
/// When the store ends a session, every guard on it is lost at once; a silent network is noticed
/// within `keepalive + answer` of its [`SessionLimits`]. The engine then reconnects.
#[derive(Debug)]
pub struct SessionEngine<D: SessionDriver> {
    shared: Arc<Shared<D>>,
    main: OnceLock<mpsc::UnboundedSender<Command<D>>>,
}

/// What the engine, its workers and its requests share.
#[derive(Debug)]
struct Shared<D: SessionDriver> {
    driver: D,
    limits: SessionLimits,
    gate: Gate<Request<D>>,
    waiters: Waiters<D>,
    main: OnceLock<mpsc::WeakUnboundedSender<Command<D>>>,
    /// The last attempt to open the main session failed.
    down: AtomicBool,
    ending: watch::Sender<Ending>,
    workers: watch::Sender<usize>,
    observer: Observer,
}

/// Whether the workers go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    No,
    /// The engine is gone: end as soon as nothing is held.
    WhenIdle,
    Now,
}

/// What a worker is told.
enum Command<D: SessionDriver> {
    /// Take the lock and answer the request.
    Acquire(Permit<Request<D>>, Request<D>),
    Release {
        id: D::Id,
        serial: u64,
        reply: Option<oneshot::Sender<Result<()>>>,
    },
    Token {
        id: D::Id,
        serial: u64,
        reply: oneshot::Sender<Result<FencingToken>>,
    },
    /// End another session of this handle.
    Kill(SessionId),
}

/// A caller that waits for a lock.
struct Request<D: SessionDriver> {
    key: Key,
    id: D::Id,
    deadline: Deadline,
    reply: oneshot::Sender<Result<Option<LockGuard>>>,
    main: mpsc::UnboundedSender<Command<D>>,
    /// How often it was put off.
    attempts: u32,
    /// That of the call.
    span: Span,
    /// The call's wait has been told.
    waits: bool,
}

impl<D: SessionDriver> Request<D> {
    fn is_gone(&self) -> bool {
        self.reply.is_closed()
    }

    /// It is not granted at once.
    fn waits(&mut self, observer: &Observer) {
        if !std::mem::replace(&mut self.waits, true) {
            self.span.in_scope(|| observer.waiting(Name::Key(&self.key)));
        }
    }

    fn answer(self, answer: Result<Option<LockGuard>>) {
        // where the caller is gone, a guard in the answer releases by its drop
        drop(self.reply.send(answer));
    }
}

impl<D: SessionDriver> Waiter for Request<D> {
    type Id = D::Id;
    fn turn(mut self, permit: Permit<Self>) -> Result<(), Permit<Self>> {
        self.waits = true; // told when it queued
        if self.is_gone() {
            return Err(permit);
        }
        let main = self.main.clone();
        // a main worker that has ended drops both: the caller sees that, the next gets its turn
        drop(main.send(Command::Acquire(permit, self)));
        Ok(())
    }
}

impl<D: SessionDriver> SessionEngine<D> {
    /// An engine over `driver`. It starts its tasks on the runtime of the first acquisition.
    pub fn new(driver: D) -> Self {
        let limits = driver.limits();
        let observer = Observer::new(driver.backend(), Kind::Lock);
        let shared = Arc::new(Shared {
            driver,
            limits,
            gate: Gate::new(),
            waiters: Waiters::new(),
            main: OnceLock::new(),
            down: AtomicBool::new(false),
            ending: watch::Sender::new(Ending::No),
            workers: watch::Sender::new(0),
            observer,
        });
        Self { shared, main: OnceLock::new() }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.shared.driver
    }

    /// Loses and frees all locks of the handle, closes its sessions and ends it.
    ///
    /// # Cancel safety
    /// Safe: it goes on in the background.
    pub async fn close(&self) {
        self.shared.ending.send_replace(Ending::Now);
        let mut workers = self.shared.workers.subscribe();
        // the sender lives in `shared`: this ends when the last worker has
        drop(workers.wait_for(|workers| *workers == 0).await);
    }

    fn main(&self) -> &mpsc::UnboundedSender<Command<D>> {
        self.main.get_or_init(|| {
            let main = worker::start_main(&self.shared);
            drop(self.shared.main.set(main.downgrade()));
            main
        })
    }

    async fn acquire(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let deadline = Deadline::after(opts.wait);
        let (reply, mut answer) = oneshot::channel();
        let request = Request {
            key: key.clone(),
            id: self.shared.driver.id(key),
            deadline,
            reply,
            main: self.main().clone(),
            attempts: 0,
            span: Span::current(),
            waits: false,
        };
        let id = request.id.clone();
        let given_up = match self.shared.gate.enter(&id, request, !deadline.has_passed()) {
            Entry::Busy => true,
            Entry::Free(permit, request) => {
                self.main().send(Command::Acquire(permit, request)).map_err(|_| closed())?;
                false
            }
            Entry::Queued(place) => {
                self.shared.observer.waiting(Name::Key(key));
                tokio::select! {
                    biased;
                    answer = &mut answer => return answer.unwrap_or_else(|_| Err(closed())),
                    () = deadline.passed() => place.leave(),
                }
            }
        };
        if !given_up {
            return answer.await.unwrap_or_else(|_| Err(closed()));
        }
        if self.shared.down.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "the store cannot be reached"));
        }
        Ok(None)
    }
}

impl<D: SessionDriver> Drop for SessionEngine<D> {
    fn drop(&mut self) {
        self.shared.ending.send_if_modified(|ending| {
            let goes_on = *ending == Ending::No;
            if goes_on {
                *ending = Ending::WhenIdle;
            }
            goes_on
        });
    }
}

#[async_trait]
impl<D: SessionDriver> NamedLock for SessionEngine<D> {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let call = self.shared.observer.call(Name::Key(key));
        let acquired = self.acquire(key, opts).instrument(call.span()).await;
        call.end(acquired.map_err(|error| error.at(self.shared.driver.backend(), "lock").on(key)))
    }
}

/// Until when a session may be believed in without hearing from the store.
#[derive(Debug)]
struct Pulse {
    start: Instant,
    until: AtomicU64,
}

impl Pulse {
    fn new() -> Self {
        Self { start: Instant::now(), until: AtomicU64::new(0) }
    }

    fn extend(&self, until: Instant) {
        let millis = until.saturating_duration_since(self.start).as_millis() as u64;
        self.until.fetch_max(millis, Ordering::Relaxed);
    }

    fn is_alive(&self) -> bool {
        self.start.elapsed() < Duration::from_millis(self.until.load(Ordering::Relaxed))
    }
}

/// A lock on a worker's session; dropping it releases.
struct Hold<D: SessionDriver> {
    id: D::Id,
    key: Key,
    serial: u64,
    worker: mpsc::UnboundedSender<Command<D>>,
    pulse: Arc<Pulse>,
    backend: &'static str,
    released: bool,
}

impl<D: SessionDriver> Hold<D> {
    fn start_release(&mut self, reply: Option<oneshot::Sender<Result<()>>>) {
        self.released = true;
        let (id, serial) = (self.id.clone(), self.serial);
        // a worker that has ended has closed its session, which frees the lock
        drop(self.worker.send(Command::Release { id, serial, reply }));
    }

    fn ended(&self, operation: &'static str) -> Error {
        lost_error(operation, &self.key, Some(LossReason::SessionEnded))
    }
}

#[async_trait]
impl<D: SessionDriver> LockHold for Hold<D> {
    async fn token(&self) -> Result<FencingToken> {
        let (reply, answer) = oneshot::channel();
        let (id, serial) = (self.id.clone(), self.serial);
        drop(self.worker.send(Command::Token { id, serial, reply }));
        let token = answer.await.unwrap_or_else(|_| Err(self.ended("token")));
        token.map_err(|error| error.at(self.backend, "token"))
    }

    async fn release(&mut self) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.start_release(Some(reply));
        let released = answer.await.unwrap_or_else(|_| Err(self.ended("release")));
        released.map_err(|error| error.at(self.backend, "release"))
    }

    fn is_alive(&self) -> bool {
        self.pulse.is_alive()
    }
}

impl<D: SessionDriver> Drop for Hold<D> {
    fn drop(&mut self) {
        if !self.released {
            self.start_release(None);
        }
    }
}

impl<D: SessionDriver> Debug for Hold<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hold").field("id", &self.id).field("serial", &self.serial).finish()
    }
}
