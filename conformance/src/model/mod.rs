//! The sequential model: what a store must answer to any sequence of operations by several clients,
//! when nothing happens at the same time.
//!
//! [`operations`] makes such sequences for proptest, [`run`] carries one out and compares every
//! answer with the model. A failing sequence shrinks; its fault tells the history step by step.
//!
//! All waits are zero and all times whole seconds, so that under a paused clock no step falls
//! between a lease's local deadline and its expiry on the store.

mod operation;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use leasehold_core::{
    Admission, Claim, ClaimOptions, DedupeGuard, DedupeOptions, Error, ErrorKind, Key, Keys,
    LeaseGuard, LeaseOptions, LockGuard, LockOptions,
};
use proptest::sample::Index;
use tokio::time::Instant;

use crate::fault::{Fault, Verdict, ensure};
use crate::harness::{Handle, Harness};

pub use self::operation::{Operation, operations};

const CLIENTS: usize = 3;
const KEYS: [&str; 2] = ["left", "right"];

/// Carries out the operations in a fresh namespace, and compares the answers with the model.
///
/// Between two steps it sleeps for a millisecond, in which what goes on in the background must be
/// done: meant for a paused clock.
///
/// # Errors
/// The first answer that differs, with the history before it.
///
/// # Cancel safety
/// Dropping it drops all guards.
pub async fn run(harness: &dyn Harness, operations: &[Operation]) -> Verdict {
    let namespace = format!("model-{:016x}", rand::random::<u64>());
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(harness.open(&namespace).await?);
    }
    let number = format!("{namespace}-n");
    let mut model = Model { harness, clients, number, ..Model::new(harness) };
    for operation in operations {
        let outcome = model.step(operation).await;
        settle().await;
        outcome.and_then(|()| model.check_beliefs()).map_err(|fault| model.told(&fault))?;
    }
    let committed = harness.committed(&model.number).await?.unwrap_or(0);
    let expected = model.committed;
    let same = committed == expected;
    let fault = || Fault::new(format!("expected {expected} to be committed, read {committed}"));
    same.then_some(()).ok_or_else(|| model.told(&fault()))
}

/// Lets the background work that a step has started run.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

struct Lock {
    guard: LockGuard,
    client: usize,
    key: usize,
    lost: bool,
}

struct Lease {
    guard: LeaseGuard,
    key: usize,
    seconds: u64,
    /// None for one that the heartbeat renews.
    expires: Option<Instant>,
}

impl Lease {
    fn lives(&self) -> bool {
        self.expires.is_none_or(|at| at > Instant::now())
    }
}

struct Open {
    claim: Claim,
    client: usize,
    keys: Vec<usize>,
    written: Option<i64>,
    lost: bool,
}

struct Entry {
    guard: DedupeGuard,
    key: usize,
    serial: u64,
    retain: u64,
}

/// What the store must remember of a dedupe key.
#[derive(Clone, Copy)]
struct Remembered {
    serial: u64,
    done: bool,
    until: Instant,
}

struct Model<'a> {
    harness: &'a dyn Harness,
    clients: Vec<Handle>,
    number: String,
    locks: Vec<Lock>,
    leases: Vec<Lease>,
    claims: Vec<Open>,
    entries: Vec<Entry>,
    remembered: HashMap<usize, Remembered>,
    committed: i64,
    serials: u64,
    /// The last token of each kind and key.
    tokens: BTreeMap<(&'static str, usize), u64>,
    history: Vec<String>,
}

fn key_of(key: usize) -> Key {
    Key::new(KEYS[key]).expect("the model's keys are valid")
}

fn pick(index: Index, length: usize) -> Option<usize> {
    (length > 0).then(|| index.index(length))
}

/// Compares the outcome of a call on a guard with whether it was good.
fn ended(what: &str, good: bool, outcome: Result<(), Error>) -> Verdict {
    match outcome {
        Ok(()) => ensure!(good, "expected {what} to fail as lost, it succeeded"),
        Err(error) => ensure!(
            !good && error.kind() == ErrorKind::Lost,
            "expected {what} to {}: {error}",
            if good { "succeed" } else { "fail as lost" }
        ),
    }
    Ok(())
}

