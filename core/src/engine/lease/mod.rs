//! [`LeaseEngine`]: waiting, holding and releasing; the renewals are in [`heartbeat`].

mod call;
mod hand_on;
mod heartbeat;

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::Instrument;

use self::call::Call;
use self::hand_on::{Caller, Run, Turn};
use self::heartbeat::{Beat, Heart};
use super::backoff::Backoff;
use super::gate::{Gate, Permit};
use super::goes_on::GoesOn;
use super::wake::WakeHub;
use super::{asked, closed};
use crate::backend::{LeaseDriver, Owner, Renewal};
use crate::error::{Error, Result};
use crate::inspect::Kind;
use crate::key::Key;
use crate::lease::{Lease, LeaseGuard, LeaseHold};
use crate::lost::{LossReason, LossSignal};
use crate::named::{LockGuard, lost_error};
use crate::observe::{Name, Observer, RenewalEnd, TARGET};
use crate::options::LeaseOptions;
use crate::steer::steered;
use crate::token::FencingToken;

/// Makes a [`Lease`] of a [`LeaseDriver`].
///
/// One heartbeat per handle renews all its leases, at a third of the ttl; a failed renewal is
/// tried again until the local deadline, never past it. Waiters are woken by the driver's
/// subscription and look again by themselves after at most
/// [`max_poll`](crate::backend::LeaseLimits::max_poll).
///
/// A lease is released on the store each time. A named lock ([`lock`](Self::lock)) is handed to the
/// next caller of the process that waits for it, where the driver allows it: a
/// [bounded](crate::backend::LeaseLimits::max_handovers) number of times before it is released, and
/// then other processes have some time in which only they ask for it.
#[derive(Debug)]
pub struct LeaseEngine<D: LeaseDriver>(Arc<Inner<D>>);

#[derive(Debug)]
struct Inner<D: LeaseDriver> {
    driver: Arc<D>,
    gate: Gate<Caller>,
    /// Shared with the hub, which reports changes of held leases to it.
    heart: Arc<OnceLock<Heart>>,
    hub: Arc<WakeHub>,
    leases: Observer,
    locks: Observer,
}

/// What the two sides of a held lease share: the guard and the heartbeat.
#[derive(Debug)]
struct Record {
    key: Key,
    owner: Owner,
    ttl: Duration,
    signal: LossSignal,
    /// The local queue place; passed on when the lease is lost or freed.
    permit: Mutex<Option<Permit<Caller>>>,
    /// How often it has been handed on; none where it may not be.
    run: Option<Run>,
}

impl Record {
    fn take_permit(&self) -> Option<Permit<Caller>> {
        self.permit.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn give_permit(&self, permit: Option<Permit<Caller>>) {
        *self.permit.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }
}

/// The local deadline of a lease whose request was sent at `sent`: the ttl less a drift margin of
/// 1 % plus 2 ms, for clocks that do not run at the same rate (as in the Redlock description).
fn local_deadline(sent: Instant, ttl: Duration) -> Instant {
    sent + ttl - (ttl / 100 + Duration::from_millis(2))
}

/// A lease that was granted. Dropping it releases.
struct Granted<D: LeaseDriver> {
    token: FencingToken,
    signal: LossSignal,
    hold: Hold<D>,
}

impl<D: LeaseDriver> LeaseEngine<D> {
    /// An engine over `driver`. It starts its tasks on the runtime of the first acquisition.
    pub fn new(driver: D) -> Self {
        let heart = Arc::new(OnceLock::<Heart>::new());
        let reports = heart.clone();
        let hub = WakeHub::new(move |wake_id| {
            if let Some(heart) = reports.get() {
                heart.tell(Beat::Check(wake_id)); // no heartbeat left: nothing is held
            }
        });
        let backend = driver.backend();
        Self(Arc::new(Inner {
            driver: Arc::new(driver),
            gate: Gate::new(),
            heart,
            hub,
            leases: Observer::new(backend, Kind::Lease),
            locks: Observer::new(backend, Kind::Lock),
        }))
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.0.driver
    }

