//! Dedupe: [`Dedupe`], [`Admission`], [`DedupeGuard`] and [`DedupeExt`].

use std::fmt::{self, Debug};
use std::future::Future;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lost::{LossReason, LossSignal, Lost};
use crate::named::lost_error;
use crate::observe::{HoldEnd, Tracked};
use crate::options::DedupeOptions;
use crate::token::FencingToken;

/// First one wins: each key is admitted once and remembered.
///
/// An entry that is in progress is not one that is done: a crash between them leaves the key to be
/// taken over after [`DedupeOptions::in_progress`], a failure frees it at once. Only the store's
/// clock counts.
#[async_trait]
pub trait Dedupe: Debug + Send + Sync + 'static {
    /// Admits `key` if it is neither in progress nor done.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a time out of range, [`ErrorKind::Unavailable`] if the
    /// store could not be reached or did not answer.
    ///
    /// # Cancel safety
    /// Safe: an admission that was granted meanwhile is abandoned in the background (one that is
    /// done at once stays done).
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission>;

    /// Admits many keys, in one round trip where the backend can; answers are in the order of
    /// `keys`. A key that occurs twice is admitted once.
    ///
    /// # Errors
    /// As [`admit`](Self::admit); then nothing stays admitted.
    ///
    /// # Cancel safety
    /// As [`admit`](Self::admit).
    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        let mut admissions = Vec::with_capacity(keys.len());
        for key in keys {
            admissions.push(self.admit(key, opts).await?);
        }
        Ok(admissions)
    }
}

/// The answer to an [`admit`](Dedupe::admit). Times are by the store's clock.
#[derive(Debug)]
pub enum Admission {
    /// It is yours: do it, then [`DedupeGuard::complete`].
    First(DedupeGuard),
    /// Somebody else is at it.
    InProgress {
        /// When it was admitted.
        since: SystemTime,
    },
    /// It has been done.
    Done {
        /// When it was completed.
        at: SystemTime,
    },
}

impl Admission {
    /// The guard, if it is the first.
    pub fn first(self) -> Option<DedupeGuard> {
        match self {
            Self::First(guard) => Some(guard),
            _ => None,
        }
    }

    /// Whether it is the first.
    pub fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }
}

/// What a backend does for a [`DedupeGuard`].
///
/// Dropping it abandons in the background; it must not panic where no runtime is left.
#[async_trait]
pub trait DedupeHold: Debug + Send + Sync + 'static {
    /// Marks it done; called at most once, after which dropping does nothing.
    async fn complete(&mut self) -> Result<()>;

    /// Forgets it; called at most once, after which dropping does nothing.
    async fn abandon(&mut self) -> Result<()>;
}

/// An admitted key that is in progress. Dropping it abandons the key in the background, so that a
/// redelivery is first again.
pub struct DedupeGuard {
    key: Key,
    token: FencingToken,
    signal: Tracked,
    hold: Box<dyn DedupeHold>,
}

impl Debug for DedupeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupeGuard")
            .field("key", &self.key)
            .field("token", &self.token)
            .field("lost", &self.signal.reason())
            .finish_non_exhaustive()
    }
}

impl DedupeGuard {
    /// Builds a guard; for backend authors. The signal's deadline is when it can be taken over.
    pub fn new(
        key: Key,
        token: FencingToken,
        signal: LossSignal,
        hold: Box<dyn DedupeHold>,
    ) -> Self {
        Self { key, token, signal: signal.into(), hold }
    }

    /// The admitted key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The fencing token: greater than that of an earlier owner whose entry was taken over.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Tells when the entry can be taken over.
    pub fn lost(&self) -> Lost {
        self.signal.subscribe()
    }

    /// Whether the entry cannot be taken over yet. No I/O.
    pub fn is_held(&self) -> bool {
        self.signal.is_held()
    }

    /// Marks the key as done; it is kept for [`DedupeOptions::retain`].
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if somebody else took it over: the work may have been done twice.
    ///
    /// # Cancel safety
    /// Safe: once polled, it goes on in the background.
    pub async fn complete(mut self) -> Result<()> {
        let result = self.hold.complete().await;
        self.signal.settle();
        self.signal.ended(&result, HoldEnd::Completed, LossReason::Taken);
        result.map_err(|error| error.on(&self.key))
    }

