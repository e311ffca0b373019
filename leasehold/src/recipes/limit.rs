//! [`Limit`]: count and take in one transaction.

use std::sync::Arc;
use std::time::Duration;

use crate::{Claim, ClaimLock, ClaimOptions, Error, ErrorKind, Key, Keys, Result};

/// A limit on how many of something there are, where the store's own rows are the count: running
/// tasks, say.
///
/// Under a claim of one key the rows are counted and one is taken, in the claim's own transaction:
/// so the count is that of all earlier takers, no second connection is needed, and a taker that
/// dies takes nothing. Limits per key (per repository, per user) are counted under the same key.
///
/// **Guaranteed:** among all who take through the same key no limit is ever exceeded; a wait that is
/// over takes nothing; `take` runs only after every limit was found to be free, and what it wrote is
/// committed or there is nothing.
///
/// **Not guaranteed:** anything against writers that do not go through it. Who lets go of a row
/// need not: fewer is never too many.
///
/// ```
/// use std::sync::Arc;
/// use leasehold::memory::{MemoryBackend, MemoryTx};
/// use leasehold::recipes::{Limit, PerKey, Taken};
/// use leasehold::{Claim, Error, Key};
///
/// /// On SQL: `SELECT count(*), count(*) FILTER (WHERE repo = $1) FROM tasks WHERE …`.
/// async fn running(claim: &mut Claim) -> Result<Vec<u64>, Error> {
///     let tx = claim.tx::<MemoryTx>()?;
///     let count = |name| tx.read(name).and_then(|count| count.parse().ok()).unwrap_or(0);
///     Ok(vec![count("all"), count("repo-a")])
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let limit = Limit::new(Arc::new(MemoryBackend::new()), Key::new("tasks")?, 20);
/// let start = async |claim: &mut Claim| -> Result<(), Error> {
///     let counts = running(claim).await?;
///     let tx = claim.tx::<MemoryTx>()?;
///     tx.write("all", (counts[0] + 1).to_string());
///     tx.write("repo-a", (counts[1] + 1).to_string());
///     Ok(())
/// };
/// let repo = [PerKey::new("repo-a", 1)];
/// assert_eq!(limit.take(&repo, running, start).await?, Taken::Taken(()));
/// let full = limit.take(&repo, running, start).await?;
/// assert_eq!(full, Taken::Full { key: Some("repo-a".into()), count: 1, max: 1 });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Limit {
    claims: Arc<dyn ClaimLock>,
    keys: Keys,
    max: u64,
    opts: ClaimOptions,
}

/// A limit for one key, under the global one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerKey {
    /// What it is for.
    pub key: String,
    /// The most there may be.
    pub max: u64,
}

impl PerKey {
    /// At most `max` for `key`.
    pub fn new(key: impl Into<String>, max: u64) -> Self {
        Self { key: key.into(), max }
    }
}

/// The answer to [`Limit::take`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Taken<T> {
    /// There was room; it is taken and committed.
    Taken(T),
    /// A limit is reached; nothing is taken.
    Full {
        /// The key whose limit it is; none for the global one.
        key: Option<String>,
        /// How many there are.
        count: u64,
        /// How many there may be.
        max: u64,
    },
    /// Others were taking for the whole wait; nothing is taken.
    Busy,
}

impl<T> Taken<T> {
    /// What was taken.
    pub fn taken(self) -> Option<T> {
        match self {
            Self::Taken(taken) => Some(taken),
            _ => None,
        }
    }
}

impl Limit {
    /// At most `max` over all that take under `key`; waits 10 s for others that are taking.
    pub fn new(claims: Arc<dyn ClaimLock>, key: Key, max: u64) -> Self {
        Self { claims, keys: key.into(), max, opts: ClaimOptions::default() }
    }

    /// How long to wait for others that are taking.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { opts: self.opts.wait(wait), ..self }
    }

    /// Counts, and takes if no limit is reached.
    ///
    /// `count` counts on the claim's transaction: first all, then for each key of `per_key`, in its
    /// order. `take` writes on it. Register with [`Claim::after_commit`] what is to happen once it is
    /// taken.
    ///
    /// # Errors
    /// Those of [`ClaimLock::claim`], [`Claim::commit`] and of the two closures, and
    /// [`ErrorKind::InvalidOptions`] if `count` gave another number of counts than there are limits.
    /// Nothing is taken then, except that [`ErrorKind::CommitUnknown`] does not know.
    ///
    /// # Cancel safety
    /// Safe: it is rolled back in the background; once the commit was polled it goes on.
    pub async fn take<T, E: From<Error>>(
        &self,
        per_key: &[PerKey],
        count: impl AsyncFnOnce(&mut Claim) -> Result<Vec<u64>, E>,
        take: impl AsyncFnOnce(&mut Claim) -> Result<T, E>,
    ) -> Result<Taken<T>, E> {
        let Some(mut claim) = self.claims.claim(&self.keys, self.opts).await? else {
            return Ok(Taken::Busy);
        };
        match self.taken(&mut claim, per_key, count, take).await {
            Ok(taken @ Taken::Taken(_)) => {
                claim.commit().await?;
                Ok(taken)
            }
            nothing => {
                if let Err(error) = claim.rollback().await {
                    tracing::warn!(%error, "rollback failed, nothing was taken");
                }
                nothing
            }
        }
    }

    async fn taken<T, E: From<Error>>(
        &self,
        claim: &mut Claim,
        per_key: &[PerKey],
        count: impl AsyncFnOnce(&mut Claim) -> Result<Vec<u64>, E>,
        take: impl AsyncFnOnce(&mut Claim) -> Result<T, E>,
    ) -> Result<Taken<T>, E> {
        let counts = count(claim).await?;
        if counts.len() != per_key.len() + 1 {
            let (limits, counts) = (per_key.len() + 1, counts.len());
            let detail = format!("there are {limits} limits, and {counts} counts were given");
            return Err(Error::new(ErrorKind::InvalidOptions, detail).on(&self.keys).into());
        }
        let all = std::iter::once((None, self.max));
        let each = per_key.iter().map(|limit| (Some(&limit.key), limit.max));
        for ((key, max), count) in all.chain(each).zip(counts) {
            if count >= max {
                return Ok(Taken::Full { key: key.cloned(), count, max });
            }
        }
        take(claim).await.map(Taken::Taken)
    }
}
