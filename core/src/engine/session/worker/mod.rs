//! The task that owns a session: the main one, which holds locks, a further one, which holds those
//! that the one before has no room for, or one that also waits.

mod exchange;
mod further;
mod wait;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use self::exchange::Plan;
use self::further::Room;
use super::super::backoff::{Backoff, jittered};
use super::super::gate::Permit;
use super::super::{contained, limited};
use super::waiters::later;
use super::{Command, Ending, Pulse, Request, Shared};
use crate::backend::{Session, SessionDriver, SessionId};
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Kind;
use crate::lost::{LossReason, LossSignal};
use crate::observe::TARGET;
use crate::steer::steered;

/// While somebody wants a lock, the next attempt to connect is made after this part of the time for
/// which the store has been down, so that the lock comes late by no more than that; in these bounds.
const OUTAGE_PART: u32 = 16;
const SOONEST: Duration = Duration::from_millis(5);
const SOON: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Main,
    Further,
    Waiter,
}

impl Role {
    fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Further => "further",
            Self::Waiter => "waiter",
        }
    }
}

struct Worker<D: SessionDriver> {
    shared: Arc<Shared<D>>,
    role: Role,
    /// What it may hold, and the worker of what goes beyond.
    room: Room<D>,
    commands: mpsc::UnboundedReceiver<Command<D>>,
    own: Own<D>,
    ending: watch::Receiver<Ending>,
    held: HashMap<D::Id, Held<D>>,
    /// Requests that go out in the next exchange.
    queued: Vec<(Permit<Request<D>>, Request<D>)>,
    kills: Vec<SessionId>,
    serials: u64,
    pulse: Arc<Pulse>,
    /// How many asked for something in the last exchange.
    last_batch: usize,
}

/// The worker's own sender, for guards. That of the main worker and the further ones is weak, so
/// that each ends when whoever passes it requests and its guards are gone; a waiter ends when it is
/// idle for long, or the engine is gone.
enum Own<D: SessionDriver> {
    Holder(mpsc::WeakUnboundedSender<Command<D>>),
    Waiter(mpsc::UnboundedSender<Command<D>>),
}

impl<D: SessionDriver> Own<D> {
    fn upgrade(&self) -> Option<mpsc::UnboundedSender<Command<D>>> {
        match self {
            Self::Holder(sender) => sender.upgrade(),
            Self::Waiter(sender) => Some(sender.clone()),
        }
    }
}

/// A lock on the session.
struct Held<D: SessionDriver> {
    permit: Permit<Request<D>>,
    signal: LossSignal,
    serial: u64,
    handovers: u32,
    since: Instant,
}

/// Whether a waiter has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    No,
    /// It stands in the list of idle ones.
    Since(Instant),
    /// It was taken from the list: a request is on its way.
    Called,
}

/// Why a session is served no longer.
enum End {
    /// The session is over; everything on it is lost.
    Lost(LossReason, Error),
    /// A wait that nobody waits for any more was cut short.
    Abandoned,
    /// A further session has held nothing for long.
    Idle,
    /// Nobody needs the worker any more.
    Done,
}

pub(super) fn start_main<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
) -> mpsc::UnboundedSender<Command<D>> {
    start(shared, Role::Main, shared.limits.max_held)
}

pub(super) fn start_waiter<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
) -> mpsc::UnboundedSender<Command<D>> {
    start(shared, Role::Waiter, 0)
}

/// `most` is what it and those beyond it may hold.
fn start<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
    role: Role,
    most: usize,
) -> mpsc::UnboundedSender<Command<D>> {
    let (sender, commands) = mpsc::unbounded_channel();
    let worker = Worker {
        shared: shared.clone(),
        role,
        room: Room::new(shared.limits.max_per_session, most),
        commands,
        own: match role {
            Role::Main | Role::Further => Own::Holder(sender.downgrade()),
            Role::Waiter => Own::Waiter(sender.clone()),
        },
        ending: shared.ending.subscribe(),
        held: HashMap::new(),
        queued: Vec::new(),
        kills: Vec::new(),
        serials: 0,
        pulse: Arc::new(Pulse::new()),
        last_batch: 0,
    };
    shared.workers.send_modify(|workers| *workers += 1);
    tokio::spawn(steered(async move {
        match role {
            Role::Main => worker.run_main().await,
            Role::Further => worker.run_further().await,
            Role::Waiter => worker.run_waiter().await,
        }
    }));
    sender
}

/// However a worker ends (also by a panic, or with its runtime), its guards hear of it.
impl<D: SessionDriver> Drop for Worker<D> {
    fn drop(&mut self) {
        self.lose_all(LossReason::SessionEnded);
        if self.role == Role::Waiter {
            self.shared.waiters.ended();
        }
        self.shared.workers.send_modify(|workers| *workers -= 1);
    }
}