impl<'a> Model<'a> {
    fn new(harness: &'a dyn Harness) -> Self {
        Self {
            harness,
            clients: Vec::new(),
            number: String::new(),
            locks: Vec::new(),
            leases: Vec::new(),
            claims: Vec::new(),
            entries: Vec::new(),
            remembered: HashMap::new(),
            committed: 0,
            serials: 0,
            tokens: BTreeMap::new(),
            history: Vec::new(),
        }
    }

    fn told(&self, fault: &Fault) -> Fault {
        let history = self.history.join("\n  ");
        Fault::new(format!("{}\nafter:\n  {history}", fault.message()))
    }

    fn note(&mut self, step: impl fmt::Display) {
        self.history.push(step.to_string());
    }

    /// Compares an acquisition with whether the model has it free, and its token with earlier ones.
    fn taken(
        &mut self,
        kind: &'static str,
        keys: &[usize],
        free: bool,
        token: Option<u64>,
    ) -> Verdict {
        let names: Vec<&str> = keys.iter().map(|key| KEYS[*key]).collect();
        ensure!(
            free == token.is_some(),
            "expected the {kind} of {names:?} to be {}, it was {}",
            if free { "granted" } else { "refused" },
            if free { "refused" } else { "granted" }
        );
        for key in keys {
            if let Some(token) = token {
                let last = self.tokens.insert((kind, *key), token).unwrap_or(0);
                ensure!(token > last, "expected a {kind} token over {last}, got {token}");
            }
        }
        Ok(())
    }

    /// What the guards believe is what the model knows.
    fn check_beliefs(&self) -> Verdict {
        for lock in &self.locks {
            let (held, expected, name) = (lock.guard.is_held(), !lock.lost, KEYS[lock.key]);
            ensure!(held == expected, "expected is_held of lock {name} to be {expected}");
        }
        for lease in &self.leases {
            let (held, expected, name) = (lease.guard.is_held(), lease.lives(), KEYS[lease.key]);
            ensure!(held == expected, "expected is_held of lease {name} to be {expected}");
        }
        Ok(())
    }

    async fn step(&mut self, operation: &Operation) -> Verdict {
        use Operation as O;
        match operation {
            O::Lock { client, key } => self.lock(*client, *key).await,
            O::Lease { client, key, seconds, auto_renew } => {
                self.lease(*client, *key, *seconds, *auto_renew).await
            }
            O::Claim { client, keys } => self.claim(*client, keys).await,
            O::Admit { client, key, in_progress, retain } => {
                self.admit(*client, *key, *in_progress, *retain).await
            }
            O::ReleaseLock(index) | O::DropLock(index) => {
                let Some(place) = pick(*index, self.locks.len()) else { return Ok(()) };
                let lock = self.locks.remove(place);
                let name = KEYS[lock.key];
                if matches!(operation, O::DropLock(_)) {
                    self.note(format!("client {} drops its lock of {name}", lock.client));
                    return Ok(());
                }
                self.note(format!("client {} releases its lock of {name}", lock.client));
                ended("the release of a lock", !lock.lost, lock.guard.release().await)
            }
            O::Renew(_) | O::ReleaseLease(_) | O::DropLease(_) => self.end_lease(operation).await,
            O::Write { .. } | O::Commit(_) | O::Rollback(_) | O::DropClaim(_) => {
                self.end_claim(operation).await
            }
            O::Complete(_) | O::Abandon(_) | O::DropEntry(_) => self.end_entry(operation).await,
            O::EndSessions { client } => {
                self.note(format!("the sessions of client {client} are ended"));
                self.clients[*client].link.end_sessions().await?;
                for lock in self.locks.iter_mut().filter(|lock| lock.client == *client) {
                    lock.lost = true;
                }
                for open in self.claims.iter_mut().filter(|open| open.client == *client) {
                    open.lost = true;
                }
                Ok(())
            }
            O::Housekeep { client } => {
                self.note(format!("client {client} does the housekeeping"));
                self.clients[*client].backend.housekeep().await?;
                Ok(())
            }
            O::Sleep { seconds } => {
                self.note(format!("{seconds}s pass"));
                tokio::time::sleep(Duration::from_secs(*seconds)).await;
                Ok(())
            }
        }
    }

