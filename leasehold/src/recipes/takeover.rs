//! [`Takeover`]: work whose process died is picked up by exactly one.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::{part, unless_lost};
use crate::{Admission, Dedupe, DedupeGuard, DedupeOptions, Error, Key, Result};

/// Work that is claimed once by its id, and goes to one other if its process dies between the claim
/// and the effect.
///
/// Whoever claims first does it. A failure frees it at once; a crash leaves it in progress, and
/// after [`after`](Self::after) exactly one of those who ask takes it over. What is done is
/// remembered for [`retain`](Self::retain).
///
/// **Guaranteed:** one worker at a time, by the store's clock; the work is dropped when its time is
/// over and others may take it over; a worker that was taken over cannot report it as done.
///
/// **Not guaranteed:** that an effect happens once: a process may die after the effect and before
/// it said so. Make the effect idempotent, or check it with [`DedupeGuard::token`]. Nothing is
/// renewed: work that may take longer than `after` wants [`Turns`](super::Turns).
///
/// ```
/// use std::sync::Arc;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::{Pickup, Takeover};
/// use leasehold::{Error, Key};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let invoices = Takeover::new(Arc::new(MemoryBackend::new()), Key::new("invoices")?);
/// let sent = invoices.run("2026-11", async |_claim| Ok::<_, Error>("sent")).await?;
/// assert_eq!(sent.done(), Some("sent"));
/// let again = invoices.run("2026-11", async |_claim| Ok::<_, Error>("sent")).await?;
/// assert!(matches!(again, Pickup::AlreadyDone { .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Takeover {
    dedupe: Arc<dyn Dedupe>,
    key: Key,
    opts: DedupeOptions,
}

/// What became of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pickup<T> {
    /// It was done here and now.
    Done(T),
    /// Somebody else is at it, or died of it not long ago.
    InProgress {
        /// Since when, by the store's clock.
        since: SystemTime,
    },
    /// It was done before.
    AlreadyDone {
        /// When, by the store's clock.
        at: SystemTime,
    },
}

impl<T> Pickup<T> {
    /// What the work gave, if it was done here.
    pub fn done(self) -> Option<T> {
        match self {
            Self::Done(done) => Some(done),
            _ => None,
        }
    }
}

impl Takeover {
    /// Work of one kind; unfinished work can be taken over after 10 min, what is done is remembered
    /// for 24 h.
    pub fn new(dedupe: Arc<dyn Dedupe>, key: Key) -> Self {
        Self { dedupe, key, opts: DedupeOptions::default() }
    }

    /// After how long unfinished work can be taken over: longer than the work ever takes.
    #[must_use]
    pub fn after(self, after: Duration) -> Self {
        Self { opts: self.opts.in_progress(after), ..self }
    }

    /// How long it is remembered that work is done.
    #[must_use]
    pub fn retain(self, retain: Duration) -> Self {
        Self { opts: self.opts.retain(retain), ..self }
    }

    /// Does the work with this id unless it is done, or in progress elsewhere. It counts as done
    /// when `work` gives `Ok`, and can be had again at once when it gives `Err`.
    ///
    /// # Errors
    /// Those of [`Dedupe::admit`] and of `work`; [`ErrorKind::Lost`](crate::ErrorKind::Lost) if its
    /// time was over before it ended; those of [`DedupeGuard::complete`]: the work has been done
    /// then, and may be done again.
    ///
    /// # Cancel safety
    /// As safe as `work`; it can be had again soon.
    pub async fn run<T, E: From<Error>>(
        &self,
        id: &str,
        work: impl AsyncFnOnce(&DedupeGuard) -> Result<T, E>,
    ) -> Result<Pickup<T>, E> {
        let key = part(&self.key, id)?;
        let claim = match self.dedupe.admit(&key, self.opts).await? {
            Admission::First(claim) => claim,
            Admission::InProgress { since } => return Ok(Pickup::InProgress { since }),
            Admission::Done { at } => return Ok(Pickup::AlreadyDone { at }),
        };
        let lost = claim.lost();
        match unless_lost(&lost, &key, work(&claim)).await? {
            Ok(done) => {
                claim.complete().await?;
                Ok(Pickup::Done(done))
            }
            Err(error) => {
                if let Err(abandon) = claim.abandon().await {
                    tracing::warn!(error = %abandon, "work that failed is left to be taken over");
                }
                Err(error)
            }
        }
    }
}
