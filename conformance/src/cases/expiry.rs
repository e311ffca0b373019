//! Leases that end without a release: expiry, stale guards, late writers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{ErrorKind, LeaseExt, LeaseOptions, LossReason};

use crate::case::cases;
use crate::ctx::{
    Ctx, HandleExt, LONG, PATIENCE, all, eventually, fails, is_lost, key, pause, soon,
};
use crate::fault::{Fault, Verdict, ensure};
use tokio::task::JoinSet;

const SHORT: Duration = Duration::from_millis(300);

cases!(Lease in "expiry" {
    frees_a_lease_that_nobody_renews = "a lease without renewals goes to the next after its ttl and not before (B86)";
    vanished_holder_is_survived = "a lease whose holder died is had after its ttl and not before, by a try and by a wait (B55, B86)";
    reclaim_follows_every_expiry = "a lease that expires again and again is had each time, with a greater token (B81)";
    holder_gives_up_first = "whenever another gets an expired lease, its old holder has given up already (B27, B79)";
    loss_is_told_by_the_deadline = "an expired lease is told as lost without any I/O, also to a late subscriber";
    renewal_never_resurrects = "renewing an expired lease fails, whether or not somebody took it (B83)";
    stale_release_spares_the_successor = "an old guard's release and drop leave its successor's lease alone (B57)";
    stale_release_spares_a_successor_of_the_same_handle = "the same within one process and one handle (B57)";
    late_writer_is_rejected = "a guarded write after the loss of the lease writes nothing (B81)";
    takeover_waits_for_a_guarded_write = "a verified lease is not taken over until the verifying transaction has ended";
    takeover_waits_for_an_open_transaction = "nor while that transaction waits for somebody else's write" [ParallelWriters];
    waiter_wakes_at_expiry = "a waiter gets a lease whose holder vanished, without any release (B73)";
    blocked_executor_is_noticed = "a holder whose thread was blocked past the ttl knows of its loss at once (B61)";
    deleted_record_is_told = "a lease whose record was deleted is told as lost, and its release spares the successor (B67)" [DeleteLease];
    late_write_after_deletion_is_rejected = "a guarded write under a deleted lease writes nothing (B67)" [DeleteLease];
    work_stops_when_its_lease_is_lost = "with_lease drops its work when the lease is lost, and fails" [DeleteLease];
    housekeeping_spares_the_live = "housekeeping removes no live lease, and tokens rise across it (B106)";
});

async fn frees_a_lease_that_nobody_renews(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let ttl = Duration::from_millis(800);
    let start = Instant::now();
    let guard = a.leased_once("x", ttl).await?;
    let next = b.leased("x", LONG).await?;
    let free = start.elapsed();
    ensure!(
        free >= ttl * 95 / 100,
        "expected a ttl of {ttl:?} to be kept, the lease was free after {free:?}"
    );
    ensure!(!guard.is_held(), "expected the first holder to know that its lease expired");
    Ok(next.release().await?)
}

async fn vanished_holder_is_survived(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let ttl = Duration::from_millis(700);
    for by_waiting in [false, true] {
        let start = Instant::now();
        let token = ctx.vanished_lease("x", ttl).await?;
        let next = if by_waiting {
            b.leased("x", LONG).await?
        } else {
            soon("an expired lease to be had", async {
                loop {
                    if let Some(next) = b.try_lease("x").await? {
                        return Ok::<_, Fault>(next);
                    }
                    pause().await;
                }
            })
            .await??
        };
        let free = start.elapsed();
        ensure!(free >= ttl * 95 / 100, "expected a ttl of {ttl:?}, it was free after {free:?}");
        ensure!(next.token().value() > token, "expected tokens to rise across the expiry");
        next.release().await?;
    }
    Ok(())
}

async fn reclaim_follows_every_expiry(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut last = 0;
    for round in 0..5 {
        let token = ctx.vanished_lease("x", Duration::from_millis(200)).await?;
        ensure!(token > last, "expected a token over {last} after expiry {round}, got {token}");
        last = token;
    }
    a.leased("x", LONG).await?.release().await?;
    Ok(())
}

async fn holder_gives_up_first(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..8 {
        let (holder, next) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let old = holder.leased_once("x", Duration::from_millis(200)).await?;
        let new = next.leased("x", LONG).await?;
        ensure!(
            !old.is_held(),
            "expected the old holder to have given up, round {round}: both believe to hold"
        );
        ensure!(old.lost().is_set(), "expected the loss to be set by then, round {round}");
        new.release().await?;
    }
    Ok(())
}

async fn loss_is_told_by_the_deadline(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let guard = a.leased_once("x", SHORT).await?;
    let early = guard.lost();
    let reason = is_lost(PATIENCE, "an expired lease", &early).await?;
    ensure!(
        reason == LossReason::Expired,
        "expected the reason to be the expiry, it is {reason:?}"
    );
    let late = guard.lost();
    ensure!(late.is_set(), "expected a late subscriber to find the loss");
    let again = is_lost(PATIENCE, "an expired lease", &late).await?;
    ensure!(again == reason, "expected one reason, got {reason:?} and {again:?}");
    ensure!(!guard.is_held(), "expected a lost guard not to be held");
    ensure!(guard.remaining().is_zero(), "expected no time to remain");
    fails("the release of an expired lease", ErrorKind::Lost, guard.release().await)?;
    Ok(())
}

