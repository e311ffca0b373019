//! A store with sessions, and the driver that the engine is given.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{oneshot, watch};

use super::super::world::{Fate, World, cut};
use crate::backend::{Batch, BatchAnswer, Session, SessionDriver, SessionId, SessionLimits, Try};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::token::FencingToken;

const FATES: &[Fate] = &[Fate::Fails, Fate::Unanswered];

/// A fault that is planted in the store or its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Mutant {
    None,
    /// A try is granted though somebody else holds the lock.
    GrantsTwice,
    /// The end of a session is not told, and its answers go on.
    ForgetsLoss,
    /// A session that was ended is replaced by another one without a word.
    Reconnects,
    /// Kills are left undone: a dropped session that waits is noticed by nothing else.
    IgnoresKills,
    /// A release is answered and left undone.
    ForgetsReleases,
    /// A release whose session was lost is repeated on the next one, soon or late.
    RepeatsReleases,
    /// A wait is granted, and who waits is not told.
    ForgetsToWake,
    /// The answer to a token is that of the holder before.
    RepeatsTokens,
    /// The first answer of a batch is left out.
    ShortAnswers,
    /// A session that was dropped stays.
    KeepsSessions,
    /// A place in the queue outlives the wait for it.
    KeepsPlaces,
}

#[derive(Clone)]
pub(in crate::model) struct Server {
    world: World,
    state: Arc<Mutex<State>>,
}

struct State {
    mutant: Mutant,
    /// A connection that closes during a wait is not noticed, as on Postgres.
    deaf: bool,
    sessions: BTreeMap<SessionId, Open>,
    locks: BTreeMap<Key, Lock>,
    /// Which handles have lost which keys by the end of a session, and not taken them since then.
    bereft: BTreeSet<(usize, Key)>,
    /// Releases whose session was lost, to be repeated.
    broken: Vec<(usize, Key)>,
    last_token: u64,
    last_session: SessionId,
}

struct Open {
    handle: usize,
    alive: watch::Sender<bool>,
    fault: u64,
}

struct Lock {
    holder: SessionId,
    queue: VecDeque<(SessionId, oneshot::Sender<()>)>,
}

impl Server {
    pub(in crate::model) fn new(world: &World, mutant: Mutant, deaf: bool) -> Self {
        let state = State {
            mutant,
            deaf,
            sessions: BTreeMap::new(),
            locks: BTreeMap::new(),
            bereft: BTreeSet::new(),
            broken: Vec::new(),
            last_token: 0,
            last_session: 0,
        };
        Self { world: world.clone(), state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::model) fn driver(&self, handle: usize, limits: SessionLimits) -> Driver {
        Driver { server: self.clone(), handle, limits }
    }

    /// The handle whose session holds the lock.
    pub(in crate::model) fn holder(&self, key: &Key) -> Option<usize> {
        let state = self.lock();
        let holder = state.locks.get(key)?.holder;
        state.sessions.get(&holder).map(|session| session.handle)
    }

    /// Whether a session of the handle has ended while it held the key.
    pub(in crate::model) fn took_away(&self, handle: usize, key: &Key) -> bool {
        self.lock().bereft.contains(&(handle, key.clone()))
    }

    /// What is left when everybody is gone.
    pub(in crate::model) fn leftovers(&self) -> Result<(), String> {
        let state = self.lock();
        let sessions: Vec<_> = state.sessions.keys().collect();
        let locks: Vec<_> = state.locks.keys().collect();
        match sessions.is_empty() && locks.is_empty() {
            true => Ok(()),
            false => Err(format!("left on the store: sessions {sessions:?}, locks {locks:?}")),
        }
    }

    fn end(&self, session: SessionId) {
        let fault = self.lock().end(session);
        if let Some(fault) = fault {
            self.world.cannot_happen(fault);
        }
    }
}

impl State {
    fn end(&mut self, session: SessionId) -> Option<u64> {
        let open = self.sessions.remove(&session)?;
        let mut held = Vec::new();
        for (key, lock) in &mut self.locks {
            lock.queue.retain(|(waiter, _)| *waiter != session);
            if lock.holder == session {
                held.push(key.clone());
            }
        }
        for key in held {
            self.bereft.insert((open.handle, key.clone()));
            self.pass_on(&key);
        }
        open.alive.send_replace(false);
        Some(open.fault)
    }

    fn pass_on(&mut self, key: &Key) {
        let Some(lock) = self.locks.get_mut(key) else { return };
        let Some((next, granted)) = lock.queue.pop_front() else {
            self.locks.remove(key);
            return;
        };
        lock.holder = next;
        self.has_it_again(key, next);
        if self.mutant == Mutant::ForgetsToWake {
            std::mem::forget(granted);
        } else {
            let _ = granted.send(()); // one who is gone drops its session, too
        }
    }

