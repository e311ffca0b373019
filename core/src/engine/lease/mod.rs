//! [`LeaseEngine`]: waiting, holding and releasing; the renewals are in [`heartbeat`].

mod heartbeat;

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::Instrument;

use self::heartbeat::{Beat, Entry, Heart};
use super::backoff::{Backoff, jittered};
use super::gate::{Gate, Permit, Turn};
use super::goes_on::GoesOn;
use super::wake::WakeHub;
use super::{asked, closed};
use crate::backend::{LeaseDriver, LeaseTry, Owner, Renewal};
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Kind;
use crate::key::Key;
use crate::lease::{Lease, LeaseGuard, LeaseHold};
use crate::lost::{LossReason, LossSignal};
use crate::named::{LockGuard, LockHold, lost_error};
use crate::observe::{Name, Observer, RenewalEnd, TARGET};
use crate::options::{Deadline, LeaseOptions};
use crate::steer::steered;
use crate::token::FencingToken;

/// Makes a [`Lease`] of a [`LeaseDriver`].
///
/// One heartbeat per handle renews all its leases, at a third of the ttl; a failed renewal is
/// tried again until the local deadline, never past it. Waiters are woken by the driver's
/// subscription and look again by themselves after at most
/// [`max_poll`](crate::backend::LeaseLimits::max_poll).
#[derive(Debug)]
pub struct LeaseEngine<D: LeaseDriver>(Arc<Inner<D>>);

#[derive(Debug)]
struct Inner<D: LeaseDriver> {
    driver: Arc<D>,
    gate: Gate<Turn<Key>>,
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
    permit: Mutex<Option<Permit<Turn<Key>>>>,
}

