//! [`SingleFlight`].

use std::sync::Arc;
use std::time::Duration;

use leasehold::recipes::SingleFlight;
use leasehold_core::{Error, ErrorKind};
use tokio::task::JoinSet;

use super::Inside;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, fails, key, pause, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    flight_is_one = "of all who want a result one does the work, and all get what it stored";
    flight_never_works_without_the_lease = "who waited too long gets what is stored or nothing, and does not do the work";
    flight_of_a_deleted_lease_is_stopped = "work whose lease is gone is dropped, and the next does it" [DeleteLease];
    flight_that_is_dropped = "a call that is dropped at every poll leaves no lease";
});

/// What is stored, none as zero.
async fn stored(ctx: &Ctx) -> Result<Option<i64>, Fault> {
    let value = ctx.committed("value").await?;
    Ok((value != 0).then_some(value))
}

async fn store(ctx: &Ctx, handle: &Handle, value: i64) -> Verdict {
    let mut tx = handle.claimed(&[]).await?;
    ctx.write(&mut tx, "value", value).await?;
    Ok(tx.commit().await?)
}

async fn flight_is_one(ctx: Ctx) -> Verdict {
    let inside = Arc::new(Inside::default());
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let handle = ctx.open().await?;
        let flights = Arc::new(SingleFlight::new(handle.backend.clone()).wait(LONG));
        for _ in 0..6 {
            let (ctx, handle) = (ctx.clone(), handle.clone());
            let (flights, inside) = (flights.clone(), inside.clone());
            tasks.spawn(async move {
                let read = || stored(&ctx);
                let key = key("x");
                let flight = flights.run(&key, read, async |_| {
                    let _entered = inside.enter();
                    pause().await;
                    store(&ctx, &handle, 7).await.map(|()| 7)
                });
                let got = soon("a result", flight).await??;
                ensure!(got == Some(7), "expected what was stored, got {got:?}");
                Ok(())
            });
        }
    }
    all(tasks).await?;
    let works = inside.all();
    ensure!(works == 1, "expected the work to be done once, it was done {works} times");
    Ok(())
}

async fn flight_never_works_without_the_lease(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = a.leased("x", LONG).await?;
    let inside = Inside::default();
    let key = key("x");
    for expected in [None, Some(7)] {
        for wait in [Duration::ZERO, Duration::from_millis(200)] {
            let flights = SingleFlight::new(b.backend.clone()).wait(wait);
            let work = async |_: &_| {
                let _entered = inside.enter();
                Ok::<_, Fault>(8)
            };
            let got = soon("an answer", flights.run(&key, || stored(&ctx), work)).await??;
            ensure!(got == expected, "expected {expected:?} within {wait:?}, got {got:?}");
        }
        store(&ctx, &a, 7).await?;
    }
    ensure!(inside.all() == 0, "expected no work without the lease");
    Ok(held.release().await?)
}

async fn flight_of_a_deleted_lease_is_stopped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let key = key("x");
    let nothing = async || Ok::<Option<i64>, Error>(None);
    let flights = SingleFlight::new(a.backend.clone()).ttl(Duration::from_secs(3));
    let flight = flights.run(&key, nothing, async |_| {
        ctx.harness().delete_lease(ctx.namespace(), &key).await?;
        std::future::pending().await
    });
    fails("work whose lease is gone", ErrorKind::Lost, soon("the loss", flight).await?)?;
    let flights = SingleFlight::new(b.backend.clone()).wait(PATIENCE);
    let next = soon("the next", flights.run(&key, nothing, async |_| Ok(9))).await??;
    ensure!(next == Some(9), "expected the next to do the work, got {next:?}");
    Ok(())
}

async fn flight_that_is_dropped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let flights = SingleFlight::new(a.backend.clone());
    let key = key("x");
    let nothing = async || Ok::<Option<i64>, Error>(None);
    let work = async |_: &_| {
        tokio::task::yield_now().await;
        Ok(1)
    };
    cancel_at_every_poll(
        || async { Ok(flights.run(&key, nothing, work)) },
        || async { Ok(b.leased("x", LONG).await?.release().await?) },
    )
    .await
}
