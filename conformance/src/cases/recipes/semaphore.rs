//! [`Semaphore`].

use std::sync::Arc;
use std::time::Duration;

use leasehold::recipes::Semaphore;
use tokio::task::JoinSet;

use super::Inside;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, LONG, PATIENCE, all, is_lost, key, pause, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    semaphore_over_locks_is_never_exceeded = "over named locks never more than n hold a permit, and all who wait get one";
    semaphore_over_leases_is_never_exceeded = "over leases never more than n hold a permit, and all who wait get one";
    semaphore_wakes_by_any_slot = "one who waits for a permit is woken by whichever slot is freed";
    semaphore_of_an_ended_session_is_free = "the permits of a session that ended are lost, told and free" [EndSessions, SessionLocks];
    semaphore_acquire = "an acquire of a free permit, dropped at every poll, leaves no permit";
    semaphore_acquire_that_waits = "an acquire that waits, dropped at every poll, leaves no permit and no queue place";
});

const PERMITS: usize = 3;

pub(super) fn over_locks(handle: &Handle) -> Result<Semaphore, Fault> {
    Ok(Semaphore::over_locks(handle.backend.clone(), &key("x"), PERMITS)?)
}

fn over_leases(handle: &Handle) -> Result<Semaphore, Fault> {
    Ok(Semaphore::over_leases(handle.backend.clone(), &key("x"), PERMITS, LONG)?)
}

type Over = fn(&Handle) -> Result<Semaphore, Fault>;

async fn is_never_exceeded(ctx: &Ctx, over: Over) -> Verdict {
    let inside = Arc::new(Inside::default());
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let semaphore = Arc::new(over(&ctx.open().await?)?);
        for _ in 0..4 {
            let (semaphore, inside) = (semaphore.clone(), inside.clone());
            tasks.spawn(async move {
                for _ in 0..4 {
                    let work = semaphore.with_permit(LONG, async |permit| {
                        let _entered = inside.enter();
                        pause().await;
                        permit.is_held()
                    });
                    let held = soon("a permit", work).await??;
                    ensure!(held == Some(true), "expected a permit and to hold it, got {held:?}");
                }
                Ok(())
            });
        }
    }
    all(tasks).await?;
    let (most, all) = (inside.most(), inside.all());
    ensure!(most <= PERMITS, "expected {PERMITS} permits at a time at most, {most} were held");
    ensure!(all == 48, "expected all 48 to get a permit, {all} did");
    Ok(())
}

async fn semaphore_over_locks_is_never_exceeded(ctx: Ctx) -> Verdict {
    is_never_exceeded(&ctx, over_locks).await
}

async fn semaphore_over_leases_is_never_exceeded(ctx: Ctx) -> Verdict {
    is_never_exceeded(&ctx, over_leases).await
}

async fn semaphore_wakes_by_any_slot(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for over in [over_locks, over_leases] {
        let (a, b) = (over(&a)?, over(&b)?);
        for freed in 0..PERMITS {
            let mut held = Vec::new();
            for _ in 0..PERMITS {
                let permit = a.acquire(PATIENCE).await?;
                held.push(permit.ok_or_else(|| Fault::new("expected a free permit"))?);
            }
            let tried = b.acquire(Duration::ZERO).await?;
            ensure!(tried.is_none(), "expected no permit while all are held");
            let waited = b.acquire(Duration::from_millis(200)).await?;
            ensure!(waited.is_none(), "expected no permit while all are held");
            held.sort_by_key(|permit| std::cmp::Reverse(permit.slot()));
            let free = async {
                pause().await;
                held.remove(PERMITS - 1 - freed).release().await
            };
            let (got, freeing) = tokio::join!(b.acquire(PATIENCE), free);
            freeing?;
            let Some(got) = got? else {
                return Err(Fault::new(format!("expected slot {freed} to wake who waits")));
            };
            ensure!(got.slot() == freed, "expected slot {freed}, got {}", got.slot());
            for permit in held.into_iter().chain([got]) {
                permit.release().await?;
            }
        }
    }
    Ok(())
}

/// All permits can be had by one handle, then freed.
pub(super) async fn all_can_be_had(semaphore: &Semaphore) -> Verdict {
    let mut held = Vec::new();
    for slot in 0..PERMITS {
        let permit = semaphore.acquire(PATIENCE).await?;
        let had = permit.ok_or_else(|| Fault::new(format!("expected a permit after {slot}")))?;
        held.push(had);
    }
    for permit in held {
        permit.release().await?;
    }
    Ok(())
}

async fn semaphore_of_an_ended_session_is_free(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (ours, others) = (over_locks(&a)?, over_locks(&b)?);
    let mut held = Vec::new();
    for _ in 0..PERMITS {
        held.extend(ours.acquire(PATIENCE).await?);
    }
    ensure!(held.len() == PERMITS, "expected {PERMITS} permits, got {}", held.len());
    a.link.end_sessions().await?;
    for permit in &held {
        is_lost(PATIENCE, "a permit", &permit.lost()).await?;
        ensure!(!permit.is_held(), "expected a lost permit not to be believed in");
    }
    all_can_be_had(&others).await
}

async fn semaphore_acquire(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for over in [over_locks, over_leases] {
        let (ours, others) = (over(&a)?, over(&b)?);
        cancel_at_every_poll(|| async { Ok(ours.acquire(PATIENCE)) }, || all_can_be_had(&others))
            .await?;
    }
    Ok(())
}

async fn semaphore_acquire_that_waits(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for over in [over_locks, over_leases] {
        let (ours, others) = (over(&a)?, over(&b)?);
        cancel_at_every_poll(
            || async {
                let mut held = Vec::new();
                for _ in 0..PERMITS {
                    held.extend(others.acquire(PATIENCE).await?);
                }
                ensure!(held.len() == PERMITS, "expected {PERMITS} permits, got {}", held.len());
                // freed while the wait is dropped
                let (wait, held) = (ours.acquire(LONG), held);
                Ok(async move {
                    let _held = held;
                    wait.await
                })
            },
            || all_can_be_had(&others),
        )
        .await?;
    }
    Ok(())
}
