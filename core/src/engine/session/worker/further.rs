//! The sessions that hold what the one before has no room for.

use tokio::sync::mpsc;

use super::super::super::gate::Permit;
use super::super::{Command, Request};
use super::{End, Role, Worker, good_bye, start};
use crate::backend::{Session, SessionDriver};
use crate::error::{Error, ErrorKind};

/// How many locks a worker's session may hold, and what goes beyond.
pub(super) struct Room<D: SessionDriver> {
    pub(super) here: usize,
    /// What the further sessions may hold together.
    beyond: usize,
    next: Option<mpsc::UnboundedSender<Command<D>>>,
}

impl<D: SessionDriver> Room<D> {
    /// Of `most` locks, up to `max` on one session.
    pub(super) fn new(max: usize, most: usize) -> Self {
        let here = max.max(1).min(most);
        Self { here, beyond: most - here, next: None }
    }
}

impl<D: SessionDriver> Worker<D> {
    /// Has the next session try what this one has no room for.
    pub(super) fn pass_on(&mut self, permit: Permit<Request<D>>, request: Request<D>) {
        if self.room.beyond == 0 {
            let detail = format!(
                "this handle holds {} locks, its limit: raise it if the store has room",
                self.shared.limits.max_held
            );
            request.answer(Err(Error::new(ErrorKind::Exhausted, detail)));
            return;
        }
        if self.room.next.as_ref().is_none_or(mpsc::UnboundedSender::is_closed) {
            self.room.next = Some(start(&self.shared, Role::Further, self.room.beyond));
        }
        if let Some(next) = &self.room.next {
            // one that ends meanwhile does so with the handle, and drops both: the caller sees that
            drop(next.send(Command::Acquire(permit, request)));
        }
    }

    /// Has a session while it holds or is asked for something.
    pub(super) async fn run_further(mut self) {
        loop {
            while self.queued.is_empty() {
                let Some(command) = self.next_command().await else {
                    return;
                };
                self.take_while_down(command);
            }
            let Some(mut session) = self.connect().await else {
                return;
            };
            match self.serve(&mut session).await {
                End::Lost(reason, error) => self.session_lost(session.id(), reason, &error),
                End::Idle => {
                    let answer = self.shared.limits.answer;
                    good_bye(session, answer).await;
                }
                End::Abandoned | End::Done => {
                    self.end(session).await;
                    return;
                }
            }
        }
    }
}
