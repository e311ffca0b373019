//! What a backend is: [`Backend`], and the driver traits from which the engine makes one.
//!
//! A backend author writes the drivers (statements and error mapping), puts an engine over each
//! ([`SessionEngine`](crate::engine::SessionEngine), [`LeaseEngine`](crate::engine::LeaseEngine),
//! [`ClaimEngine`](crate::engine::ClaimEngine), [`DedupeEngine`](crate::engine::DedupeEngine)) and
//! forwards the four traits to them. What is hard (queueing, batching, waiting, loss,
//! cancellation, drop) is the engine's.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::hash::Hash;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::claim::{ClaimLock, ClaimTx};
use crate::dedupe::Dedupe;
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Inspect;
pub use crate::inspect::{log_released, no_token};
use crate::key::Key;
use crate::lease::Lease;
use crate::named::NamedLock;
use crate::options::Deadline;
use crate::steer::random_u128;
use crate::token::FencingToken;

/// All four traits on one store, and a look into it.
#[async_trait]
pub trait Backend: NamedLock + Lease + ClaimLock + Dedupe + Inspect {
    /// A short name for messages, e.g. `postgres`.
    fn name(&self) -> &'static str;

    /// What differs between stores that keep the same promises.
    fn capabilities(&self) -> Capabilities;

    /// Creates or upgrades what the store must have (tables, sequences). Safe to run from many
    /// processes at once, and again.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the store refuses, e.g. for a missing
    /// privilege.
    ///
    /// # Cancel safety
    /// Safe: it can be run again.
    async fn migrate(&self) -> Result<()>;

    /// Deletes what has expired, in batches; never a live entry, and no token is ever lowered.
    /// Call it now and then; correctness does not depend on it.
    ///
    /// # Errors
    /// Those of a statement.
    ///
    /// # Cancel safety
    /// Safe: it stops after a batch.
    async fn housekeep(&self) -> Result<Housekeeping>;

    /// Ends the handle: releases everything that it holds, tells every guard that it is lost
    /// ([`LossReason::Closed`](crate::LossReason::Closed)) and closes what the handle opened.
    /// Later calls fail. Wrap it in a time-out at shutdown.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store did not answer.
    ///
    /// # Cancel safety
    /// Safe: it goes on in the background.
    async fn close(&self) -> Result<()>;
}

/// What differs between backends that keep the same promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// How far apart the processes may be that coordinate by it.
    pub reach: Reach,
    /// A named lock is held by a session with the store, and is free the moment that ends; false:
    /// it is kept alive by renewals, and a killed holder's is free after a ttl.
    pub session_locks: bool,
    /// [`Inspect::holdings`] lists named locks and claims by their names; false: by a hash.
    pub lock_names: bool,
    /// Leases, dedupe entries and the order of tokens survive a restart of the store.
    pub durable: bool,
    /// The name of the type that [`Claim::tx`](crate::Claim::tx) gives, for messages.
    pub claim_tx: &'static str,
}

impl Capabilities {
    /// Those of a backend whose claims give this type, as a server has them: everything, for all
    /// processes that can reach it.
    pub fn new(claim_tx: &'static str) -> Self {
        Self {
            reach: Reach::Network,
            session_locks: true,
            lock_names: true,
            durable: true,
            claim_tx,
        }
    }
}

/// How far apart processes may be that coordinate by a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// The handles of one process.
    Process,
    /// The processes of one machine.
    Machine,
    /// All that can reach the server.
    Network,
}

/// What [`Backend::housekeep`] deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Housekeeping {
    /// Expired leases.
    pub leases: u64,
    /// Expired dedupe entries.
    pub dedupe: u64,
}

impl Housekeeping {
    /// Counts of deleted leases and dedupe entries.
    pub fn new(leases: u64, dedupe: u64) -> Self {
        Self { leases, dedupe }
    }
}

/// A random owner, fresh for each acquisition: 128 bits from a secure source. It makes a repeated
/// request recognisable and a stale one harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u128);

impl Owner {
    /// A fresh one.
    pub fn fresh() -> Self {
        Self(random_u128())
    }
}

/// The number by which the store knows a session.
pub type SessionId = u64;

// --- named locks ---------------------------------------------------------------------------

