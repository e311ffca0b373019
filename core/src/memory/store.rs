//! [`MemoryStore`]: what a server would keep.

mod inspect;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::backend::{Admit, AdmitAnswer, Housekeeping, LeaseTry, Owner, Renewal, SessionId, Wake};
use crate::holder::Holder;
use crate::key::Key;
use crate::token::FencingToken;

/// How long the store keeps the session of a client that vanished without a word.
pub(super) const VANISHED: Duration = Duration::from_secs(10);

pub(super) type LinkId = u64;
pub(super) type Namespace = Arc<str>;
pub(super) type Name = (Namespace, Key);

/// Which of the store's lock tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Named,
    Claim,
    /// A dedupe key that an open claim has entered.
    Seen,
}

/// The store that handles share. Cloning gives another reference to it.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    last_token: u64,
    last_id: u64,
    /// Start of the store's own clock.
    origin: (SystemTime, Instant),
    sessions: HashMap<SessionId, Session>,
    locks: HashMap<(Kind, Name), Lock>,
    leases: HashMap<Name, LeaseRow>,
    dedupe: HashMap<Name, DedupeRow>,
    map: BTreeMap<String, String>,
    listeners: Vec<mpsc::UnboundedSender<Wake>>,
}

#[derive(Debug)]
struct Session {
    link: LinkId,
    holder: Arc<Holder>,
    alive: watch::Sender<bool>,
    /// When its client was last heard of, if it vanished.
    vanished: Option<Instant>,
}

/// A session lock, re-entrant per session as on the SQL stores, with a FIFO of waiters.
#[derive(Debug)]
struct Lock {
    holder: SessionId,
    entries: u32,
    since: Instant,
    queue: VecDeque<(SessionId, oneshot::Sender<()>)>,
}

#[derive(Debug)]
struct LeaseRow {
    owner: Option<Owner>,
    token: FencingToken,
    holder: Arc<Holder>,
    since: Instant,
    expires: Instant,
    /// Open transactions that verified it: it is not taken over before they end.
    pins: u32,
}

#[derive(Debug)]
struct DedupeRow {
    owner: Owner,
    holder: Arc<Holder>,
    token: FencingToken,
    done: bool,
    since: Instant,
    until: Instant,
}

/// A lock that was asked for with a wait.
pub(super) enum Asked {
    Granted,
    Queued(oneshot::Receiver<()>),
    Ended,
}

