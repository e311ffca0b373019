//! Dedupe entries that nobody finished: takeover, stale owners, purges.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold_core::{DedupeGuard, DedupeOptions, ErrorKind};
use tokio::task::JoinSet;

use super::dedupe::{SHORT, count_winners, done, in_progress, short};
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, PATIENCE, all, fails, is_lost, key, pause, soon};
use crate::fault::{Fault, Verdict, ensure};

cases!(Dedupe in "dedupe" {
    unfinished_is_taken_over = "an entry that nobody finished goes to the next after in_progress, not before (B86)";
    stale_owner_cannot_complete = "an owner whose entry was taken over cannot complete it for its successor (B57)";
    stale_owner_cannot_abandon = "an owner whose entry was taken over cannot abandon its successor's (B57)";
    one_taker_of_an_unfinished_entry = "of many that find an unfinished entry overdue exactly one takes it over";
    guard_knows_when_it_can_be_taken_over = "a guard tells by its deadline that its entry can be taken over";
    housekeeping_spares_the_live = "housekeeping removes neither done nor unfinished entries before their time (B106)";
    every_answer_is_one_of_three = "under purges, completions and failures every admission gets an answer (B97, B100)";
});

/// An entry of `a` that `b` has taken over: both guards.
async fn taken_over(ctx: &Ctx) -> Result<(DedupeGuard, DedupeGuard), Fault> {
    let (a, b) = ctx.two().await?;
    let old = a.admitted("event", short()).await?;
    let start = Instant::now();
    loop {
        ensure!(
            start.elapsed() < PATIENCE,
            "expected the entry to be taken over within {PATIENCE:?}"
        );
        if let Some(new) = b.admission("event").await?.first() {
            ensure!(!old.is_held(), "expected the old owner to know that it may be taken over");
            return Ok((old, new));
        }
    }
}

async fn unfinished_is_taken_over(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let start = Instant::now();
    let old = a.admitted("event", short()).await?;
    let token = old.token();
    std::mem::forget(old); // its process is gone
    let mut taken = None;
    while taken.is_none() {
        ensure!(
            start.elapsed() < PATIENCE,
            "expected the entry to be taken over within {PATIENCE:?}"
        );
        taken = b.admission("event").await?.first();
    }
    let after = start.elapsed();
    ensure!(
        after >= SHORT * 95 / 100,
        "expected no takeover before {SHORT:?}, it was after {after:?}"
    );
    let taken = taken.ok_or_else(|| Fault::new("expected a takeover"))?;
    ensure!(taken.token() > token, "expected a greater token than {token}, got {}", taken.token());
    Ok(taken.complete().await?)
}

async fn stale_owner_cannot_complete(ctx: Ctx) -> Verdict {
    let (old, new) = taken_over(&ctx).await?;
    fails("a stale complete", ErrorKind::Lost, old.complete().await)?;
    let c = ctx.open().await?;
    let next = c.admission("event").await?;
    ensure!(in_progress(&next), "expected the successor to be at it still, the key is {next:?}");
    new.complete().await?;
    let next = c.admission("event").await?;
    ensure!(done(&next), "expected the successor to complete it, the key is {next:?}");
    Ok(())
}

async fn stale_owner_cannot_abandon(ctx: Ctx) -> Verdict {
    let (old, new) = taken_over(&ctx).await?;
    fails("a stale abandon", ErrorKind::Lost, old.abandon().await)?;
    let c = ctx.open().await?;
    let next = c.admission("event").await?;
    ensure!(in_progress(&next), "expected the successor to be at it still, the key is {next:?}");
    Ok(new.complete().await?)
}

async fn one_taker_of_an_unfinished_entry(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    for round in 0..3 {
        let name = format!("event-{round}");
        let old = a.admitted(&name, short()).await?;
        is_lost(PATIENCE, "an overdue entry", &old.lost()).await?;
        std::mem::forget(old); // its process is gone
        let mut count = 0;
        let start = Instant::now();
        while count == 0 {
            ensure!(start.elapsed() < PATIENCE, "expected a takeover within {PATIENCE:?}");
            count = count_winners(&ctx, &name, DedupeOptions::default()).await?;
        }
        ensure!(count == 1, "expected one taker of 24, round {round} had {count}");
    }
    Ok(())
}

async fn guard_knows_when_it_can_be_taken_over(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let guard = a.admitted("event", short()).await?;
    is_lost(PATIENCE, "an overdue entry", &guard.lost()).await?;
    ensure!(!guard.is_held(), "expected an overdue guard not to be held");
    let finished = a.admitted("other", DedupeOptions::default()).await?;
    let lost = finished.lost();
    finished.complete().await?;
    ensure!(!lost.is_set(), "expected a completed entry not to be told as lost");
    Ok(())
}

async fn housekeeping_spares_the_live(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _unfinished = a.admitted("unfinished", DedupeOptions::default()).await?;
    a.admitted("done", DedupeOptions::default()).await?.complete().await?;
    let old = a.admitted("dead", short()).await?;
    let token = old.token();
    is_lost(PATIENCE, "an overdue entry", &old.lost()).await?;
    std::mem::forget(old); // left to the housekeeping
    for _ in 0..3 {
        b.backend.housekeep().await?;
    }
    let (unfinished, finished) = (b.admission("unfinished").await?, b.admission("done").await?);
    ensure!(
        in_progress(&unfinished),
        "expected the unfinished entry to stay, it is {unfinished:?}"
    );
    ensure!(done(&finished), "expected the done entry to stay, it is {finished:?}");
    // its owner gives it up a little before the store does
    let next = soon("an overdue entry to be first again", async {
        loop {
            if let Some(next) = b.admission("dead").await?.first() {
                return Ok::<_, Fault>(next);
            }
            pause().await;
        }
    })
    .await??;
    ensure!(
        next.token() > token,
        "expected tokens to rise across a purge: {token}, then {}",
        next.token()
    );
    Ok(next.abandon().await?)
}

async fn every_answer_is_one_of_three(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let owners: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let (firsts, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let (handle, owners, firsts) = (handles[task % 3].clone(), owners.clone(), firsts.clone());
        tasks.spawn(async move {
            for _ in 0..10 {
                let name = format!("event-{}", rand::random_range(0..4));
                let opts = DedupeOptions::default().retain(Duration::from_millis(100));
                let Some(guard) = handle.backend.admit(&key(&name), opts).await?.first() else {
                    continue;
                };
                firsts.fetch_add(1, Ordering::SeqCst);
                let others = {
                    let mut owners = owners.lock().unwrap_or_else(PoisonError::into_inner);
                    owners.insert(name.clone(), task)
                };
                ensure!(
                    others.is_none(),
                    "expected one at a time to be at {name:?}, {others:?} and {task} are"
                );
                tokio::task::yield_now().await;
                owners.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
                match rand::random_range(0..3) {
                    0 => guard.complete().await?,
                    1 => guard.abandon().await?,
                    _ => drop(guard),
                }
            }
            Ok(())
        });
    }
    let purge = async {
        while !over.load(Ordering::SeqCst) {
            handles[0].backend.housekeep().await?;
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        Ok(())
    };
    let work = async {
        let done = all(tasks).await;
        over.store(true, Ordering::SeqCst);
        done
    };
    let (worked, purged): (Verdict, Verdict) = tokio::join!(work, purge);
    worked.and(purged)?;
    let firsts = firsts.load(Ordering::SeqCst);
    ensure!(firsts >= 4, "expected admissions under way, there were {firsts}");
    Ok(())
}
