//! Named locks: handed on within the process without a trip to the store.
//!
//! What the store knows stays the same: the owner, the token, the heartbeat's entry. The next guard
//! gets a signal and a record of its own, so that nothing that is told about the old one reaches
//! it, and asks the store for its token if somebody asks for that.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::asked;
use super::super::gate::{Permit, Waiter};
use super::{Hold, Record};
use crate::backend::{Freed, LeaseDriver, LeaseLimits};
use crate::error::Result;
use crate::key::Key;
use crate::lease::LeaseHold;
use crate::lost::{LossReason, LossSignal};
use crate::named::{LockGuard, LockHold, lost_error};
use crate::steer::steered;
use crate::token::FencingToken;

/// Who waits in the local queue.
pub(super) enum Caller {
    /// Asks the store when its turn has come.
    Contender(oneshot::Sender<Permit<Caller>>),
    /// May also be given what another caller held.
    Taker {
        tell: oneshot::Sender<Turn>,
        /// With which ttl; none where it has to be its own.
        ttl: Option<Duration>,
        runtime: Handle,
    },
}

/// What a [`Caller::Taker`] is told.
pub(super) enum Turn {
    Permit(Permit<Caller>),
    Handed(LockGuard),
}

impl Caller {
    pub(super) fn taker(tell: oneshot::Sender<Turn>, ttl: Option<Duration>) -> Self {
        Self::Taker { tell, ttl, runtime: Handle::current() }
    }

    fn is_gone(&self) -> bool {
        match self {
            Self::Contender(tell) => tell.is_closed(),
            Self::Taker { tell, .. } => tell.is_closed(),
        }
    }

    fn takes(&self, held: Duration) -> bool {
        matches!(self, Self::Taker { ttl: Some(ttl), .. } if *ttl == held)
    }
}

impl Waiter for Caller {
    type Id = Key;
    fn turn(self, permit: Permit<Self>) -> std::result::Result<(), Permit<Self>> {
        match self {
            Self::Contender(tell) => tell.send(permit),
            Self::Taker { tell, .. } => match tell.send(permit.into()) {
                Err(Turn::Permit(back)) => Err(back),
                Ok(()) | Err(Turn::Handed(_)) => Ok(()),
            },
        }
    }
}

impl From<Permit<Caller>> for Turn {
    fn from(permit: Permit<Caller>) -> Self {
        Self::Permit(permit)
    }
}

/// Consecutive hand-overs of one hold on the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) handed: u32,
    /// When the store was asked for it.
    pub(super) since: Instant,
    /// It was waited for because others had it: they will want it again, also those of whom the
    /// store has not heard yet.
    pub(super) contended: bool,
}

impl Run {
    /// It is the turn of other processes.
    pub(super) fn is_over(self, limits: &LeaseLimits) -> bool {
        self.handed >= limits.max_handovers || self.since.elapsed() >= limits.handover_time
    }
}

impl<D: LeaseDriver> Hold<D> {
    /// Gives what is held to the next caller of the process, if one waits for it and others need
    /// not have their turn. What was given to somebody who is gone is given on by its drop.
    pub(super) fn hand_on(&mut self) -> bool {
        let (inner, record) = (self.inner.clone(), &self.record);
        let Some(run) = record.run.filter(|run| !run.is_over(&inner.driver.limits())) else {
            return false;
        };
        let mut permit = record.take_permit();
        let handed = inner.heart().replace(record.owner, |held| {
            let next = next_record(held, run, &mut permit)?;
            Some((next.0.clone(), next))
        });
        let Some((next, tell, runtime)) = handed else {
            record.give_permit(permit);
            return false;
        };
        self.released = true;
        let signal = next.signal.clone();
        let hold = Self { inner, record: next, released: false, runtime };
        // where nobody receives it, its drop hands it on, or releases it
        drop(tell.send(Turn::Handed(hold.lock_guard(None, signal))));
        true
    }

    pub(super) fn lock_guard(self, token: Option<FencingToken>, signal: LossSignal) -> LockGuard {
        let key = self.record.key.clone();
        LockGuard::new(key, token, signal, Box::new(Lock { token, hold: self }))
    }

    async fn fetch_token(&self) -> Result<FencingToken> {
        let (driver, record) = (&self.inner.driver, &self.record);
        let limit = driver.limits().answer;
        let token = asked(limit, || driver.token(&record.key, record.owner)).await.0?;
        if token.is_none() {
            record.signal.lose(LossReason::Taken);
        }
        // who has lost it meanwhile gets none, as others may have it by now
        token
            .filter(|_| record.signal.is_held())
            .ok_or_else(|| lost_error("token", &record.key, record.signal.reason()))
    }
}

/// Frees what was held.
pub(super) async fn free<D: LeaseDriver>(driver: &D, record: &Record) -> Result<Freed> {
    let Record { key, owner, run, .. } = record;
    match run {
        Some(_) => driver.hand_back(key, *owner).await,
        None => Ok(Freed { ours: driver.release(key, *owner).await?, awaited: false }),
    }
}

/// Gives the place in the queue to the next one. If it is the turn of others who wait, that one asks
/// only later: he would be sooner than they, who first have to hear of it.
pub(super) fn pass_on(
    permit: Option<Permit<Caller>>,
    record: &Record,
    limits: LeaseLimits,
    awaited: bool,
) {
    let yields = record.run.is_some_and(|run| run.is_over(&limits) && (awaited || run.contended));
    if yields && permit.as_ref().is_some_and(|permit| !permit.is_last()) {
        tokio::spawn(steered(async move {
            tokio::time::sleep(limits.handover_pause).await;
            drop(permit);
        }));
    }
}

/// Ends what `held` is the record of, for who waits next, and makes that one's.
fn next_record(
    held: &Record,
    run: Run,
    permit: &mut Option<Permit<Caller>>,
) -> Option<(Arc<Record>, oneshot::Sender<Turn>, Handle)> {
    let deadline = held.signal.deadline()?;
    // with less left its renewals fail: the next one has to ask the store, when that answers
    let lasts = deadline.saturating_duration_since(Instant::now()) > held.ttl / 2;
    if !lasts || permit.as_ref()?.is_last() || !held.signal.settle() {
        return None;
    }
    let next = permit.as_ref()?.next_if(Caller::is_gone, |caller| caller.takes(held.ttl))?;
    let Caller::Taker { tell, runtime, .. } = next else { return None };
    let record = Record {
        key: held.key.clone(),
        owner: held.owner,
        ttl: held.ttl,
        signal: LossSignal::until(deadline),
        permit: Mutex::new(permit.take()),
        run: Some(Run { handed: run.handed + 1, ..run }),
    };
    Some((Arc::new(record), tell, runtime))
}

/// A lease that is given as a named lock.
#[derive(Debug)]
struct Lock<D: LeaseDriver> {
    /// None for one that was handed on.
    token: Option<FencingToken>,
    hold: Hold<D>,
}

#[async_trait]
impl<D: LeaseDriver> LockHold for Lock<D> {
    async fn token(&self) -> Result<FencingToken> {
        if let Some(token) = self.token {
            return Ok(token);
        }
        let token = self.hold.fetch_token().await;
        token.map_err(|error| self.hold.error("token", error))
    }

    async fn release(&mut self) -> Result<()> {
        if self.hold.hand_on() {
            return Ok(());
        }
        LeaseHold::release(&mut self.hold).await
    }
}
