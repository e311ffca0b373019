//! Leases, beyond what they share with named locks and claims: guards, renewals, tokens, options.

use std::time::{Duration, Instant};

use leasehold_core::{ErrorKind, LeaseExt, LeaseOptions};
use tokio::task::JoinSet;

#[allow(clippy::wildcard_imports)] // the table names nearly all of it
use super::shared::*;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, eventually, fails, key, soon};
use crate::fault::{Fault, Verdict, ensure};

cases!(Lease in "lease" {
    excludes(Kind::Lease) = "a lease that one handle holds is not to be had by another";
    different_keys_are_independent(Kind::Lease) = "holding one key does not keep others from another";
    can_be_taken_again_after_release(Kind::Lease) = "a released lease is free at once, for this handle and for others";
    is_not_reentrant(Kind::Lease) = "a handle does not get a lease that it holds itself (B08)";
    release_then_drop_frees_once(Kind::Lease) = "ending a guard does not free its successor's lease";
    try_never_waits(Kind::Lease) = "a wait of zero, a nanosecond or a millisecond ends at once (B25)";
    wait_bounds_everything(Kind::Lease) = "a wait ends at its limit, behind a local holder and behind another process";
    huge_waits_wait(Kind::Lease) = "a wait of 40 days or Duration::MAX neither overflows nor ends early (B25)";
    waiter_wakes_on_release(Kind::Lease) = "a waiter on another handle gets the lease soon after its release";
    waiters_are_woken = "waiters get their leases at the release, and not when they happen to look";
    counter_of_100_tasks(Kind::Lease) = "100 tasks on three handles increment a counter without a lost update";
    fuzz_of_two_names(Kind::Lease) = "holds of two names by many tasks never overlap and tokens rise with them";
    tokens_rise(Kind::Lease) = "each later acquisition has a greater token, on whichever handle";
    local_waiters_are_served_in_order(Kind::Lease) = "waiters of one process get the lease in the order in which they came";
    drop_frees(Kind::Lease) = "a dropped guard frees its lease soon, without being released";
    panic_frees(Kind::Lease) = "a task that panics or is aborted while it holds a lease frees it";
    cancelled_waiters_leave_nothing(Kind::Lease) = "waits that are dropped at any time leave no lease and no queue place (B03, B66)";
    lost_is_silent_on_release(Kind::Lease) = "releasing or dropping a guard is not told as a loss";
    one_winner_of_many(Kind::Lease) = "of many tries at once exactly one gets the lease";
    renewal_keeps_the_token = "a renewal, by hand or by the heartbeat, does not change the token";
    renewal_by_hand_outlives_the_ttl = "a lease that is renewed by hand is held past its ttl";
    heartbeat_outlives_the_ttl = "a lease that the heartbeat renews is held past its ttl";
    heartbeat_renews_many = "one handle keeps hundreds of leases past their ttl (B106)";
    max_hold_ends_the_renewals = "a stuck holder is not renewed for ever where max_hold is set (B89)";
    dropped_guards_are_not_renewed = "dropping a guard stops its renewals, another gets the lease (B89)";
    remaining_is_bounded_by_the_ttl = "the time that remains never exceeds the ttl, falls, and a renewal restores it";
    ttl_out_of_range_is_refused = "a ttl of zero, under the minimum or too long is an invalid option";
    guarded_write_of_a_holder_passes = "a write that verifies the lease in its own transaction takes effect while it is held";
    with_lease_gives_the_result_and_frees = "with_lease runs its work under the lease, or not at all, and frees it";
});