    async fn lock(&mut self, client: usize, key: usize) -> Verdict {
        self.note(format!("client {client} locks {}", KEYS[key]));
        let free = !self.locks.iter().any(|lock| lock.key == key && !lock.lost);
        let opts = LockOptions::try_once();
        let guard = self.clients[client].backend.lock(&key_of(key), opts).await?;
        let token = match &guard {
            Some(guard) => Some(guard.token().await?.value()),
            None => None,
        };
        self.locks.extend(guard.map(|guard| Lock { guard, client, key, lost: false }));
        self.taken("lock", &[key], free, token)
    }

    async fn lease(&mut self, client: usize, key: usize, seconds: u64, auto: bool) -> Verdict {
        let how = if auto { ", renewed" } else { "" };
        self.note(format!("client {client} leases {} for {seconds}s{how}", KEYS[key]));
        let free = !self.leases.iter().any(|lease| lease.key == key && lease.lives());
        let ttl = Duration::from_secs(seconds);
        let opts = LeaseOptions::try_once().ttl(ttl);
        let opts = if auto { opts } else { opts.manual_renewal() };
        let guard = self.clients[client].backend.lease(&key_of(key), opts).await?;
        let token = guard.as_ref().map(|guard| guard.token().value());
        let expires = (!auto).then(|| Instant::now() + ttl);
        self.leases.extend(guard.map(|guard| Lease { guard, key, seconds, expires }));
        self.taken("lease", &[key], free, token)
    }

    async fn end_lease(&mut self, operation: &Operation) -> Verdict {
        let (Operation::Renew(index)
        | Operation::ReleaseLease(index)
        | Operation::DropLease(index)) = operation
        else {
            return Ok(());
        };
        let Some(place) = pick(*index, self.leases.len()) else { return Ok(()) };
        let (lives, name) = (self.leases[place].lives(), KEYS[self.leases[place].key]);
        let token = self.leases[place].guard.token();
        if let Operation::Renew(_) = operation {
            self.note(format!("the lease of {name} with token {token} is renewed"));
            let lease = &mut self.leases[place];
            let renewed = lease.guard.renew().await;
            if lives && lease.expires.is_some() {
                lease.expires = Some(Instant::now() + Duration::from_secs(lease.seconds));
            }
            return ended("the renewal of a lease", lives, renewed);
        }
        let lease = self.leases.remove(place);
        if let Operation::DropLease(_) = operation {
            self.note(format!("the lease of {name} with token {token} is dropped"));
            return Ok(());
        }
        self.note(format!("the lease of {name} with token {token} is released"));
        ended("the release of a lease", lives, lease.guard.release().await)
    }

    async fn claim(&mut self, client: usize, keys: &[usize]) -> Verdict {
        let names: Vec<&str> = keys.iter().map(|key| KEYS[*key]).collect();
        self.note(format!("client {client} claims {names:?}"));
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        let busy = |open: &Open| !open.lost && open.keys.iter().any(|key| keys.contains(key));
        // a lost claim that its client still has keeps its place in that client's own queue
        let queued =
            |open: &Open| open.client == client && open.keys.iter().any(|k| keys.contains(k));
        let free = !self.claims.iter().any(|open| busy(open) || queued(open));
        let opts = ClaimOptions::try_once();
        let taken = self.clients[client].backend.claim(&Keys::new(&names)?, opts).await?;
        let token = taken.as_ref().map(|claim| claim.token().value());
        self.claims.extend(taken.map(|claim| Open {
            claim,
            client,
            keys: keys.clone(),
            written: None,
            lost: false,
        }));
        self.taken("claim", &keys, free, token)
    }

