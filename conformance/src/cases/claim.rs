//! Claims, beyond what they share with locks and leases: key sets, the transaction, deadlocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{Claim, ClaimLockExt, ClaimOptions, Error, ErrorKind, Keys};
use tokio::task::JoinSet;

#[allow(clippy::wildcard_imports)] // the table names nearly all of it
use super::shared::*;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, PATIENCE, all, fails, keys, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::{Handle, Need};
use crate::history::{History, Interval, monotonic};

cases!(ClaimLock in "claim" {
    excludes(Kind::Claim) = "keys that one handle claimed are not to be had by another";
    different_keys_are_independent(Kind::Claim) = "claiming one key does not keep others from another";
    can_be_taken_again_after_release(Kind::Claim) = "a committed claim frees its keys at once, for this handle and for others";
    is_not_reentrant(Kind::Claim) = "a handle does not get a key that it has claimed itself (B08)";
    release_then_drop_frees_once(Kind::Claim) = "ending a claim does not free its successor's keys";
    try_never_waits(Kind::Claim) = "a wait of zero, a nanosecond or a millisecond ends at once (B25)";
    wait_bounds_everything(Kind::Claim) = "a wait ends at its limit, behind a local holder and behind another process";
    huge_waits_wait(Kind::Claim) = "a wait of 40 days or Duration::MAX neither overflows nor ends early (B25, B43)";
    waiter_wakes_on_release(Kind::Claim) = "a waiter on another handle gets the keys soon after the commit";
    counter_of_100_tasks(Kind::Claim) = "100 tasks on three handles increment a counter without a lost update";
    fuzz_of_two_names(Kind::Claim) = "holds of two names by many tasks never overlap and tokens rise with them";
    tokens_rise(Kind::Claim) = "each later claim has a greater token, on whichever handle";
    local_waiters_are_served_in_order(Kind::Claim) = "waiters of one process get the key in the order in which they came";
    drop_frees(Kind::Claim) = "a dropped claim frees its keys soon";
    panic_frees(Kind::Claim) = "a task that panics or is aborted during a claim frees it";
    cancelled_waiters_leave_nothing(Kind::Claim) = "waits that are dropped at any time leave no lock and no open transaction (B03, B06)";
    lost_is_silent_on_release(Kind::Claim) = "committing or dropping a claim is not told as a loss";
    one_winner_of_many(Kind::Claim) = "of many tries at once exactly one gets the key";
    sets_are_all_or_nothing = "a claim that does not get one of its keys holds none of them";
    duplicates_are_collapsed = "a key that is named twice in a claim is claimed once";
    wait_covers_the_whole_set = "one wait bounds all keys of a claim together";
    empty_set_is_a_plain_transaction = "claims of no key run side by side, commit and roll back";
    opposite_orders_do_not_deadlock = "tasks that name the same keys in opposite orders all get them (B17)";
    overlapping_sets_do_not_deadlock = "many tasks with overlapping sets all get their turn, one at a time per key (B17, B100)";
    lock_timeout_gives_up = "behind a holder that never commits a claimer returns nothing, has not run, and goes on (B23)";
    limit_never_exceeded = "counting under a claim keeps a limit at every moment, and slots are not lost (B32)";
    one_claimer_of_a_job = "of many tasks that find a job unclaimed exactly one claims it (B32)";
    waiter_reads_what_was_committed = "one that waited for a claim reads what its former holder committed (B26)";
    counter_on_the_store = "100 tasks on three handles increment a number on the store, each in its claim (B26)";
    more_claimers_than_connections = "claimers on one key and on many never use up the connections of the holder (B29)";
});

async fn sets_are_all_or_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let c = ctx.open().await?;
    for taken in ["a", "m", "z"] {
        let held = c.claimed(&[taken]).await?;
        let tried = b.try_claim(&["a", "m", "z"]).await?;
        ensure!(tried.is_none(), "expected no claim of a set while {taken:?} of it is held");
        let waited = b.claim_within(&["a", "m", "z"], Duration::from_millis(100)).await?;
        ensure!(waited.is_none(), "expected no claim of a set while {taken:?} of it is held");
        let free: Vec<&str> = ["a", "m", "z"].into_iter().filter(|name| *name != taken).collect();
        for handle in [&a, &b] {
            handle.claimed(&free).await?.rollback().await?;
        }
        held.rollback().await?;
    }
    Ok(())
}

