//! What is told of a hold, until its one end.

use std::fmt::Display;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use tracing::Level;

use super::meters::Meters;
use super::{CommitEnd, HoldEnd, Loss, RenewalEnd, TARGET, is_heard};
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Kind;
use crate::key::{Key, Keys};
use crate::lost::{LossReason, LossSignal};
use crate::token::FencingToken;

/// What is told of a hold. It lives in the guard's [`LossSignal`], where every end comes by.
#[derive(Debug)]
pub(crate) struct Held {
    backend: &'static str,
    kind: Kind,
    key: HeldName,
    token: OnceLock<FencingToken>,
    /// None where nobody heard of it.
    since: Option<Instant>,
    /// Its end has been counted.
    ended: AtomicBool,
    meters: Arc<Meters>,
}

#[derive(Debug)]
pub(super) enum HeldName {
    Key(Key),
    Keys(Keys),
    /// Nobody listened when it was taken.
    Unknown,
}

impl Held {
    pub(super) fn new(
        backend: &'static str,
        kind: Kind,
        key: HeldName,
        token: Option<FencingToken>,
        since: Option<Instant>,
        meters: Arc<Meters>,
    ) -> Self {
        let token = token.map(OnceLock::from).unwrap_or_default();
        Self { backend, kind, key, token, since, ended: AtomicBool::new(false), meters }
    }

    pub(crate) fn lost(&self, reason: Loss) {
        if self.ends() {
            return;
        }
        self.meters.lost(reason);
        let (backend, kind, key) = (self.backend, self.kind.as_str(), self.key());
        let (token, held_ms) = (self.known_token(), self.time_held(Level::WARN));
        let (closed, reason) = (reason == Loss::Closed, reason.as_str());
        if closed {
            tracing::debug!(target: TARGET, backend, kind, key, token, held_ms, reason, "lost");
        } else {
            tracing::warn!(target: TARGET, backend, kind, key, token, held_ms, reason, "lost");
        }
    }

    fn released(&self, outcome: HoldEnd) {
        if self.ends() {
            return;
        }
        self.meters.released(outcome);
        let (backend, kind, key) = (self.backend, self.kind.as_str(), self.key());
        let (token, held_ms) = (self.known_token(), self.time_held(Level::DEBUG));
        let outcome = outcome.as_str();
        tracing::debug!(target: TARGET, backend, kind, key, token, held_ms, outcome, "released");
    }

    /// Whether it has ended before; it has now.
    fn ends(&self) -> bool {
        self.ended.swap(true, Ordering::AcqRel)
    }

    /// In milliseconds. Counts the end.
    fn time_held(&self, level: Level) -> Option<u64> {
        let since = self.since.filter(|_| is_heard(level));
        let held = since.map(|since| since.elapsed());
        self.meters.holds_no_more(held.unwrap_or_default());
        held.map(|held| held.as_millis() as u64)
    }

    fn known_token(&self) -> Option<u64> {
        self.token.get().map(|token| token.value())
    }

    fn key(&self) -> Option<tracing::field::DisplayValue<&dyn Display>> {
        match &self.key {
            HeldName::Key(key) => Some(tracing::field::display(key)),
            HeldName::Keys(keys) => Some(tracing::field::display(keys)),
            HeldName::Unknown => None,
        }
    }
}

/// The [`LossSignal`] of a guard. Dropping it is the end of the hold, unless that has been told.
pub(crate) struct Tracked {
    signal: LossSignal,
    /// The hold's end is told elsewhere.
    handed_over: bool,
}

impl From<LossSignal> for Tracked {
    fn from(signal: LossSignal) -> Self {
        Self { signal, handed_over: false }
    }
}

impl Deref for Tracked {
    type Target = LossSignal;
    fn deref(&self) -> &LossSignal {
        &self.signal
    }
}

impl Tracked {
    /// Another one that tells the end of the hold in place of this one.
    pub(crate) fn hand_over(&mut self) -> Self {
        self.handed_over = true;
        self.signal.clone().into()
    }

    /// The token was fetched.
    pub(crate) fn has_token(&self, token: FencingToken) {
        if let Some(held) = self.signal.held() {
            held.token.get_or_init(|| token);
        }
    }

    /// The guard ended the hold, with this result. `lost` is why, where only the end told of it.
    pub(crate) fn ended<T>(&self, result: &Result<T>, outcome: HoldEnd, lost: LossReason) {
        let Some(held) = self.signal.held() else { return };
        match result {
            Ok(_) => held.released(outcome),
            Err(error) if error.kind() == ErrorKind::Lost => {
                held.lost(self.signal.reason().unwrap_or(lost).into());
            }
            Err(_) => held.released(HoldEnd::Unconfirmed),
        }
    }

    /// A claim was committed, or not.
    pub(crate) fn committed(&self, backend: &'static str, keys: &Keys, result: &Result<()>) {
        let held = self.signal.held();
        let outcome = match result.as_ref().map_err(Error::kind) {
            Ok(()) => CommitEnd::Committed,
            Err(ErrorKind::Lost) => CommitEnd::Lost,
            Err(ErrorKind::CommitUnknown) => CommitEnd::Unknown,
            Err(_) => CommitEnd::Error,
        };
        if let Some(held) = held {
            held.meters.committed(outcome);
        }
        let (kind, outcome) = (Kind::Claim.as_str(), outcome.as_str());
        let token = held.and_then(|held| held.token.get()).map(|token| token.value());
        match result {
            Ok(()) => tracing::debug!(
                target: TARGET, backend, kind, key = %keys, token, outcome, "commit"
            ),
            Err(error) => tracing::warn!(
                target: TARGET, backend, kind, key = %keys, token, outcome, %error, "commit"
            ),
        }
        self.ended(result, HoldEnd::Committed, LossReason::Taken);
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if !self.handed_over
            && let Some(held) = self.signal.held()
        {
            match self.signal.reason() {
                Some(reason) => held.lost(reason.into()),
                None => held.released(HoldEnd::Dropped),
            }
        }
    }
}

impl LossSignal {
    /// A renewal was answered, or not.
    pub(crate) fn renewed(&self, outcome: RenewalEnd) {
        if let Some(held) = self.held() {
            held.meters.renewed(outcome);
        }
    }

    /// Nobody renews it any more, and nobody will tell of its end.
    pub(crate) fn is_unattended(&self) {
        if let Some(held) = self.held() {
            held.lost(Loss::RuntimeEnded);
        }
    }
}