/// Opens the sessions of the [`SessionEngine`](crate::engine::SessionEngine).
#[async_trait]
pub trait SessionDriver: Debug + Send + Sync + 'static {
    /// What the store knows a lock by. Keys with equal ids are one lock.
    type Id: Clone + Debug + Eq + Ord + Hash + Send + Sync + 'static;
    /// An open session.
    type Session: Session<Id = Self::Id>;

    /// The name of the backend.
    fn backend(&self) -> &'static str;

    /// The id of a key.
    fn id(&self, key: &Key) -> Self::Id;

    /// Opens a session of its own, outside of any pool. The engine limits its time.
    ///
    /// Dropping the future must leave nothing behind.
    async fn open(&self) -> Result<Self::Session>;

    /// The limits of the engine on this store.
    fn limits(&self) -> SessionLimits {
        SessionLimits::default()
    }
}

/// The stated bounds of a [`SessionEngine`](crate::engine::SessionEngine).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SessionLimits {
    /// An idle session is asked for a sign of life so often; default 5 s.
    pub keepalive: Duration,
    /// An answer takes at most so long, otherwise the session counts as lost; default 5 s. A
    /// silent network is noticed within `keepalive + answer`.
    pub answer: Duration,
    /// Locks on the main session and those that it spreads over; more are refused as
    /// [`ErrorKind::Exhausted`]. Default 10,000.
    pub max_held: usize,
    /// Locks on one session, for a store where a lock costs the more the more its session holds:
    /// past it they go on a further session. Default: no bound, so that there is only the main one.
    pub max_per_session: usize,
    /// Requests that go out in one exchange; default 512.
    pub max_batch: usize,
    /// Sessions that wait on the store for keys that others hold; past it the engine polls.
    /// Default 8.
    pub max_waiters: usize,
    /// The longest single wait on the store (a long statement can hold back the store's clean-up);
    /// default 10 s.
    pub max_wait: Duration,
    /// An idle session other than the main one is closed after so long; default 30 s.
    pub waiter_idle: Duration,
    /// Consecutive local hand-overs of a lock before other processes get their turn; default 16.
    pub max_handovers: u32,
    /// The longest time of consecutive local hand-overs; default 100 ms.
    pub handover_time: Duration,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            keepalive: Duration::from_secs(5),
            answer: Duration::from_secs(5),
            max_held: 10_000,
            max_per_session: usize::MAX,
            max_batch: 512,
            max_waiters: 8,
            max_wait: Duration::from_secs(10),
            waiter_idle: Duration::from_secs(30),
            max_handovers: 16,
            handover_time: Duration::from_millis(100),
        }
    }
}

/// One open session, used by one task at a time.
///
/// Any error of a method means that the session is over: the engine drops it, and every lock on
/// it counts as lost. Dropping it closes the connection.
#[async_trait]
pub trait Session: Debug + Send + 'static {
    /// As [`SessionDriver::Id`].
    type Id;

    /// The number by which the store knows it.
    fn id(&self) -> SessionId;

    /// One round trip: first the kills, then the releases, then the tries and tokens. Without any
    /// of them it is a sign of life and must still ask the store.
    async fn exchange(&mut self, batch: &Batch<Self::Id>) -> Result<BatchAnswer>;

    /// Waits on the store for a lock, at most about `wait`.
    async fn wait(&mut self, id: &Self::Id, wait: Duration) -> Result<Try>;

    /// Ends when the store has closed the idle session. Must be cancel safe. Where a store cannot
    /// tell, leave it pending: the keepalive notices later.
    async fn closed(&mut self) -> Error {
        std::future::pending().await
    }

    /// Says good-bye to the store.
    async fn close(self);
}

/// What goes out together in [`Session::exchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<Id> {
    /// Sessions of this handle that the store must end.
    pub kill: Vec<SessionId>,
    /// Locks to free.
    pub release: Vec<Id>,
    /// Locks to try, without waiting.
    pub tries: Vec<Id>,
    /// Held locks for which a token is wanted.
    pub tokens: Vec<Id>,
}

impl<Id> Default for Batch<Id> {
    fn default() -> Self {
        Self { kill: Vec::new(), release: Vec::new(), tries: Vec::new(), tokens: Vec::new() }
    }
}

impl<Id> Batch<Id> {
    /// Whether it asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.kill.is_empty()
            && self.release.is_empty()
            && self.tries.is_empty()
            && self.tokens.is_empty()
    }
}

