//! [`Takeover`] and [`Turns`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::recipes::{Pickup, Recovery, Takeover, Turns};
use leasehold_core::{Error, ErrorKind};
use tokio::task::JoinSet;

use super::Inside;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::cases::dedupe::{SHORT, short};
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, eventually, fails, key, pause, soon};
use crate::fault::{Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    takeover_by_exactly_one = "work that a process left when it died is picked up by exactly one, not before its time";
    takeover_of_failed_work = "work that failed can be had again at once, work that is done cannot";
    takeover_stops_overdue_work = "work that takes longer than others wait for it is dropped, and cannot be reported as done";
    takeover_that_is_dropped = "work that is dropped at every poll can be had again";
    turns_recover_only_the_dead = "a recovery settles what a dead process left, once, and nothing of a living one";
    turn_of_a_deleted_lease_is_stopped = "work whose turn is gone is dropped, and a recovery settles it" [DeleteLease];
});

pub(super) fn takeover(handle: &Handle) -> Takeover {
    Takeover::new(handle.backend.clone(), key("work"))
}

/// Many ask until the work is done: how often it was, and after how long at first.
pub(super) async fn many_pick_up(
    ctx: &Ctx,
    id: &'static str,
) -> Result<Arc<Inside>, crate::fault::Fault> {
    let inside = Arc::new(Inside::default());
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let handle = ctx.open().await?;
        for _ in 0..4 {
            let (takeover, inside) = (takeover(&handle), inside.clone());
            tasks.spawn(async move {
                loop {
                    let work = takeover.run(id, async |_| {
                        let _entered = inside.enter();
                        pause().await;
                        Ok::<_, Error>(())
                    });
                    match soon("an answer", work).await?? {
                        Pickup::InProgress { .. } => pause().await,
                        _ => return Ok(()),
                    }
                }
            });
        }
    }
    soon("the work to be picked up", all(tasks)).await??;
    Ok(inside)
}

async fn takeover_by_exactly_one(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let start = Instant::now();
    std::mem::forget(a.admitted("work/7", short()).await?); // its process is gone
    let inside = many_pick_up(&ctx, "7").await?;
    let after = start.elapsed();
    let done = inside.all();
    ensure!(done == 1, "expected one to pick it up, {done} did");
    ensure!(after >= SHORT * 95 / 100, "expected it not before {SHORT:?}, it was after {after:?}");
    Ok(())
}

async fn takeover_of_failed_work(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (a, b) = (takeover(&a), takeover(&b));
    for takeover in [&a, &b] {
        let failed = takeover
            .run("7", async |_| Err::<(), _>(Error::new(ErrorKind::Backend, "on purpose")))
            .await;
        fails("work that fails", ErrorKind::Backend, failed)?;
    }
    let done = b
        .run("7", async |_| {
            let other = a.run("7", async |_| Ok::<_, Error>(())).await?;
            let busy = matches!(other, Pickup::InProgress { .. });
            ensure!(busy, "expected it to be in progress for others, it is {other:?}");
            Ok(())
        })
        .await?;
    ensure!(matches!(done, Pickup::Done(())), "expected it to be done, it is {done:?}");
    for takeover in [&a, &b] {
        let again = takeover.run("7", async |_| Ok::<_, Error>(())).await?;
        let fits = matches!(again, Pickup::AlreadyDone { .. });
        ensure!(fits, "expected it to have been done, it is {again:?}");
    }
    Ok(())
}

async fn takeover_stops_overdue_work(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let slow = takeover(&a).after(SHORT);
    let stopped = slow.run("7", async |_| std::future::pending::<Result<(), Error>>().await);
    fails("overdue work", ErrorKind::Lost, soon("the end", stopped).await?)?;
    let other = takeover(&b);
    eventually("the next to do it", || async {
        let next = other.run("7", async |_| Ok::<_, Error>(())).await?;
        Ok(matches!(next, Pickup::Done(())))
    })
    .await
}

async fn takeover_that_is_dropped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (ours, others) = (takeover(&a), takeover(&b));
    let round = std::sync::atomic::AtomicUsize::new(0);
    cancel_at_every_poll(
        || async {
            let (ours, id) = (ours.clone(), round.fetch_add(1, Ordering::SeqCst).to_string());
            Ok(async move {
                let work = ours.run(&id, async |_| {
                    tokio::task::yield_now().await;
                    Ok::<_, Error>(())
                });
                work.await
            })
        },
        || async {
            let id = (round.load(Ordering::SeqCst) - 1).to_string();
            eventually("it to be done, by either", || async {
                let next = others.run(&id, async |_| Ok::<_, Error>(())).await?;
                Ok(!matches!(next, Pickup::InProgress { .. }))
            })
            .await
        },
    )
    .await
}

fn turns(handle: &Handle) -> Turns {
    Turns::new(handle.backend.clone(), key("turn")).ttl(Duration::from_secs(3))
}

async fn turns_recover_only_the_dead(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let living = turns(&a).begin("living").await?;
    ensure!(living.is_some(), "expected the turn of a new row to be free");
    ctx.vanished_lease("turn/dead", Duration::from_secs(2)).await?;
    let (settled, is_settled) = (Arc::new(Inside::default()), Arc::new(AtomicBool::new(false)));
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let handle = ctx.open().await?;
        for _ in 0..3 {
            let turns = turns(&handle);
            let (settled, is_settled) = (settled.clone(), is_settled.clone());
            tasks.spawn(async move {
                while !is_settled.load(Ordering::SeqCst) {
                    let recovered = turns.recover(
                        "dead",
                        async |_| Ok(!is_settled.load(Ordering::SeqCst)),
                        async |_| {
                            let _entered = settled.enter();
                            pause().await;
                            is_settled.store(true, Ordering::SeqCst);
                            Ok::<_, Error>(())
                        },
                    );
                    soon("an answer", recovered).await??;
                    pause().await;
                }
                let found =
                    turns.recover("living", async |_| Ok(true), async |_| Ok::<_, Error>(()));
                let found = soon("an answer", found).await??;
                ensure!(found == Recovery::Alive, "expected it to be alive, it is {found:?}");
                Ok(())
            });
        }
    }
    soon("the dead one to be settled", all(tasks)).await??;
    let times = settled.all();
    ensure!(times == 1, "expected it to be settled once, it was {times} times");
    if let Some(living) = living {
        ensure!(living.is_held(), "expected the living to keep its turn");
        living.release().await?;
    }
    Ok(())
}

async fn turn_of_a_deleted_lease_is_stopped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (ours, others) = (turns(&a), turns(&b));
    let work = ours.run("7", async |turn| {
        ctx.harness().delete_lease(ctx.namespace(), turn.key()).await?;
        std::future::pending::<Result<(), Error>>().await
    });
    fails("work whose turn is gone", ErrorKind::Lost, soon("the loss", work).await?)?;
    let found = others.recover("7", async |_| Ok(true), async |_| Ok::<_, Error>(()));
    let found = soon("an answer", found).await??;
    ensure!(found == Recovery::Settled(()), "expected it to be settled, it is {found:?}");
    let next = b.lease_within("turn/7", PATIENCE).await?;
    ensure!(next.is_some(), "expected the turn to be free");
    a.leased("other", LONG).await?.release().await?;
    Ok(())
}
