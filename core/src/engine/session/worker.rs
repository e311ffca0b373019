//! The task that owns a session: the main one, which holds locks, or one that also waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::super::backoff::Backoff;
use super::super::gate::Permit;
use super::super::limited;
use super::waiters::{dispatch, later};
use super::{Command, Ending, Hold, Pulse, Request, Shared};
use crate::backend::{Batch, BatchAnswer, Session, SessionDriver, SessionId, Try};
use crate::error::{Error, ErrorKind, Result};
use crate::lost::{LossReason, LossSignal};
use crate::named::LockGuard;
use crate::token::FencingToken;

/// A wait on the store that has nobody left is left to its end if that is as near as this;
/// otherwise its session is killed.
const NEAR_END: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Main,
    Waiter,
}

struct Worker<D: SessionDriver> {
    shared: Arc<Shared<D>>,
    role: Role,
    commands: mpsc::UnboundedReceiver<Command<D>>,
    own: Own<D>,
    ending: watch::Receiver<Ending>,
    held: HashMap<D::Id, Held<D>>,
    /// Requests that go out in the next exchange.
    queued: Vec<(Permit<Request<D>>, Request<D>)>,
    kills: Vec<SessionId>,
    serials: u64,
    pulse: Arc<Pulse>,
}

/// The worker's own sender, for guards. The main worker's is weak, so that it ends when engine and
/// guards are gone; a waiter ends when it is idle for long, or the engine is gone.
enum Own<D: SessionDriver> {
    Main(mpsc::WeakUnboundedSender<Command<D>>),
    Waiter(mpsc::UnboundedSender<Command<D>>),
}

impl<D: SessionDriver> Own<D> {
    fn upgrade(&self) -> Option<mpsc::UnboundedSender<Command<D>>> {
        match self {
            Self::Main(sender) => sender.upgrade(),
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

/// A lock that is being freed. The permit stays here until the store has done so; there is none
/// where it goes with a try.
type Freed<D> = (Option<Permit<Request<D>>>, Option<oneshot::Sender<Result<()>>>);

/// Who is answered after an exchange, in the order of the batch.
struct Plan<D: SessionDriver> {
    batch: Batch<D::Id>,
    releases: Vec<Freed<D>>,
    tries: Vec<(Permit<Request<D>>, Request<D>)>,
    tokens: Vec<oneshot::Sender<Result<FencingToken>>>,
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
    /// Nobody needs the worker any more.
    Done,
}

pub(super) fn start_main<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
) -> mpsc::UnboundedSender<Command<D>> {
    start(shared, Role::Main)
}

pub(super) fn start_waiter<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
) -> mpsc::UnboundedSender<Command<D>> {
    start(shared, Role::Waiter)
}

fn start<D: SessionDriver>(
    shared: &Arc<Shared<D>>,
    role: Role,
) -> mpsc::UnboundedSender<Command<D>> {
    let (sender, commands) = mpsc::unbounded_channel();
    let worker = Worker {
        shared: shared.clone(),
        role,
        commands,
        own: match role {
            Role::Main => Own::Main(sender.downgrade()),
            Role::Waiter => Own::Waiter(sender.clone()),
        },
        ending: shared.ending.subscribe(),
        held: HashMap::new(),
        queued: Vec::new(),
        kills: Vec::new(),
        serials: 0,
        pulse: Arc::new(Pulse::new()),
    };
    shared.workers.send_modify(|workers| *workers += 1);
    tokio::spawn(async move {
        match role {
            Role::Main => worker.run_main().await,
            Role::Waiter => worker.run_waiter().await,
        }
    });
    sender
}

/// However a worker ends (also by a panic, or with its runtime), its guards hear of it.
impl<D: SessionDriver> Drop for Worker<D> {
    fn drop(&mut self) {
        self.lose_all(LossReason::SessionEnded, &super::closed());
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
                End::Lost(reason, error) => self.lose_all(reason, &error),
                End::Abandoned | End::Done => {
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
                tracing::debug!(%error, "no session to wait with");
                return self.hand_back();
            }
        };
        match self.serve(&mut session).await {
            End::Lost(reason, error) => self.lose_all(reason, &error),
            End::Abandoned => {}
            End::Done => return self.end(session).await,
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
        self.lose_all(LossReason::Closed, &super::closed());
        self.queued.clear();
        let answer = self.shared.limits.answer;
        drop(tokio::time::timeout(answer, session.close()).await); // silence ends it as well
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
        let mut last_error = None;
        loop {
            let shared = self.shared.clone();
            let opening = limited(shared.limits.answer, shared.driver.open());
            let opened = self.meanwhile(opening, last_error.as_ref()).await?;
            let error = match opened {
                Ok(session) => {
                    self.shared.down.store(false, Ordering::Relaxed);
                    return Some(session);
                }
                Err(error) => error,
            };
            tracing::warn!(backend = shared.driver.backend(), %error, "no session with the store");
            self.shared.down.store(true, Ordering::Relaxed);
            if error.is_retryable() {
                self.give_up_late(&error);
                let pause = tokio::time::sleep(backoff.next());
                self.meanwhile(pause, Some(&error)).await?;
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

    fn lose_all(&mut self, reason: LossReason, error: &Error) {
        let (backend, locks) = (self.shared.driver.backend(), self.held.len());
        if locks > 0 && reason != LossReason::Closed {
            tracing::warn!(backend, locks, %error, "session lost, and with it its locks");
        }
        for held in self.held.values() {
            held.signal.lose(reason);
        }
        // only now: whoever gets a permit finds the old guards lost
        self.held.clear();
    }

    // --- with a session ----------------------------------------------------------------------

    async fn serve(&mut self, session: &mut D::Session) -> End {
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
                    self.shared.waiters.rest(own);
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
                    error = session.closed() => {
                        return End::Lost(LossReason::SessionEnded, error);
                    }
                    () = sleep_until(heard + limits.keepalive) => {
                        let plan = Plan::default();
                        if let Some(end) = self.exchange(session, plan, &mut heard).await {
                            return end;
                        }
                    }
                    () = tired => match self.own.upgrade() {
                        Some(own) if !self.shared.waiters.retire(&own) => rest = Rest::Called,
                        _ => return End::Done,
                    }
                }
            } else if let Some(end) = self.round(session, Plan::default(), &mut heard).await {
                return end;
            }
        }
    }

