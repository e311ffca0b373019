//! Tasks of one process that all want the same.

use std::time::Duration;

use leasehold_peers::Outcome;

use super::{entrants, name};
use crate::load::{Wanted, crowd, micros};
use crate::players::{Player, Players};
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;

const TASKS: usize = 64;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    const NAME: &str = "contended";
    let what = format!("{TASKS} tasks of one process, one key");
    let mut records = vec![
        Record::new(NAME, format!("{what}, locks a second"), Unit::PerSecond, Better::Higher)
            .target(Against::Peers, 5.0)
            .note("A holder releases at once. That no two hold at the same time is checked."),
        Record::new(NAME, format!("{what}, wait and release, p99"), Unit::Micros, Better::Lower)
            .note("Of those that were granted within the time of a round."),
    ];
    let time = Duration::from_millis(scene.pick(50, 250, 1_000));
    let rounds = scene.pick(1, 3, 15);
    let players = Players::open(&entrants(scene)?, 1).await;
    players.play(scene, rounds, &mut records, &|player| Box::pin(turn(player, time))).await;
    Ok(records)
}

async fn turn(player: Player, time: Duration) -> Outcome<Vec<f64>> {
    let done = crowd(&player.handles[0], vec![name("all"); TASKS], Wanted::Together, time).await?;
    Ok(vec![done.total() as f64 / time.as_secs_f64(), micros(&done.times, 0.99)])
}
