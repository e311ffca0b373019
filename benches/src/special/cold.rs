//! From nothing to the first lock.

use std::time::{Duration, Instant};

use leasehold_peers::Outcome;

use super::add;
use crate::contenders;
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut record = Record::new("cold", "cold start", Unit::Millis, Better::Lower)
        .target(Against::Peers, 1.0)
        .note("Opens a handle and takes a first lock; the tables are there.");
    let entrants = contenders::of(scene.kind(), &scene.server.url())?;
    for round in 0..=scene.pick(1, 10, 30) {
        for entrant in &entrants {
            let name = format!("cold-{:08x}", rand::random::<u32>());
            let start = Instant::now();
            let handle = entrant.contender.open().await?;
            let lock = handle.lock(&name, Duration::ZERO).await?.ok_or("it was free")?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            lock.release().await?;
            add(&mut record, round, entrant.role, entrant.name(), took);
        }
    }
    Ok(vec![record])
}