    /// Takes a lease and gives it as the guard of a named lock, for stores without sessions: the
    /// heartbeat's renewals stand in for the session.
    ///
    /// One that was handed on within the process asks the store for its token when it is first
    /// asked for it, so that a lock that nobody asks for its token costs no trip to the store.
    ///
    /// # Errors
    /// Those of [`Lease::lease`].
    ///
    /// # Cancel safety
    /// As [`Lease::lease`].
    pub async fn lock(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LockGuard>> {
        let Inner { driver, locks, .. } = &*self.0;
        let call = locks.call(Name::Key(key));
        let acquired = Inner::lock(&self.0, key, opts).instrument(call.span()).await;
        call.end(acquired.map_err(|error| error.at(driver.backend(), "lock").on(key)))
    }

    /// Loses and frees all leases of the handle, and ends it.
    ///
    /// # Errors
    /// The first that a release gave.
    ///
    /// # Cancel safety
    /// Safe: it goes on in the background.
    pub async fn close(&self) -> Result<()> {
        let (reply, done) = oneshot::channel();
        if !self.0.heart().tell(Beat::Close(reply)) {
            return Ok(());
        }
        done.await.unwrap_or(Ok(()))
    }
}

impl<D: LeaseDriver> Inner<D> {
    fn heart(&self) -> &Heart {
        self.heart.get_or_init(|| Heart::start(self.driver.clone()))
    }

    async fn lease(inner: &Arc<Self>, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        let mut call = Call::begin(inner, key, opts, &inner.leases)?;
        let (tell, told) = oneshot::channel();
        let Some(permit) = call.wait(Caller::Contender(tell), told).await else {
            return Ok(None);
        };
        let granted = call.contend(permit, false).await?;
        Ok(granted.map(|Granted { token, signal, hold }| {
            LeaseGuard::new(key.clone(), token, signal, Box::new(hold))
        }))
    }

