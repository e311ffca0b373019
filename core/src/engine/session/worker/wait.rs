//! Waiting on the store for a key that others hold.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::super::gate::Permit;
use super::super::super::limited;
use super::super::{Command, Ending, Request};
use super::exchange::Plan;
use super::{End, Worker, reached};
use crate::backend::{Session, SessionDriver, Try};
use crate::lost::LossReason;

/// A wait on the store that has nobody left is left to its end if that is as near as this;
/// otherwise its session is killed.
const NEAR_END: Duration = Duration::from_millis(100);

impl<D: SessionDriver> Worker<D> {
    /// Waits on the store, for one request after another while they last.
    pub(super) async fn wait(
        &mut self,
        session: &mut D::Session,
        permit: Permit<Request<D>>,
        request: Request<D>,
        heard: &mut Instant,
    ) -> Option<End> {
        let limits = self.shared.limits;
        let id = request.id.clone();
        let mut late = Late::default();
        let mut next = live_within(&permit, Some(request), &mut late);
        while let Some(request) = next {
            std::mem::take(&mut late).answer(); // others are waiting, whoever has it
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
                        owner = live_within(&permit, owner.take(), &mut late);
                        if owner.is_none() && ends > Instant::now() + NEAR_END {
                            if let Some(main) = self.shared.main.get().and_then(mpsc::WeakUnboundedSender::upgrade) {
                                drop(main.send(Command::Kill(session_id)));
                            }
                            drop(permit);
                            late.answer();
                            return Some(End::Abandoned);
                        }
                        // the wait goes on, and with it the turn: they have waited for long enough
                        std::mem::take(&mut late).answer();
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
            next = live_within(&permit, owner, &mut late);
        }
        drop(permit);
        late.answer();
        None
    }
}

/// The request, or the next one of the queue, whose caller is still there.
pub(super) fn live<D: SessionDriver>(
    permit: &Permit<Request<D>>,
    request: Option<Request<D>>,
) -> Option<Request<D>> {
    let next = || {
        let mut request = permit.next()?;
        request.waits = true; // told when it queued
        Some(request)
    };
    let mut request = request.or_else(next)?;
    while request.is_gone() {
        request = next()?;
    }
    Some(request)
}

/// As [`live`], but those whose wait is over are put aside.
pub(super) fn live_within<D: SessionDriver>(
    permit: &Permit<Request<D>>,
    request: Option<Request<D>>,
    late: &mut Late<D>,
) -> Option<Request<D>> {
    let mut request = live(permit, request)?;
    while request.deadline.has_passed() {
        late.0.push(request);
        request = live(permit, None)?;
    }
    Some(request)
}

/// Those whose wait is over. They are answered when the permit has passed on, since one who tries
/// again at once must not be in its own way.
pub(super) struct Late<D: SessionDriver>(Vec<Request<D>>);

impl<D: SessionDriver> Late<D> {
    /// That others have it.
    pub(super) fn answer(self) {
        self.0.into_iter().for_each(|request| request.answer(Ok(None)));
    }
}

impl<D: SessionDriver> Default for Late<D> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// Ends when the caller is gone or its wait is over.
async fn gone<D: SessionDriver>(request: &mut Option<Request<D>>) {
    if let Some(request) = request {
        let deadline = request.deadline;
        tokio::select! {
            biased;
            () = request.reply.closed() => {}
            () = deadline.passed() => {}
        }
    }
}
