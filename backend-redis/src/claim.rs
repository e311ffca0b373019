//! Claims: locks that are renewed while the transaction is open.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{AdmitAnswer, ClaimDriver, LeaseTry, Owner};
use leasehold_core::{
    ClaimTx, Deadline, Error, ErrorKind, FencingToken, Key, LossReason, LossSignal, Result,
};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::conn::{Conn, NAME};
use crate::dedupe::{Entry, Question};
use crate::keys::{Kind, Place};
use crate::locks::{self, first_wake};
use crate::tx::{Freed, RedisTx};
use crate::wake::Wakes;

/// Keys of one claim; more do not fit on the stack of a script.
const MAX_KEYS: usize = 5_000;
/// A waiter that heard nothing looks again after at most so long.
const MAX_POLL: Duration = Duration::from_secs(1);
/// How long `first_seen` waits for another open claim that has seen the same key first.
const SEEN_WAIT: Duration = Duration::from_secs(10);

/// Begins the transactions.
#[derive(Debug)]
pub(crate) struct Claims {
    conn: Arc<Conn>,
    wakes: Arc<Wakes>,
}

impl Claims {
    pub(crate) fn new(conn: Arc<Conn>, wakes: Arc<Wakes>) -> Self {
        Self { conn, wakes }
    }
}

#[async_trait]
impl ClaimDriver for Claims {
    type Id = Place;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<RedisTx>()
    }

    fn id(&self, key: &Key) -> Place {
        self.conn.keys.place(Kind::Claim, key)
    }

    async fn begin(&self, ids: &[Place], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        if self.conn.closing.is_cancelled() {
            return Err(Error::new(ErrorKind::Unavailable, "the handle is closed"));
        }
        if ids.len() > MAX_KEYS {
            let detail = format!("a claim on Redis has at most {MAX_KEYS} keys");
            return Err(Error::new(ErrorKind::Exhausted, detail));
        }
        let ttl = self.conn.settings.claim_ttl;
        let mut held = Held::new(self.conn.clone(), ids);
        let tag = self.conn.keys.claim_tag();
        let mut registration = None;
        // once an answer was lost, a request may still arrive
        let mut unsure = false;
        let mut pause = Duration::from_millis(20);
        loop {
            let sent = Instant::now();
            let taken = self.conn.claim(tag, ids, held.owner, ttl);
            let sleep = match taken.await {
                Ok(LeaseTry::Acquired(token)) => {
                    let deadline = local_deadline(sent, ttl);
                    if deadline <= Instant::now() {
                        let detail = "the answer took longer than the ttl of a claim";
                        return Err(Error::new(ErrorKind::Unavailable, detail));
                    }
                    return Ok(Some(Box::new(RedisClaim::open(held, token, deadline))));
                }
                Ok(LeaseTry::Busy { .. }) if deadline.has_passed() => {
                    held.armed = unsure;
                    return Ok(None);
                }
                Ok(LeaseTry::Busy { expires_in }) => {
                    if registration.is_none() {
                        // look once more: it may have been freed before the registration
                        let news = ids.iter().map(|place| place.wake).collect();
                        registration = Some(self.wakes.register(news));
                        self.wakes.want(tag);
                        continue;
                    }
                    jittered(MAX_POLL).min(expires_in + Duration::from_millis(1))
                }
                Err(error) if deadline.has_passed() || !error.is_retryable() => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "the server cannot be reached, trying on");
                    unsure = true;
                    pause = (pause * 2).min(MAX_POLL);
                    jittered(pause)
                }
            };
            let sleep = tokio::time::sleep(sleep.min(deadline.remaining()));
            match &registration {
                None => sleep.await,
                Some(registration) => tokio::select! {
                    () = registration.woken() => {}
                    () = sleep => {}
                },
            }
        }
    }

    fn answer_limit(&self) -> Duration {
        self.conn.answer_limit() + Duration::from_millis(250)
    }
}

