//! Who holds what: [`Inspect`], for operators and tools.

use std::fmt::{self, Debug};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::holder::Holder;
use crate::key::Key;
use crate::token::FencingToken;

/// Shows who holds what in the handle's namespace, and takes it away by force.
///
/// It is for people and tools: a picture is old when it arrives, so a service decides nothing by
/// it. It needs more of the store than the four traits do (to see other sessions, to end them),
/// hence errors of its own.
#[async_trait]
pub trait Inspect: Debug + Send + Sync + 'static {
    /// What is held now, in the order of kind and name.
    ///
    /// Where the store keeps only a hash of a name (see
    /// [`Capabilities::lock_names`](crate::Capabilities::lock_names)), it is listed as
    /// [`HeldName::Hashed`], whatever prefix is asked for; a question for one key is answered
    /// by its name everywhere.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the store cannot tell, [`ErrorKind::Backend`] if it refuses,
    /// e.g. for a missing privilege, [`ErrorKind::Unavailable`] if it does not answer.
    ///
    /// # Cancel safety
    /// Safe.
    async fn holdings(&self, query: &HoldingQuery) -> Result<Vec<Holding>> {
        let _ = query;
        Err(unsupported("tell who holds what"))
    }

    /// Takes it away from whoever holds it, and gives what that was; `None`: nobody held it. A
    /// dedupe entry is forgotten, also one that is done.
    ///
    /// The displaced holder is told (its guard is lost) as soon as the store lets it know, for a
    /// lease at its next renewal at the latest; what it writes meanwhile is rejected where writes
    /// are guarded by tokens. Where locks or claims belong to a session of the store
    /// ([`Capabilities::session_locks`](crate::Capabilities::session_locks)), that session is
    /// ended: **all** that it holds is lost with it.
    ///
    /// # Errors
    /// As [`holdings`](Self::holdings).
    ///
    /// # Cancel safety
    /// Safe: it has happened or not.
    async fn force_release(&self, kind: Kind, key: &Key) -> Result<Option<Holding>> {
        let _ = (kind, key);
        Err(unsupported("release by force"))
    }

    /// Frees a lease, or a named lock that lives by a ttl, for a holder that has ended and could not
    /// do it itself: only if it is still held under this token, never a successor's. True: it was
    /// held so until now; false: it was free, or somebody else's.
    ///
    /// A named lock that its process has handed on, from one caller to the next without a trip to the
    /// store, goes by the token of the one before until its holder asks for its own
    /// ([`LockGuard::token`](crate::LockGuard::token)): so it is freed for a process that has died,
    /// whoever in it held the lock.
    ///
    /// Who calls it must know that the holder's work has ended. Those who wait are woken as by a
    /// release; a holder that is alive after all is told as by [`force_release`](Self::force_release).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for what has no token of its own to go by: claims, dedupe entries,
    /// and named locks that belong to a session of the store
    /// ([`Capabilities::session_locks`](crate::Capabilities::session_locks)), which the store frees
    /// by itself when the holder's process ends. Otherwise as [`holdings`](Self::holdings).
    ///
    /// # Cancel safety
    /// Safe: it has happened or not.
    async fn release_by_token(&self, kind: Kind, key: &Key, token: FencingToken) -> Result<bool> {
        let _ = (key, token);
        Err(no_token(kind))
    }

    /// Looks for what is wrong or risky with the store, the way to it and its settings: version,
    /// privileges, poolers, time-outs, eviction, replication, clock. Findings that are well are
    /// told too.
    ///
    /// # Errors
    /// Only where nothing could be asked at all; what fails on the way is a finding.
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
}

fn unsupported(what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("this backend cannot {what}"))
}

/// What [`Inspect::release_by_token`] answers for a kind that it cannot free.
pub fn no_token(kind: Kind) -> Error {
    let detail = match kind {
        Kind::Lock => "the store frees a named lock by itself when its holder's session ends",
        Kind::Lease => "this backend cannot release a lease by its token",
        Kind::Claim => "the store frees a claim by itself when its transaction ends or expires",
        Kind::Dedupe => {
            "an entry of dedupe is completed, abandoned or taken over by its owner only"
        }
    };
    Error::new(ErrorKind::Unsupported, detail)
}

/// The four kinds of what is held; those of one name never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Of [`NamedLock`](crate::NamedLock).
    Lock,
    /// Of [`Lease`](crate::Lease).
    Lease,
    /// Of [`ClaimLock`](crate::ClaimLock): one key of a claim.
    Claim,
    /// Of [`Dedupe`](crate::Dedupe).
    Dedupe,
}

impl Kind {
    /// All of them, in order.
    pub const ALL: [Self; 4] = [Self::Lock, Self::Lease, Self::Claim, Self::Dedupe];

    /// Its name: `lock`, `lease`, `claim` or `dedupe`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Lease => "lease",
            Self::Claim => "claim",
            Self::Dedupe => "dedupe",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What to ask [`Inspect::holdings`] for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldingQuery {
    /// These kinds; default all.
    pub kinds: Vec<Kind>,
    /// These names; default all.
    pub names: NameQuery,
    /// Dedupe entries that are done too; default false: only those in progress.
    pub done: bool,
    /// At most so many; default 1,000.
    pub limit: usize,
}

/// Which names to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameQuery {
    /// Those that begin with this; empty for all.
    Prefix(String),
    /// This one.
    Key(Key),
}

