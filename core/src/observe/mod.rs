//! What an operator sees: the spans and events of [`tracing`], and metrics. Nothing to call here.
//!
//! The engine and the guards tell it, so it is the same on every backend. Keys are logged; they
//! are never labels of a metric. No password can appear: errors do not hold one.
//!
//! # Spans and events
//!
//! All have the target `leasehold` (`RUST_LOG=leasehold=debug`). Messages, fields and values below
//! are kept stable; others may be added.
//!
//! | span | level | fields | around |
//! |---|---|---|---|
//! | `acquire` | debug | `backend` `kind` `key` `token` `wait_ms` `outcome` | a call of `lock`, `lease` or `claim`, its wait included |
//! | `admit` | debug | `backend` `kind` `keys` | a call of `admit` or `admit_many` |
//!
//! | event | level | fields besides `backend` and `kind` | when |
//! |---|---|---|---|
//! | `waiting` | debug | `key` | others have it, and the call begins to wait; once per call, in its span [^claims] |
//! | `acquire ended` | debug | `key` `token` `wait_ms` `outcome` `error` | at the end of the call, in its span |
//! | `admission` | debug | `key` `token` `outcome` `error` | for each key, in the span |
//! | `renewal failed` | warn | `key`, or `leases` (how many), `error` | a renewal got no answer or was refused; it is tried again |
//! | `lost` | warn | `key` `token` `held_ms` `reason` | what a guard held is lost; debug where the reason is `closed` |
//! | `released` | debug | `key` `token` `held_ms` `outcome` | a guard ended otherwise |
//! | `commit` | debug | `key` `token` `outcome` `error` | a claim was committed; warn unless the outcome is `committed` |
//! | `session opened` | debug | `session` `role` | a session for named locks is open; the role is `main`, `further` or `waiter` |
//! | `session lost` | warn | `session` `role` `locks` `error` | it ended unwanted, and with it so many locks; debug for none |
//! | `no session` | warn | `error` | none could be opened; it is tried again |
//! | `released by force` | warn | `key` `holder` `session` | somebody took it away from its holder |
//! | `released by its token` | info | `key` `token` | it was freed for a holder that had ended |
//!
//! [^claims]: for a claim, only where another caller of this process has it: what it waits for
//! on the store, the backend alone knows.
//!
//! Of an event on a renewal or a session the kind is that of the machinery: `lease` or `lock`. (On
//! stores without sessions a lease stands in for a lock.)
//!
//! | field | values |
//! |---|---|
//! | `backend` | the name of the backend, e.g. `postgres` |
//! | `kind` | `lock` `lease` `claim` `dedupe` |
//! | `key` | the key, or the keys of a claim |
//! | `token` | the fencing token; absent where it is not known (yet) |
//! | `wait_ms` | milliseconds from the call to its end |
//! | `held_ms` | milliseconds from the end of the call to the end of the hold |
//! | `reason` | of a loss: `session_ended` `silent` `expired` `taken` `closed` (those of [`LossReason`](crate::LossReason)), `runtime_ended` (the runtime that renewed a lease is gone, the guard is not) |
//! | `outcome` of `acquire` | `acquired` `busy` `error` `cancelled` (the caller dropped the call) |
//! | `outcome` of `admission` | `first` `in_progress` `done` `error` `cancelled` |
//! | `outcome` of `released` | `released` `dropped` `committed` `rolled_back` `completed` `abandoned` `unconfirmed` (it ended, but the store did not say so) |
//! | `outcome` of `commit` | `committed` `lost` `unknown` `error` |
//! | `outcome` of a renewal | `renewed` `lost` `error` |
//!
//! # Metrics
//!
//! With the feature `metrics`, by the facade of the crate `metrics` 0.24. Install the recorder
//! before the first call: each handle keeps what it was given then. Values are those of the fields
//! of the same names.
//!
//! | name | type | labels | counts |
//! |---|---|---|---|
//! | `leasehold_acquisitions_total` | counter | `backend` `kind` `outcome` | calls of `lock`, `lease` and `claim` |
//! | `leasehold_admissions_total` | counter | `backend` `outcome` | keys of `admit` and `admit_many` |
//! | `leasehold_releases_total` | counter | `backend` `kind` `outcome` | holds that ended as wanted |
//! | `leasehold_losses_total` | counter | `backend` `kind` `reason` | holds that were lost |
//! | `leasehold_renewals_total` | counter | `backend` `outcome` | renewals, one per lease |
//! | `leasehold_commits_total` | counter | `backend` `outcome` | commits of claims |
//! | `leasehold_held` | gauge | `backend` `kind` | what is held now |
//! | `leasehold_wait_seconds` | histogram | `backend` `kind` `outcome` | seconds from the call of `lock`, `lease` or `claim` to its end |
//! | `leasehold_hold_seconds` | histogram | `backend` `kind` | seconds from then to the end of the hold |
//!
//! Every hold ends once, as a release or as a loss, so for each `backend` and `kind`:
//!
//! ```text
//! held = acquisitions{outcome="acquired"} - releases - losses
//! ```
//!
//! For the kind `dedupe` it is `admissions{outcome="first"}`, without those that are done at once:
//! nothing is held then. A dedupe entry that can be taken over counts as held until its guard
//! ends; it is a loss then. A guard that is forgotten (`mem::forget`) still holds, and counts.