impl<D: SessionDriver> Worker<D> {
    /// Keeps a session up for the life of the handle.
    async fn run_main(mut self) {
        let Some(first) = self.next_command().await else {
            return;
        };
        self.take_while_down(first);
        while let Some(mut session) = self.connect().await {
            match self.serve(&mut session).await {
                End::Lost(reason, error) => self.session_lost(session.id(), reason, &error),
                End::Abandoned | End::Idle | End::Done => {
                    self.end(session).await;
                    return;
                }
            }
        }
    }

    /// Waits on the store for one key at a time, and holds it when it was granted.
    async fn run_waiter(mut self) {
        let Some(Command::Acquire(permit, request)) = self.next_command().await else {
            return;
        };
        self.queued.push((permit, request));
        let mut session = match self.open().await {
            Ok(session) => session,
            Err(error) => {
                self.no_session(&error);
                return self.hand_back();
            }
        };
        match self.serve(&mut session).await {
            End::Lost(reason, error) => self.session_lost(session.id(), reason, &error),
            End::Abandoned => {}
            End::Idle | End::Done => return self.end(session).await,
        }
        self.hand_back();
    }

    /// Gives requests that a waiter cannot serve back to the main session.
    fn hand_back(&mut self) {
        if let Some(own) = self.own.upgrade() {
            self.shared.waiters.retire(&own);
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.take_while_down(command);
        }
        for (permit, request) in self.queued.drain(..) {
            later(permit, request);
        }
    }

    async fn end(&mut self, session: D::Session) {
        self.lose_all(LossReason::Closed);
        self.queued.clear();
        let answer = self.shared.limits.answer;
        good_bye(session, answer).await;
    }

    /// The next command; none when the worker has to end.
    async fn next_command(&mut self) -> Option<Command<D>> {
        tokio::select! {
            biased;
            () = reached(&mut self.ending, Ending::Now) => None,
            command = self.commands.recv() => command,
        }
    }

    async fn open(&self) -> Result<D::Session> {
        limited(self.shared.limits.answer, self.shared.driver.open()).await
    }

    // --- without a session -------------------------------------------------------------------

    /// Opens the session, however long it takes; none when the worker has to end.
    async fn connect(&mut self) -> Option<D::Session> {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        let down_since = Instant::now();
        let mut last_error = None;
        loop {
            let shared = self.shared.clone();
            let opening = limited(shared.limits.answer, shared.driver.open());
            let opened = self.meanwhile(opening, last_error.as_ref()).await?;
            let error = match opened {
                Ok(session) => {
                    self.tell_down(false);
                    return Some(session);
                }
                Err(error) => error,
            };
            self.no_session(&error);
            self.tell_down(true);
            if error.is_retryable() {
                self.give_up_late(&error);
                let soon = jittered((down_since.elapsed() / OUTAGE_PART).clamp(SOONEST, SOON));
                self.pause(soon, backoff.next(), &error).await?;
            } else {
                // it will not mend by itself: the next request tries anew
                for (_, request) in self.queued.drain(..) {
                    request.answer(Err(error.clone()));
                }
                let command = self.next_command().await?;
                self.take_while_down(command);
            }
            last_error = Some(error);
        }
    }

    /// Pauses between two attempts while taking commands: for `long`, or only until somebody is
    /// there who wants a lock, but at least for `soon`.
    async fn pause(&mut self, soon: Duration, long: Duration, error: &Error) -> Option<()> {
        let start = Instant::now();
        let long = start + long.max(soon);
        self.meanwhile(sleep_until(start + soon), Some(error)).await?;
        while self.queued.is_empty() && Instant::now() < long {
            tokio::select! {
                biased;
                () = sleep_until(long) => {}
                command = self.next_command() => self.take_while_down(command?),
            }
        }
        Some(())
    }

    fn tell_down(&self, down: bool) {
        if self.role == Role::Main {
            self.shared.down.store(down, Ordering::Relaxed);
        }
    }