    /// Adds what else has arrived to the plan, carries it out, and waits where that is needed.
    async fn round(
        &mut self,
        session: &mut D::Session,
        mut plan: Plan<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        for (permit, request) in std::mem::take(&mut self.queued) {
            self.take(Command::Acquire(permit, request), &mut plan);
        }
        plan.batch.kill.append(&mut self.kills);
        while plan.len() < self.shared.limits.max_batch {
            let Ok(command) = self.commands.try_recv() else {
                break;
            };
            self.take(command, &mut plan);
        }
        if !plan.batch.is_empty() {
            let ended = self.exchange(session, plan, heard).await;
            if ended.is_some() {
                return ended;
            }
        }
        if self.role == Role::Waiter
            && self.held.is_empty()
            && let Some((permit, request)) = self.queued.pop()
        {
            return self.wait(session, permit, request, heard).await;
        }
        None
    }

    fn take(&mut self, command: Command<D>, plan: &mut Plan<D>) {
        match command {
            Command::Kill(session) => plan.batch.kill.push(session),
            Command::Token { id, serial, reply } => {
                if self.held.get(&id).is_some_and(|held| held.serial == serial) {
                    plan.batch.tokens.push(id);
                    plan.tokens.push(reply);
                } else {
                    drop(reply.send(Err(ended())));
                }
            }
            Command::Acquire(permit, request) => {
                if let Some(request) = live(&permit, Some(request)) {
                    self.try_or_wait(permit, request, plan);
                }
            }
            Command::Release { id, serial, reply } => {
                match self.held.remove(&id) {
                    Some(held) if held.serial == serial => self.release(id, held, reply, plan),
                    other => {
                        // it was lost with its session; a successor's hold stays
                        self.held.extend(other.map(|held| (id, held)));
                        drop(reply.map(|reply| reply.send(Err(ended()))));
                    }
                }
            }
        }
    }

    /// The main session tries; a waiter was sent a request because a try has failed.
    fn try_or_wait(&mut self, permit: Permit<Request<D>>, request: Request<D>, plan: &mut Plan<D>) {
        if self.role == Role::Waiter {
            if self.held.is_empty() {
                self.queued.push((permit, request));
            } else {
                later(permit, request); // one that holds cannot wait: releases must get through
            }
            return;
        }
        let max_held = self.shared.limits.max_held;
        if self.held.len() + plan.tries.len() >= max_held {
            let detail = format!(
                "this handle holds {max_held} locks, its limit: raise it if the store has room"
            );
            request.answer(Err(Error::new(ErrorKind::Exhausted, detail)));
            return;
        }
        plan.batch.tries.push(request.id.clone());
        plan.tries.push((permit, request));
    }

