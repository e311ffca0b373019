//! Processes that all want the same: this program again, eight times.

use std::io::{BufRead, Write};
use std::time::Duration;

use futures_util::future::try_join_all;
use leasehold_conformance::servers::Kind;
use leasehold_peers::Outcome;
use serde::{Deserialize, Serialize};

use super::{entrants, name};
use crate::contenders;
use crate::load::{Wanted, crowd, unfairness};
use crate::players::Players;
use crate::process::Process;
use crate::record::{Against, Better, Record, Unit};
use crate::scene::Scene;

const PROCESSES: usize = 8;

/// What one of the processes is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The server's kind, by name.
    pub kind: String,
    /// Where it is.
    pub url: String,
    /// Who is to play, by name.
    pub contender: String,
    /// The name to lock.
    pub name: String,
    /// By how many tasks.
    pub tasks: usize,
    /// For how many milliseconds.
    pub millis: u64,
}

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut records = with(scene, 8).await?;
    records.extend(with(scene, 1).await?);
    Ok(records)
}

async fn with(scene: &Scene, tasks: usize) -> Outcome<Vec<Record>> {
    const NAME: &str = "processes";
    let (all, s) = (PROCESSES * tasks, if tasks == 1 { "" } else { "s" });
    let what = format!("{all} tasks in {PROCESSES} processes, one key");
    let mut records = vec![
        Record::new(NAME, format!("{what}, locks a second"), Unit::PerSecond, Better::Higher)
            .target(Against::Peers, 1.0)
            .note(format!("{PROCESSES} client processes with {tasks} task{s} each.")),
        Record::new(NAME, format!("{what}, fairness"), Unit::Times, Better::Lower)
            .target(Against::Nothing, 2.0)
            .note(
                "How often the process that got the lock most often got it, as a multiple of the \
                 one that got it least often (at least once, in this calculation).",
            ),
    ];
    let time = Duration::from_millis(scene.pick(200, 400, 2_000));
    let rounds = scene.pick(1, 2, 9);
    // only to know who there is: the handles are those of the processes
    let players = Players::open(&entrants(scene)?, 0).await.without_warm_up();
    let (kind, url) = (scene.kind().name(), scene.server.url());
    let turn = |player: crate::players::Player| -> crate::players::Turn {
        let job = Job {
            kind: kind.to_owned(),
            url: url.clone(),
            contender: player.name,
            name: name("all"),
            tasks,
            millis: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        };
        Box::pin(turn(job))
    };
    players.play(scene, rounds, &mut records, &turn).await;
    Ok(records)
}

async fn turn(job: Job) -> Outcome<Vec<f64>> {
    let mut workers = Vec::with_capacity(PROCESSES);
    for _ in 0..PROCESSES {
        workers.push(Process::start("client", &job)?);
    }
    for worker in &mut workers {
        worker.expect("ready").await?;
    }
    for worker in &mut workers {
        worker.tell("go").await?;
    }
    let mut counts = Vec::with_capacity(PROCESSES);
    for worker in &mut workers {
        counts.push(serde_json::from_str::<u64>(&worker.line().await?)?);
    }
    try_join_all(workers.into_iter().map(Process::end)).await?;
    let seconds = Duration::from_millis(job.millis).as_secs_f64();
    let total: u64 = counts.iter().sum();
    Ok(vec![total as f64 / seconds, unfairness(&counts)])
}

/// What such a process does: connects, says `ready`, waits for a line, plays, says how often it had
/// the lock, and ends when its input does. A failure is said in a line that begins with `failed:`.
///
/// # Errors
/// When there is nobody to say it to.
pub async fn client(job: Job) -> Outcome {
    // as a service's tasks: on a worker
    let played = tokio::spawn(play_alone(job)).await?;
    if let Err(error) = played {
        println!("failed: {}", error.to_string().replace('\n', " "));
    }
    // its connections end with the process, when all others are done too
    let end = tokio::task::spawn_blocking(|| std::io::stdin().lock().lines().next());
    end.await?.transpose()?;
    Ok(())
}

async fn play_alone(job: Job) -> Outcome {
    let kind: Kind = job.kind.parse()?;
    let entrants = contenders::of(kind, &job.url)?;
    let entrant = entrants.iter().find(|entrant| entrant.name() == job.contender);
    let handle = entrant.ok_or("nobody of this name")?.contender.open().await?;
    // as many at once as there are tasks, so that pools and sessions are open
    let warm: Vec<String> = (0..job.tasks).map(|task| format!("{}-{task}", name("warm"))).collect();
    let held = try_join_all(warm.iter().map(|name| handle.lock(name, Duration::ZERO))).await?;
    for lock in held {
        lock.ok_or("it was free")?.release().await?;
    }
    println!("ready");
    std::io::stdout().flush()?;
    let go = tokio::task::spawn_blocking(|| std::io::stdin().lock().lines().next());
    go.await?.transpose()?;
    let names = vec![job.name; job.tasks];
    let done = crowd(&handle, names, Wanted::Together, Duration::from_millis(job.millis)).await?;
    println!("{}", done.total());
    Ok(std::io::stdout().flush()?)
}
