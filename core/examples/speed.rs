//! What the engine itself costs, on the memory backend: nanoseconds per acquisition and release.
//!
//! `cargo run --release -p leasehold-core --example speed [-- ROUNDS]`

use std::time::{Duration, Instant};

use leasehold_core::memory::MemoryBackend;
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Key, Keys, Lease, LeaseOptions, LockOptions,
    NamedLock, Result,
};

/// The best of several runs: others on the machine only ever make it slower.
const RUNS: usize = 7;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(50_000);
    let store = MemoryBackend::new();
    let key = Key::new("a")?;
    let keys = Keys::new(["a"])?;
    let opts = DedupeOptions::default().in_progress(Duration::from_secs(60));
    let mut best = [Duration::MAX; 4];
    for _ in 0..RUNS {
        let start = Instant::now();
        for _ in 0..rounds {
            let guard = store.lock(&key, LockOptions::try_once()).await?;
            guard.expect("free").release().await?;
        }
        best[0] = best[0].min(start.elapsed());

        let start = Instant::now();
        for _ in 0..rounds {
            let guard = store.lease(&key, LeaseOptions::try_once()).await?;
            guard.expect("free").release().await?;
        }
        best[1] = best[1].min(start.elapsed());

        let start = Instant::now();
        for _ in 0..rounds {
            let claim = store.claim(&keys, ClaimOptions::default()).await?;
            claim.expect("free").commit().await?;
        }
        best[2] = best[2].min(start.elapsed());

        let start = Instant::now();
        for _ in 0..rounds {
            let admitted = store.admit(&key, opts).await?;
            admitted.first().expect("abandoned before").abandon().await?;
        }
        best[3] = best[3].min(start.elapsed());
    }
    for (kind, took) in ["lock", "lease", "claim", "dedupe"].into_iter().zip(best) {
        println!("{kind:8} {:6} ns", took.as_nanos() / rounds as u128);
    }
    Ok(())
}