impl MemoryStore {
    /// An empty store.
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the store's clock, which decides; no client reads it"
    )]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            last_token: 0,
            last_id: 0,
            origin: (SystemTime::now(), Instant::now()),
            sessions: HashMap::new(),
            locks: HashMap::new(),
            leases: HashMap::new(),
            dedupe: HashMap::new(),
            map: BTreeMap::new(),
            listeners: Vec::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restarts the store: all sessions end, what is durable stays (leases, dedupe, map, tokens).
    pub fn restart(&self) {
        self.end_sessions(|_| true);
        self.lock().listeners.clear();
    }

    /// Deletes the record of a lease, as an outsider would.
    pub fn delete_lease(&self, namespace: &str, key: &Key) {
        let name = (Namespace::from(namespace), key.clone());
        let mut state = self.lock();
        state.leases.remove(&name);
        state.tell(Wake::Changed(wake_id(&name)));
    }

    /// A committed value of the map that claims write.
    pub fn read(&self, name: &str) -> Option<String> {
        self.lock().map.get(name).cloned()
    }

    /// The committed values of names that begin with `prefix`.
    pub(super) fn list(&self, prefix: &str) -> BTreeMap<String, String> {
        let state = self.lock();
        let from = state.map.range(prefix.to_owned()..);
        let found = from.take_while(|(name, _)| name.starts_with(prefix));
        found.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// What is held or waited for in a namespace, in words.
    pub fn leftovers(&self, namespace: &str) -> Vec<String> {
        let state = self.lock();
        let now = Instant::now();
        let locks = state.locks.iter().filter(|((_, (ns, _)), _)| **ns == *namespace).map(
            |((kind, (_, key)), lock)| {
                let waiters = lock.queue.len();
                format!("{kind:?} lock {key:?} of session {} ({waiters} wait)", lock.holder)
            },
        );
        let leases = state
            .leases
            .iter()
            .filter(|((ns, _), row)| **ns == *namespace && row.expires > now)
            .map(|((_, key), row)| format!("lease {key:?} with token {}", row.token));
        locks.chain(leases).collect()
    }

    pub(super) fn new_link(&self) -> LinkId {
        self.lock().new_id()
    }

    pub(super) fn next_token(&self) -> FencingToken {
        self.lock().next_token()
    }

    // --- sessions and their locks ------------------------------------------------------------

    pub(super) fn open_session(
        &self,
        link: LinkId,
        holder: Arc<Holder>,
    ) -> (SessionId, watch::Receiver<bool>) {
        let mut state = self.lock();
        let id = state.new_id();
        let alive = watch::Sender::new(true);
        let seen = alive.subscribe();
        state.sessions.insert(id, Session { link, holder, alive, vanished: None });
        (id, seen)
    }

    pub(super) fn end_session(&self, id: SessionId) {
        self.lock().end_session(id);
    }

    /// The client is gone, but the store cannot see that yet.
    pub(super) fn vanish(&self, id: SessionId) {
        if let Some(session) = self.lock().sessions.get_mut(&id) {
            session.vanished = Some(Instant::now());
        }
    }

    pub(super) fn end_vanished(&self, link: LinkId) {
        self.lock().end_where(|session| session.link == link && session.vanished.is_some());
    }

    pub(super) fn end_sessions(&self, of: impl Fn(LinkId) -> bool) {
        self.lock().end_where(|session| of(session.link));
    }

    /// Takes the lock if it is free or already the session's; none if the session has ended.
    pub(super) fn try_lock(&self, kind: Kind, name: &Name, session: SessionId) -> Option<bool> {
        let mut state = self.lock();
        state.sweep_vanished();
        state.sessions.get(&session)?;
        Some(state.try_lock(kind, name, session))
    }

    /// Takes the lock or queues for it. The place stays until it is granted, left or the session
    /// ends, whatever becomes of the receiver: so do real servers.
    pub(super) fn ask(&self, kind: Kind, name: &Name, session: SessionId) -> Asked {
        match self.try_lock(kind, name, session) {
            None => Asked::Ended,
            Some(true) => Asked::Granted,
            Some(false) => {
                let (grant, granted) = oneshot::channel();
                if let Some(lock) = self.lock().locks.get_mut(&(kind, name.clone())) {
                    lock.queue.push_back((session, grant));
                    return Asked::Queued(granted);
                }
                self.ask(kind, name, session) // freed in between
            }
        }
    }

    /// Leaves the queue; true if the lock was granted meanwhile.
    pub(super) fn leave(&self, kind: Kind, name: &Name, session: SessionId) -> bool {
        let mut state = self.lock();
        let Some(lock) = state.locks.get_mut(&(kind, name.clone())) else {
            return false;
        };
        lock.queue.retain(|(waiter, _)| *waiter != session);
        lock.holder == session
    }

    /// Frees one entry; false if the session does not hold the lock.
    pub(super) fn unlock(&self, kind: Kind, name: &Name, session: SessionId) -> bool {
        self.lock().unlock(kind, name, session)
    }

    // --- leases ------------------------------------------------------------------------------

    pub(super) fn acquire(
        &self,
        holder: &Arc<Holder>,
        name: &Name,
        owner: Owner,
        ttl: Duration,
    ) -> LeaseTry {
        let mut state = self.lock();
        let now = Instant::now();
        if let Some(row) = state.leases.get_mut(name) {
            let live = row.expires > now;
            if live && row.owner == Some(owner) {
                row.expires = now + ttl;
                return LeaseTry::Acquired(row.token);
            }
            if live || row.pins > 0 {
                let expires_in = row.expires.saturating_duration_since(now);
                return LeaseTry::Busy { expires_in };
            }
        }
        let token = state.next_token();
        let (owner, holder, expires) = (Some(owner), holder.clone(), now + ttl);
        let row = LeaseRow { owner, token, holder, since: now, expires, pins: 0 };
        state.leases.insert(name.clone(), row);
        LeaseTry::Acquired(token)
    }

    pub(super) fn renew(&self, namespace: &Namespace, renewals: &[Renewal]) -> Vec<bool> {
        let mut state = self.lock();
        let now = Instant::now();
        let renew = |renewal: &Renewal| {
            let name = (namespace.clone(), renewal.key.clone());
            let row = state.leases.get_mut(&name);
            let row = row.filter(|row| row.owner == Some(renewal.owner) && row.expires > now);
            row.map(|row| row.expires = now + renewal.ttl).is_some()
        };
        renewals.iter().map(renew).collect()
    }

    /// Gives a live lease of `owner` a new token.
    pub(super) fn retoken(&self, name: &Name, owner: Owner) -> Option<FencingToken> {
        let mut state = self.lock();
        let (now, token) = (Instant::now(), state.next_token());
        let row = state.leases.get_mut(name);
        let row = row.filter(|row| row.owner == Some(owner) && row.expires > now)?;
        row.token = token;
        Some(token)
    }

    pub(super) fn release(&self, name: &Name, owner: Owner) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(row) = state.leases.get_mut(name).filter(|row| row.owner == Some(owner)) else {
            return false;
        };
        let held = row.expires > now;
        (row.owner, row.expires) = (None, row.expires.min(now));
        state.forget_if_over(name);
        held
    }

    /// Keeps a live lease of `owner` from being taken over until [`unpin`](Self::unpin).
    pub(super) fn pin(&self, name: &Name, owner: Owner) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let row = state.leases.get_mut(name);
        let row = row.filter(|row| row.owner == Some(owner) && row.expires > now);
        row.map(|row| row.pins += 1).is_some()
    }

    pub(super) fn unpin(&self, name: &Name) {
        let mut state = self.lock();
        if let Some(row) = state.leases.get_mut(name) {
            row.pins = row.pins.saturating_sub(1);
        }
        state.forget_if_over(name);
    }

    pub(super) fn listen(&self) -> mpsc::UnboundedReceiver<Wake> {
        let (tell, told) = mpsc::unbounded_channel();
        self.lock().listeners.push(tell);
        told
    }

    // --- dedupe ------------------------------------------------------------------------------

    pub(super) fn admit(
        &self,
        holder: &Arc<Holder>,
        namespace: &Namespace,
        item: &Admit,
    ) -> AdmitAnswer {
        let name = (namespace.clone(), item.key.clone());
        let mut state = self.lock();
        let now = Instant::now();
        if let Some(lock) = state.locks.get(&(Kind::Seen, name.clone())) {
            return AdmitAnswer::InProgress { since: state.time(lock.since) };
        }
        if let Some(row) = state.dedupe.get(&name).filter(|row| row.until > now) {
            return match row.done {
                _ if row.owner == item.owner => AdmitAnswer::First(row.token),
                true => AdmitAnswer::Done { at: state.time(row.since) },
                false => AdmitAnswer::InProgress { since: state.time(row.since) },
            };
        }
        let token = state.next_token();
        let row = DedupeRow {
            owner: item.owner,
            holder: holder.clone(),
            token,
            done: item.in_progress.is_none(),
            since: now,
            until: now + item.in_progress.unwrap_or(item.retain),
        };
        state.dedupe.insert(name, row);
        AdmitAnswer::First(token)
    }

    pub(super) fn complete(&self, name: &Name, owner: Owner, retain: Duration) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        let Some(row) = state.dedupe.get_mut(name).filter(|row| row.owner == owner) else {
            return false;
        };
        if !row.done {
            (row.done, row.since, row.until) = (true, now, now + retain);
        }
        true
    }

    pub(super) fn abandon(&self, name: &Name, owner: Owner) -> bool {
        let mut state = self.lock();
        let ours = state.dedupe.get(name).is_some_and(|row| row.owner == owner && !row.done);
        if ours {
            state.dedupe.remove(name);
        }
        ours
    }

    /// Whether a key is neither in progress nor done.
    pub(super) fn is_unseen(&self, name: &Name) -> bool {
        let now = Instant::now();
        self.lock().dedupe.get(name).is_none_or(|row| row.until <= now)
    }

    // --- the transactions of claims ----------------------------------------------------------

    /// Applies what a claim has written, if its session is alive.
    pub(super) fn apply(
        &self,
        session: SessionId,
        writes: BTreeMap<String, Option<String>>,
        seen: Vec<(Name, Duration)>,
    ) -> bool {
        let mut state = self.lock();
        let Some(holder) = state.sessions.get(&session).map(|session| session.holder.clone())
        else {
            return false;
        };
        for (name, value) in writes {
            match value {
                Some(value) => drop(state.map.insert(name, value)),
                None => drop(state.map.remove(&name)),
            }
        }
        for (name, retain) in seen {
            let (now, token) = (Instant::now(), state.next_token());
            let owner = Owner::fresh();
            let (done, until) = (true, now + retain);
            let holder = holder.clone();
            let row = DedupeRow { owner, holder, token, done, since: now, until };
            state.dedupe.insert(name, row);
        }
        true
    }

    pub(super) fn housekeep(&self, namespace: &Namespace) -> Housekeeping {
        let mut state = self.lock();
        let now = Instant::now();
        let (leases, dedupe) = (state.leases.len(), state.dedupe.len());
        let ours = |name: &Name| name.0 == *namespace;
        state.leases.retain(|name, row| !ours(name) || row.expires > now || row.pins > 0);
        state.dedupe.retain(|name, row| !ours(name) || row.until > now);
        let gone = |before: usize, after: usize| (before - after) as u64;
        Housekeeping::new(gone(leases, state.leases.len()), gone(dedupe, state.dedupe.len()))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn next_token(&mut self) -> FencingToken {
        self.last_token += 1;
        FencingToken(self.last_token)
    }

    fn time(&self, at: Instant) -> SystemTime {
        self.origin.0 + at.saturating_duration_since(self.origin.1)
    }

    fn tell(&mut self, wake: Wake) {
        self.listeners.retain(|listener| listener.send(wake).is_ok());
    }

    fn forget_if_over(&mut self, name: &Name) {
        let over = |row: &LeaseRow| row.pins == 0 && row.expires <= Instant::now();
        if self.leases.get(name).is_some_and(over) {
            self.leases.remove(name);
            self.tell(Wake::Released(wake_id(name)));
        }
    }

    fn try_lock(&mut self, kind: Kind, name: &Name, session: SessionId) -> bool {
        let new =
            || Lock { holder: session, entries: 0, since: Instant::now(), queue: VecDeque::new() };
        let lock = self.locks.entry((kind, name.clone())).or_insert_with(new);
        let ours = lock.holder == session;
        lock.entries += u32::from(ours);
        ours
    }

    fn unlock(&mut self, kind: Kind, name: &Name, session: SessionId) -> bool {
        let at = (kind, name.clone());
        let Some(lock) = self.locks.get_mut(&at).filter(|lock| lock.holder == session) else {
            return false;
        };
        lock.entries -= 1;
        if lock.entries == 0 {
            self.pass_on(&at);
        }
        true
    }

    fn pass_on(&mut self, at: &(Kind, Name)) {
        let Some(lock) = self.locks.get_mut(at) else {
            return;
        };
        match lock.queue.pop_front() {
            None => drop(self.locks.remove(at)),
            Some((next, grant)) => {
                (lock.holder, lock.entries, lock.since) = (next, 1, Instant::now());
                // a waiter that has stopped listening holds it all the same
                let _ = grant.send(());
            }
        }
    }

    fn end_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        session.alive.send_replace(false);
        let mut held = Vec::new();
        for (at, lock) in &mut self.locks {
            lock.queue.retain(|(waiter, _)| *waiter != id);
            if lock.holder == id {
                held.push(at.clone());
            }
        }
        held.iter().for_each(|at| self.pass_on(at));
    }

    fn end_where(&mut self, ends: impl Fn(&Session) -> bool) {
        let ended = self.sessions.iter().filter(|(_, session)| ends(session)).map(|(id, _)| *id);
        for id in ended.collect::<Vec<_>>() {
            self.end_session(id);
        }
    }

    fn sweep_vanished(&mut self) {
        self.end_where(|session| session.vanished.is_some_and(|at| at.elapsed() >= VANISHED));
    }
}

/// What a [`Wake`] calls a lease.
pub(super) fn wake_id(name: &Name) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}
