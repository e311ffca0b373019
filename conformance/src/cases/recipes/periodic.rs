//! [`Poller`] and [`Housekeeper`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::recipes::{Housekeeper, Poller, Sweep};
use leasehold_core::{Error, ErrorKind};
use tokio::task::JoinSet;

use super::Inside;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, all, eventually, fails, key, pause, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    poller_ticks_one_at_a_time = "of all who tick one does, and the others do not wait";
    poller_holds_at_least_so_long = "after a tick nobody ticks for at least so long, also if it failed or was dropped";
    poller_of_a_deleted_lease_is_stopped = "a tick whose lease is gone is dropped, and the next ticks" [DeleteLease];
    poller_that_is_dropped = "a tick that is dropped at every poll leaves no lease";
    housekeeper_sweeps_once_in_an_interval = "of all processes one sweeps in an interval, and all sweeps are reported";
    housekeeper_of_a_deleted_lease_is_stopped = "a sweep whose lease is gone is dropped" [DeleteLease];
});

fn poller(handle: &Handle) -> Poller {
    Poller::new(handle.backend.clone(), key("x"))
}

async fn poller_ticks_one_at_a_time(ctx: Ctx) -> Verdict {
    let inside = Arc::new(Inside::default());
    let mut tasks = JoinSet::new();
    for task in 0..12 {
        let (poller, inside) = (poller(&ctx.open().await?), inside.clone());
        let poller = if task % 2 == 0 { poller } else { poller.keep_alive(LONG) };
        tasks.spawn(async move {
            for _ in 0..8 {
                let tick = poller.tick(async |_| {
                    let _entered = inside.enter();
                    pause().await;
                });
                soon("a tick or none", tick).await??;
            }
            Ok(())
        });
    }
    all(tasks).await?;
    let (most, ticks) = (inside.most(), inside.all());
    ensure!(most == 1 && ticks > 0, "expected one tick at a time, {most} of {ticks} were");
    Ok(())
}

async fn poller_holds_at_least_so_long(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let least = Duration::from_millis(600);
    let pollers = [&a, &b].map(|handle| poller(handle).at_least(least));
    for ending in ["done", "dropped"] {
        let start = Instant::now();
        let work = pollers[0].tick(async |_| {
            if ending == "dropped" {
                std::future::pending::<()>().await;
            }
        });
        let ticked = tokio::time::timeout(least / 3, work).await;
        let fits = match &ticked {
            Ok(ticked) => matches!(ticked, Ok(Some(()))),
            Err(_) => true, // dropped, or a store that took long
        };
        ensure!(fits, "expected a tick, got {ticked:?}");
        eventually("the other's tick", || async {
            Ok(pollers[1].tick(async |_| ()).await?.is_some())
        })
        .await?;
        let after = start.elapsed();
        if ticked.is_ok() || ending == "dropped" {
            ensure!(
                after >= least * 95 / 100,
                "expected no tick within {least:?} after one was {ending}, it was after {after:?}"
            );
        }
        eventually("a's turn", || async { Ok(a.try_lease("x").await?.is_some()) }).await?;
        a.leased("x", LONG).await?.release().await?;
    }
    Ok(())
}

async fn poller_of_a_deleted_lease_is_stopped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let most = Duration::from_secs(3);
    for poller in [poller(&a).at_most(most), poller(&a).keep_alive(most)] {
        let tick = poller.tick(async |_| {
            ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?;
            std::future::pending::<Verdict>().await
        });
        fails("a tick whose lease is gone", ErrorKind::Lost, soon("the loss", tick).await?)?;
        for handle in [&b, &a] {
            handle.leased("x", LONG).await?.release().await?;
        }
    }
    Ok(())
}

async fn poller_that_is_dropped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let poller = poller(&a);
    cancel_at_every_poll(
        || async { Ok(poller.tick(async |_| tokio::task::yield_now().await)) },
        || async { Ok(b.leased("x", LONG).await?.release().await?) },
    )
    .await
}

async fn housekeeper_sweeps_once_in_an_interval(ctx: Ctx) -> Verdict {
    let interval = Duration::from_secs(2);
    let inside = Arc::new(Inside::default());
    let mut keepers = Vec::new();
    for _ in 0..3 {
        let backend = ctx.open().await?.backend;
        let keeper = Housekeeper::new(backend, key("x")).interval(interval);
        let inside = inside.clone();
        keeper.register_sweep("counts", move || {
            let inside = inside.clone();
            async move {
                let _entered = inside.enter();
                pause().await;
                Ok::<_, Error>(3)
            }
        });
        keeper.register_sweep("fails", async || Err::<u64, _>("on purpose"));
        keepers.push(Arc::new(keeper));
    }
    let start = Instant::now();
    for round in 1..=2 {
        // until one has swept in this interval
        let swept = async {
            loop {
                let mut tasks = JoinSet::new();
                for keeper in &keepers {
                    let keeper = keeper.clone();
                    tasks.spawn(async move { keeper.sweep().await });
                }
                let mut reports = Vec::new();
                while let Some(swept) = tasks.join_next().await {
                    reports.extend(swept??.into_iter().flatten());
                }
                if !reports.is_empty() {
                    return Ok::<_, Fault>(reports);
                }
                pause().await;
            }
        };
        let reports = soon("a sweep", swept).await??;
        let outcomes: Vec<_> = reports.iter().map(|report| &report.outcome).collect();
        let fits = matches!(
            outcomes[..],
            [Sweep::Removed(_), Sweep::Removed(3), Sweep::Failed(why)] if why == "on purpose"
        );
        ensure!(fits, "expected one to sweep everything, the reports are {reports:?}");
        ensure!(inside.all() == round, "expected {round} sweeps, there were {}", inside.all());
    }
    let after = start.elapsed();
    ensure!(
        after >= interval * 8 / 10,
        "expected the second sweep in the next interval of {interval:?}, it was after {after:?}"
    );
    Ok(())
}

async fn housekeeper_of_a_deleted_lease_is_stopped(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let keeper = Housekeeper::new(a.backend.clone(), key("x")).interval(Duration::from_secs(3));
    let on = ctx.clone();
    keeper.register_sweep("loses", move || {
        let ctx = on.clone();
        async move {
            ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?;
            std::future::pending::<Result<u64, Error>>().await
        }
    });
    // its ttl is 30 s: the next renewal tells, or the store does
    let swept = crate::ctx::within(Duration::from_secs(40), "the loss", keeper.sweep()).await?;
    fails("a sweep whose lease is gone", ErrorKind::Lost, swept)?;
    Ok(())
}
