//! The recipes on the memory backend, mostly under a paused clock. What every backend must show is
//! in the conformance suite.

mod housekeeper;
mod leader;
mod limit;
mod one_time_token;
mod poller;
mod schedule;
mod semaphore;
mod single_flight;
mod takeover;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold::Key;
use leasehold::memory::{MemoryBackend, MemoryStore};

/// So many processes on one store.
fn processes<const N: usize>() -> [Arc<MemoryBackend>; N] {
    let store = MemoryStore::new();
    std::array::from_fn(|_| Arc::new(MemoryBackend::builder().store(&store).build()))
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Waits for what must happen, on a clock that jumps.
async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let waited = tokio::time::timeout(secs(600), future).await;
    waited.unwrap_or_else(|_| panic!("expected {what}"))
}

/// Lets everything happen that needs no time to pass.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}
