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
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use self::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};

/// Runs one call to the store, at most for `limit`.
async fn limited<T>(limit: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, contained(call)).await.unwrap_or_else(|_| Err(silent(limit)))
}

/// A call to the store whose panic is an error: a driver's decoder may stumble over what a broken
/// server or proxy says, and the task that looks after the locks of a handle must outlive that.
async fn contained<T>(call: impl Future<Output = Result<T>>) -> Result<T> {
    let panicked = |_| Err(Error::new(ErrorKind::Unavailable, "the driver panicked"));
    AssertUnwindSafe(call).catch_unwind().await.unwrap_or_else(panicked)
}

fn silent(limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("no answer within {limit:?}"))
}

/// How often a repeatable request that failed is asked for again.
const REPEATS: u32 = 3;

/// The answer to a request that may be repeated: asked again a few times if it soon fails in a way
/// that may pass (a connection that was cut, say), all within `limit`. The flag tells whether an
/// earlier one went without an answer, and so may have been carried out.
async fn asked<T, F>(limit: Duration, mut ask: impl FnMut() -> F) -> (Result<T>, bool)
where
    F: Future<Output = Result<T>>,
{
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));
    let start = Instant::now();
    let mut failed = None;
    let answer = tokio::time::timeout(limit, async {
        loop {
            match contained(ask()).await {
                Err(error)
                    if error.is_retryable()
                        && backoff.tries() < REPEATS
                        && start.elapsed() < limit / 4 =>
                {
                    tracing::debug!(%error, "a request failed, asking again");
                    failed = Some(error);
                    tokio::time::sleep(backoff.next()).await;
                }
                answer => return answer,
            }
        }
    });
    let answer = answer.await;
    let repeated = failed.is_some();
    // an error says more than its silence
    (answer.unwrap_or_else(|_| Err(failed.unwrap_or_else(|| silent(limit)))), repeated)
}

/// The error for a call on a handle that was closed, or whose runtime has ended.
fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the handle is closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    /// Asks for what takes `took` and then fails as often as `fails` says.
    async fn ask(took: Duration, fails: u32) -> (Result<u32>, bool, u32) {
        let mut asks = 0;
        let (answer, repeated) = asked(LIMIT, || {
            asks += 1;
            let ask = asks;
            async move {
                tokio::time::sleep(took).await;
                match ask <= fails {
                    true => Err(Error::new(ErrorKind::Unavailable, "cut")),
                    false => Ok(ask),
                }
            }
        })
        .await;
        (answer, repeated, asks)
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_soon_is_asked_again_and_what_fails_late_is_not() {
        let soon = Duration::from_millis(1);
        assert!(matches!(ask(soon, 0).await, (Ok(1), false, 1)));
        assert!(matches!(ask(soon, REPEATS).await, (Ok(_), true, _)));
        let (answer, repeated, asks) = ask(soon, u32::MAX).await;
        assert!(answer.unwrap_err().detail() == "cut" && repeated && asks == REPEATS + 1);
        let (answer, repeated, asks) = ask(LIMIT / 2, u32::MAX).await;
        assert!(answer.unwrap_err().detail() == "cut" && !repeated && asks == 1);
        let (answer, ..) = ask(LIMIT * 2, 0).await;
        assert!(answer.unwrap_err().detail().starts_with("no answer within"));
    }
}
