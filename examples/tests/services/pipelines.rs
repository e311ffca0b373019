//! Pipelines: each step is done once, none is orphaned, whatever happens to the servers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold::{Key, Kind};
use leasehold_examples::pipelines::{Pipeline, Server, Settings, pipelines};
use leasehold_examples::{docs, journal::Event};
use libtest_mimic::Failed;

use crate::fleet::{Fleet, Program};

const PIPELINES: u32 = 12;
const STEPS: u32 = 8;

pub(crate) static PROGRAM: Program = Program {
    name: "pipelines",
    path: env!("CARGO_BIN_EXE_pipelines"),
    args: &["--pipelines", "12", "--steps", "8", "--step-ms", "100"],
    task: |store, docs, journal| {
        let settings = Settings {
            pipelines: PIPELINES,
            steps: STEPS,
            step: Duration::from_millis(100),
            tick: Duration::from_millis(50),
            share: 5,
        };
        let server = Server::new(&store, docs, settings, journal);
        tokio::spawn(async move {
            // it never stops by itself
            drop(server.run(std::future::pending()).await);
        })
    },
};

/// So long a pipeline may stay without a server: that of a killed process is had once the store
/// has seen its session end, or its ttl has passed.
const TAKEOVER: Duration = Duration::from_secs(20);
const LONG: Duration = Duration::from_secs(60);

pub(crate) async fn check(fleet: &mut Fleet) -> Result<String, Failed> {
    for name in ["a", "b", "c"] {
        fleet.start(name)?;
    }
    fleet
        .until("each server to drive some", LONG, async |fleet| {
            let mut all = true;
            for name in ["a", "b", "c"] {
                all &= !driven_by(fleet, name).await?.is_empty();
            }
            Ok(all)
        })
        .await?;

    // one dies
    fleet.kill("a").await?;
    let killed = Instant::now();
    let orphans = driven_by(fleet, "a").await?;
    fleet
        .until("the others to take over", TAKEOVER, async |fleet| {
            Ok(driven_by(fleet, "a").await?.is_empty())
        })
        .await?;
    let takeover = killed.elapsed();
    fleet.start("a2")?;

    // one is paused, and one is deprived of its locks
    fleet.pause("b")?;
    let deprived = driven_by(fleet, "c").await?;
    for name in &deprived {
        fleet.store.force_release(Kind::Lock, &Key::new(name)?).await?;
    }
    tokio::time::sleep(Duration::from_secs(3)).await; // the length of the pause
    fleet.resume("b")?;

    fleet
        .until("every pipeline to be finished", LONG, async |fleet| {
            let all = pipelines(&fleet.store, &*fleet.docs).await?;
            let finished = |(_, pipeline): &(String, Pipeline)| pipeline.done == pipeline.steps;
            Ok(all.len() == PIPELINES as usize && all.iter().all(finished))
        })
        .await?;
    once_each(fleet).await?;
    tokens_rise(&fleet.events())?;
    Ok(format!(
        "{PIPELINES} pipelines of {STEPS} steps, each step done once; {} taken over within \
         {takeover:.1?} of a kill, {} taken away by force, {} losses told, {} stale writes rejected",
        orphans.len(),
        deprived.len(),
        fleet.count("lost"),
        fleet.count("rejected"),
    ))
}

fn is_turn(event: &Event) -> bool {
    event.what == "driving"
}

/// The unfinished pipelines that a server was the last to take.
async fn driven_by(fleet: &Fleet, server: &str) -> Result<Vec<String>, Failed> {
    let mut drivers = BTreeMap::new();
    for event in fleet.events().into_iter().filter(is_turn) {
        drivers.insert(event.subject, event.server);
    }
    let all = pipelines(&fleet.store, &*fleet.docs).await?;
    let open = all.into_iter().filter(|(_, pipeline)| pipeline.done < pipeline.steps);
    let ours = open.filter(|(name, _)| drivers.get(name).is_some_and(|driver| driver == server));
    Ok(ours.map(|(name, _)| name).collect())
}

/// Each step of each pipeline was done exactly once.
async fn once_each(fleet: &Fleet) -> Result<(), Failed> {
    let mut claim = docs::claim(&fleet.store, &[]).await?;
    let done = fleet.docs.list(&mut claim, "done/").await?;
    claim.rollback().await?;
    let expected = (PIPELINES * STEPS) as usize;
    let more = done.iter().filter(|(_, times)| times != "1").collect::<Vec<_>>();
    if done.len() != expected || !more.is_empty() {
        let found = done.len();
        return Err(format!("expected {expected} steps, each done once: {found}, {more:?}").into());
    }
    Ok(())
}

/// No write came after one with a greater token.
fn tokens_rise(events: &[Event]) -> Result<(), Failed> {
    let mut last = BTreeMap::new();
    let mut steps: Vec<_> = events.iter().filter(|event| event.what == "step").collect();
    // the number of the step is the order of the writes
    steps.sort_by_key(|event| event.subject.clone());
    for event in steps {
        let (name, _) = event.subject.rsplit_once('/').unwrap_or_default();
        let last = last.entry(name.to_owned()).or_insert(0);
        if event.token < *last {
            return Err(format!("{event:?} was written after token {last}").into());
        }
        *last = event.token;
    }
    Ok(())
}
