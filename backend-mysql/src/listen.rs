//! The waiters' side of waking those who wait for a lease: a few connections that wait on the
//! server for the bells of those who hold what is waited for. The holders' side is in
//! [`crate::bell`].

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::Result;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bell::{bell_name, statement_limit};
use crate::error::{is_interrupted, mapped};
use crate::store::Store;

/// Connections of one handle that listen.
const LISTENERS: usize = 4;
/// Seconds of one wait; a listener that is gone is in the server's queue for no longer.
const SLICE: u32 = 5;
/// What an answer may take beyond it.
const GRACE: Duration = Duration::from_secs(5);
/// A listener without a bell to listen to ends after so long.
const IDLE: Duration = Duration::from_secs(30);
/// The pauses before a bell is listened to again that rang for nothing: there may be no one who
/// keeps it.
const SHORTEST_REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_secs(2);
/// The pause after a failed connection.
const REPAIR: Duration = Duration::from_millis(500);

/// Listens to bells. Dropping it closes its connections.
#[derive(Debug)]
pub(crate) struct Listeners {
    ears: Arc<Ears>,
    tasks: Mutex<JoinSet<()>>,
}

/// What the listeners share.
#[derive(Debug)]
struct Ears {
    store: Arc<Store>,
    bells: Mutex<HashMap<u64, Heard>>,
    /// There may be a bell that nobody listens to.
    wanted: Notify,
    /// A bell rang, or is not listened to any more.
    news: Arc<Notify>,
}

/// What is known of a bell.
#[derive(Clone, Copy, Debug)]
struct Heard {
    wanted: bool,
    listening: bool,
    /// Rings in a row after which nothing was free.
    vain: u32,
    rest_until: Instant,
}

impl Listeners {
    /// Notifies `news` when a bell rang or is not listened to any more.
    pub(crate) fn new(store: Arc<Store>, news: Arc<Notify>) -> Self {
        let ears = Ears { store, bells: Mutex::default(), wanted: Notify::new(), news };
        Self { ears: Arc::new(ears), tasks: Mutex::default() }
    }

    /// Listens to these bells, and to no other from the next slice on. Says whether all of them
    /// are listened to.
    pub(crate) fn listen_to(&self, wanted: &HashSet<u64>) -> bool {
        let (mut all, mut missing) = (true, 0);
        {
            let mut bells = self.ears.lock();
            for number in wanted {
                let fresh = Heard::new(Instant::now());
                let bell = bells.entry(*number).or_insert(fresh);
                all &= bell.listening;
                missing += usize::from(!bell.listening);
            }
            bells.retain(|number, bell| {
                bell.wanted = wanted.contains(number);
                bell.wanted || bell.listening
            });
        }
        if missing > 0 {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            while tasks.try_join_next().is_some() {}
            while tasks.len() < LISTENERS.min(wanted.len()) {
                tasks.spawn(listen(self.ears.clone()));
            }
            (0..missing).for_each(|_| self.ears.wanted.notify_one());
        }
        all
    }

    /// The ring of this bell was one for us.
    pub(crate) fn rang_well(&self, number: u64) {
        if let Some(bell) = self.ears.lock().get_mut(&number) {
            bell.vain = 0;
            bell.rest_until = Instant::now();
        }
    }

    /// Closes all connections.
    pub(crate) fn end(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
        self.ears.lock().clear();
    }
}

impl Heard {
    fn new(now: Instant) -> Self {
        Self { wanted: true, listening: false, vain: 0, rest_until: now }
    }

    fn rang(&mut self, now: Instant) {
        let rest = SHORTEST_REST.saturating_mul(1 << self.vain.min(10)).min(LONGEST_REST);
        self.vain += 1;
        self.rest_until = now + rest;
    }
}

impl Ears {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Heard>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes on a bell that nobody listens to; otherwise says when one has rested.
    fn take(&self) -> std::result::Result<u64, Option<Instant>> {
        let now = Instant::now();
        let mut bells = self.lock();
        let free = bells.iter_mut().filter(|(_, bell)| bell.wanted && !bell.listening);
        let Some((number, bell)) = free.min_by_key(|(_, bell)| bell.rest_until) else {
            return Err(None);
        };
        if bell.rest_until > now {
            return Err(Some(bell.rest_until));
        }
        bell.listening = true;
        Ok(*number)
    }

    /// The next bell to listen to; none after a long time without any.
    async fn next(&self) -> Option<u64> {
        let over = Instant::now() + IDLE;
        loop {
            let until = match self.take() {
                Ok(number) => return Some(number),
                Err(_) if Instant::now() >= over => return None,
                Err(rested) => rested.unwrap_or(over).min(over),
            };
            tokio::select! {
                () = self.wanted.notified() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    fn settle(&self, number: u64, outcome: &Result<bool>) {
        let mut bells = self.lock();
        let Some(bell) = bells.get_mut(&number) else {
            return;
        };
        bell.listening = false;
        match outcome {
            Ok(true) => bell.rang(Instant::now()),
            Ok(false) => bell.vain = 0,
            Err(_) => bell.rest_until = Instant::now() + REPAIR,
        }
        if !matches!(outcome, Ok(false)) {
            drop(bells);
            self.news.notify_one();
        }
    }
}

/// One listener.
async fn listen(ears: Arc<Ears>) {
    let mut conn = None;
    while let Some(number) = ears.next().await {
        let outcome = wait(&ears.store, &mut conn, number).await;
        if let Err(error) = &outcome {
            tracing::debug!(%error, "a connection that waits for a lease's release failed");
            conn = None;
        }
        ears.settle(number, &outcome);
    }
}

/// Whether the bell rang within a slice.
async fn wait(store: &Store, slot: &mut Option<Conn>, number: u64) -> Result<bool> {
    let conn = if let Some(conn) = slot {
        conn
    } else {
        let mut conn = store.connect().await?;
        let unlimited = format!("SET SESSION {} = 0", statement_limit(store));
        conn.query_drop(unlimited).await.map_err(mapped)?;
        slot.insert(conn)
    };
    // passed on within the statement: not even a process that is paused keeps it from the others
    let name = bell_name(number);
    let text = format!("SELECT IF(GET_LOCK('{name}', {SLICE}) = 1, RELEASE_LOCK('{name}'), 0)");
    let answer = conn.query_first::<Option<u8>, _>(text);
    let limit = Duration::from_secs(SLICE.into()) + GRACE;
    match tokio::time::timeout(limit, answer).await {
        Ok(Ok(rang)) => Ok(rang.flatten() == Some(1)),
        Ok(Err(error)) if is_interrupted(&error) => Ok(false),
        Ok(Err(error)) => Err(mapped(error)),
        Err(_) => Err(leasehold_core::Error::new(
            leasehold_core::ErrorKind::Unavailable,
            "the server did not answer",
        )),
    }
}
