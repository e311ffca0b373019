//! From a release to the next one's holding it, across processes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold_peers::Outcome;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{entrants, is_sql, name};
use crate::load::{histogram, micros, nanos};
use crate::players::{Player, Players};
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;
use crate::turns::Meter;

const WAIT: Duration = Duration::from_secs(30);

/// The times of all rounds by contender, as a p99 takes more of them than a round has: first those of
/// the round that warms up, in which sessions are opened that wait on the server, then all others.
type All = Arc<Mutex<HashMap<String, Vec<Histogram<u64>>>>>;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut records = with(scene, 1).await?;
    records.extend(with(scene, 50).await?);
    Ok(records)
}

async fn with(scene: &Scene, waiters: usize) -> Outcome<Vec<Record>> {
    const NAME: &str = "hand-off";
    let what = format!("hand-off, {waiters} waiter{}", if waiters == 1 { "" } else { "s" });
    let record = |share| Record::new(NAME, format!("{what}, {share}"), Unit::Micros, Better::Lower);
    let mut middle = record("p50").target(Against::Peers, 1.0).note(
        "From the call of release to the next one's holding it. Holder and waiters each have a \
         handle of their own, as processes have.",
    );
    if waiters == 1 {
        middle = middle.target(Against::Floor, if is_sql(scene.kind()) { 1.3 } else { 1.5 });
    }
    let mut records = vec![middle];
    let (turns, rounds) = if waiters == 1 {
        (scene.pick(2, 8, 60), scene.pick(1, 3, 15))
    } else {
        (1, scene.pick(1, 2, 15))
    };
    let all = All::default();
    let players = Players::open(&entrants(scene)?, 1 + waiters).await;
    let meter = Meter::of(&scene.server);
    meter.pin();
    let turn = |player| -> crate::players::Turn { Box::pin(turn(player, turns, all.clone())) };
    players.play(scene, rounds, &mut records, &turn).await;
    meter.unpin();
    let mut tail = record("p99").note(
        "Of all rounds together. In a quick run these are few, so that it is about the longest of \
         all: told, but not promised.",
    );
    let all = all.lock().unwrap_or_else(PoisonError::into_inner);
    for series in &records[0].series {
        let ours = tail.of(series.role, &series.contender);
        ours.cannot.clone_from(&series.cannot);
        // one that was too slow for another round has its first only
        if let Some(times) = all.get(&series.contender).and_then(|rounds| rounds.last())
            && series.cannot.is_none()
        {
            ours.rounds.push(micros(times, 0.99));
        }
    }
    records.push(tail);
    Ok(records)
}

async fn turn(player: Player, turns: u32, all: All) -> Outcome<Vec<f64>> {
    let mut times = histogram();
    for _ in 0..turns {
        chain(&player, &mut times).await?;
    }
    let median = micros(&times, 0.5);
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    let rounds = all.entry(player.name).or_default();
    match rounds.get_mut(1) {
        Some(later) => later.add(times)?,
        None => rounds.push(times),
    }
    Ok(vec![median])
}

/// The first handle holds, all others wait; each gives it on at once.
async fn chain(player: &Player, times: &mut Histogram<u64>) -> Outcome {
    let name = name("hand");
    let held = player.handles[0].lock(&name, Duration::ZERO).await?.ok_or("it was free")?;
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut waiters = JoinSet::new();
    for handle in &player.handles[1..] {
        let (handle, name, tell) = (handle.clone(), name.clone(), tell.clone());
        waiters.spawn(async move {
            let next = handle.lock(&name, WAIT).await?.ok_or("it came free")?;
            let (got, releases) = (Instant::now(), Instant::now());
            next.release().await?;
            // nobody receives once the chain has failed
            let _ = tell.send((got, releases));
            Outcome::Ok(())
        });
    }
    drop(tell);
    // Nothing common to all tells that somebody waits. Long enough for all to do so, and as likely
    // at any moment between two looks of those who poll.
    let settle = if waiters.len() == 1 { 5..55 } else { 80..130 };
    let settle = rand::random_range(settle);
    tokio::time::sleep(Duration::from_millis(settle)).await;
    let mut released = vec![Instant::now()];
    held.release().await?;
    let mut got = Vec::new();
    while let Some((at, releases)) = told.recv().await {
        got.push(at);
        released.push(releases);
    }
    while let Some(waiter) = waiters.join_next().await {
        waiter??;
    }
    got.sort_unstable();
    released.sort_unstable();
    for (got, released) in got.into_iter().zip(released) {
        times.record(nanos(got.saturating_duration_since(released)))?;
    }
    Ok(())
}
