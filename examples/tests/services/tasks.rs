//! Tasks: limits are never exceeded; each delivery, tick, refresh and token counts once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use leasehold_examples::tasks::{Pod, Settings, State, all};
use leasehold_examples::{Event, docs};
use libtest_mimic::Failed;
use rand::seq::IndexedRandom;
use tokio::task::JoinSet;

use crate::fleet::{Fleet, Program};
use crate::http::ask;

const DELIVERIES: usize = 24;
const LIMIT: i32 = 3;

pub(crate) static PROGRAM: Program = Program {
    name: "tasks",
    path: env!("CARGO_BIN_EXE_tasks"),
    args: &["--limit", "3", "--per-repo", "1", "--run-ms", "150", "--turn-ms", "2000"],
    task: |store, docs, journal| {
        let settings = Settings {
            limit: 3,
            per_repo: 1,
            workers: 2,
            run: Duration::from_millis(150),
            turn: Duration::from_secs(2),
            tick: Duration::from_millis(250),
        };
        let pod = Pod::new(&store, docs, settings, journal).expect("valid keys");
        tokio::spawn(async move {
            // it never stops by itself
            drop(pod.run(std::future::pending()).await);
        })
    },
};

const LONG: Duration = Duration::from_secs(60);

pub(crate) async fn check(fleet: &mut Fleet) -> Result<String, Failed> {
    for name in ["a", "b", "c"] {
        fleet.start(name)?;
    }
    let up = async |fleet: &Fleet| Ok(fleet.count("listening") == 3);
    fleet.until("three pods", LONG, up).await?;
    let ports = ports(fleet)?;

    // every delivery is sent twice and more, to whatever pod
    let mut senders = JoinSet::new();
    for number in 0..DELIVERIES {
        for _ in 0..2 {
            senders.spawn(deliver(number, ports.clone()));
        }
    }
    let some = async |fleet: &Fleet| Ok(fleet.count("run ends") >= 3);
    fleet.until("the first runs", LONG, some).await?;

    fleet.kill("a").await?;
    fleet.pause("b")?;
    let paused = Instant::now();
    let rest = BTreeMap::from([("c", ports["c"])]);
    refreshes(&rest, 1..4).await?;
    let spoken = chats(ports["c"]).await?;
    fleet.start("a2")?;
    // longer than a turn
    tokio::time::sleep(Duration::from_secs(3).saturating_sub(paused.elapsed())).await;
    fleet.resume("b")?;
    let up = async |fleet: &Fleet| Ok(fleet.count("listening") == 4);
    fleet.until("the fourth pod", LONG, up).await?;
    let ports = self::ports(fleet)?;
    let alive = ports.into_iter().filter(|(name, _)| *name != "a").collect();
    refreshes(&alive, 4..8).await?;
    let redeemed = upgrades(&alive).await?;

    while let Some(sent) = senders.join_next().await {
        sent??;
    }
    fleet
        .until("every run to be done", LONG, async |fleet| {
            let mut claim = docs::claim(&fleet.store, &[]).await?;
            let runs = all(&*fleet.docs, &mut claim).await?;
            claim.rollback().await?;
            let done = runs.values().filter(|run| run.state == State::Done).count();
            Ok(done == DELIVERIES && runs.len() == DELIVERIES)
        })
        .await?;
    let ticks = outcome(fleet).await?;
    limits_kept(&fleet.events())?;
    Ok(format!(
        "{DELIVERIES} deliveries, each run to its end once, never more than {LIMIT} at a time; \
         {} put back after a kill and a pause, {} stale writes rejected; {ticks} ticks, 7 refreshes, \
         {redeemed} tokens, each once; {spoken} of 8 spoke at a time",
        fleet.count("put back"),
        fleet.count("rejected"),
    ))
}

/// The ports of the pods, by name.
fn ports(fleet: &Fleet) -> Result<BTreeMap<&'static str, u16>, Failed> {
    let mut ports = BTreeMap::new();
    for event in fleet.events().iter().filter(|event| event.what == "listening") {
        let names = ["a", "b", "c", "a2"];
        let name = names.into_iter().find(|name| *name == event.server).ok_or("an unknown pod")?;
        ports.insert(name, event.subject.parse()?);
    }
    Ok(ports)
}