async fn waiter_reads_what_was_committed(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 1..=6 {
        let mut former = a.claimed(&["x"]).await?;
        ctx.write(&mut former, "n", round).await?;
        let waiter = {
            let (ctx, b) = (ctx.clone(), b.clone());
            tokio::spawn(async move {
                let mut claim = b.claimed(&["x"]).await?;
                let read = ctx.read(&mut claim, "n").await?;
                claim.rollback().await?;
                Ok::<_, Fault>(read)
            })
        };
        tokio::time::sleep(Duration::from_millis(100)).await; // it waits by now
        former.commit().await?;
        let read = soon("the waiter to read", waiter).await???;
        ensure!(
            read == round,
            "expected the waiter to read {round}, which was committed before, it read {read}"
        );
    }
    Ok(())
}

async fn duplicates_are_collapsed(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let claim = soon("a claim of a repeated key", a.claimed(&["x", "y", "x"])).await??;
    ensure!(claim.keys().len() == 2, "expected two distinct keys, the claim has {}", claim.keys());
    ensure!(b.try_claim(&["x"]).await?.is_none(), "expected the repeated key to be held");
    claim.commit().await?;
    b.claimed(&["x"]).await?.commit().await?;
    Ok(())
}

async fn wait_covers_the_whole_set(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (first, last) = (a.claimed(&["a"]).await?, a.claimed(&["z"]).await?);
    let wait = Duration::from_millis(600);
    let start = Instant::now();
    let (got, ()) = tokio::join!(b.claim_within(&["a", "z"], wait), async {
        tokio::time::sleep(wait / 2).await;
        drop(first); // the second key stays held
    });
    let took = start.elapsed();
    ensure!(got?.is_none(), "expected nothing while one key stays held");
    ensure!(took >= wait * 9 / 10, "expected the wait to last {wait:?}, it ended after {took:?}");
    ensure!(took < wait + PATIENCE, "expected one wait for both keys, it took {took:?}");
    a.claimed(&["a"]).await?.commit().await?;
    Ok(last.commit().await?)
}

async fn empty_set_is_a_plain_transaction(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut one = a.claimed(&[]).await?;
    let two = soon("a second claim of no key", a.claimed(&[])).await??;
    let three = soon("a third claim of no key", b.claimed(&[])).await??;
    ctx.write(&mut one, "n", 1).await?;
    three.rollback().await?;
    one.commit().await?;
    two.commit().await?;
    let value = ctx.committed("n").await?;
    ensure!(value == 1, "expected the write of a claim without keys, read {value}");
    Ok(())
}

async fn opposite_orders_do_not_deadlock(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut tasks = JoinSet::new();
    for (handle, names) in [(a, ["left", "right"]), (b, ["right", "left"])] {
        tasks.spawn(async move {
            for round in 0..40 {
                // shorter than the limit of the case, so that a deadlock is told as one
                let claim = handle.claim_within(&names, Duration::from_secs(4)).await?;
                let claim = claim.ok_or_else(|| {
                    Fault::new(format!("expected no deadlock of opposite orders, round {round}"))
                })?;
                tokio::task::yield_now().await;
                claim.commit().await?;
            }
            Ok(())
        });
    }
    all(tasks).await
}

