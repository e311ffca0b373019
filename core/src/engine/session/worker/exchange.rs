//! One exchange with the store: what goes out together, and who is answered after it.

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::super::contained;
use super::super::super::gate::Permit;
use super::super::waiters::{dispatch, later};
use super::super::{Command, Hold, Request};
use super::wait::{Late, live, live_within};
use super::{End, Held, Role, Worker, ended};
use crate::backend::{Batch, BatchAnswer, Session, SessionDriver, Try};
use crate::error::{Error, ErrorKind, Result};
use crate::lost::{LossReason, LossSignal};
use crate::named::LockGuard;
use crate::token::FencingToken;

/// A lock that is being freed. The permit stays here until the store has done so; there is none
/// where it goes with a try.
pub(super) type Freed<D> = (Option<Permit<Request<D>>>, Option<oneshot::Sender<Result<()>>>);

/// Who is answered after an exchange, in the order of the batch.
pub(super) struct Plan<D: SessionDriver> {
    pub(super) batch: Batch<D::Id>,
    pub(super) releases: Vec<Freed<D>>,
    tries: Vec<(Permit<Request<D>>, Request<D>)>,
    tokens: Vec<oneshot::Sender<Result<FencingToken>>>,
}

impl<D: SessionDriver> Worker<D> {
    /// Adds what else has arrived to the plan, carries it out, and waits where that is needed.
    pub(super) async fn round(
        &mut self,
        session: &mut D::Session,
        mut plan: Plan<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        if self.last_batch > 1 {
            // Those who were answered together ask again together, if they get to run first: a
            // worker is woken by the first of them, and would leave with its request alone.
            tokio::task::yield_now().await;
        }
        let room = self.queued.len().min(self.shared.limits.max_batch);
        let rest = self.queued.split_off(room);
        for (permit, request) in std::mem::replace(&mut self.queued, rest) {
            self.take(Command::Acquire(permit, request), &mut plan);
        }
        plan.batch.kill.append(&mut self.kills);
        while plan.len() < self.shared.limits.max_batch {
            let Ok(command) = self.commands.try_recv() else {
                break;
            };
            self.take(command, &mut plan);
        }
        self.last_batch = plan.len();
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

    pub(super) fn take(&mut self, command: Command<D>, plan: &mut Plan<D>) {
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

    /// A session that holds tries; a waiter was sent a request because a try has failed.
    fn try_or_wait(&mut self, permit: Permit<Request<D>>, request: Request<D>, plan: &mut Plan<D>) {
        if self.role == Role::Waiter {
            if self.held.is_empty() {
                self.queued.push((permit, request));
            } else {
                later(permit, request); // one that holds cannot wait: releases must get through
            }
            return;
        }
        if self.held.len() + plan.tries.len() >= self.room.here {
            self.pass_on(permit, request);
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

    pub(super) fn grant(
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
    pub(super) async fn exchange(
        &mut self,
        session: &mut D::Session,
        plan: Plan<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        let limits = self.shared.limits;
        let sent = Instant::now();
        let answer =
            tokio::time::timeout(limits.answer, contained(session.exchange(&plan.batch))).await;
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
                Try::Refused(error) => {
                    drop(permit);
                    request.answer(Err(error));
                }
                Try::Busy => {
                    let mut late = Late::default();
                    match live_within(&permit, Some(request), &mut late) {
                        None => drop(permit),
                        Some(mut request) => {
                            request.waits(&self.shared.observer);
                            match self.role {
                                Role::Main | Role::Further => {
                                    dispatch(&self.shared, permit, request);
                                }
                                Role::Waiter => self.queued.push((permit, request)),
                            }
                        }
                    }
                    late.answer();
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