/// Between half of `time` and the whole of it.
pub(crate) fn jittered(time: Duration) -> Duration {
    // 128 random bits, of which 16 are enough
    let share = (Owner::fresh().0 & 0xffff) as f64 / 131_072.0;
    time.mul_f64(0.5 + share)
}

/// As for leases: less a drift margin of 1 % of the ttl plus 2 ms.
fn local_deadline(sent: Instant, ttl: Duration) -> Instant {
    sent + ttl - (ttl / 100 + Duration::from_millis(2))
}

/// Entries of `first_seen`, reserved until the claim ends; false while the answer is not known.
#[derive(Debug, Default)]
struct Reserved(Mutex<HashMap<Place, bool>>);

impl Reserved {
    fn lock(&self) -> MutexGuard<'_, HashMap<Place, bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that are ours, or may be.
    fn all(&self) -> Vec<Place> {
        self.lock().keys().cloned().collect()
    }

    /// Those that are ours.
    fn known(&self) -> Vec<Place> {
        let reserved = self.lock();
        let known = reserved.iter().filter(|(_, known)| **known);
        known.map(|(place, _)| place.clone()).collect()
    }
}

/// What an owner has, or may have, on the server. Dropping it frees that in the background.
#[derive(Debug)]
struct Held {
    conn: Arc<Conn>,
    owner: Owner,
    places: Arc<[Place]>,
    reserved: Arc<Reserved>,
    armed: bool,
    runtime: Handle,
}

impl Held {
    fn new(conn: Arc<Conn>, places: &[Place]) -> Self {
        Self {
            conn,
            owner: Owner::fresh(),
            places: places.into(),
            reserved: Arc::default(),
            armed: true,
            runtime: Handle::current(),
        }
    }

    async fn free(conn: &Conn, owner: Owner, places: &[Place], reserved: &[Place]) -> Result<()> {
        for place in reserved {
            conn.settle(place, owner, None).await?;
        }
        let held: Vec<_> =
            places.iter().map(|place| locks::Held { place: place.clone(), owner }).collect();
        conn.release_all(&held).await.map(|_| ())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        let (conn, owner, places) = (self.conn.clone(), self.owner, self.places.clone());
        let reserved = self.reserved.all();
        if places.is_empty() && reserved.is_empty() {
            return;
        }
        let tracker = self.conn.tasks_of_claims.clone();
        let release = async move {
            let until = Instant::now() + conn.settings.claim_ttl;
            let mut pause = Duration::from_millis(50);
            while let Err(error) = Self::free(&conn, owner, &places, &reserved).await {
                tracing::debug!(%error, "the release of a claim failed");
                if !error.is_retryable() || Instant::now() >= until {
                    return;
                }
                tokio::time::sleep(jittered(pause)).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
        };
        drop(tracker.spawn_on(release, &self.runtime));
    }
}

/// An open claim.
#[derive(Debug)]
struct RedisClaim {
    tx: RedisTx,
    held: Held,
    token: FencingToken,
    signal: LossSignal,
    renewer: AbortHandle,
    /// What `first_seen` admits at the commit.
    seen: Vec<(Place, Duration)>,
}

impl RedisClaim {
    fn open(held: Held, token: FencingToken, deadline: Instant) -> Self {
        let signal =
            if held.places.is_empty() { LossSignal::new() } else { LossSignal::until(deadline) };
        let renewals = renew(
            held.conn.clone(),
            held.owner,
            held.places.clone(),
            held.reserved.clone(),
            signal.clone(),
        );
        Self {
            tx: RedisTx::new(held.conn.clone(), first_wake(&held.places)),
            renewer: held.conn.tasks_of_claims.spawn(renewals).abort_handle(),
            held,
            token,
            signal,
            seen: Vec::new(),
        }
    }
}

/// Renews an open claim until it is lost, or until the task is aborted by the claim's end.
async fn renew(
    conn: Arc<Conn>,
    owner: Owner,
    places: Arc<[Place]>,
    reserved: Arc<Reserved>,
    signal: LossSignal,
) {
    let ttl = conn.settings.claim_ttl;
    let mut pause = ttl / 3;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = conn.closing.cancelled() => {
                signal.lose(LossReason::Closed);
                let entries = reserved.all();
                if let Err(error) = Held::free(&conn, owner, &places, &entries).await {
                    tracing::debug!(%error, "the release of a claim failed");
                }
                return;
            }
        }
        if signal.reason().is_some() {
            return;
        }
        let entries = reserved.known();
        let renewals: Vec<_> =
            places.iter().chain(&entries).map(|place| (place, owner, ttl)).collect();
        if renewals.is_empty() {
            continue;
        }
        let sent = Instant::now();
        let limit = conn.settings.command_limit.min(ttl / 4);
        match conn.renew(&renewals, limit).await {
            Ok(renewed) if renewed.iter().all(|renewed| *renewed) => {
                if !signal.extend(local_deadline(sent, ttl)) && !places.is_empty() {
                    return;
                }
                pause = ttl / 3;
            }
            Ok(_) => {
                if signal.lose(LossReason::Taken) {
                    tracing::warn!("claim lost: the server says that a key is not ours");
                }
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "the renewal of a claim failed, trying again");
                pause = jittered((ttl / 10).min(Duration::from_secs(1)));
            }
        }
    }
}

