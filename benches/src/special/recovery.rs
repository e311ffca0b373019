//! A server that was killed and is back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold_peers::{Locker, Outcome};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;

use crate::contenders;
use crate::record::{Against, Better, Record, Role, Unit};
use crate::scene::Scene;

/// A failed call is made again after this time.
const PAUSE: Duration = Duration::from_millis(2);

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut record = Record::new("recovery", "recovery", Unit::Millis, Better::Lower)
        .target(Against::Peers, 1.0)
        .note(
            "From a killed server's answering again to the first lock of a handle that had one \
             before, asking all the time; all contenders at once. Zero: it had one before the \
             server was seen to answer.",
        );
    if scene.server.pid().is_none() {
        record.cannot(Role::Leasehold, super::OURS, "the server is not ours to kill");
        return Ok(vec![record]);
    }
    // who has no lock by then has given up
    let limit = Duration::from_secs(scene.pick(10, 10, 30));
    let mut out: Vec<&str> = Vec::new();
    for _ in 0..scene.pick(1, 3, 7) {
        let mut entrants = contenders::of(scene.kind(), &scene.server.url())?;
        entrants.retain(|entrant| !out.contains(&entrant.name()));
        let (mut tasks, gone) = (JoinSet::new(), Arc::new(AtomicBool::new(false)));
        for entrant in entrants {
            let handle = entrant.contender.open().await?;
            let name = format!("back-{:08x}", rand::random::<u32>());
            handle.lock(&name, Duration::ZERO).await?.ok_or("it was free")?.release().await?;
            let gone = gone.clone();
            tasks.spawn(async move {
                let name = format!("{name}-again");
                (entrant.role, entrant.name(), first_lock(&handle, &name, &gone, limit).await)
            });
        }
        let server = scene.server.clone();
        let restarted = spawn_blocking(move || {
            server.kill()?;
            gone.store(true, Ordering::SeqCst);
            server.restart()
        });
        restarted.await??;
        let back = Instant::now();
        while let Some(done) = tasks.join_next().await {
            match done? {
                (role, name, Some(at)) => {
                    let took = at.saturating_duration_since(back).as_secs_f64() * 1e3;
                    record.add(role, name, took);
                }
                (role, name, None) => {
                    out.push(name);
                    record.cannot(role, name, format!("no lock within {} s", limit.as_secs()));
                }
            }
        }
    }
    Ok(vec![record])
}

/// Asks all the time; what counts is the first lock that was asked for when the server had gone. Some
/// drivers never fail: they hold a request back until they are connected again.
async fn first_lock(
    handle: &Arc<dyn Locker>,
    name: &str,
    gone: &AtomicBool,
    limit: Duration,
) -> Option<Instant> {
    let ends = Instant::now() + limit;
    while Instant::now() < ends {
        let had_gone = gone.load(Ordering::SeqCst);
        match timeout(limit, handle.lock(name, Duration::ZERO)).await {
            Ok(Ok(Some(_))) if had_gone => return Some(Instant::now()),
            // its failure is the server's end, which the flag tells
            Ok(Ok(Some(lock))) => drop(lock.release().await),
            Ok(Ok(None) | Err(_)) => {}
            Err(_) => return None,
        }
        tokio::time::sleep(PAUSE).await;
    }
    None
}