    async fn end_claim(&mut self, operation: &Operation) -> Verdict {
        let (Operation::Write { claim: index, .. }
        | Operation::Commit(index)
        | Operation::Rollback(index)
        | Operation::DropClaim(index)) = operation
        else {
            return Ok(());
        };
        let Some(place) = pick(*index, self.claims.len()) else { return Ok(()) };
        let client = self.claims[place].client;
        if let Operation::Write { value, .. } = operation {
            self.note(format!("client {client} writes {value} in its claim"));
            let open = &mut self.claims[place];
            if !open.lost {
                self.harness.write(&mut open.claim, &self.number, *value).await?;
                open.written = Some(*value);
                let read = self.harness.read(&mut open.claim, &self.number).await?;
                ensure!(read == Some(*value), "expected its own {value}, read {read:?}");
            }
            return Ok(());
        }
        let open = self.claims.remove(place);
        match operation {
            Operation::Commit(_) => {
                self.note(format!("client {client} commits its claim"));
                if !open.lost {
                    self.committed = open.written.unwrap_or(self.committed);
                }
                let committed = open.claim.commit().await;
                ensure!(
                    committed.is_ok() != open.lost,
                    "expected the commit of a claim to fail exactly if it is lost ({}): {committed:?}",
                    open.lost
                );
            }
            Operation::Rollback(_) => {
                self.note(format!("client {client} rolls its claim back"));
                drop(open.claim.rollback().await); // a lost one may say so
            }
            _ => self.note(format!("client {client} drops its claim")),
        }
        let read = self.harness.committed(&self.number).await?.unwrap_or(0);
        let expected = self.committed;
        ensure!(read == expected, "expected {expected} to be committed, read {read}");
        Ok(())
    }

    async fn admit(&mut self, client: usize, key: usize, busy: u64, retain: u64) -> Verdict {
        let name = KEYS[key];
        self.note(format!("client {client} admits {name}, within {busy}s, kept {retain}s"));
        let opts = DedupeOptions::default()
            .in_progress(Duration::from_secs(busy))
            .retain(Duration::from_secs(retain));
        let answer = self.clients[client].backend.admit(&key_of(key), opts).await?;
        let now = Instant::now();
        let known = self.remembered.get(&key).filter(|known| known.until > now).copied();
        let fits = match (&answer, known) {
            (Admission::First(_), None) => true,
            (Admission::InProgress { .. }, Some(known)) => !known.done,
            (Admission::Done { .. }, Some(known)) => known.done,
            _ => false,
        };
        let expected = match known {
            None => "the first",
            Some(known) if known.done => "done",
            Some(_) => "in progress",
        };
        ensure!(fits, "expected {name} to be {expected}, the answer was {answer:?}");
        if let Admission::First(guard) = answer {
            self.serials += 1;
            let serial = self.serials;
            let token = guard.token().value();
            let until = now + Duration::from_secs(busy);
            self.remembered.insert(key, Remembered { serial, done: false, until });
            self.entries.push(Entry { guard, key, serial, retain });
            return self.taken("entry", &[key], true, Some(token));
        }
        Ok(())
    }

    async fn end_entry(&mut self, operation: &Operation) -> Verdict {
        let (Operation::Complete(index) | Operation::Abandon(index) | Operation::DropEntry(index)) =
            operation
        else {
            return Ok(());
        };
        let Some(place) = pick(*index, self.entries.len()) else { return Ok(()) };
        let Entry { guard, key, serial, retain } = self.entries.remove(place);
        let (name, token) = (KEYS[key], guard.token());
        let now = Instant::now();
        let own = self.remembered.get(&key).filter(|known| known.serial == serial).copied();
        let in_time = own.is_some_and(|own| own.until > now);
        // one that is overdue and that nobody took over: either answer will do
        let either = own.is_some() && !in_time;
        let (what, outcome) = match operation {
            Operation::Complete(_) => {
                self.note(format!("the entry {name} with token {token} is completed"));
                ("the completion of an entry", guard.complete().await)
            }
            Operation::Abandon(_) => {
                self.note(format!("the entry {name} with token {token} is abandoned"));
                ("the abandoning of an entry", guard.abandon().await)
            }
            _ => {
                self.note(format!("the entry {name} with token {token} is dropped"));
                drop(guard);
                if own.is_some() {
                    self.remembered.remove(&key);
                }
                return Ok(());
            }
        };
        if own.is_some() && outcome.is_ok() {
            if let Operation::Complete(_) = operation {
                let until = Instant::now() + Duration::from_secs(retain);
                self.remembered.insert(key, Remembered { serial, done: true, until });
            } else {
                self.remembered.remove(&key);
            }
        }
        match outcome {
            Err(error) if either => {
                ensure!(
                    error.kind() == ErrorKind::Lost,
                    "expected {what} to say that it is lost: {error}"
                );
                Ok(())
            }
            Ok(()) if either => Ok(()),
            outcome => ended(what, in_time, outcome),
        }
    }
}