    /// Runs `work` while taking commands; once an attempt has failed, requests whose wait is over
    /// get its error.
    async fn meanwhile<T>(
        &mut self,
        work: impl Future<Output = T>,
        error: Option<&Error>,
    ) -> Option<T> {
        tokio::pin!(work);
        loop {
            let first = self.queued.iter().map(|(_, request)| request.deadline);
            let first = first.min_by_key(|deadline| deadline.remaining());
            let overdue = async {
                match (first, error) {
                    (Some(first), Some(_)) => first.passed().await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = reached(&mut self.ending, Ending::Now) => return None,
                done = &mut work => return Some(done),
                command = self.commands.recv() => self.take_while_down(command?),
                () = overdue => {
                    if let Some(error) = error {
                        self.give_up_late(error);
                    }
                }
            }
        }
    }

    fn take_while_down(&mut self, command: Command<D>) {
        match command {
            Command::Acquire(permit, request) => self.queued.push((permit, request)),
            Command::Kill(session) => self.kills.push(session),
            Command::Release { reply, .. } => drop(reply.map(|reply| reply.send(Err(ended())))),
            Command::Token { reply, .. } => drop(reply.send(Err(ended()))),
        }
    }

    fn give_up_late(&mut self, error: &Error) {
        let late =
            |(_, request): &mut (_, Request<D>)| request.is_gone() || request.deadline.has_passed();
        for (_, request) in self.queued.extract_if(.., late) {
            request.answer(Err(error.clone()));
        }
    }

    fn session_opened(&self, session: SessionId) {
        let (backend, kind) = (self.shared.driver.backend(), Kind::Lock.as_str());
        let role = self.role.as_str();
        tracing::debug!(target: TARGET, backend, kind, session, role, "session opened");
    }

    fn no_session(&self, error: &Error) {
        let (backend, kind) = (self.shared.driver.backend(), Kind::Lock.as_str());
        tracing::warn!(target: TARGET, backend, kind, %error, "no session");
    }

    fn session_lost(&mut self, session: SessionId, reason: LossReason, error: &Error) {
        let (backend, kind) = (self.shared.driver.backend(), Kind::Lock.as_str());
        let (role, locks) = (self.role.as_str(), self.held.len());
        if locks > 0 {
            tracing::warn!(target: TARGET, backend, kind, session, role, locks, %error, "session lost");
        } else {
            tracing::debug!(target: TARGET, backend, kind, session, role, locks, %error, "session lost");
        }
        self.lose_all(reason);
    }

    fn lose_all(&mut self, reason: LossReason) {
        for held in self.held.values() {
            held.signal.lose(reason);
        }
        // only now: whoever gets a permit finds the old guards lost
        self.held.clear();
    }

    // --- with a session ----------------------------------------------------------------------

    async fn serve(&mut self, session: &mut D::Session) -> End {
        self.session_opened(session.id());
        let limits = self.shared.limits;
        let mut heard = Instant::now();
        self.pulse.extend(heard + limits.keepalive + limits.answer);
        let mut rest = Rest::No;
        loop {
            if self.queued.is_empty() && self.kills.is_empty() {
                let busy = !self.held.is_empty() || self.role == Role::Main;
                let ends_at = if busy { Ending::Now } else { Ending::WhenIdle };
                if !busy && rest == Rest::No {
                    let Some(own) = self.own.upgrade() else {
                        return End::Done;
                    };
                    if self.role == Role::Waiter {
                        self.shared.waiters.rest(own);
                    }
                    rest = Rest::Since(Instant::now());
                }
                let tired = async {
                    match rest {
                        Rest::Since(start) => sleep_until(start + limits.waiter_idle).await,
                        Rest::No | Rest::Called => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    () = reached(&mut self.ending, ends_at) => return End::Done,
                    command = self.commands.recv() => {
                        let Some(command) = command else { return End::Done };
                        if matches!(command, Command::Acquire(..)) {
                            rest = Rest::No;
                        }
                        let mut plan = Plan::default();
                        self.take(command, &mut plan);
                        if let Some(end) = self.round(session, plan, &mut heard).await {
                            return end;
                        }
                    }
                    error = closed(session) => {
                        return End::Lost(LossReason::SessionEnded, error);
                    }
                    () = sleep_until(heard + limits.keepalive) => {
                        let plan = Plan::default();
                        if let Some(end) = self.exchange(session, plan, &mut heard).await {
                            return end;
                        }
                    }
                    () = tired => match self.own.upgrade() {
                        _ if self.role == Role::Further => return End::Idle,
                        Some(own) if !self.shared.waiters.retire(&own) => rest = Rest::Called,
                        _ => return End::Done,
                    }
                }
            } else if let Some(end) = self.round(session, Plan::default(), &mut heard).await {
                return end;
            }
        }
    }
}

/// Closes a session; silence ends it as well.
async fn good_bye<S: Session>(session: S, limit: Duration) {
    let bye = async {
        session.close().await;
        Ok(())
    };
    drop(limited(limit, bye).await);
}

/// Ends when the store has closed the session.
async fn closed<S: Session>(session: &mut S) -> Error {
    let closed = contained(async { Ok(session.closed().await) }).await;
    closed.unwrap_or_else(|panic| panic)
}

/// Ends when it has come to `stage`.
async fn reached(ending: &mut watch::Receiver<Ending>, stage: Ending) {
    // the sender lives in `shared`, which every worker has
    drop(ending.wait_for(|now| *now >= stage).await);
}

fn ended() -> Error {
    let reason = LossReason::SessionEnded.as_str();
    Error::new(ErrorKind::Lost, format!("it is held no longer: {reason}"))
}