async fn overlapping_sets_do_not_deadlock(ctx: Ctx) -> Verdict {
    const NAMES: [&str; 6] = ["f", "b", "A", "e", "ä", "d"];
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let history = Arc::new(History::new());
    let mut tasks = JoinSet::new();
    for task in 0..18 {
        let (handle, history) = (handles[task % 3].clone(), history.clone());
        tasks.spawn(async move {
            for round in 0..5 {
                let set: Vec<&str> = (0..4).map(|_| NAMES[rand::random_range(0..6)]).collect();
                let claim = handle.claim_within(&set, Duration::from_secs(40)).await?;
                let claim = claim
                    .ok_or_else(|| Fault::new(format!("expected no deadlock over {set:?}")))?;
                let from = monotonic();
                let (token, claimed) = (claim.token().value(), claim.keys().clone());
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..3))).await;
                let to = monotonic();
                match round % 3 {
                    0 => claim.commit().await?,
                    1 => claim.rollback().await?,
                    _ => drop(claim),
                }
                history.extend(claimed.iter().map(|key| Interval {
                    key: key.to_string(),
                    holder: format!("task {task}"),
                    from,
                    to,
                    token,
                }));
            }
            Ok(())
        });
    }
    all(tasks).await?;
    history.check_at_least(18 * 5)
}

async fn lock_timeout_gives_up(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut holder = a.claimed(&["global"]).await?;
    let parallel = ctx.harness().lacks(Need::ParallelWriters).is_none();
    if parallel {
        ctx.write(&mut holder, "n", 1).await?;
    }
    let wait = Duration::from_millis(500);
    for handle in [&b, &a, &b] {
        let (start, ran) = (Instant::now(), AtomicBool::new(false));
        let opts = ClaimOptions::default().wait(wait);
        let outcome: Result<Option<()>, Error> = handle
            .backend
            .with_claim(&keys(&["global"]), opts, async |_: &mut Claim| {
                ran.store(true, Ordering::SeqCst);
                Ok(())
            })
            .await;
        let took = start.elapsed();
        ensure!(outcome?.is_none(), "expected nothing behind a holder that never commits");
        ensure!(!ran.load(Ordering::SeqCst), "expected the work not to have run");
        ensure!(
            took >= wait * 9 / 10 && took < wait + PATIENCE,
            "expected it to give up after about {wait:?}, it took {took:?}"
        );
        // what it waited with is usable afterwards
        let mut next = handle.claimed(&["other"]).await?;
        let count = ctx.read(&mut next, "other").await?;
        ctx.write(&mut next, "other", count + 1).await?;
        next.commit().await?;
    }
    if !parallel {
        ctx.write(&mut holder, "n", 1).await?;
    }
    holder.commit().await?;
    b.claimed(&["global"]).await?.commit().await?;
    let (n, other) = (ctx.committed("n").await?, ctx.committed("other").await?);
    ensure!((n, other) == (1, 3), "expected 1 and 3 to be written, read {n} and {other}");
    Ok(())
}

const LIMIT: i64 = 3;

/// Starts one job if the limit allows it.
async fn start_job(ctx: &Ctx, handle: &Handle) -> Result<bool, Fault> {
    let mut claim = handle.claimed(&["global"]).await?;
    let running = ctx.read(&mut claim, "running").await?;
    if running >= LIMIT {
        claim.rollback().await?;
        return Ok(false);
    }
    tokio::task::yield_now().await;
    ctx.write(&mut claim, "running", running + 1).await?;
    claim.commit().await?;
    Ok(true)
}

async fn finish_job(ctx: &Ctx, handle: &Handle) -> Verdict {
    let mut claim = handle.claimed(&["global"]).await?;
    let running = ctx.read(&mut claim, "running").await?;
    ensure!(running > 0, "expected a running job to be counted");
    ctx.write(&mut claim, "running", running - 1).await?;
    Ok(claim.commit().await?)
}

