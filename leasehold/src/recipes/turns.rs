//! [`Turns`]: a lease that is taken before the row exists, so that recovery knows who lives.

use std::sync::Arc;
use std::time::Duration;

use super::{part, released, unless_lost};
use crate::{Error, Key, Lease, LeaseGuard, LeaseOptions, Result};

/// Work that is recorded in rows of your own, and a recovery pass that settles only the rows whose
/// process is gone.
///
/// A worker takes the turn of an id *before* it writes the row, renews it while it works, and gives
/// it back after the row is settled. So a row that is unsettled while its turn is free is one whose
/// process died, and there is no moment in which a living one looks dead. Unlike
/// [`Takeover`](super::Takeover) the work may take as long as it likes, and is recovered within the
/// ttl.
///
/// **Guaranteed:** one worker or recovery at a time for each id; of many recovery passes one
/// settles; what runs is dropped when the turn is lost.
///
/// **Not guaranteed:** a fence: a worker that is paused past its ttl may still write. Write rows
/// with [`LeaseGuard::verify`] in the transaction, or compare tokens.
///
/// ```
/// use std::sync::Arc;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::{Recovery, Turns};
/// use leasehold::{Error, Key};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let turns = Turns::new(Arc::new(MemoryBackend::new()), Key::new("chat")?);
/// let answer = turns
///     .run("turn-1", async |_turn| {
///         // insert the row, do the work, settle the row
///         Ok::<_, Error>("hello")
///     })
///     .await?;
/// assert_eq!(answer, Some("hello"));
///
/// // elsewhere, for each row that is unsettled
/// let recovered = turns
///     .recover(
///         "turn-2",
///         async |_turn| Ok(true), // looks again: still unsettled?
///         async |_turn| Ok::<_, Error>("marked as failed"),
///     )
///     .await?;
/// assert_eq!(recovered, Recovery::Settled("marked as failed"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Turns {
    leases: Arc<dyn Lease>,
    key: Key,
    opts: LeaseOptions,
}

/// What [`Turns::recover`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recovery<T> {
    /// Its process is gone, and it was settled here.
    Settled(T),
    /// Somebody has its turn: a worker that lives, or another recovery.
    Alive,
    /// It was settled meanwhile.
    NothingToDo,
}

impl Turns {
    /// Turns of one kind of work: leases of 60 s, renewed every 20 s. A worker does not wait.
    pub fn new(leases: Arc<dyn Lease>, key: Key) -> Self {
        let opts = LeaseOptions::try_once().ttl(Duration::from_secs(60));
        Self { leases, key, opts }
    }

    /// After how long the turn of a dead process is free; it is renewed at a third of it.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { opts: self.opts.ttl(ttl), ..self }
    }

    /// How long a worker waits for a turn; default zero.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { opts: self.opts.wait(wait), ..self }
    }

    /// Takes the turn, to be kept until the row is settled; `Ok(None)` if somebody has it.
    ///
    /// # Errors
    /// Those of [`Lease::lease`].
    ///
    /// # Cancel safety
    /// As [`Lease::lease`].
    pub async fn begin(&self, id: &str) -> Result<Option<LeaseGuard>> {
        self.leases.lease(&part(&self.key, id)?, self.opts).await
    }

    /// Does `work` in the turn: it inserts the row, works and settles the row. `Ok(None)` if
    /// somebody has the turn.
    ///
    /// # Errors
    /// Those of [`Lease::lease`] and of `work`, and [`ErrorKind::Lost`](crate::ErrorKind::Lost) if
    /// the turn was lost before the work ended.
    ///
    /// # Cancel safety
    /// As safe as `work`; the turn is freed in the background, and the row is left to recovery.
    pub async fn run<T, E: From<Error>>(
        &self,
        id: &str,
        work: impl AsyncFnOnce(&LeaseGuard) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        match self.begin(id).await? {
            Some(turn) => in_turn(turn, work).await.map(Some),
            None => Ok(None),
        }
    }

    /// Settles what a dead process left. Call it for each unsettled row.
    ///
    /// In the turn, `is_unsettled` looks at the row *again* (it may have been settled between your
    /// query and the turn), then `settle` settles it.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub async fn recover<T, E: From<Error>>(
        &self,
        id: &str,
        is_unsettled: impl AsyncFnOnce(&LeaseGuard) -> Result<bool, E>,
        settle: impl AsyncFnOnce(&LeaseGuard) -> Result<T, E>,
    ) -> Result<Recovery<T>, E> {
        let opts = self.opts.wait(Duration::ZERO);
        let Some(turn) = self.leases.lease(&part(&self.key, id)?, opts).await? else {
            return Ok(Recovery::Alive);
        };
        in_turn(turn, async |turn: &LeaseGuard| {
            if is_unsettled(turn).await? {
                settle(turn).await.map(Recovery::Settled)
            } else {
                Ok(Recovery::NothingToDo)
            }
        })
        .await
    }
}

async fn in_turn<T, E: From<Error>>(
    turn: LeaseGuard,
    work: impl AsyncFnOnce(&LeaseGuard) -> Result<T, E>,
) -> Result<T, E> {
    let done = unless_lost(&turn.lost(), turn.key(), work(&turn)).await?;
    let freed = released(turn.release().await);
    let done = done?;
    freed?;
    Ok(done)
}