    async fn lock(inner: &Arc<Self>, key: &Key, opts: LeaseOptions) -> Result<Option<LockGuard>> {
        let mut call = Call::begin(inner, key, opts, &inner.locks)?;
        // who is to lose it at a time of his own can't have another's
        let hands_on =
            inner.driver.limits().max_handovers > 0 && opts.auto_renew && opts.max_hold.is_none();
        let (tell, told) = oneshot::channel();
        let caller = Caller::taker(tell, hands_on.then_some(opts.ttl));
        let permit = match call.wait(caller, told).await {
            None => return Ok(None),
            Some(Turn::Handed(guard)) => return Ok(Some(guard)),
            Some(Turn::Permit(permit)) => permit,
        };
        let granted = call.contend(permit, hands_on).await?;
        Ok(granted.map(|Granted { token, signal, hold }| hold.lock_guard(Some(token), signal)))
    }
}

/// When [`free`] is content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Insist {
    /// With any answer.
    UntilAnswered,
    /// With the answer that it was freed: a request that is still under way may take it yet.
    UntilFreed,
}

/// Releases on the store, trying on until the ttl is over.
async fn free<D: LeaseDriver>(
    driver: Arc<D>,
    key: Key,
    owner: Owner,
    until: Instant,
    insist: Insist,
) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        let answer = driver.limits().answer;
        let ended = match asked(answer, || driver.release(&key, owner)).await.0 {
            Ok(freed) => freed || insist == Insist::UntilAnswered,
            Err(error) => {
                tracing::debug!(%key, %error, "release failed");
                !error.is_retryable()
            }
        };
        if ended || Instant::now() >= until {
            return;
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

/// A held lease; dropping it releases.
#[derive(Debug)]
struct Hold<D: LeaseDriver> {
    inner: Arc<Inner<D>>,
    record: Arc<Record>,
    released: bool,
    runtime: Handle,
}

impl<D: LeaseDriver> Hold<D> {
    fn stop_renewals(&mut self) -> Arc<D> {
        self.released = true;
        self.record.signal.settle();
        self.inner.heart().remove(self.record.owner);
        self.inner.driver.clone()
    }

    /// Stops the renewals and starts the release.
    fn start_release(&mut self) -> impl Future<Output = Result<bool>> + Send + 'static + use<D> {
        let (driver, record) = (self.stop_renewals(), self.record.clone());
        let until = Instant::now() + record.ttl;
        async move {
            let permit = record.take_permit();
            let Record { key, owner, .. } = &*record;
            let limit = driver.limits().answer;
            let (outcome, repeated) = asked(limit, || hand_on::free(&*driver, &record)).await;
            let awaited = outcome.as_ref().is_ok_and(|freed| freed.awaited);
            hand_on::pass_on(permit, &record, driver.limits(), awaited);
            if outcome.as_ref().is_err_and(Error::is_retryable) {
                let (key, insist) = (key.clone(), Insist::UntilAnswered);
                tokio::spawn(steered(free(driver, key, *owner, until, insist)));
            }
            outcome.map(|freed| freed.ours || repeated) // the lost one did it
        }
    }

    fn error(&self, operation: &'static str, error: Error) -> Error {
        error.at(self.inner.driver.backend(), operation)
    }

    fn taken(&self, operation: &'static str) -> Error {
        let key = &self.record.key;
        self.error(operation, lost_error(operation, key, Some(LossReason::Taken)))
    }
}

#[async_trait]
impl<D: LeaseDriver> LeaseHold for Hold<D> {
    async fn renew(&self) -> Result<()> {
        let (driver, record) = (self.inner.driver.clone(), self.record.clone());
        let task = tokio::spawn(steered(async move {
            let Record { key, owner, ttl, .. } = &*record;
            let renewal = Renewal { key: key.clone(), owner: *owner, ttl: *ttl };
            let limit = (*ttl / 2).min(driver.limits().answer);
            let sent = Instant::now();
            let renewals = [renewal];
            let ours = match asked(limit, || driver.renew(&renewals)).await.0 {
                Ok(ours) => ours.first() == Some(&true),
                Err(error) => {
                    let (backend, kind) = (driver.backend(), Kind::Lease.as_str());
                    tracing::warn!(target: TARGET, backend, kind, %key, %error, "renewal failed");
                    record.signal.renewed(RenewalEnd::Error);
                    return Err(error);
                }
            };
            if !ours {
                record.signal.renewed(RenewalEnd::Lost);
                record.signal.lose(LossReason::Taken);
                return Ok(false);
            }
            record.signal.renewed(RenewalEnd::Renewed);
            Ok(record.signal.extend(local_deadline(sent, *ttl)))
        }));
        let renewed = task.await.unwrap_or_else(|_| Err(closed()));
        match renewed.map_err(|error| self.error("renew", error))? {
            true => Ok(()),
            false => Err(self.taken("renew")),
        }
    }

    async fn release(&mut self) -> Result<()> {
        let release = self.start_release();
        let released = GoesOn::new(release, &self.runtime).await;
        match released.map_err(|error| self.error("release", error))? {
            true => Ok(()),
            false => Err(self.taken("release")),
        }
    }

    async fn verify(&self, tx: &mut (dyn Any + Send)) -> Result<()> {
        let Record { key, owner, .. } = &*self.record;
        let verified = self.inner.driver.verify(key, *owner, tx).await;
        verified.map_err(|error| self.error("verify", error))
    }
}

impl<D: LeaseDriver> Drop for Hold<D> {
    fn drop(&mut self) {
        if !self.released && !self.hand_on() {
            let release = self.start_release();
            self.runtime.spawn(steered(async move { drop(release.await) }));
        }
    }
}

#[async_trait]
impl<D: LeaseDriver> Lease for LeaseEngine<D> {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        let Inner { driver, leases, .. } = &*self.0;
        let call = leases.call(Name::Key(key));
        let acquired = Inner::lease(&self.0, key, opts).instrument(call.span()).await;
        call.end(acquired.map_err(|error| error.at(driver.backend(), "lease").on(key)))
    }
}
