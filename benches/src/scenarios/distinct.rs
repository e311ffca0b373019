//! Tasks of one process that are in nobody's way.

use std::time::Duration;

use leasehold_peers::Outcome;

use super::{entrants, is_postgres, is_sql, name};
use crate::load::{Wanted, crowd, micros};
use crate::players::{Player, Players};
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;
use crate::turns::Meter;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut all = Vec::new();
    for tasks in [1, 8, 64, 512] {
        all.extend(with(scene, tasks).await?);
    }
    Ok(all)
}

async fn with(scene: &Scene, tasks: usize) -> Outcome<Vec<Record>> {
    const NAME: &str = "distinct";
    let what = format!("{tasks} task{} with a key each", if tasks == 1 { "" } else { "s" });
    let mut rate =
        Record::new(NAME, format!("{what}, locks a second"), Unit::PerSecond, Better::Higher)
            .target(Against::Peers, 1.0)
            .note(if tasks == 1 {
                "Client and server are pinned to a core each."
            } else {
                "Client and server on any core."
            });
    if tasks == 64 {
        let kind = scene.kind();
        let bound = if is_postgres(kind) { 3.0 } else { 2.0 };
        rate = rate.target(Against::Floor, if is_sql(kind) { bound } else { 1.0 });
    }
    let title = format!("{what}, lock and release, p99");
    let tail = Record::new(NAME, title, Unit::Micros, Better::Lower);
    let mut records = vec![rate, tail];
    let time = Duration::from_millis(scene.pick(20, 80, 500));
    let rounds = scene.pick(1, 4, 15);
    let players = Players::open(&entrants(scene)?, 1).await;
    let meter = Meter::of(&scene.server);
    if tasks == 1 {
        meter.pin();
    }
    players.play(scene, rounds, &mut records, &|player| Box::pin(turn(player, tasks, time))).await;
    meter.unpin();
    Ok(records)
}

async fn turn(player: Player, tasks: usize, time: Duration) -> Outcome<Vec<f64>> {
    let base = name("own");
    let names = (0..tasks).map(|task| format!("{base}-{task}")).collect();
    let done = crowd(&player.handles[0], names, Wanted::Alone, time).await?;
    Ok(vec![done.total() as f64 / time.as_secs_f64(), micros(&done.times, 0.99)])
}
