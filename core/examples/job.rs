//! A job that one copy of a service runs at a time: `cargo run -p leasehold-core --example job`.

use leasehold_core::memory::{MemoryBackend, MemoryStore};
use leasehold_core::{Key, LeaseExt, LeaseOptions, Result};
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<()> {
    // The memory store stands for your Postgres, MySQL or Redis.
    let store = MemoryStore::new();
    let key = Key::new("nightly-report")?;
    let copies = ["one", "two", "three"].map(|name| {
        let backend = MemoryBackend::builder().store(&store).build();
        let key = key.clone();
        tokio::spawn(async move {
            let opts = LeaseOptions::try_once().ttl(Duration::from_secs(30));
            let done = backend
                .with_lease(&key, opts, async |lease| {
                    println!("copy {name}: running, with fencing token {}", lease.token());
                    tokio::time::sleep(Duration::from_millis(200)).await;
                })
                .await?;
            if done.is_none() {
                println!("copy {name}: somebody else is at it");
            }
            Ok::<_, leasehold_core::Error>(())
        })
    });
    for copy in copies {
        copy.await.expect("the copy does not panic")?;
    }
    Ok(())
}