impl Default for HoldingQuery {
    fn default() -> Self {
        Self {
            kinds: Kind::ALL.to_vec(),
            names: NameQuery::Prefix(String::new()),
            done: false,
            limit: 1_000,
        }
    }
}

impl HoldingQuery {
    /// One key, of any kind.
    pub fn key(key: &Key) -> Self {
        Self { names: NameQuery::Key(key.clone()), ..Self::default() }
    }

    /// All names that begin with `prefix`.
    pub fn prefix(prefix: impl Into<String>) -> Self {
        Self { names: NameQuery::Prefix(prefix.into()), ..Self::default() }
    }

    /// Only these kinds.
    #[must_use]
    pub fn kinds(self, kinds: impl Into<Vec<Kind>>) -> Self {
        Self { kinds: kinds.into(), ..self }
    }

    /// Dedupe entries that are done too.
    #[must_use]
    pub fn done(self, done: bool) -> Self {
        Self { done, ..self }
    }

    /// At most so many.
    #[must_use]
    pub fn limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Whether this kind is asked for.
    pub fn wants(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether this name is asked for.
    pub fn matches(&self, key: &Key) -> bool {
        match &self.names {
            NameQuery::Prefix(prefix) => key.as_str().starts_with(prefix),
            NameQuery::Key(wanted) => wanted == key,
        }
    }

    /// Puts in order what a store gave, and cuts it to the limit; for backend authors.
    pub fn arrange(&self, mut holdings: Vec<Holding>) -> Vec<Holding> {
        holdings.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        holdings.truncate(self.limit);
        holdings
    }
}

/// Something that is held. What the store does not know is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holding {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: HeldName,
    /// Whose it is.
    pub holder: Option<Holder>,
    /// The store's own name for the session that holds it, e.g. a connection's number.
    pub session: Option<String>,
    /// For how long it has been held (a dedupe entry: been in progress or done), by the store's
    /// clock.
    pub held_for: Option<Duration>,
    /// The time until it ends by itself, by the store's clock; none for what a session or
    /// transaction holds.
    pub expires_in: Option<Duration>,
    /// Its fencing token.
    pub token: Option<FencingToken>,
    /// How many wait for it on the store, as far as it sees them.
    pub waiters: Option<u32>,
    /// For a dedupe entry: whether it is done. Otherwise false.
    pub done: bool,
}

impl Holding {
    /// One of which nothing else is known.
    pub fn new(kind: Kind, name: HeldName) -> Self {
        Self {
            kind,
            name,
            holder: None,
            session: None,
            held_for: None,
            expires_in: None,
            token: None,
            waiters: None,
            done: false,
        }
    }

    /// Logs that it was taken away by force; for backend authors.
    pub fn log_displaced(&self, backend: &'static str) {
        let holder = self.holder.as_ref().map(tracing::field::display);
        let session = self.session.as_deref();
        tracing::warn!(
            target: crate::observe::TARGET,
            backend, kind = self.kind.as_str(), key = %self.name, holder, session, "released by force"
        );
    }
}

/// Logs that [`Inspect::release_by_token`] has freed something.
pub fn log_released(backend: &'static str, kind: Kind, key: &Key, token: FencingToken) {
    tracing::info!(
        target: crate::observe::TARGET,
        backend, kind = kind.as_str(), %key, %token, "released by its token"
    );
}

/// The name of a [`Holding`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeldName {
    /// The key.
    Key(Key),
    /// The store keeps only this hash of it.
    Hashed(String),
}

impl HeldName {
    /// The key, where it is known.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Key(key) => Some(key),
            Self::Hashed(_) => None,
        }
    }
}

impl fmt::Display for HeldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.pad(key.as_str()),
            Self::Hashed(hash) => f.pad(&format!("(hash {hash})")),
        }
    }
}

/// One thing that [`Inspect::diagnose`] looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at, in a few words, e.g. `idle_session_timeout`.
    pub topic: &'static str,
    /// What was found.
    pub found: String,
    /// What to do about it; empty where all is well.
    pub advice: String,
}

impl Finding {
    /// All is well.
    pub fn fine(topic: &'static str, found: impl Into<String>) -> Self {
        Self { severity: Severity::Fine, topic, found: found.into(), advice: String::new() }
    }

    /// It can go wrong one day.
    pub fn warning(
        topic: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let severity = Severity::Warning;
        Self { severity, topic, found: found.into(), advice: advice.into() }
    }

    /// It is wrong: something does not work, or a promise does not hold.
    pub fn fault(topic: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let severity = Severity::Fault;
        Self { severity, topic, found: found.into(), advice: advice.into() }
    }
}

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// All is well.
    Fine,
    /// It can go wrong one day.
    Warning,
    /// Something does not work, or a promise does not hold.
    Fault,
}
