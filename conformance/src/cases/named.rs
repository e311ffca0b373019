//! Named locks, beyond what they share with leases and claims.

use std::time::Duration;

use futures_util::FutureExt;
use leasehold_core::{LockOptions, NamedLockExt};
use tokio::task::JoinSet;

#[allow(clippy::wildcard_imports)] // the table names nearly all of it
use super::shared::*;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, all, key, soon};
use crate::fault::{Fault, Verdict, ensure};

cases!(NamedLock in "named" {
    excludes(Kind::Lock) = "a lock that one handle holds is not to be had by another";
    different_keys_are_independent(Kind::Lock) = "holding one key does not keep others from another";
    can_be_taken_again_after_release(Kind::Lock) = "a released lock is free at once, for this handle and for others";
    is_not_reentrant(Kind::Lock) = "a handle does not get a lock that it holds itself (B08)";
    release_then_drop_frees_once(Kind::Lock) = "ending a guard does not free its successor's lock";
    try_never_waits(Kind::Lock) = "a wait of zero, a nanosecond or a millisecond ends at once (B25)";
    wait_bounds_everything(Kind::Lock) = "a wait ends at its limit, behind a local holder and behind another process";
    huge_waits_wait(Kind::Lock) = "a wait of 40 days or Duration::MAX neither overflows nor ends early (B25, B43)";
    waiter_wakes_on_release(Kind::Lock) = "a waiter on another handle gets the lock soon after its release";
    counter_of_100_tasks(Kind::Lock) = "100 tasks on three handles increment a counter without a lost update";
    fuzz_of_two_names(Kind::Lock) = "holds of two names by many tasks never overlap and tokens rise with them";
    tokens_rise(Kind::Lock) = "each later acquisition has a greater token, on whichever handle";
    local_waiters_are_served_in_order(Kind::Lock) = "waiters of one process get the lock in the order in which they came";
    drop_frees(Kind::Lock) = "a dropped guard frees its lock soon, without being released (B54)";
    panic_frees(Kind::Lock) = "a task that panics or is aborted while it holds a lock frees it";
    cancelled_waiters_leave_nothing(Kind::Lock) = "waits that are dropped at any time leave no lock and no queue place (B03, B07)";
    lost_is_silent_on_release(Kind::Lock) = "releasing or dropping a guard is not told as a loss";
    token_stays_for_the_hold = "asking a guard for its token again gives the same one";
    tokens_rise_along_the_queue = "who waited in one process for a lock has a greater token than those before, and a lesser one than those after";
    other_processes_get_their_turn = "local hand-overs do not keep another process from the lock for ever";
    with_lock_gives_the_result_and_frees = "with_lock runs its work under the lock, or not at all, and frees it";
    many_locks_on_one_handle = "one handle holds hundreds of locks, each of which excludes (B30)";
    many_contended_keys_at_once = "waiting for more keys than there are waiter sessions ends well (B74)";
    crossed_waits_end = "two tasks that want each other's lock end at their limits and keep their own (B16, B49)";
});

async fn token_stays_for_the_hold(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let guard = a.locked("x").await?;
    let token = guard.token().await?;
    let _other = a.locked("y").await?;
    let again = guard.token().await?;
    ensure!(token == again, "expected one token for one hold, got {token} and then {again}");
    Ok(())
}

async fn tokens_rise_along_the_queue(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut guard = a.locked("x").await?;
    let mut last = guard.token().await?;
    for turn in 0..40 {
        let mut waiter = Box::pin(a.lock_within("x", Duration::from_secs(20)));
        let early = waiter.as_mut().now_or_never();
        ensure!(early.is_none(), "expected the lock to be held in turn {turn}, got {early:?}");
        guard.release().await?;
        let Some(next) = waiter.await? else {
            return Err(Fault::new(format!("expected the lock in turn {turn}, got None")));
        };
        guard = next;
        // some are never asked for theirs
        if turn % 3 != 0 {
            let token = guard.token().await?;
            ensure!(token > last, "expected a token above {last} in turn {turn}, got {token}");
            last = token;
        }
    }
    guard.release().await?;
    let token = b.locked("x").await?.token().await?;
    ensure!(token > last, "expected a token above {last} on another handle, got {token}");
    Ok(())
}

