//! One call for a lease or a lock: its tries, and the waits between them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::backoff::{Backoff, jittered};
use super::super::gate::Permit;
use super::super::goes_on::GoesOn;
use super::super::{asked, closed};
use super::hand_on::{Caller, Run};
use super::heartbeat::Entry;
use super::{Granted, Hold, Inner, Insist, Record, free, local_deadline};
use crate::backend::{LeaseDriver, LeaseTry, Owner};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lost::{LossReason, LossSignal};
use crate::observe::{Name, Observer};
use crate::options::{Deadline, LeaseOptions};
use crate::steer::steered;

/// A call.
pub(super) struct Call<'a, D: LeaseDriver> {
    inner: &'a Arc<Inner<D>>,
    key: &'a Key,
    opts: LeaseOptions,
    observer: &'a Observer,
    deadline: Deadline,
    waits: bool,
}

/// The outcome of one try; the permit comes back unless the hold has it.
enum Outcome<D: LeaseDriver> {
    Acquired(Granted<D>),
    Busy(Permit<Caller>, Duration),
    Failed(Permit<Caller>, Error, Orphan<D>),
}

impl<'a, D: LeaseDriver> Call<'a, D> {
    pub(super) fn begin(
        inner: &'a Arc<Inner<D>>,
        key: &'a Key,
        opts: LeaseOptions,
        observer: &'a Observer,
    ) -> Result<Self> {
        opts.check()?;
        if inner.heart().is_closed() {
            return Err(closed());
        }
        if inner.driver.limits().watch_held {
            inner.hub.start(&inner.driver);
        }
        Ok(Self { inner, key, opts, observer, deadline: Deadline::after(opts.wait), waits: false })
    }

    fn waits(&mut self) {
        if !std::mem::replace(&mut self.waits, true) {
            self.observer.waiting(Name::Key(self.key));
        }
    }

    /// Waits for the turn within the process.
    pub(super) async fn wait<T: From<Permit<Caller>>>(
        &mut self,
        caller: Caller,
        told: oneshot::Receiver<T>,
    ) -> Option<T> {
        let (gate, key, deadline) = (&self.inner.gate, self.key, self.deadline);
        gate.wait(key, caller, told, deadline, || self.waits()).await
    }

    /// Asks the store until it is had or the wait is over.
    pub(super) async fn contend(
        mut self,
        mut permit: Permit<Caller>,
        hands_on: bool,
    ) -> Result<Option<Granted<D>>> {
        let Self { inner, key, opts, deadline, .. } = self;
        let limits = inner.driver.limits();
        // one owner for all tries: one whose answer was lost is recognised by the next
        let owner = Owner::fresh();
        let mut orphan: Option<Orphan<D>> = None;
        let mut registration = None;
        let mut backoff = Backoff::new(Duration::from_millis(20), limits.max_poll);
        loop {
            if inner.heart().is_closed() {
                return Err(closed()); // while it waited in the queue
            }
            let attempt = Attempt {
                inner: inner.clone(),
                key: key.clone(),
                opts,
                owner,
                waits: registration.is_some(),
                hands_on,
            };
            let pause = match GoesOn::new(attempt.make(permit), &Handle::current()).await {
                Outcome::Acquired(granted) => {
                    if let Some(orphan) = &mut orphan {
                        orphan.adopt();
                    }
                    return Ok(Some(granted));
                }
                Outcome::Busy(..) if deadline.has_passed() => return Ok(None),
                Outcome::Failed(_, error, _orphan)
                    if deadline.has_passed() || !error.is_retryable() =>
                {
                    return Err(error);
                }
                Outcome::Busy(back, expires_in) => {
                    permit = back;
                    self.waits();
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
}

/// One try, which goes on when the caller is gone: what it gave to nobody is released by its drop.
struct Attempt<D: LeaseDriver> {
    inner: Arc<Inner<D>>,
    key: Key,
    opts: LeaseOptions,
    owner: Owner,
    waits: bool,
    hands_on: bool,
}

impl<D: LeaseDriver> Attempt<D> {
    async fn make(self, permit: Permit<Caller>) -> Outcome<D> {
        let Self { inner, key, opts, owner, waits, hands_on } = self;
        let sent = Instant::now();
        let driver = &inner.driver;
        let acquire = || match waits {
            true => driver.acquire_waiting(&key, owner, opts.ttl),
            false => driver.acquire(&key, owner, opts.ttl),
        };
        let orphan =
            |key| Orphan { driver: driver.clone(), key, owner, ttl: opts.ttl, adopted: false };
        let token = match asked(driver.limits().answer, acquire).await.0 {
            Ok(LeaseTry::Acquired(token)) => token,
            Ok(LeaseTry::Busy { expires_in }) => return Outcome::Busy(permit, expires_in),
            Err(error) => return Outcome::Failed(permit, error, orphan(key)),
        };
        let expires = local_deadline(sent, opts.ttl);
        if expires <= Instant::now() {
            let error = Error::new(ErrorKind::Unavailable, "the answer took longer than the ttl");
            return Outcome::Failed(permit, error, orphan(key));
        }
        let signal = LossSignal::until(expires);
        let wake_id = driver.wake_id(&key);
        let record = Arc::new(Record {
            key,
            owner,
            ttl: opts.ttl,
            signal: signal.clone(),
            permit: Mutex::new(Some(permit)),
            run: hands_on.then_some(Run { handed: 0, since: sent, contended: waits }),
        });
        let renew_until = match (opts.auto_renew, opts.max_hold) {
            (false, _) => Some(sent),
            (true, max_hold) => max_hold.and_then(|time| sent.checked_add(time)),
        };
        if !inner.heart().add(Entry::new(record.clone(), sent, renew_until, wake_id)) {
            record.signal.lose(LossReason::Closed);
        }
        let hold = Hold { inner, record, released: false, runtime: Handle::current() };
        Outcome::Acquired(Granted { token, signal, hold })
    }
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
            runtime.spawn(steered(free(driver, key, self.owner, until, Insist::UntilFreed)));
        }
    }
}