    /// Forgets the key, so that it is first again.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if somebody else took it over.
    ///
    /// # Cancel safety
    /// Safe: once polled, it goes on in the background.
    pub async fn abandon(mut self) -> Result<()> {
        let result = self.hold.abandon().await;
        self.signal.settle();
        self.signal.ended(&result, HoldEnd::Abandoned, LossReason::Taken);
        result.map_err(|error| error.on(&self.key))
    }

    pub(crate) fn not_ours(operation: &str, key: &Key) -> Error {
        lost_error(operation, key, Some(LossReason::Taken))
    }

    pub(crate) fn tracked(&self) -> &Tracked {
        &self.signal
    }
}

/// The answer of [`DedupeExt::first_seen_or_accept`].
#[derive(Debug)]
pub enum Seen {
    /// It is the first.
    First,
    /// It was seen before, or is in progress.
    Before,
    /// The store did not say in time: it was accepted without knowing.
    Accepted(Error),
}

impl Seen {
    /// Whether to handle it: first, or accepted without knowing.
    pub fn is_accepted(&self) -> bool {
        !matches!(self, Self::Before)
    }
}

/// One-step forms over a [`Dedupe`]; implemented for all of them.
// The futures say that they are `Send`: inferred through a trait object, the compiler fails to see it.
pub trait DedupeExt: Dedupe {
    /// Whether `key` is seen for the first time within `retain`; it counts as done at once.
    ///
    /// # Errors
    /// As [`Dedupe::admit`].
    ///
    /// # Cancel safety
    /// The key may have been recorded.
    fn first_seen(&self, key: &Key, retain: Duration) -> impl Future<Output = Result<bool>> + Send {
        async move {
            let opts = DedupeOptions::default().retain(retain).done_at_once();
            match self.admit(key, opts).await? {
                Admission::First(guard) => guard.complete().await.map(|()| true),
                Admission::InProgress { .. } | Admission::Done { .. } => Ok(false),
            }
        }
    }

    /// As [`first_seen`](Self::first_seen), but fails open: without an answer within `within`
    /// the key is accepted, with a warning in the log.
    ///
    /// # Errors
    /// Only for an invalid option.
    ///
    /// # Cancel safety
    /// The key may have been recorded.
    fn first_seen_or_accept(
        &self,
        key: &Key,
        retain: Duration,
        within: Duration,
    ) -> impl Future<Output = Result<Seen>> + Send {
        async move {
            let answer = tokio::time::timeout(within, self.first_seen(key, retain)).await;
            let error = match answer {
                Ok(Ok(true)) => return Ok(Seen::First),
                Ok(Ok(false)) => return Ok(Seen::Before),
                Ok(Err(error)) if error.kind() == ErrorKind::InvalidOptions => return Err(error),
                Ok(Err(error)) => error,
                Err(_) => {
                    let detail = format!("no answer within {within:?}");
                    Error::new(ErrorKind::Unavailable, detail).on(key)
                }
            };
            tracing::warn!(%key, %error, "accepted without knowing whether it was seen before");
            Ok(Seen::Accepted(error))
        }
    }
}

impl<D: Dedupe + ?Sized> DedupeExt for D {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::MemoryBackend;

    #[tokio::test]
    async fn the_one_step_forms_work_in_a_spawned_task_through_a_trait_object() {
        let dedupe: Arc<dyn Dedupe> = Arc::new(MemoryBackend::new());
        let task = tokio::spawn(async move {
            let key = Key::new("event")?;
            let (retain, within) = (Duration::from_secs(60), Duration::from_secs(10));
            let first = dedupe.first_seen(&key, retain).await?;
            let seen = dedupe.first_seen_or_accept(&key, retain, within).await?;
            Ok::<_, Error>((first, seen))
        });
        assert!(matches!(task.await.unwrap(), Ok((true, Seen::Before))));
    }
}