/// Those who look once a second would not all happen to look soon after one moment: they come one
/// after the other, each on a handle of its own, so that they look at different times.
async fn waiters_are_woken(ctx: Ctx) -> Verdict {
    const SOON: Duration = Duration::from_millis(400);
    let a = ctx.open().await?;
    let mut handles = Vec::new();
    for _ in 0..10 {
        handles.push(ctx.open().await?);
    }
    let mut slowest = Vec::new();
    // a busy machine may be late now and then, those who only look always are
    for _ in 0..3 {
        let mut waiting = Vec::new();
        for (n, handle) in handles.iter().enumerate() {
            let name = format!("x{n}");
            let held = a.leased(&name, LONG).await?;
            let handle = handle.clone();
            let waiter = tokio::spawn(async move {
                let taken = handle.lease_within(&name, PATIENCE * 2).await?;
                let at = Instant::now();
                let taken = taken.ok_or_else(|| Fault::new("expected every waiter to get its"))?;
                taken.release().await?;
                Ok::<_, Fault>(at)
            });
            waiting.push((held, waiter));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // by then those who look have slowed down
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut woken = Vec::new();
        for (held, waiter) in waiting {
            let released = Instant::now();
            held.release().await?;
            woken.push((released, waiter));
        }
        let mut late = Duration::ZERO;
        for (released, waiter) in woken {
            let got = soon("a waiter to get its lease", waiter).await???;
            late = late.max(got.saturating_duration_since(released));
        }
        if late < SOON {
            return Ok(());
        }
        slowest.push(late);
    }
    Err(Fault::new(format!(
        "expected waiters to get what was released within {SOON:?}, the slowest took {slowest:?}"
    )))
}

async fn renewal_keeps_the_token(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let by_hand = a.leased_once("x", LONG).await?;
    let by_heartbeat = a.leased("y", Duration::from_millis(900)).await?;
    let (x, y) = (by_hand.token(), by_heartbeat.token());
    for round in 0..5 {
        by_hand.renew().await?;
        by_heartbeat.renew().await?;
        let same = by_hand.token() == x && by_heartbeat.token() == y;
        ensure!(same, "expected renewal {round} to keep the token");
        tokio::time::sleep(Duration::from_millis(120)).await; // heartbeats
    }
    // the store's own record: a later acquisition follows the old token at once or not at all
    by_hand.release().await?;
    let later = a.leased_once("x", LONG).await?.token();
    ensure!(later > x, "expected a later token than {x}, got {later}");
    Ok(())
}

async fn stays_held(
    name: &str,
    b: &crate::harness::Handle,
    time: Duration,
    mut each: impl AsyncFnMut() -> Verdict + Send,
) -> Verdict {
    let end = Instant::now() + time;
    while Instant::now() < end {
        each().await?;
        let taken = b.try_lease(name).await?;
        ensure!(taken.is_none(), "expected a renewed lease to stay held, another handle got it");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

async fn renewal_by_hand_outlives_the_ttl(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.leased_once("x", Duration::from_secs(4)).await?;
    let end = Instant::now() + Duration::from_secs(6);
    while Instant::now() < end {
        guard.renew().await?;
        stays_held("x", &b, Duration::from_millis(200), async || Ok(())).await?;
    }
    ensure!(guard.is_held(), "expected the renewed lease to be held");
    Ok(guard.release().await?)
}

async fn heartbeat_outlives_the_ttl(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.leased("x", Duration::from_secs(4)).await?;
    stays_held("x", &b, Duration::from_secs(7), async || Ok(())).await?;
    ensure!(guard.is_held(), "expected the heartbeat to keep the lease");
    Ok(guard.release().await?)
}

async fn heartbeat_renews_many(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut tasks = JoinSet::new();
    for number in 0..200 {
        let a = a.clone();
        tasks
            .spawn(async move { a.leased(&format!("key-{number}"), Duration::from_secs(5)).await });
    }
    let mut guards = Vec::new();
    while let Some(guard) = tasks.join_next().await {
        guards.push(guard??);
    }
    tokio::time::sleep(Duration::from_millis(7500)).await; // past every ttl
    for guard in &guards {
        ensure!(
            guard.is_held(),
            "expected the heartbeat to keep all leases, {:?} is lost",
            guard.key()
        );
    }
    for number in [0, 100, 199] {
        let taken = b.try_lease(&format!("key-{number}")).await?;
        ensure!(taken.is_none(), "expected renewed lease {number} to exclude");
    }
    drop(guards);
    Ok(())
}

async fn max_hold_ends_the_renewals(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let opts =
        LeaseOptions::default().ttl(Duration::from_millis(400)).max_hold(Duration::from_secs(1));
    let start = Instant::now();
    let stuck = a.backend.lease(&key("x"), opts).await?;
    let stuck = stuck.ok_or_else(|| Fault::new("expected a free lease"))?;
    b.leased("x", LONG).await?.release().await?;
    let held = start.elapsed();
    ensure!(
        held > Duration::from_millis(900),
        "expected renewals for 1s, it was free after {held:?}"
    );
    ensure!(!stuck.is_held(), "expected the stuck holder to know its loss");
    std::mem::forget(stuck); // it is stuck: never released
    Ok(())
}

async fn dropped_guards_are_not_renewed(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut dropped = Vec::new();
    for number in 0..10 {
        dropped.push(a.leased(&format!("key-{number}"), Duration::from_millis(300)).await?);
    }
    drop(dropped);
    for number in 0..10 {
        let opts = LeaseOptions::default().ttl(LONG).wait(PATIENCE);
        let taken = b.backend.lease(&key(&format!("key-{number}")), opts).await?;
        ensure!(taken.is_some(), "expected dropped lease {number} to be had");
    }
    Ok(())
}

async fn remaining_is_bounded_by_the_ttl(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let ttl = Duration::from_secs(60);
    let guard = a.leased_once("x", ttl).await?;
    let first = guard.remaining();
    ensure!(
        first < ttl,
        "expected less than the ttl of {ttl:?} to remain, for the drift margin: {first:?}"
    );
    ensure!(first > ttl / 2, "expected most of the ttl to remain, it is {first:?}");
    eventually("the remaining time to fall", || async { Ok(guard.remaining() < first) }).await?;
    tokio::time::sleep(Duration::from_millis(50)).await; // a fall that a renewal makes good
    let (before, asked) = (guard.remaining(), tokio::time::Instant::now());
    guard.renew().await?;
    let (after, took) = (guard.remaining(), asked.elapsed());
    ensure!(
        before < after + took && after < ttl, // it counts from before the request was sent
        "expected a renewal to restore the time: {before:?}, then {after:?} after {took:?}"
    );
    Ok(guard.release().await?)
}

async fn ttl_out_of_range_is_refused(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    for ttl in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(99), Duration::MAX] {
        let opts = LeaseOptions::try_once().ttl(ttl);
        let refused = a.backend.lease(&key("x"), opts).await;
        fails(&format!("a ttl of {ttl:?}"), ErrorKind::InvalidOptions, refused)?;
    }
    a.leased("x", leasehold_core::MAX_TTL).await?.release().await?;
    Ok(())
}

async fn guarded_write_of_a_holder_passes(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let guard = a.leased("x", LONG).await?;
    for value in 1..=3 {
        ctx.guarded_write(&a, &guard, "n", value).await?;
        let read = ctx.committed("n").await?;
        ensure!(read == value, "expected the guarded write of {value} to take effect, read {read}");
    }
    ensure!(guard.is_held(), "expected a verified lease to stay held");
    guard.renew().await?;
    Ok(guard.release().await?)
}

async fn with_lease_gives_the_result_and_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (key("x"), LeaseOptions::default());
    let work = a.backend.with_lease(&x, opts, async |guard| {
        let other = b.try_lease("x").await?;
        ensure!(other.is_none(), "expected the lease to be held while the work runs");
        ensure!(guard.is_held(), "expected the work's guard to be held");
        Ok(7)
    });
    let done = soon("the work to end", work).await??;
    ensure!(matches!(done, Some(Ok(7))), "expected the work's result, got {done:?}");
    let held = b.leased("x", LONG).await?;
    let ran = a.backend.with_lease(&x, LeaseOptions::try_once(), async |_| ()).await?;
    ensure!(ran.is_none(), "expected no work without the lease");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { Ok(held.release().await?) });
    all(tasks).await?;
    a.leased("x", LONG).await?.release().await?;
    Ok(())
}