/// Sends a delivery to one pod after another until one has it.
async fn deliver(number: usize, ports: BTreeMap<&'static str, u16>) -> Result<(), String> {
    let ports: Vec<u16> = ports.into_values().collect();
    let path = format!("/deliveries/d{number:02}/repo-{}", number % 5);
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        let port = *ports.choose(&mut rand::rng()).ok_or("no pods")?;
        if let Some((200 | 201, _)) = ask(port, "POST", &path).await {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err(format!("no pod took the delivery {number}"))
}

/// All pods want a newer access token at the same time: each generation is refreshed once.
async fn refreshes(
    ports: &BTreeMap<&'static str, u16>,
    generations: std::ops::Range<u64>,
) -> Result<(), Failed> {
    for next in generations {
        let mut asking = JoinSet::new();
        for port in ports.values().copied().cycle().take(6) {
            asking.spawn(async move {
                let path = format!("/access-token/{}", next - 1);
                ask(port, "GET", &path).await
            });
        }
        let mut got = 0;
        while let Some(answer) = asking.join_next().await {
            match answer? {
                Some((200, token)) if token == next.to_string() => got += 1,
                Some((503, _)) | None => {}
                Some(other) => return Err(format!("expected token {next}, got {other:?}").into()),
            }
        }
        if got == 0 {
            return Err(format!("expected somebody to get the access token {next}").into());
        }
    }
    Ok(())
}

/// Each upgrade token is redeemed at all pods at once, and accepted by one.
async fn upgrades(ports: &BTreeMap<&'static str, u16>) -> Result<usize, Failed> {
    for user in 0..5 {
        let any = *ports.values().next().ok_or("no pods")?;
        let issued = ask(any, "POST", &format!("/upgrades/u{user}")).await;
        let Some((201, token)) = issued else {
            return Err(format!("expected a token, got {issued:?}").into());
        };
        let mut redeeming = JoinSet::new();
        for port in ports.values().copied().cycle().take(6) {
            let path = format!("/upgrades/u{user}/{token}");
            redeeming.spawn(async move { ask(port, "POST", &path).await });
        }
        let mut accepted = 0;
        while let Some(answer) = redeeming.join_next().await {
            match answer? {
                Some((200, _)) => accepted += 1,
                Some((410, _)) => {}
                other => return Err(format!("expected 200 or 410, got {other:?}").into()),
            }
        }
        if accepted != 1 {
            return Err(format!("expected the token to be good once, it was {accepted}").into());
        }
    }
    Ok(5)
}

/// Eight want to speak in one chat: one at a time does.
async fn chats(port: u16) -> Result<usize, Failed> {
    let mut speaking = JoinSet::new();
    for _ in 0..8 {
        speaking.spawn(async move { ask(port, "POST", "/chats/u1").await });
    }
    let mut spoken = 0;
    while let Some(answer) = speaking.join_next().await {
        match answer? {
            Some((200, _)) => spoken += 1,
            Some((409, _)) => {}
            other => return Err(format!("expected 200 or 409, got {other:?}").into()),
        }
    }
    if spoken == 0 {
        return Err("expected somebody to speak".into());
    }
    Ok(spoken)
}

/// Whatever was counted was done once; gives the number of ticks.
async fn outcome(fleet: &Fleet) -> Result<usize, Failed> {
    let mut claim = docs::claim(&fleet.store, &[]).await?;
    let counts = fleet.docs.list(&mut claim, "count/").await?;
    claim.rollback().await?;
    let more: Vec<_> = counts.iter().filter(|(_, times)| times != "1").collect();
    if !more.is_empty() {
        return Err(format!("expected everything to be done once: {more:?}").into());
    }
    let of = |kind: &str| {
        let prefix = format!("count/{kind}/");
        let found = counts.iter().filter_map(move |(name, _)| name.strip_prefix(&prefix));
        found.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let (done, refreshed) = (of("done").len(), of("refreshed").len());
    if done != DELIVERIES || refreshed != 7 {
        return Err(
            format!("expected {DELIVERIES} runs and 7 refreshes: {done}, {refreshed}").into()
        );
    }
    // every tick of the time was fired; one that was recorded by a pod that died at that moment,
    // or was stopped in it, may be missing
    let mut ticks = of("tick").iter().map(|at| at.parse()).collect::<Result<Vec<u64>, _>>()?;
    ticks.sort_unstable();
    let (Some(first), Some(last)) = (ticks.first(), ticks.last()) else {
        return Err("expected the schedule to tick".into());
    };
    let due = (last - first) / 250 + 1;
    let missing = due - ticks.len() as u64;
    if missing > 2 {
        return Err(format!("expected {due} ticks, {missing} are missing").into());
    }
    Ok(ticks.len())
}

/// No moment had more runs at work than the limit, those of killed and paused pods aside; and no
/// pod has ever counted more.
fn limits_kept(events: &[Event]) -> Result<(), Failed> {
    if let Some(event) = events.iter().find(|event| event.what == "limit exceeded") {
        return Err(format!("a pod counted too many: {event:?}").into());
    }
    let mut at_work = 0;
    for event in events.iter().filter(|event| !["a", "b"].contains(&event.server.as_str())) {
        match event.what.as_str() {
            "run begins" => at_work += 1,
            "run ends" | "run lost" | "rejected" => at_work -= 1,
            _ => {}
        }
        if at_work > LIMIT {
            return Err(format!("{at_work} runs were at work at {event:?}").into());
        }
    }
    Ok(())
}