    /// Hands the lock to the next local waiter, or frees it on the store; in the same statement it
    /// is tried for again where others get their turn before the next local waiter.
    fn release(
        &mut self,
        id: D::Id,
        mut held: Held<D>,
        reply: Option<oneshot::Sender<Result<()>>>,
        plan: &mut Plan<D>,
    ) {
        let limits = &self.shared.limits;
        held.signal.settle();
        let Some(next) = live(&held.permit, None) else {
            plan.batch.release.push(id);
            plan.releases.push((Some(held.permit), reply));
            return;
        };
        let own_turn =
            held.handovers < limits.max_handovers && held.since.elapsed() < limits.handover_time;
        if own_turn {
            held.handovers += 1;
            self.grant(held.permit, next, None, held.handovers, held.since);
            drop(reply.map(|reply| reply.send(Ok(()))));
            return;
        }
        plan.batch.release.push(id.clone());
        plan.releases.push((None, reply));
        plan.batch.tries.push(id);
        plan.tries.push((held.permit, next));
    }

    fn grant(
        &mut self,
        permit: Permit<Request<D>>,
        request: Request<D>,
        token: Option<FencingToken>,
        handovers: u32,
        since: Instant,
    ) {
        // engine and guards are gone: so is the caller, and ending the session frees the lock
        let Some(worker) = self.own.upgrade() else {
            return;
        };
        self.serials += 1;
        let signal = LossSignal::new();
        let hold = Hold {
            id: request.id.clone(),
            key: request.key.clone(),
            serial: self.serials,
            worker,
            pulse: self.pulse.clone(),
            backend: self.shared.driver.backend(),
            released: false,
        };
        let guard = LockGuard::new(request.key.clone(), token, signal.clone(), Box::new(hold));
        let held = Held { permit, signal, serial: self.serials, handovers, since };
        self.held.insert(request.id.clone(), held);
        request.answer(Ok(Some(guard)));
    }