    fn release(&mut self, key: &Key, session: SessionId) -> bool {
        let ours = self.locks.get(key).is_some_and(|lock| lock.holder == session);
        if ours && self.mutant != Mutant::ForgetsReleases {
            self.pass_on(key);
        }
        ours
    }

    fn take(&mut self, key: &Key, session: SessionId) -> bool {
        if let Some(lock) = self.locks.get(key) {
            // as on the real stores a session takes what it has once more
            return lock.holder == session || self.mutant == Mutant::GrantsTwice;
        }
        self.locks.insert(key.clone(), Lock { holder: session, queue: VecDeque::new() });
        self.has_it_again(key, session);
        true
    }

    fn has_it_again(&mut self, key: &Key, session: SessionId) {
        if let Some(session) = self.sessions.get(&session) {
            self.bereft.remove(&(session.handle, key.clone()));
        }
    }

    /// What a driver does that repeats whatever was cut off.
    fn repeat_releases(&mut self, session: SessionId, handle: usize) {
        let repeated = self.broken.extract_if(.., |(of, _)| *of == handle);
        for (_, key) in repeated.collect::<Vec<_>>() {
            self.release(&key, session);
        }
    }

    fn next_token(&mut self) -> FencingToken {
        if self.mutant != Mutant::RepeatsTokens || self.last_token == 0 {
            self.last_token += 1;
        }
        FencingToken(self.last_token)
    }

    fn open(&mut self, handle: usize, fault: u64) -> (SessionId, watch::Receiver<bool>) {
        self.last_session += 1;
        let (alive, seen) = watch::channel(true);
        self.sessions.insert(self.last_session, Open { handle, alive, fault });
        (self.last_session, seen)
    }