/// The answers to a [`Batch`], each list in the order of the questions.
#[derive(Clone, Debug, Default)]
pub struct BatchAnswer {
    /// Whether the store held each lock for this session until now.
    pub released: Vec<bool>,
    /// The outcome of each try.
    pub tries: Vec<Try>,
    /// The tokens.
    pub tokens: Vec<FencingToken>,
}

/// The outcome of trying one lock.
#[derive(Clone, Debug)]
pub enum Try {
    /// It is ours; with its token where that came for free.
    Granted(Option<FencingToken>),
    /// Somebody else holds it.
    Busy,
    /// The store refused this one; the session and its other locks are fine.
    Refused(Error),
}

// --- leases --------------------------------------------------------------------------------

/// The statements of the [`LeaseEngine`](crate::engine::LeaseEngine).
///
/// The engine calls each from a task of its own and limits its time. A call whose future is
/// dropped may still take effect; every statement compares the owner, so that it is harmless.
#[async_trait]
pub trait LeaseDriver: Debug + Send + Sync + 'static {
    /// The name of the backend.
    fn backend(&self) -> &'static str;

    /// Takes the lease if it is free, expired, or already owned by `owner` (a repeated request).
    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry>;

    /// As [`acquire`](Self::acquire), for one who waits if somebody else holds it: a store where
    /// the holder must know that somebody waits notes it in the same statement.
    async fn acquire_waiting(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.acquire(key, owner, ttl).await
    }

    /// Renews those that are still owned and not expired; says of each whether it was.
    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>>;

    /// As [`renew`](Self::renew), for a store where one lease can fail on its own, e.g. because
    /// somebody's transaction keeps its row: the others must not be lost with it.
    async fn renew_each(&self, renewals: &[Renewal]) -> Result<Vec<Result<bool>>> {
        let renewed = self.renew(renewals).await?;
        Ok(renewed.into_iter().map(Ok).collect())
    }

    /// Frees the lease if `owner` has it, and wakes those who wait for it; says whether it had it.
    async fn release(&self, key: &Key, owner: Owner) -> Result<bool>;

    /// As [`release`](Self::release), for a named lock after its hand-overs; says besides whether
    /// others wait for it. By default they might.
    async fn hand_back(&self, key: &Key, owner: Owner) -> Result<Freed> {
        Ok(Freed { ours: self.release(key, owner).await?, awaited: true })
    }

    /// Makes a token for a lease that `owner` holds, greater than all before it, and keeps it in the
    /// place of the one that the lease had; none if `owner` does not hold it. Asked for by named
    /// locks that were [handed on](LeaseLimits::max_handovers).
    async fn token(&self, key: &Key, owner: Owner) -> Result<Option<FencingToken>> {
        let _ = (key, owner);
        Err(Error::new(ErrorKind::Unsupported, "a held lease keeps its token"))
    }

    /// See [`LeaseGuard::verify`](crate::LeaseGuard::verify).
    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()>;

    /// What a [`Wake`] calls a key; two keys may share a number.
    fn wake_id(&self, key: &Key) -> u64;

    /// Opens the one subscription of this handle; `None` where the store has no push.
    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>>;

    /// The limits of the engine on this store.
    fn limits(&self) -> LeaseLimits {
        LeaseLimits::default()
    }
}

/// The stated bounds of a [`LeaseEngine`](crate::engine::LeaseEngine).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LeaseLimits {
    /// A statement takes at most so long; default 5 s. Renewals take at most a quarter of the
    /// shortest ttl among them.
    pub answer: Duration,
    /// Leases renewed by one statement; default 2,500.
    pub max_batch: usize,
    /// A waiter that heard nothing looks again after at most so long; default 1 s.
    pub max_poll: Duration,
    /// Whether to listen from the first acquisition on, because the store tells of changes to held
    /// leases ([`Wake::Changed`]); otherwise from the first wait. Default false.
    pub watch_held: bool,
    /// Consecutive hand-overs of a named lock within the process, without a trip to the store,
    /// before other processes get their turn. Default 0: it is released each time. Leases always
    /// are. Needs [`LeaseDriver::token`].
    pub max_handovers: u32,
    /// The longest time of consecutive hand-overs; default 100 ms.
    pub handover_time: Duration,
    /// After them, so long only others ask for the lock if they wait for it; default 1 ms.
    pub handover_pause: Duration,
}