async fn limit_never_exceeded(ctx: Ctx) -> Verdict {
    let started = Arc::new(AtomicUsize::new(0));
    let mut claimers: JoinSet<Verdict> = JoinSet::new();
    for _ in 0..2 {
        let (ctx, handle, started) = (ctx.clone(), ctx.open().await?, started.clone());
        claimers.spawn(async move {
            let mut own = 0;
            for _ in 0..50 {
                if start_job(&ctx, &handle).await? {
                    own += 1;
                    started.fetch_add(1, Ordering::SeqCst);
                }
                // as long as a job takes: the watcher sees it run
                tokio::time::sleep(Duration::from_millis(rand::random_range(1..4))).await;
                while own > 0 && rand::random_bool(0.4) {
                    finish_job(&ctx, &handle).await?;
                    own -= 1;
                }
            }
            for _ in 0..own {
                finish_job(&ctx, &handle).await?;
            }
            Ok(())
        });
    }
    let (mut looks, mut most) = (0, 0);
    while !claimers.is_empty() {
        tokio::select! {
            biased;
            Some(done) = claimers.join_next() => done??,
            running = ctx.committed("running") => {
                let running = running?;
                ensure!((0..=LIMIT).contains(&running), "expected at most {LIMIT} at a time, {running} run");
                (looks, most) = (looks + 1, most.max(running));
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        }
    }
    let (left, started) = (ctx.committed("running").await?, started.load(Ordering::SeqCst));
    ensure!(left == 0, "expected all slots back in the end, {left} are lost");
    ensure!(started > 10, "expected jobs to be started, there were {started}");
    ensure!(
        looks > 0 && most > 0,
        "expected the watcher to see them: {looks} looks, at most {most}"
    );
    Ok(())
}

async fn one_claimer_of_a_job(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let won = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..24 {
        let (ctx, handle, won) = (ctx.clone(), handles[task % 3].clone(), won.clone());
        tasks.spawn(async move {
            let mut claim = handle.claimed(&["job"]).await?;
            if ctx.read(&mut claim, "owner").await? == 0 {
                tokio::task::yield_now().await;
                ctx.write(&mut claim, "owner", i64::try_from(task).unwrap_or(0) + 1).await?;
                claim.commit().await?;
                won.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        });
    }
    all(tasks).await?;
    let won = won.load(Ordering::SeqCst);
    ensure!(won == 1, "expected one of 24 to claim the job, {won} did");
    Ok(())
}

async fn counter_on_the_store(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let mut tasks = JoinSet::new();
    for task in 0..100 {
        let (ctx, handle) = (ctx.clone(), handles[task % 3].clone());
        tasks.spawn(async move {
            let claim = handle.claim_within(&["counter"], Duration::from_secs(50)).await?;
            let mut claim =
                claim.ok_or_else(|| Fault::new("expected every task to get its turn"))?;
            let count = ctx.read(&mut claim, "count").await?;
            tokio::task::yield_now().await;
            ctx.write(&mut claim, "count", count + 1).await?;
            Ok(claim.commit().await?)
        });
    }
    all(tasks).await?;
    let count = ctx.committed("count").await?;
    ensure!(count == 100, "expected 100 increments, {} were lost", 100 - count);
    Ok(())
}

async fn more_claimers_than_connections(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut tasks = JoinSet::new();
    for task in 0..60 {
        let (ctx, a) = (ctx.clone(), a.clone());
        tasks.spawn(async move {
            // half of them contend for one key, half have keys of their own
            let name = if task % 2 == 0 { "one".to_owned() } else { format!("own-{task}") };
            let opts = ClaimOptions::default().wait(Duration::from_secs(50));
            let claim = a.backend.claim(&Keys::new([&name])?, opts).await?;
            let mut claim =
                claim.ok_or_else(|| Fault::new("expected every task to get its turn"))?;
            let count = ctx.read(&mut claim, &name).await?;
            tokio::time::sleep(Duration::from_millis(2)).await;
            ctx.write(&mut claim, &name, count + 1).await?;
            Ok(claim.commit().await?)
        });
    }
    all(tasks).await?;
    let count = ctx.committed("one").await?;
    ensure!(count == 30, "expected 30 increments under one key, there were {count}");
    let mut claim = a.claimed(&["one"]).await?;
    fails(
        "a transaction of another type",
        ErrorKind::WrongBackend,
        claim.tx::<String>().map(|_| ()),
    )?;
    Ok(claim.commit().await?)
}