impl Record {
    fn take_permit(&self) -> Option<Permit<Turn<Key>>> {
        self.permit.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The local deadline of a lease whose request was sent at `sent`: the ttl less a drift margin of
/// 1 % plus 2 ms, for clocks that do not run at the same rate (as in the Redlock description).
fn local_deadline(sent: Instant, ttl: Duration) -> Instant {
    sent + ttl - (ttl / 100 + Duration::from_millis(2))
}

/// The outcome of one try; the permit comes back unless the guard has it.
enum Outcome<D: LeaseDriver> {
    Acquired(LeaseGuard),
    Busy(Permit<Turn<Key>>, Duration),
    Failed(Permit<Turn<Key>>, Error, Orphan<D>),
}

/// What a try without an answer may have left on the store, or may leave there yet: freed when
/// this is dropped, unless a later try of the same owner got an answer.
struct Orphan<D: LeaseDriver> {
    driver: Arc<D>,
    key: Key,
    owner: Owner,
    ttl: Duration,
    adopted: bool,
}

impl<D: LeaseDriver> Orphan<D> {
    fn adopt(&mut self) {
        self.adopted = true;
    }
}

impl<D: LeaseDriver> Drop for Orphan<D> {
    fn drop(&mut self) {
        if let (false, Ok(runtime)) = (self.adopted, Handle::try_current()) {
            let until = Instant::now() + self.ttl;
            let (driver, key) = (self.driver.clone(), self.key.clone());
            runtime.spawn(steered(free(driver, key, self.owner, until, Insist::UntilFreed, None)));
        }
    }
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
    /// # Errors
    /// Those of [`Lease::lease`].
    ///
    /// # Cancel safety
    /// As [`Lease::lease`].
    pub async fn lock(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LockGuard>> {
        let Inner { driver, locks, .. } = &*self.0;
        let call = locks.call(Name::Key(key));
        let acquired = Inner::acquire(&self.0, key, opts, locks).instrument(call.span()).await;
        let guard = acquired.map(|guard| guard.map(LeaseGuard::into_lock_guard));
        call.end(guard.map_err(|error| error.at(driver.backend(), "lock").on(key)))
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

    async fn acquire(
        inner: &Arc<Self>,
        key: &Key,
        opts: LeaseOptions,
        observer: &Observer,
    ) -> Result<Option<LeaseGuard>> {
        opts.check()?;
        if inner.heart().is_closed() {
            return Err(closed());
        }
        let limits = inner.driver.limits();
        if limits.watch_held {
            inner.hub.start(&inner.driver);
        }
        let deadline = Deadline::after(opts.wait);
        let mut waits = false;
        let mut begins_to_wait = || {
            if !std::mem::replace(&mut waits, true) {
                observer.waiting(Name::Key(key));
            }
        };
        let acquired = inner.gate.acquire(key, deadline, &mut begins_to_wait).await;
        let Some(mut permit) = acquired else {
            return Ok(None);
        };
        // one owner for all tries: one whose answer was lost is recognised by the next
        let owner = Owner::fresh();
        let mut orphan: Option<Orphan<D>> = None;
        let mut registration = None;
        let mut backoff = Backoff::new(Duration::from_millis(20), limits.max_poll);
        loop {
            let again = registration.is_some();
            let attempt = Self::attempt(inner.clone(), key.clone(), opts, owner, again, permit);
            let pause = match GoesOn::new(attempt, &Handle::current()).await {
                Outcome::Acquired(guard) => {
                    if let Some(orphan) = &mut orphan {
                        orphan.adopt();
                    }
                    return Ok(Some(guard));
                }
                Outcome::Busy(..) if deadline.has_passed() => return Ok(None),
                Outcome::Failed(_, error, _orphan)
                    if deadline.has_passed() || !error.is_retryable() =>
                {
                    return Err(error);
                }
                Outcome::Busy(back, expires_in) => {
                    permit = back;
                    begins_to_wait();
                    if registration.is_none() {
                        // look once more: it may have been freed before the registration
                        registration = Some(inner.hub.register(inner.driver.wake_id(key)));
                        inner.hub.start(&inner.driver);
                        continue;
                    }
                    jittered(limits.max_poll).min(expires_in + Duration::from_millis(1))
                }
                Outcome::Failed(back, error, left) => {
                    // the same owner's: only the last one is kept
                    if let Some(mut older) = orphan.replace(left) {
                        older.adopt();
                    }
                    tracing::debug!(%key, %error, "the store cannot be reached, trying on");
                    permit = back;
                    backoff.next()
                }
            };
            let sleep = tokio::time::sleep(pause.min(deadline.remaining()));
            let woken = async {
                match &registration {
                    None => std::future::pending().await,
                    Some(registration) => registration.woken().await,
                }
            };
            tokio::select! {
                biased;
                () = woken => {}
                () = sleep => {}
                () = inner.heart().closed() => return Err(closed()),
            }
        }
    }

    /// One try, which goes on when the caller is gone: what it gave to nobody is released by its
    /// drop.
    async fn attempt(
        inner: Arc<Self>,
        key: Key,
        opts: LeaseOptions,
        owner: Owner,
        waits: bool,
        permit: Permit<Turn<Key>>,
    ) -> Outcome<D> {
        let sent = Instant::now();
        let driver = &inner.driver;
        let acquire = || match waits {
            true => driver.acquire_waiting(&key, owner, opts.ttl),
            false => driver.acquire(&key, owner, opts.ttl),
        };
        let token = match asked(driver.limits().answer, acquire).await.0 {
            Ok(LeaseTry::Acquired(token)) => token,
            Ok(LeaseTry::Busy { expires_in }) => return Outcome::Busy(permit, expires_in),
            Err(error) => {
                return Outcome::Failed(permit, error, inner.orphan(key, owner, opts.ttl));
            }
        };
        let expires = local_deadline(sent, opts.ttl);
        if expires <= Instant::now() {
            let error = Error::new(ErrorKind::Unavailable, "the answer took longer than the ttl");
            return Outcome::Failed(permit, error, inner.orphan(key, owner, opts.ttl));
        }
        let signal = LossSignal::until(expires);
        let record = Arc::new(Record {
            key: key.clone(),
            owner,
            ttl: opts.ttl,
            signal: signal.clone(),
            permit: Mutex::new(Some(permit)),
        });
        let hold = Hold {
            inner: inner.clone(),
            record: record.clone(),
            released: false,
            runtime: Handle::current(),
        };
        let renew_until = match (opts.auto_renew, opts.max_hold) {
            (false, _) => Some(sent),
            (true, max_hold) => max_hold.and_then(|time| sent.checked_add(time)),
        };
        let wake_id = inner.driver.wake_id(&key);
        let entry = Entry::new(record, sent, renew_until, wake_id);
        inner.heart().add(entry);
        Outcome::Acquired(LeaseGuard::new(key, token, signal, Box::new(hold)))
    }

    fn orphan(&self, key: Key, owner: Owner, ttl: Duration) -> Orphan<D> {
        Orphan { driver: self.driver.clone(), key, owner, ttl, adopted: false }
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

/// Releases on the store, trying on until the ttl is over; the permit passes on after the first try.
async fn free<D: LeaseDriver>(
    driver: Arc<D>,
    key: Key,
    owner: Owner,
    until: Instant,
    insist: Insist,
    mut permit: Option<Permit<Turn<Key>>>,
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
        drop(permit.take());
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
    fn start_release(&mut self) {
        let (driver, record) = (self.stop_renewals(), self.record.clone());
        let until = Instant::now() + record.ttl;
        self.runtime.spawn(steered(async move {
            let permit = record.take_permit();
            let (key, insist) = (record.key.clone(), Insist::UntilAnswered);
            free(driver, key, record.owner, until, insist, permit).await;
        }));
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
        let (driver, record) = (self.stop_renewals(), self.record.clone());
        let until = Instant::now() + record.ttl;
        let release = async move {
            let permit = record.take_permit();
            let Record { key, owner, .. } = &*record;
            let limit = driver.limits().answer;
            let (outcome, repeated) = asked(limit, || driver.release(key, *owner)).await;
            let outcome = outcome.map(|freed| freed || repeated); // the lost one did it
            drop(permit);
            if outcome.as_ref().is_err_and(Error::is_retryable) {
                let (key, insist) = (key.clone(), Insist::UntilAnswered);
                tokio::spawn(steered(free(driver, key, *owner, until, insist, None)));
            }
            outcome
        };
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
        if !self.released {
            self.start_release();
        }
    }
}

/// A lease that is given as a named lock.
#[derive(Debug)]
struct LeaseAsLock(FencingToken, Box<dyn LeaseHold>);

#[async_trait]
impl LockHold for LeaseAsLock {
    async fn token(&self) -> Result<FencingToken> {
        Ok(self.0)
    }

    async fn release(&mut self) -> Result<()> {
        self.1.release().await
    }
}

impl LeaseGuard {
    fn into_lock_guard(self) -> LockGuard {
        let (key, token, signal, hold) = self.into_parts();
        LockGuard::new(key, Some(token), signal, Box::new(LeaseAsLock(token, hold)))
    }
}

#[async_trait]
impl<D: LeaseDriver> Lease for LeaseEngine<D> {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        let Inner { driver, leases, .. } = &*self.0;
        let call = leases.call(Name::Key(key));
        let acquired = Inner::acquire(&self.0, key, opts, leases).instrument(call.span()).await;
        call.end(acquired.map_err(|error| error.at(driver.backend(), "lease").on(key)))
    }
}