#[async_trait]
impl ClaimTx for RedisClaim {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        &mut self.tx
    }

    async fn first_seen(&mut self, key: &Key, retain: Duration) -> Result<bool> {
        let conn = &self.held.conn;
        let place = conn.keys.place(Kind::Dedupe, key);
        if conn.keys.clustered() && place.tag != conn.keys.claim_tag() {
            let detail = "in a cluster, dedupe and claims share a slot only with a cluster tag";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        if self.seen.iter().any(|(seen, _)| *seen == place) {
            return Ok(false);
        }
        let question = [Question {
            place: place.clone(),
            owner: self.held.owner,
            in_progress: Some(conn.settings.claim_ttl),
            retain: Duration::from_millis(1),
            by_claim: true,
        }];
        let until = Deadline::after(SEEN_WAIT);
        // whatever becomes of the request, the end of the claim takes it back
        self.held.reserved.lock().insert(place.clone(), false);
        loop {
            match conn.admit(&question).await?.first() {
                Some(Entry::Answer(AdmitAnswer::First(_))) => {
                    self.held.reserved.lock().insert(place.clone(), true);
                    self.seen.push((place, retain));
                    return Ok(true);
                }
                Some(Entry::Answer(_)) => {
                    self.held.reserved.lock().remove(&place);
                    return Ok(false);
                }
                // as on the SQL stores, it depends on how the other transaction ends
                Some(Entry::Reserved { .. }) | None if until.has_passed() => {
                    let detail = "another open claim has seen the key first and does not end";
                    return Err(Error::new(ErrorKind::Unavailable, detail));
                }
                Some(Entry::Reserved { .. }) | None => {
                    tokio::time::sleep(jittered(Duration::from_millis(40))).await;
                }
            }
        }
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        // a renewal that comes after the commit would take the freed keys for lost ones
        self.renewer.abort();
        if let Some(reason) = self.signal.reason() {
            let detail = format!("cannot commit, nothing was written: {}", reason.as_str());
            return Err(Error::new(ErrorKind::Lost, detail));
        }
        let places = self.held.places.clone();
        let owner = self.held.owner;
        match self.tx.commit(owner, &places, &self.seen).await {
            Ok(()) => {
                self.held.armed = false;
                Ok(())
            }
            Err((error, freed)) => {
                self.held.armed = freed == Freed::No;
                Err(error)
            }
        }
    }

    async fn rollback(mut self: Box<Self>) -> Result<()> {
        self.renewer.abort();
        let Held { conn, owner, .. } = &self.held;
        Held::free(conn, *owner, &self.held.places, &self.held.reserved.all()).await?;
        self.held.armed = false;
        Ok(())
    }

    fn signal(&self) -> Option<LossSignal> {
        Some(self.signal.clone())
    }
}

impl Drop for RedisClaim {
    fn drop(&mut self) {
        self.renewer.abort();
    }
}