async fn renewal_never_resurrects(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let expired = a.leased_once("x", SHORT).await?;
    // gone on the store as well: the local deadline comes first
    let next = b.leased("x", LONG).await?;
    fails("renewing a lease that another has", ErrorKind::Lost, expired.renew().await)?;
    next.renew().await?;
    ensure!(next.is_held(), "expected the successor to keep its lease");
    next.release().await?;
    fails("renewing a lease that another had", ErrorKind::Lost, expired.renew().await)?;
    ensure!(!expired.is_held(), "expected a lost lease to stay lost");
    let free = b.try_lease("x").await?;
    ensure!(free.is_some(), "expected the failed renewal to leave the lease free");
    drop(free);

    let alone = a.leased_once("y", SHORT).await?;
    is_lost(PATIENCE, "an expired lease", &alone.lost()).await?;
    fails("renewing an expired lease", ErrorKind::Lost, alone.renew().await)?;
    ensure!(!alone.is_held(), "expected the renewal not to resurrect the lease");
    b.leased("y", LONG).await?.release().await?;
    Ok(())
}

async fn stale_release_spares_the_successor(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for by_drop in [false, true] {
        let stale = a.leased_once("x", SHORT).await?;
        let successor = b.leased("x", LONG).await?;
        if by_drop {
            drop(stale);
        } else {
            fails("a stale release", ErrorKind::Lost, stale.release().await)?;
        }
        ensure!(
            a.try_lease("x").await?.is_none(),
            "expected the stale guard to spare its successor's lease"
        );
        successor.renew().await?;
        successor.release().await?;
    }
    Ok(())
}

async fn stale_release_spares_a_successor_of_the_same_handle(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for by_drop in [false, true] {
        let stale = a.leased_once("x", SHORT).await?;
        let successor = a.leased("x", LONG).await?;
        fails("a stale renewal", ErrorKind::Lost, stale.renew().await)?;
        if by_drop {
            drop(stale);
        } else {
            fails("a stale release", ErrorKind::Lost, stale.release().await)?;
        }
        ensure!(
            b.try_lease("x").await?.is_none(),
            "expected the stale guard to spare its successor's lease"
        );
        ensure!(
            a.try_lease("x").await?.is_none(),
            "expected the stale guard to keep its hands off the local queue"
        );
        successor.renew().await?;
        successor.release().await?;
    }
    Ok(())
}

async fn late_writer_is_rejected(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let old = a.leased_once("x", SHORT).await?;
    let new = b.leased("x", LONG).await?;
    ensure!(new.token() > old.token(), "expected the successor's token to be greater");
    ctx.guarded_write(&b, &new, "n", 2).await?;
    let late = ctx.guarded_write(&a, &old, "n", 1).await;
    fails("a write after the lease moved on", ErrorKind::Lost, late)?;
    let value = ctx.committed("n").await?;
    ensure!(value == 2, "expected the successor's write to stay, read {value}");
    Ok(new.release().await?)
}

async fn takeover_waits_for_a_guarded_write(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..5 {
        let name = format!("n{round}");
        let old = a.leased_once("x", Duration::from_millis(150)).await?;
        let writer = {
            let (ctx, a, name) = (ctx.clone(), a.clone(), name.clone());
            tokio::spawn(async move {
                let mut value = 0;
                while ctx.guarded_write(&a, &old, &name, value + 1).await.is_ok() {
                    value += 1;
                }
                drop(old);
                value
            })
        };
        let new = b.leased("x", LONG).await?;
        let at_takeover = ctx.committed(&name).await?;
        let written = soon("the writer to be stopped", writer).await??;
        let in_the_end = ctx.committed(&name).await?;
        ensure!(
            at_takeover == in_the_end,
            "expected no write after the takeover, there were {at_takeover} then and {in_the_end} in the end"
        );
        ensure!(
            written <= in_the_end,
            "expected every confirmed write to stay: {written} of {in_the_end}"
        );
        new.release().await?;
    }
    Ok(())
}

async fn takeover_waits_for_an_open_transaction(ctx: Ctx) -> Verdict {
    const TTL: Duration = Duration::from_secs(2);
    let (a, b) = ctx.two().await?;
    let mut other = b.claimed(&["other"]).await?;
    ctx.write(&mut other, "n", 5).await?; // which makes the guarded write wait, where writes lock
    let old = a.leased_once("x", TTL).await?;
    let lost = old.lost();
    let writer = {
        let (ctx, a) = (ctx.clone(), a.clone());
        tokio::spawn(async move {
            let written = ctx.guarded_write(&a, &old, "n", 7).await;
            (written, old) // which is not released, but expires
        })
    };
    is_lost(PATIENCE, "an expired lease", &lost).await?;
    tokio::time::sleep(TTL / 4).await; // it has expired on the store as well
    let taken = b.try_lease("x").await?;
    let writes = !writer.is_finished();
    ensure!(
        taken.is_none() || !writes,
        "expected no takeover before the transaction that verified the lease has ended"
    );
    other.rollback().await?;
    let (written, old) = soon("the writer to end", writer).await??;
    let written = written.is_ok();
    drop(old);
    let value = ctx.committed("n").await?;
    ensure!(
        value == if written { 7 } else { 0 },
        "expected a write just if it was confirmed, it was {written} and the value is {value}"
    );
    drop(taken);
    Ok(b.leased("x", LONG).await?.release().await?)
}