mod hold;
mod labels;
mod meters;

use std::fmt::{self, Debug, Display};
use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use tracing::field::Empty;
use tracing::{Level, Span};

pub(crate) use self::hold::{Held, Tracked};
pub(crate) use self::labels::{AdmitEnd, CallEnd, CommitEnd, HoldEnd, Loss, RenewalEnd};

use self::hold::HeldName;
use self::meters::Meters;
use crate::dedupe::Admission;
use crate::error::{Error, Result};
use crate::inspect::Kind;
use crate::key::{Key, Keys};
use crate::token::FencingToken;

/// The target of all spans and events.
pub const TARGET: &str = "leasehold";

/// What an engine tells: of one backend and kind.
#[derive(Debug)]
pub(crate) struct Observer {
    backend: &'static str,
    kind: Kind,
    /// Made at the first call, when the recorder is there.
    meters: OnceLock<Arc<Meters>>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name<'a> {
    Key(&'a Key),
    Keys(&'a Keys),
}

impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => Display::fmt(key, f),
            Self::Keys(keys) => Display::fmt(keys, f),
        }
    }
}

/// A guard, as far as it is observed.
pub(crate) trait Observed {
    fn tracked(&self) -> &Tracked;
    fn known_token(&self) -> Option<FencingToken>;
}

impl Observer {
    pub(crate) fn new(backend: &'static str, kind: Kind) -> Self {
        Self { backend, kind, meters: OnceLock::new() }
    }

    fn meters(&self) -> &Arc<Meters> {
        self.meters.get_or_init(|| Arc::new(Meters::new(self.backend, self.kind)))
    }

    /// A call for a lock, lease or claim begins. Its work runs in the call's span.
    pub(crate) fn call<'a>(&'a self, name: Name<'a>) -> Call<'a> {
        let span = tracing::debug_span!(
            target: TARGET,
            "acquire",
            backend = self.backend,
            kind = self.kind.as_str(),
            key = %name,
            token = Empty,
            wait_ms = Empty,
            outcome = Empty,
        );
        let start = is_heard(Level::DEBUG).then(Instant::now);
        Call { observer: self, name, span, start, ended: false }
    }

    /// The call begins to wait for what others have.
    pub(crate) fn waiting(&self, name: Name<'_>) {
        let (backend, kind) = (self.backend, self.kind.as_str());
        tracing::debug!(target: TARGET, backend, kind, key = %name, "waiting");
    }

    /// A question for keys begins. Its work runs in the question's span.
    pub(crate) fn question<'a>(&'a self, keys: &'a [Key]) -> Question<'a> {
        let span = tracing::debug_span!(
            target: TARGET,
            "admit",
            backend = self.backend,
            kind = self.kind.as_str(),
            keys = keys.len(),
        );
        Question { observer: self, keys, span, ended: false }
    }

    fn hold(
        &self,
        name: Name<'_>,
        since: Option<Instant>,
        guard: &Tracked,
        token: Option<FencingToken>,
    ) {
        let (backend, kind) = (self.backend, self.kind);
        let key = match name {
            Name::Key(key) => HeldName::Key(key.clone()),
            // not for nobody: this clone has a cost
            Name::Keys(keys) if since.is_some() => HeldName::Keys(keys.clone()),
            Name::Keys(_) => HeldName::Unknown,
        };
        let meters = self.meters();
        // before it can end
        meters.holds();
        if !guard.observe(Held::new(backend, kind, key, token, since, meters.clone())) {
            meters.holds_not();
        }
    }
}