async fn other_processes_get_their_turn(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut busy = JoinSet::new();
    for _ in 0..6 {
        let a = a.clone();
        busy.spawn(async move {
            loop {
                let guard = a.locked("x").await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                guard.release().await?;
            }
        });
    }
    for turn in 0..5 {
        let got = b.lock_within("x", Duration::from_secs(10)).await?;
        ensure!(got.is_some(), "expected another process to get its turn {turn} within 10s");
    }
    let ended = busy.try_join_next();
    let ended: Option<Result<Verdict, _>> = ended;
    ensure!(ended.is_none(), "expected the local tasks to go on: {ended:?}");
    busy.shutdown().await;
    Ok(())
}

async fn with_lock_gives_the_result_and_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (key("x"), LockOptions::default());
    let done = a
        .backend
        .with_lock(&x, opts, async |guard| {
            let other = b.try_lock("x").await?;
            ensure!(other.is_none(), "expected the lock to be held while the work runs");
            ensure!(guard.is_held(), "expected the work's guard to be held");
            Ok(7)
        })
        .await?;
    ensure!(matches!(done, Some(Ok(7))), "expected the work's result, got {done:?}");
    let held = b.locked("x").await?;
    let ran = a.backend.with_lock(&x, LockOptions::try_once(), async |_| ()).await?;
    ensure!(ran.is_none(), "expected no work without the lock");
    held.release().await?;
    let panics = {
        let a = a.clone();
        tokio::spawn(async move {
            let work = async |_: &_| std::panic::resume_unwind(Box::new("on purpose"));
            let outcome: leasehold_core::Result<Option<()>> =
                a.backend.with_lock(&key("x"), opts, work).await;
            outcome
        })
    };
    ensure!(panics.await.is_err(), "expected the work's panic to come through");
    b.locked("x").await?.release().await?;
    Ok(())
}

async fn many_locks_on_one_handle(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut tasks = JoinSet::new();
    for number in 0..300 {
        let a = a.clone();
        tasks.spawn(async move { a.locked(&format!("key-{number}")).await });
    }
    let mut guards = Vec::new();
    while let Some(guard) = tasks.join_next().await {
        guards.push(guard??);
    }
    for number in [0, 1, 150, 299] {
        let taken = b.try_lock(&format!("key-{number}")).await?;
        ensure!(taken.is_none(), "expected each of many locks to exclude, number {number} did not");
    }
    ensure!(guards.iter().all(leasehold_core::LockGuard::is_held), "expected all locks to be held");
    let opts = LockOptions::try_once();
    ensure!(a.backend.lock(&key("free"), opts).await?.is_some(), "expected room for one more");
    for guard in guards.drain(..100) {
        guard.release().await?;
    }
    drop(guards);
    b.locked("key-299").await?.release().await?;
    Ok(())
}

async fn many_contended_keys_at_once(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut held = Vec::new();
    let mut tasks = JoinSet::new();
    for number in 0..24 {
        let name = format!("key-{number}");
        held.push(a.locked(&name).await?);
        let b = b.clone();
        tasks.spawn(async move {
            let guard = b.lock_within(&name, Duration::from_secs(40)).await?;
            let guard =
                guard.ok_or_else(|| Fault::new(format!("expected {name} to be had in time")))?;
            Ok(guard.release().await?)
        });
    }
    tokio::time::sleep(Duration::from_millis(200)).await; // all of them wait by now
    for guard in held {
        guard.release().await?;
    }
    all(tasks).await
}

async fn crossed_waits_end(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (left, right) = (a.locked("left").await?, b.locked("right").await?);
    let wait = LockOptions::default().wait(Duration::from_millis(600));
    let (x, y) = (key("right"), key("left"));
    let crossed = async { tokio::join!(a.backend.lock(&x, wait), b.backend.lock(&y, wait)) };
    let (first, second) = soon("crossed waits to end", crossed).await?;
    for outcome in [first, second] {
        match outcome {
            Ok(None) => {}
            Ok(Some(_)) => return Err(Fault::new("expected nobody to get a lock that is held")),
            Err(error) => ensure!(
                error.kind() == leasehold_core::ErrorKind::Deadlock,
                "expected nothing or a deadlock, got {error}"
            ),
        }
    }
    ensure!(left.is_held() && right.is_held(), "expected both to keep what they hold");
    left.release().await?;
    right.release().await?;
    Ok(())
}
