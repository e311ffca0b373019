//! [`SingleFlight`]: one does it, the others wait and read what it stored.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::{released, unless_lost};
use crate::{DEFAULT_WAIT, Deadline, Error, Key, Lease, LeaseGuard, LeaseOptions};

/// Callers beyond which ended ones are looked for.
const TIDY_AT: usize = 64;

/// Does something once for all who want its result, over all processes: a token refresh, say.
///
/// Whoever gets the lease does the work and stores its result; everybody else waits, and reads what
/// is stored as soon as it is their turn. Callers of one process queue locally, so that each
/// process asks the store once.
///
/// **Guaranteed:** the work runs only under the lease, only if a look under the lease found nothing
/// stored, and is dropped when the lease is lost. A caller whose wait is over gets what is stored
/// then, or nothing; it never does the work without the lease.
///
/// **Not guaranteed:** a fence. A holder that is paused while it stores may store late: store with
/// the guard's token, or call [`LeaseGuard::verify`] in the transaction that stores.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::SingleFlight;
/// use leasehold::{Error, Key};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let flights = SingleFlight::new(Arc::new(MemoryBackend::new()));
/// let stored = Mutex::new(None); // in a table, usually
/// let token = flights
///     .run(
///         &Key::new("refresh/account-7")?,
///         async || Ok::<_, Error>(stored.lock().unwrap().clone()),
///         async |_lease| {
///             let fresh = "fresh token".to_owned();
///             *stored.lock().unwrap() = Some(fresh.clone());
///             Ok(fresh)
///         },
///     )
///     .await?;
/// assert_eq!(token.as_deref(), Some("fresh token"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SingleFlight {
    leases: Arc<dyn Lease>,
    ttl: Duration,
    wait: Duration,
    queues: Mutex<HashMap<Key, Weak<tokio::sync::Mutex<()>>>>,
}

impl SingleFlight {
    /// With a lease of 30 s, renewed while the work runs, and a wait of 10 s.
    pub fn new(leases: Arc<dyn Lease>) -> Self {
        let ttl = LeaseOptions::default().ttl;
        Self { leases, ttl, wait: DEFAULT_WAIT, queues: Mutex::default() }
    }

    /// After how long the lease of a dead process is free.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// How long a caller waits for another's work; zero never waits, [`Duration::MAX`] for ever.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Gives what `read` finds, if need be after `work` (by whomever) has stored it.
    ///
    /// `read` gives what is stored, `None` if there is nothing good; it is asked several times.
    /// `work` does it, stores the result and gives it. `Ok(None)`: the wait was over and nothing
    /// is stored.
    ///
    /// # Errors
    /// Those of [`Lease::lease`] and of the two closures, and
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if the lease was lost before the work ended.
    ///
    /// # Cancel safety
    /// As safe as the closures; a lease is released in the background.
    pub async fn run<T, E: From<Error>, R: Future<Output = Result<Option<T>, E>>>(
        &self,
        key: &Key,
        read: impl Fn() -> R,
        work: impl AsyncFnOnce(&LeaseGuard) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        if let Some(stored) = read().await? {
            return Ok(Some(stored));
        }
        let deadline = Deadline::after(self.wait);
        let queue = self.queue(key);
        let turn = tokio::select! {
            biased;
            turn = queue.lock() => Some(turn),
            () = deadline.passed() => None,
        };
        let Some(_turn) = turn else {
            return read().await;
        };
        // one of this process may have stored it meanwhile: no need to ask for the lease
        if let Some(stored) = read().await? {
            return Ok(Some(stored));
        }
        let opts = LeaseOptions::default().ttl(self.ttl).wait(deadline.remaining());
        let Some(guard) = self.leases.lease(key, opts).await? else {
            return read().await;
        };
        let flight = async {
            match read().await? {
                Some(stored) => Ok(stored),
                None => work(&guard).await,
            }
        };
        let done = unless_lost(&guard.lost(), key, flight).await?;
        let freed = released(guard.release().await);
        let done = done?;
        freed?;
        Ok(Some(done))
    }

    fn queue(&self, key: &Key) -> Arc<tokio::sync::Mutex<()>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(key).and_then(Weak::upgrade) {
            return queue;
        }
        if queues.len() >= TIDY_AT {
            queues.retain(|_, queue| queue.strong_count() > 0);
        }
        let queue = Arc::default();
        queues.insert(key.clone(), Arc::downgrade(&queue));
        queue
    }
}
