//! Every recipe, on the memory backend, in two seconds: `cargo run -p leasehold --example recipes`.
//!
//! Two handles on one store stand for two processes of a service.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::memory::{MemoryBackend, MemoryStore, MemoryTx};
use leasehold::recipes::{
    Every, Housekeeper, Leader, Limit, OneTimeTokens, PerKey, Pickup, Poller, Recovery, Schedule,
    Semaphore, SingleFlight, Takeover, Turns,
};
use leasehold::{Claim, Error, Key, Result};

type Process = Arc<MemoryBackend>;

#[tokio::main]
async fn main() -> Result<()> {
    let store = MemoryStore::new();
    let [a, b] = ["a", "b"].map(|_| Arc::new(MemoryBackend::builder().store(&store).build()));
    leader(&a, &b).await?;
    poller(&a, &b).await?;
    single_flight(&a, &b).await?;
    semaphore(&a, &b).await?;
    one_time_token(&a, &b).await?;
    schedule(&a, &b).await?;
    housekeeper(&a, &b).await?;
    limit(&a).await?;
    takeover(&a, &b).await?;
    turns(&a, &b).await
}

async fn leader(a: &Process, b: &Process) -> Result<()> {
    let key = Key::new("scheduler")?;
    let first = Leader::over_locks(a.clone(), key.clone()).start();
    let token = first.lead(async |term| term.token()).await;
    println!("leader          a leads with token {token}");
    let second = Leader::over_locks(b.clone(), key).start();
    first.resign().await;
    println!("                a resigns, b leads with token {}", second.elected().await.token());
    Ok(())
}

async fn poller(a: &Process, b: &Process) -> Result<()> {
    let poller = |process: &Process| {
        let poller = Poller::new(process.clone(), Key::new("poll-feeds")?);
        Ok::<_, Error>(poller.at_least(Duration::from_secs(20)))
    };
    let (one, two) = (poller(a)?, poller(b)?);
    println!("poller          a: {:?}", one.tick(async |_| "polled").await?);
    println!("                b, within 20 s: {:?}", two.tick(async |_| "polled").await?);
    Ok(())
}

async fn single_flight(a: &Process, b: &Process) -> Result<()> {
    let stored = Mutex::new(None);
    let read = || std::future::ready(Ok::<_, Error>(stored.lock().ok().and_then(|value| *value)));
    let key = Key::new("refresh/account-7")?;
    let refresh = async |process: &Process, token: &'static str| {
        let work = async |_: &_| {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if let Ok(mut stored) = stored.lock() {
                *stored = Some(token);
            }
            Ok(token)
        };
        SingleFlight::new(process.clone()).run(&key, read, work).await
    };
    let (one, two) = tokio::join!(refresh(a, "fetched by a"), refresh(b, "fetched by b"));
    println!("single flight   a got {:?}, b got {:?}", one?, two?);
    Ok(())
}

async fn semaphore(a: &Process, b: &Process) -> Result<()> {
    let key = Key::new("exports")?;
    let one = Semaphore::over_locks(a.clone(), &key, 2)?;
    let two = Semaphore::over_locks(b.clone(), &key, 2)?;
    let held = [one.acquire(Duration::ZERO).await?, one.acquire(Duration::ZERO).await?];
    let third = two.acquire(Duration::from_millis(50)).await?;
    let taken = held.iter().flatten().count();
    println!("semaphore       a holds {taken} of 2 permits, b gets one: {}", third.is_some());
    drop(held);
    let third = two.acquire(Duration::from_secs(5)).await?;
    println!("                a lets go, b gets one: {}", third.is_some());
    Ok(())
}

async fn one_time_token(a: &Process, b: &Process) -> Result<()> {
    let purpose = Key::new("upgrade/user-7")?;
    let one = OneTimeTokens::new(a.clone(), purpose.clone());
    let two = OneTimeTokens::new(b.clone(), purpose);
    let token = one.issue(Duration::from_secs(30)).await?;
    println!("one-time token  a issues {token:?}");
    let accepted = two.redeem(token.expose_secret()).await?.is_accepted();
    println!("                b accepts it: {accepted}");
    let again = one.redeem(token.expose_secret()).await?;
    println!("                presented again: {again:?}");
    Ok(())
}