async fn waiter_wakes_at_expiry(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    ctx.vanished_lease("x", Duration::from_millis(700)).await?;
    let mut tasks = JoinSet::new();
    for handle in [&b, &b, &a] {
        let handle = handle.clone();
        tasks.spawn(async move {
            let guard = handle.lease_within("x", PATIENCE * 2).await?;
            let guard = guard
                .ok_or_else(|| Fault::new("expected every waiter to get the lease in time"))?;
            Ok(guard.release().await?)
        });
    }
    all(tasks).await
}

async fn blocked_executor_is_noticed(ctx: Ctx) -> Verdict {
    let (blocked, b) = (ctx.clone(), ctx.open().await?);
    let thread = std::thread::spawn(move || -> Verdict {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let a = blocked.open_for_now().await?;
            let guard = a.leased("x", Duration::from_millis(400)).await?;
            std::thread::sleep(Duration::from_millis(900)); // nothing runs meanwhile
            ensure!(!guard.is_held(), "expected the loss to be known at once, without I/O");
            ensure!(guard.lost().is_set(), "expected the loss to be set at once");
            let late = blocked.guarded_write(&a, &guard, "n", 1).await;
            fails("a write after the block", ErrorKind::Lost, late)?;
            a.backend.close().await?;
            Ok(())
        })
    });
    let ended = tokio::task::spawn_blocking(move || thread.join());
    let ended = soon("the blocked thread to end", ended).await??;
    ended.map_err(|_| Fault::new("the blocked thread panicked"))??;
    ensure!(ctx.committed("n").await? == 0, "expected nothing to be written after the block");
    b.leased("x", LONG).await?.release().await?;
    Ok(())
}

async fn deleted_record_is_told(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.leased("x", Duration::from_secs(3)).await?;
    let token = guard.token();
    ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?;
    is_lost(PATIENCE, "a deleted lease", &guard.lost()).await?;
    let next = b.leased("x", LONG).await?;
    ensure!(next.token() > token, "expected tokens to rise across the deletion");
    fails("the release of a deleted lease", ErrorKind::Lost, guard.release().await)?;
    ensure!(a.try_lease("x").await?.is_none(), "expected the successor to keep its lease");
    Ok(next.release().await?)
}

async fn late_write_after_deletion_is_rejected(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for _ in 0..5 {
        let guard = a.leased("x", LONG).await?;
        ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?;
        let next = b.leased("x", LONG).await?;
        // the old holder may not have heard of it yet: the store has to refuse
        let late = ctx.guarded_write(&a, &guard, "n", 1).await;
        fails("a write under a deleted lease", ErrorKind::Lost, late)?;
        next.release().await?;
    }
    ensure!(ctx.committed("n").await? == 0, "expected nothing to be written");
    Ok(())
}

async fn work_stops_when_its_lease_is_lost(ctx: Ctx) -> Verdict {
    struct Told(Arc<AtomicBool>);
    impl Drop for Told {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let a = ctx.open().await?;
    let (running, stopped) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let work = {
        let (a, running, told) = (a.clone(), running.clone(), Told(stopped.clone()));
        tokio::spawn(async move {
            let opts = LeaseOptions::default().ttl(Duration::from_secs(2));
            let work = async |_: &_| {
                let _told = told;
                running.store(true, Ordering::SeqCst);
                std::future::pending::<()>().await;
            };
            a.backend.with_lease(&key("x"), opts, work).await
        })
    };
    eventually("the work to run", || async { Ok(running.load(Ordering::SeqCst)) }).await?;
    ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?;
    let ended = soon("the work to be stopped", work).await??;
    fails("with_lease under a lost lease", ErrorKind::Lost, ended)?;
    ensure!(stopped.load(Ordering::SeqCst), "expected the work to be dropped");
    Ok(())
}

async fn housekeeping_spares_the_live(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let live = a.leased("live", LONG).await?;
    let dead = a.leased_once("dead", Duration::from_millis(150)).await?;
    let last = dead.token();
    is_lost(PATIENCE, "an expired lease", &dead.lost()).await?;
    std::mem::forget(dead); // left to the housekeeping
    for _ in 0..3 {
        b.backend.housekeep().await?;
    }
    ensure!(b.try_lease("live").await?.is_none(), "expected housekeeping to spare a live lease");
    live.renew().await?;
    let next = b.leased("dead", LONG).await?;
    ensure!(
        next.token() > last,
        "expected tokens to rise across a purge: {last}, then {}",
        next.token()
    );
    next.release().await?;
    Ok(live.release().await?)
}
