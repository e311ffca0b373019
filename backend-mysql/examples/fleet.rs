//! A fleet: every server runs every job, one drives each pipeline, and another takes over when it
//! goes away. Run it in two terminals, and end one of them:
//!
//! `cargo run -p leasehold-mysql --example fleet -- mysql://test:test@127.0.0.1:3306/test`

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Backend, Key, LockOptions, LockRegistry};
use leasehold_mysql::MySqlBackend;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1);
    let url = url.ok_or("usage: fleet mysql://user:password@host:port/database [ticks]")?;
    let ticks = std::env::args().nth(2).map_or(Ok(u32::MAX), |ticks| ticks.parse())?;
    let backend = MySqlBackend::builder().namespace("fleet").connect(&url).await?;
    println!("connected to {}", backend.server());
    backend.migrate().await?;
    let backend = Arc::new(backend);
    let registry = LockRegistry::new(backend.clone());
    for tick in 0..ticks {
        for pipeline in pipelines(tick)? {
            // fail closed: an error means that this server drives nothing
            if !registry.hold(&pipeline, LockOptions::try_once()).await.unwrap_or(false) {
                continue;
            }
            let Some(guard) = registry.guard(&pipeline) else { continue };
            // a lock is not a fence: a write carries the token, and a smaller one is refused
            println!("tick {tick}: drives {pipeline} with token {}", guard.token().await?);
        }
        // the snapshot comes before the query: what is taken in between is not swept
        let snapshot = registry.snapshot();
        let active: HashSet<Key> = pipelines(tick + 1)?.into_iter().collect();
        for ended in snapshot.release_all_except(&active).await? {
            println!("tick {tick}: {ended} has ended");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(backend.close().await?)
}

/// The active pipelines, as a query would give them: one ends every few ticks.
fn pipelines(tick: u32) -> leasehold_core::Result<Vec<Key>> {
    (tick / 4..tick / 4 + 3).map(|n| Key::new(format!("pipeline-{n}"))).collect()
}