impl Default for LeaseLimits {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(5),
            max_batch: 2_500,
            max_poll: Duration::from_secs(1),
            watch_held: false,
            max_handovers: 0,
            handover_time: Duration::from_millis(100),
            handover_pause: Duration::from_millis(1),
        }
    }
}

/// The answer to [`LeaseDriver::acquire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseTry {
    /// It is ours.
    Acquired(FencingToken),
    /// Somebody else holds it.
    Busy {
        /// The time until it expires if it is not renewed, by the store's clock.
        expires_in: Duration,
    },
}

/// The answer to [`LeaseDriver::hand_back`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The owner had it.
    pub ours: bool,
    /// Others wait for it.
    pub awaited: bool,
}

/// One lease to renew.
#[derive(Clone, Debug)]
pub struct Renewal {
    /// Which.
    pub key: Key,
    /// For whom.
    pub owner: Owner,
    /// For how long from now.
    pub ttl: Duration,
}

/// The news of a subscription.
#[async_trait]
pub trait WakeSource: Debug + Send + 'static {
    /// The next piece of news. An error ends the subscription; the engine opens it again and
    /// wakes everybody, since news may have been missed. Need not be cancel safe.
    async fn next(&mut self) -> Result<Wake>;
}

/// A piece of news: a hint, never a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// A lease was released.
    Released(u64),
    /// A lease was deleted or changed without its holder's doing: who believes to hold it checks.
    Changed(u64),
    /// News may have been missed.
    Missed,
}

// --- claims --------------------------------------------------------------------------------

/// Begins the transactions of the [`ClaimEngine`](crate::engine::ClaimEngine).
#[async_trait]
pub trait ClaimDriver: Debug + Send + Sync + 'static {
    /// What the store knows a lock by. Keys with equal ids are one lock. Locks are taken in the
    /// order of their ids.
    type Id: Clone + Debug + Eq + Ord + Hash + Send + Sync + 'static;

    /// The name of the backend.
    fn backend(&self) -> &'static str;

    /// The type behind [`ClaimTx::tx`].
    fn tx_type(&self) -> TypeId;

    /// The id of a key.
    fn id(&self, key: &Key) -> Self::Id;

    /// Opens a transaction that holds all of `ids` (sorted, distinct), or gives `None` when the
    /// deadline passes; tries once if it has passed already.
    ///
    /// The engine drops the future when its caller is gone or the deadline is well past: that
    /// must leave nothing behind, e.g. by closing the connection instead of pooling it.
    async fn begin(&self, ids: &[Self::Id], deadline: Deadline)
    -> Result<Option<Box<dyn ClaimTx>>>;

    /// How long the store may take to answer beyond the wait; default 5 s.
    fn answer_limit(&self) -> Duration {
        Duration::from_secs(5)
    }
}

// --- dedupe --------------------------------------------------------------------------------

/// The statements of the [`DedupeEngine`](crate::engine::DedupeEngine).
#[async_trait]
pub trait DedupeDriver: Debug + Send + Sync + 'static {
    /// The name of the backend.
    fn backend(&self) -> &'static str;

    /// Admits each key, in one round trip if possible; answers in their order. A repeated request
    /// of the same owner is answered like the first. `items` have distinct keys.
    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>>;

    /// Marks the key done for `retain` if `owner` has it in progress, or already did so; says
    /// whether.
    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool>;

    /// Forgets the key if `owner` has it in progress; says whether.
    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool>;

    /// How long a statement may take; default 5 s.
    fn answer_limit(&self) -> Duration {
        Duration::from_secs(5)
    }
}

/// One key to admit.
#[derive(Clone, Debug)]
pub struct Admit {
    /// Which.
    pub key: Key,
    /// For whom.
    pub owner: Owner,
    /// See [`DedupeOptions::in_progress`](crate::DedupeOptions::in_progress); `None`: done at once.
    pub in_progress: Option<Duration>,
    /// How long it is kept once done.
    pub retain: Duration,
}

/// The answer to an [`Admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmitAnswer {
    /// It is the owner's.
    First(FencingToken),
    /// Somebody else is at it.
    InProgress {
        /// Since when, by the store's clock.
        since: SystemTime,
    },
    /// It is done.
    Done {
        /// Since when, by the store's clock.
        at: SystemTime,
    },
}