    /// Asks the store and answers those who asked. Some if the session is over.
    async fn exchange(
        &mut self,
        session: &mut D::Session,
        plan: Plan<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        let limits = self.shared.limits;
        let sent = Instant::now();
        let answer = tokio::time::timeout(limits.answer, session.exchange(&plan.batch)).await;
        let answer = match answer {
            Ok(Ok(answer)) if plan.fits(&answer) => answer,
            Ok(outcome) => {
                let error = outcome.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::Backend, "the store answered another number of questions")
                });
                return Some(self.broken(plan, LossReason::SessionEnded, error));
            }
            Err(_) => {
                let detail = format!("no answer within {:?}", limits.answer);
                let error = Error::new(ErrorKind::Unavailable, detail);
                return Some(self.broken(plan, LossReason::Silent, error));
            }
        };
        *heard = Instant::now();
        self.pulse.extend(sent + limits.keepalive + limits.answer);
        for ((permit, reply), released) in plan.releases.into_iter().zip(answer.released) {
            drop(permit);
            let outcome = if released { Ok(()) } else { Err(ended()) };
            drop(reply.map(|reply| reply.send(outcome)));
        }
        for ((permit, request), outcome) in plan.tries.into_iter().zip(answer.tries) {
            match outcome {
                Try::Granted(token) => self.grant(permit, request, token, 0, *heard),
                Try::Refused(error) => request.answer(Err(error)),
                Try::Busy => {
                    if let Some(request) = live_within(&permit, Some(request)) {
                        match self.role {
                            Role::Main => dispatch(&self.shared, permit, request),
                            Role::Waiter => self.queued.push((permit, request)),
                        }
                    }
                }
            }
        }
        for (reply, token) in plan.tokens.into_iter().zip(answer.tokens) {
            drop(reply.send(Ok(token)));
        }
        None
    }

    /// The session broke under a plan: what it would have freed is lost, what it would have taken
    /// is tried for again on the next session.
    fn broken(&mut self, plan: Plan<D>, reason: LossReason, error: Error) -> End {
        for (_, reply) in plan.releases {
            drop(reply.map(|reply| reply.send(Err(ended()))));
        }
        for reply in plan.tokens {
            drop(reply.send(Err(ended())));
        }
        self.queued.extend(plan.tries);
        self.kills.extend(plan.batch.kill);
        End::Lost(reason, error)
    }

    /// Waits on the store, for one request after another while they last.
    async fn wait(
        &mut self,
        session: &mut D::Session,
        permit: Permit<Request<D>>,
        request: Request<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        let limits = self.shared.limits;
        let id = request.id.clone();
        let mut next = live_within(&permit, Some(request));
        while let Some(request) = next {
            let slice = request.deadline.remaining().min(limits.max_wait);
            let ends = Instant::now() + slice;
            let session_id = session.id();
            let mut owner = Some(request);
            let mut waiting = Box::pin(limited(slice + limits.answer, session.wait(&id, slice)));
            let outcome = loop {
                tokio::select! {
                    biased;
                    () = reached(&mut self.ending, Ending::Now) => {
                        return Some(End::Done);
                    }
                    outcome = &mut waiting => break outcome,
                    () = gone(&mut owner), if owner.is_some() => {
                        // the place on the store serves the next local waiter
                        owner = live_within(&permit, owner.take());
                        if owner.is_none() && ends > Instant::now() + NEAR_END {
                            if let Some(main) = self.shared.main.get().and_then(mpsc::WeakUnboundedSender::upgrade) {
                                drop(main.send(Command::Kill(session_id)));
                            }
                            return Some(End::Abandoned);
                        }
                    }
                }
            };
            drop(waiting);
            match outcome {
                Err(error) => {
                    self.queued.extend(owner.map(|request| (permit, request)));
                    return Some(End::Lost(LossReason::SessionEnded, error));
                }
                Ok(Try::Refused(error)) => {
                    if let Some(request) = owner.take() {
                        request.answer(Err(error));
                    }
                }
                Ok(Try::Busy) => {}
                Ok(Try::Granted(token)) => {
                    *heard = Instant::now();
                    self.pulse.extend(*heard + limits.keepalive + limits.answer);
                    let Some(request) = live(&permit, owner) else {
                        let mut plan = Plan::default();
                        plan.batch.release.push(id);
                        plan.releases.push((Some(permit), None));
                        return self.exchange(session, plan, heard).await;
                    };
                    self.grant(permit, request, token, 0, *heard);
                    return None;
                }
            }
            *heard = Instant::now();
            next = live_within(&permit, owner);
        }
        None
    }
}

impl<D: SessionDriver> Default for Plan<D> {
    fn default() -> Self {
        Self {
            batch: Batch::default(),
            releases: Vec::new(),
            tries: Vec::new(),
            tokens: Vec::new(),
        }
    }
}

impl<D: SessionDriver> Plan<D> {
    fn len(&self) -> usize {
        self.releases.len() + self.tries.len() + self.tokens.len()
    }

    fn fits(&self, answer: &BatchAnswer) -> bool {
        answer.released.len() == self.releases.len()
            && answer.tries.len() == self.tries.len()
            && answer.tokens.len() == self.tokens.len()
    }
}

/// The request, or the next one of the queue, whose caller is still there.
fn live<D: SessionDriver>(
    permit: &Permit<Request<D>>,
    request: Option<Request<D>>,
) -> Option<Request<D>> {
    let mut request = request.or_else(|| permit.next())?;
    while request.is_gone() {
        request = permit.next()?;
    }
    Some(request)
}

/// As [`live`], but one whose wait is over is answered that others have it.
fn live_within<D: SessionDriver>(
    permit: &Permit<Request<D>>,
    request: Option<Request<D>>,
) -> Option<Request<D>> {
    let mut request = live(permit, request)?;
    while request.deadline.has_passed() {
        request.answer(Ok(None));
        request = live(permit, None)?;
    }
    Some(request)
}

/// Ends when it has come to `stage`.
async fn reached(ending: &mut watch::Receiver<Ending>, stage: Ending) {
    // the sender lives in `shared`, which every worker has
    drop(ending.wait_for(|now| *now >= stage).await);
}

/// Ends when the caller is gone or its wait is over.
async fn gone<D: SessionDriver>(request: &mut Option<Request<D>>) {
    if let Some(request) = request {
        let deadline = request.deadline;
        tokio::select! {
            () = request.reply.closed() => {}
            () = deadline.passed() => {}
        }
    }
}

fn ended() -> Error {
    let reason = LossReason::SessionEnded.as_str();
    Error::new(ErrorKind::Lost, format!("it is held no longer: {reason}"))
}