/// Whether anybody wants to know times: to look at the clock costs more than all the rest here.
fn is_heard(level: Level) -> bool {
    cfg!(feature = "metrics")
        || match level {
            Level::WARN => tracing::enabled!(target: TARGET, Level::WARN),
            _ => tracing::enabled!(target: TARGET, Level::DEBUG),
        }
}

/// A call that is under way; dropping it is its cancellation.
#[must_use]
pub(crate) struct Call<'a> {
    observer: &'a Observer,
    name: Name<'a>,
    span: Span,
    /// None where nobody hears of it.
    start: Option<Instant>,
    ended: bool,
}

impl Call<'_> {
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Counts what it gave. A guard counts as held from here on: what was granted to a caller that
    /// is gone never does.
    pub(crate) fn end<G: Observed>(mut self, answer: Result<Option<G>>) -> Result<Option<G>> {
        match &answer {
            Ok(Some(guard)) => {
                let token = guard.known_token();
                let now = is_heard(Level::WARN).then(Instant::now);
                self.tell(now, CallEnd::Acquired, token, None);
                self.observer.hold(self.name, now, guard.tracked(), token);
            }
            Ok(None) => self.tell(self.now(), CallEnd::Busy, None, None),
            Err(error) => self.tell(self.now(), CallEnd::Error, None, Some(error)),
        }
        answer
    }

    fn now(&self) -> Option<Instant> {
        self.start.map(|_| Instant::now())
    }

    fn tell(
        &mut self,
        now: Option<Instant>,
        outcome: CallEnd,
        token: Option<FencingToken>,
        error: Option<&Error>,
    ) {
        self.ended = true;
        let wait = now.zip(self.start).map(|(now, start)| now.saturating_duration_since(start));
        self.observer.meters().acquired(outcome, wait.unwrap_or_default());
        let (backend, kind) = (self.observer.backend, self.observer.kind.as_str());
        let (token, outcome) = (token.map(FencingToken::value), outcome.as_str());
        let wait_ms = wait.map(|wait| wait.as_millis() as u64);
        if !self.span.is_disabled() {
            self.span.record("wait_ms", wait_ms).record("outcome", outcome);
            if let Some(token) = token {
                self.span.record("token", token);
            }
        }
        let (key, error) = (&self.name, error.map(tracing::field::display));
        tracing::debug!(
            target: TARGET, parent: &self.span,
            backend, kind, %key, token, wait_ms, outcome, error, "acquire ended"
        );
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(self.now(), CallEnd::Cancelled, None, None);
        }
    }
}

/// A question to dedupe that is under way; dropping it is its cancellation.
#[must_use]
pub(crate) struct Question<'a> {
    observer: &'a Observer,
    keys: &'a [Key],
    span: Span,
    ended: bool,
}

impl Question<'_> {
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Counts the answers; `holds` is false where nothing stays in progress.
    pub(crate) fn end(
        mut self,
        holds: bool,
        answer: Result<Vec<Admission>>,
    ) -> Result<Vec<Admission>> {
        self.ended = true;
        match &answer {
            Ok(admissions) => {
                let now = is_heard(Level::WARN).then(Instant::now);
                for (key, admission) in self.keys.iter().zip(admissions) {
                    let Admission::First(guard) = admission else {
                        self.tell(key, admission.into(), None, None);
                        continue;
                    };
                    let token = Some(guard.token());
                    self.tell(key, AdmitEnd::First, token, None);
                    if holds {
                        self.observer.hold(Name::Key(key), now, guard.tracked(), token);
                    }
                }
            }
            Err(error) => {
                for key in self.keys {
                    self.tell(key, AdmitEnd::Error, None, Some(error));
                }
            }
        }
        answer
    }

    fn tell(
        &self,
        key: &Key,
        outcome: AdmitEnd,
        token: Option<FencingToken>,
        error: Option<&Error>,
    ) {
        self.observer.meters().admitted(outcome);
        let (backend, kind) = (self.observer.backend, self.observer.kind.as_str());
        let (token, outcome) = (token.map(FencingToken::value), outcome.as_str());
        let error = error.map(tracing::field::display);
        tracing::debug!(
            target: TARGET, parent: &self.span,
            backend, kind, %key, token, outcome, error, "admission"
        );
    }
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        if !self.ended {
            for key in self.keys {
                self.tell(key, AdmitEnd::Cancelled, None, None);
            }
        }
    }
}

impl From<&Admission> for AdmitEnd {
    fn from(admission: &Admission) -> Self {
        match admission {
            Admission::First(_) => Self::First,
            Admission::InProgress { .. } => Self::InProgress,
            Admission::Done { .. } => Self::Done,
        }
    }
}
