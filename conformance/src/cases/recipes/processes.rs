//! Recipes between processes, one of which is killed, or has another clock.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::recipes::Leader;
use tokio::task::JoinSet;

use super::semaphore::{all_can_be_had, over_locks};
use super::takeover::many_pick_up;
use crate::case::cases;
use crate::cases::processes::{libfaketime, skewed};
use crate::ctx::{Ctx, key, soon};
use crate::fault::{Fault, Verdict, ensure};

cases!(Recipes in "recipes" {
    leader_that_is_killed_is_followed = "a process that is killed while it leads is followed at once, with a greater token" [Processes, SessionLocks];
    semaphore_of_a_killed_process_is_free = "the permits of a process that is killed are free at once" [Processes, SessionLocks];
    takeover_of_a_killed_process = "the work of a process that is killed is picked up by exactly one" [Processes];
    schedule_of_processes = "each tick fires once across processes, and none is left out" [Processes];
    schedule_with_clocks_apart = "each tick fires once across processes whose clocks are two hours apart" [Processes, OwnClock];
});

async fn leader_that_is_killed_is_followed(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut process = ctx.process(&[]).await?;
    let token = process.leads("x").await?;
    let leader = Leader::over_locks(b.backend.clone(), key("x")).start();
    let early = tokio::time::timeout(Duration::from_millis(300), leader.elected()).await;
    ensure!(early.is_err(), "expected the process to be the only leader");
    process.dies().await?;
    let term = soon("the next to lead", leader.elected()).await?;
    ensure!(term.token().value() > token, "expected tokens to rise across processes");
    Ok(())
}

async fn semaphore_of_a_killed_process_is_free(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let semaphore = over_locks(&b)?;
    let mut process = ctx.process(&[]).await?;
    process.takes_permits("x", semaphore.permits()).await?;
    let tried = semaphore.acquire(Duration::from_millis(300)).await?;
    ensure!(tried.is_none(), "expected the process to hold all permits");
    process.dies().await?;
    all_can_be_had(&semaphore).await
}

async fn takeover_of_a_killed_process(ctx: Ctx) -> Verdict {
    let mut process = ctx.process(&[]).await?;
    process.begins_work("work", "7", Duration::from_secs(2)).await?;
    process.dies().await?;
    let done = many_pick_up(&ctx, "7").await?.all();
    ensure!(done == 1, "expected one to pick it up, {done} did");
    Ok(())
}

async fn each_tick_once(ctx: &Ctx, envs: &[&[(&str, &str)]]) -> Verdict {
    let every = Duration::from_millis(250);
    let mut processes = Vec::new();
    for env in envs {
        processes.push(ctx.process(env).await?);
    }
    let mut tasks = JoinSet::new();
    for mut process in processes {
        tasks.spawn(async move {
            let ticks = process.ticks("x", every, Duration::from_secs(4)).await?;
            process.exits().await?;
            Ok::<_, Fault>(ticks)
        });
    }
    let mut fired = BTreeMap::new();
    while let Some(ticks) = tasks.join_next().await {
        for tick in ticks?? {
            *fired.entry(tick).or_insert(0) += 1;
        }
    }
    ensure!(fired.len() >= 5, "expected a tick every {every:?}, there were {}", fired.len());
    ensure!(fired.values().all(|times| *times == 1), "expected each once: {fired:?}");
    let gaps: Vec<_> =
        fired.keys().zip(fired.keys().skip(1)).map(|(one, two)| two.abs_diff(*one)).collect();
    // the ends of the processes may each take one that is recorded and not fired
    let odd = gaps.iter().rev().skip(envs.len()).filter(|gap| **gap != every).count();
    ensure!(odd == 0, "expected a tick every {every:?}, the gaps are {gaps:?}");
    Ok(())
}

async fn schedule_of_processes(ctx: Ctx) -> Verdict {
    each_tick_once(&ctx, &[&[], &[], &[]]).await
}

async fn schedule_with_clocks_apart(ctx: Ctx) -> Verdict {
    let library = libfaketime()?;
    let (early, late) = (skewed(&library, "-1h"), skewed(&library, "+1h"));
    each_tick_once(&ctx, &[&early, &late, &[]]).await
}
