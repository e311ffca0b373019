//! One after the other: what a lock and its release take when nobody else is there.

use std::time::{Duration, Instant};

use leasehold_peers::Outcome;

use super::{entrants, is_sql, name};
use crate::load::{histogram, micros, nanos};
use crate::players::{Player, Players};
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;
use crate::turns::Meter;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    const NAME: &str = "uncontended";
    let bound = if is_sql(scene.kind()) { 1.15 } else { 1.10 };
    let record = |title: &str| {
        Record::new(NAME, format!("uncontended, {title}"), Unit::Micros, Better::Lower)
    };
    let mut records = vec![
        record("lock and release, p50")
            .target(Against::Floor, bound)
            .target(Against::Peers, 1.0)
            .note("One task. Client and server are pinned to a core each."),
        record("lock and release, p99").note("As above; of the runs of a round."),
        record("CPU time of the client").note("All threads of the process, each lock and release."),
        record("CPU time of the server").note("All its processes, each lock and release."),
    ];
    let (runs, rounds) = (scene.pick(5, 150, 400), scene.pick(1, 9, 31));
    let players = Players::open(&entrants(scene)?, 1).await;
    let meter = Meter::of(&scene.server);
    let pinned = meter.pin();
    players
        .play(scene, rounds, &mut records, &|player| Box::pin(turn(player, runs, meter.clone())))
        .await;
    meter.unpin();
    if !pinned {
        records[0].note = "One task. Client and server could not be pinned to cores.".into();
    }
    Ok(records)
}

async fn turn(player: Player, runs: u32, meter: Meter) -> Outcome<Vec<f64>> {
    let (handle, name) = (&player.handles[0], name("one"));
    let mut times = histogram();
    let before = meter.read();
    for _ in 0..runs {
        let start = Instant::now();
        let held = handle.lock(&name, Duration::ZERO).await?.ok_or("it was free")?;
        held.release().await?;
        times.record(nanos(start.elapsed()))?;
    }
    let after = meter.read();
    let each =
        |before: u64, after: u64| after.saturating_sub(before) as f64 / 1e3 / f64::from(runs);
    Ok(vec![
        micros(&times, 0.5),
        micros(&times, 0.99),
        each(before.client, after.client),
        each(before.server, after.server),
    ])
}