async fn schedule(a: &Process, b: &Process) -> Result<()> {
    let schedule = |process: &Process| {
        let often = Every::new(Duration::from_millis(100))?;
        Ok::<_, Error>(Schedule::new(process.clone(), Key::new("report")?, often))
    };
    let (one, two) = (schedule(a)?, schedule(b)?);
    let fired = Mutex::new(Vec::new());
    let fires = |name| {
        let fired = &fired;
        move |_| {
            if let Ok(mut fired) = fired.lock() {
                fired.push(name);
            }
            std::future::ready(())
        }
    };
    tokio::select! {
        ended = one.run(fires("a")) => ended?,
        ended = two.run(fires("b")) => ended?,
        () = tokio::time::sleep(Duration::from_millis(750)) => {}
    }
    let fired = fired.into_inner().unwrap_or_default();
    println!("schedule        ticks of 100 ms, in 750 ms, fired by {}", fired.join(" "));
    Ok(())
}

async fn housekeeper(a: &Process, b: &Process) -> Result<()> {
    let keeper = |process: &Process| {
        let keeper = Housekeeper::new(process.clone(), Key::new("housekeeping")?);
        keeper.register_sweep("old deliveries", async || Ok::<_, Error>(3));
        Ok::<_, Error>(keeper)
    };
    let (one, two) = (keeper(a)?, keeper(b)?);
    for report in one.sweep().await?.into_iter().flatten() {
        println!("housekeeper     a swept {:?}: {:?}", report.name, report.outcome);
    }
    println!("                b, within 30 s: {:?}", two.sweep().await?);
    Ok(())
}

async fn limit(a: &Process) -> Result<()> {
    let limit = Limit::new(a.clone(), Key::new("tasks")?, 20);
    let per_repo = [PerKey::new("repo-a", 1)];
    let count = async |claim: &mut Claim| -> Result<Vec<u64>> {
        let tx = claim.tx::<MemoryTx>()?;
        let count = |name| tx.read(name).and_then(|count| count.parse().ok()).unwrap_or(0);
        Ok(vec![count("all"), count("repo-a")])
    };
    let take = async |claim: &mut Claim| -> Result<&str> {
        let counts = count(claim).await?;
        let tx = claim.tx::<MemoryTx>()?;
        tx.write("all", (counts[0] + 1).to_string());
        tx.write("repo-a", (counts[1] + 1).to_string());
        Ok("a task of repo-a")
    };
    for _ in 0..2 {
        println!("limit           {:?}", limit.take(&per_repo, count, take).await?);
    }
    Ok(())
}

async fn takeover(a: &Process, b: &Process) -> Result<()> {
    let invoices = |process: &Process| {
        let takeover = Takeover::new(process.clone(), Key::new("invoices")?);
        Ok::<_, Error>(takeover.after(Duration::from_millis(200)))
    };
    let (one, two) = (invoices(a)?, invoices(b)?);
    let hangs = async |_: &_| std::future::pending::<Result<()>>().await;
    if let Err(error) = one.run("2026-11", hangs).await {
        println!("takeover        a: {error}");
    }
    loop {
        match two.run("2026-11", async |claim| Ok::<_, Error>(claim.token())).await? {
            Pickup::InProgress { .. } => tokio::time::sleep(Duration::from_millis(20)).await,
            other => {
                println!("                b: done with token {:?}", other.done());
                return Ok(());
            }
        }
    }
}

async fn turns(a: &Process, b: &Process) -> Result<()> {
    let key = Key::new("chat")?;
    let (workers, recovery) = (Turns::new(a.clone(), key.clone()), Turns::new(b.clone(), key));
    let recover = async || -> Result<Recovery<&str>> {
        recovery.recover("turn-1", async |_| Ok(true), async |_| Ok("marked as failed")).await
    };
    let answered = workers
        .run("turn-1", async |_| {
            println!("turns           while a works, b finds it {:?}", recover().await?);
            Ok::<_, Error>("answered")
        })
        .await?;
    println!(
        "                a: {answered:?}; then b, had its row been left: {:?}",
        recover().await?
    );
    Ok(())
}
