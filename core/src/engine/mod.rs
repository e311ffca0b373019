//! The engine: what is hard, written once over the drivers of [`backend`](crate::backend).
//!
//! - [`SessionEngine`] makes a [`NamedLock`](crate::NamedLock) of one dedicated session: requests
//!   that arrive while a statement is under way go out together in the next one (group commit);
//!   a few more sessions wait on the store for keys that others hold.
//! - [`LeaseEngine`] makes a [`Lease`](crate::Lease): one heartbeat renews all leases of the handle.
//! - [`ClaimEngine`] makes a [`ClaimLock`](crate::ClaimLock), [`DedupeEngine`] a
//!   [`Dedupe`](crate::Dedupe).
//!
//! In each, callers of one process queue locally per key, in order, so that a process contends on
//! the store with one request per key; and a task that nobody cancels does the talking.

mod backoff;
mod claim;
mod dedupe;
mod gate;
mod goes_on;
mod lease;
mod session;
mod wake;

pub use claim::ClaimEngine;
pub use dedupe::DedupeEngine;
pub use lease::LeaseEngine;
pub use session::SessionEngine;

use std::future::Future;
use std::time::Duration;

use self::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};

/// Runs one call to the store, at most for `limit`.
async fn limited<T>(limit: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Unavailable, format!("no answer within {limit:?}")))
    })
}

/// How often a repeatable request that failed is asked for again.
const REPEATS: u32 = 3;

/// The answer to a request that may be repeated: asked again a few times if it fails in a way that
/// may pass (a connection that was cut, say), all within `limit`. The flag tells whether an earlier
/// one went without an answer, and so may have been carried out.
async fn asked<T, F>(limit: Duration, mut ask: impl FnMut() -> F) -> (Result<T>, bool)
where
    F: Future<Output = Result<T>>,
{
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));
    let mut repeated = false;
    let answer = limited(limit, async {
        loop {
            match ask().await {
                Err(error) if error.is_retryable() && backoff.tries() < REPEATS => {
                    tracing::debug!(%error, "a request failed, asking again");
                    repeated = true;
                    tokio::time::sleep(backoff.next()).await;
                }
                answer => return answer,
            }
        }
    });
    (answer.await, repeated)
}

/// The error for a call on a handle that was closed, or whose runtime has ended.
fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the handle is closed")
}