    fn exchange(&mut self, session: SessionId, batch: &Batch<Key>) -> BatchAnswer {
        let released = batch.release.iter().map(|key| self.release(key, session)).collect();
        let attempt = |key| match self.take(key, session) {
            true => Try::Granted(None),
            false => Try::Busy,
        };
        let mut tries: Vec<_> = batch.tries.iter().map(attempt).collect();
        if self.mutant == Mutant::ShortAnswers && tries.len() > 1 {
            tries.remove(0);
        }
        let tokens = batch.tokens.iter().map(|_| self.next_token()).collect();
        BatchAnswer { released, tries, tokens }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

/// The driver of one handle.
#[derive(Debug)]
pub(in crate::model) struct Driver {
    server: Server,
    handle: usize,
    limits: SessionLimits,
}

impl Driver {
    /// The next token, as a statement of a session that it lives by would give it.
    pub(in crate::model) fn token(&self) -> FencingToken {
        self.server.lock().next_token()
    }

    fn opened(&self) -> Conversation {
        let server = self.server.clone();
        // a number of its own before the store knows it, so that the fault can name it
        let session = server.lock().last_session + 1;
        let ended = server.clone();
        let fault = server
            .world
            .may_happen(format!("session {session} is ended"), move || ended.end(session));
        let (id, alive) = server.lock().open(self.handle, fault);
        Conversation { server, handle: self.handle, id, alive, said_good_bye: false, waits: false }
    }
}

#[async_trait]
impl SessionDriver for Driver {
    type Id = Key;
    type Session = Conversation;

    fn backend(&self) -> &'static str {
        "model"
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn open(&self) -> Result<Conversation> {
        let this = Self { server: self.server.clone(), ..*self };
        let name = format!("handle {} opens a session", self.handle);
        let open = move |fate| match fate {
            Fate::Fails => Err(cut()),
            Fate::Unanswered => {
                drop(this.opened()); // on its way
                Err(cut())
            }
            Fate::Done | Fate::Late(_) => Ok(this.opened()),
        };
        self.server.world.request(name, FATES, open).await
    }

    fn limits(&self) -> SessionLimits {
        self.limits
    }
}

/// The client's side of a session.
pub(in crate::model) struct Conversation {
    server: Server,
    handle: usize,
    id: SessionId,
    alive: watch::Receiver<bool>,
    said_good_bye: bool,
    waits: bool,
}

impl Conversation {
    /// Its last statement, which frees what it holds; fails if it was ended before.
    pub(in crate::model) async fn ends(mut self, how: &str) -> Result<()> {
        self.said_good_bye = true;
        let (server, id) = (self.server.clone(), self.id);
        let end = move |fate| {
            let lives = server.lock().sessions.contains_key(&id);
            server.end(id);
            if fate == Fate::Done && lives { Ok(()) } else { Err(cut()) }
        };
        self.server.world.request(format!("session {id} {how}"), FATES, end).await
    }
}

#[async_trait]
impl Session for Conversation {
    type Id = Key;

    fn id(&self) -> SessionId {
        self.id
    }

    async fn exchange(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        let (server, id, batch) = (self.server.clone(), self.id, batch.clone());
        let handle = self.handle;
        let name = format!("session {id} asks {}", told(&batch));
        let ask = move |fate| {
            let mutant = server.lock().mutant;
            let dead = !server.lock().sessions.contains_key(&id);
            if fate == Fate::Fails || (dead && !mutant.hides_the_end()) {
                if mutant == Mutant::RepeatsReleases {
                    let broken = batch.release.iter().map(|key| (handle, key.clone()));
                    server.lock().broken.extend(broken);
                }
                server.end(id);
                return Err(cut());
            }
            if dead && mutant == Mutant::Reconnects {
                let mut state = server.lock();
                let (alive, _) = watch::channel(true);
                state.sessions.insert(id, Open { handle, alive, fault: 0 });
            }
            if mutant != Mutant::IgnoresKills {
                batch.kill.iter().for_each(|session| server.end(*session));
            }
            let answer = if dead && mutant == Mutant::ForgetsLoss {
                BatchAnswer {
                    released: vec![true; batch.release.len()],
                    tries: vec![Try::Busy; batch.tries.len()],
                    tokens: vec![FencingToken(u64::MAX); batch.tokens.len()],
                }
            } else {
                server.lock().exchange(id, &batch)
            };
            if batch.tries.is_empty() {
                server.lock().repeat_releases(id, handle);
            }
            if fate == Fate::Unanswered {
                server.end(id);
                return Err(cut());
            }
            Ok(answer)
        };
        self.server.world.request(name, FATES, ask).await
    }

    async fn wait(&mut self, key: &Key, wait: Duration) -> Result<Try> {
        let (server, id, wanted) = (self.server.clone(), self.id, key.clone());
        let queue = move |fate| {
            let mut state = server.lock();
            if fate == Fate::Fails || !state.sessions.contains_key(&id) {
                drop(state);
                server.end(id);
                return Err(cut());
            }
            let (grant, granted) = oneshot::channel();
            if state.take(&wanted, id) {
                let _ = grant.send(());
            } else if let Some(lock) = state.locks.get_mut(&wanted) {
                lock.queue.push_back((id, grant));
            }
            Ok(granted)
        };
        let name = format!("session {id} waits for {key}");
        self.waits = true;
        let granted = self.server.world.request(name, &[Fate::Fails], queue).await?;
        let mut alive = self.alive.clone();
        let outcome = tokio::select! {
            biased;
            granted = granted => granted.map(|()| Try::Granted(None)).map_err(|_| cut()),
            _ = alive.wait_for(|alive| !alive) => Err(cut()),
            () = tokio::time::sleep(wait) => {
                let mut state = self.server.lock();
                let keeps = state.mutant == Mutant::KeepsPlaces;
                let lock = state.locks.get_mut(key);
                let granted = lock.is_some_and(|lock| {
                    if !keeps {
                        lock.queue.retain(|(waiter, _)| *waiter != id);
                    }
                    lock.holder == id
                });
                Ok(if granted { Try::Granted(None) } else { Try::Busy })
            }
        };
        self.waits = false;
        outcome
    }

    async fn closed(&mut self) -> Error {
        if self.server.lock().mutant.hides_the_end() {
            return std::future::pending().await;
        }
        drop(self.alive.wait_for(|alive| !alive).await);
        cut()
    }

    async fn close(mut self) {
        self.said_good_bye = true;
        let (server, id) = (self.server.clone(), self.id);
        let bye = move |_| {
            server.end(id);
            Ok(())
        };
        drop(self.server.world.request(format!("session {id} says good-bye"), &[], bye).await);
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        let (server, id) = (self.server.clone(), self.id);
        let alive = server.lock().sessions.contains_key(&id);
        let unheard = self.waits && server.lock().deaf;
        let noticed = !unheard && server.lock().mutant != Mutant::KeepsSessions;
        if alive && !self.said_good_bye && noticed {
            let world = server.world.clone();
            let name = format!("the store sees that session {id} is gone");
            world.happen(name, &[], move |_| server.end(id));
        }
    }
}

impl fmt::Debug for Conversation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {}", self.id)
    }
}

impl Mutant {
    fn hides_the_end(self) -> bool {
        matches!(self, Self::ForgetsLoss | Self::Reconnects)
    }
}

fn told(batch: &Batch<Key>) -> String {
    if batch.is_empty() {
        return "for a sign of life".to_owned();
    }
    let list = |what: &str, keys: &[Key]| match keys {
        [] => String::new(),
        keys => format!(" {what} {}", keys.iter().map(Key::as_str).collect::<Vec<_>>().join(",")),
    };
    let kill =
        if batch.kill.is_empty() { String::new() } else { format!(" kill {:?}", batch.kill) };
    let (release, tries) = (list("free", &batch.release), list("try", &batch.tries));
    format!("to{kill}{release}{tries}{}", list("number", &batch.tokens))
}
