//! The life of a handle and of its store: runtimes that end, close, migrate, restart.

use std::time::Duration;

use leasehold_core::{Admission, DedupeOptions, ErrorKind, LossReason};
use tokio::task::JoinSet;

use super::shared::Kind;
use crate::case::cases;
use crate::ctx::{
    Ctx, HandleExt, LONG, PATIENCE, SILENCE_BOUND, all, eventually, fails, is_lost, key, soon,
    within,
};
use crate::fault::{Fault, Verdict, ensure};

cases!(Backend in "lifecycle" {
    guards_outlive_their_runtime = "guards dropped outside of a runtime, and after it has shut down, neither panic nor hang (B85)";
    dropped_handle_frees_what_it_held = "what a handle held is free soon after its guards and itself are dropped";
    close_frees_and_tells = "close frees what is held, tells every guard, and later calls fail (B85)";
    close_twice_is_safe = "closing a handle again, or at the same time, ends well";
    migrate_runs_from_many_at_once = "migrate may be run by many handles at once, and again, while locks are held";
    housekeep_runs_from_many_at_once = "housekeeping may be run by many handles at once, while leases come and go (B100)";
    restart_keeps_what_is_promised = "across a restart tokens rise, done stays done and committed stays committed (B69, B81)" [Restart];
    handle_recovers_from_a_restart = "after a restart a handle works again, and says which locks it lost (B10)" [Restart];
});

async fn guards_outlive_their_runtime(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let inner = ctx.clone();
    let thread = std::thread::spawn(move || -> Verdict {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let short = Duration::from_millis(300);
        let held = runtime.block_on(async {
            let a = inner.open_for_now().await?;
            let opts = DedupeOptions::default().in_progress(short);
            let outside = (
                a.locked("o").await?,
                a.leased("o", short).await?,
                a.claimed(&["o"]).await?,
                a.admitted("o", opts).await?,
            );
            let late = (
                a.locked("l").await?,
                a.leased("l", short).await?,
                a.claimed(&["l"]).await?,
                a.admitted("l", opts).await?,
            );
            Ok::<_, Fault>((a, outside, late))
        })?;
        let (a, outside, late) = held;
        drop(outside); // no runtime around
        runtime.shutdown_timeout(Duration::from_secs(5));
        drop(late); // no runtime left
        drop(a);
        Ok(())
    });
    let ended = tokio::task::spawn_blocking(move || thread.join());
    let ended = soon("the drops to end", ended).await??;
    ended.map_err(|_| Fault::new("expected drops without a runtime not to panic"))??;
    for name in ["o", "l"] {
        for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
            let next = kind.waits(&b, name, SILENCE_BOUND).await?;
            let next = next
                .ok_or_else(|| Fault::new(format!("expected the {kind:?} {name:?} to be freed")))?;
            next.release().await?;
        }
        eventually("the entry to be first again", || async {
            Ok(b.admission(name).await?.is_first())
        })
        .await?;
    }
    Ok(())
}

async fn dropped_handle_frees_what_it_held(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let a = ctx.open_for_now().await?;
    let held = (a.locked("x").await?, a.leased("x", LONG).await?, a.claimed(&["x"]).await?);
    let entry = a.admitted("x", DedupeOptions::default()).await?;
    drop(a);
    ensure!(b.try_lock("x").await?.is_none(), "expected a guard to hold without its handle");
    ensure!(
        held.0.is_held() && held.1.is_held(),
        "expected guards to be held without their handle"
    );
    drop((held, entry));
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        kind.takes(&b, "x").await?.release().await?;
    }
    eventually("the entry to be first again", || async { Ok(b.admission("x").await?.is_first()) })
        .await
}

async fn close_frees_and_tells(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (lock, lease) = (a.locked("x").await?, a.leased("x", LONG).await?);
    let waiting = {
        let a = a.clone();
        let held = b.locked("y").await?;
        let waiter = tokio::spawn(async move { a.lock_within("y", Duration::from_secs(60)).await });
        tokio::time::sleep(Duration::from_millis(50)).await; // it waits by now
        (held, waiter)
    };
    soon("the close to end", a.backend.close()).await??;
    for (what, lost) in [("a lock", lock.lost()), ("a lease", lease.lost())] {
        let reason = is_lost(PATIENCE, &format!("{what} of a closed handle"), &lost).await?;
        ensure!(
            reason == LossReason::Closed,
            "expected {what} to be lost by the close, it is {reason:?}"
        );
    }
    ensure!(
        !lock.is_held() && !lease.is_held(),
        "expected guards of a closed handle not to be held"
    );
    let ended = soon("a wait on a closed handle to end", waiting.1).await??;
    ensure!(ended.is_err(), "expected a wait on a closed handle to fail, got {ended:?}");
    for kind in [Kind::Lock, Kind::Lease] {
        kind.takes(&b, "x").await?.release().await?;
        let refused = soon("a call on a closed handle", kind.tries(&a, "x")).await?;
        ensure!(
            refused.is_err(),
            "expected a {kind:?} of a closed handle to fail, got {refused:?}"
        );
    }
    fails("the release of a closed lease", ErrorKind::Lost, lease.release().await)?;
    Ok(waiting.0.release().await?)
}

async fn close_twice_is_safe(ctx: Ctx) -> Verdict {
    let (a, unused) = ctx.two().await?;
    let _lock = a.locked("x").await?;
    let _lease = a.leased("x", LONG).await?;
    let both = async { tokio::join!(a.backend.close(), a.backend.close()) };
    let (first, second) = soon("both closes to end", both).await?;
    first.and(second)?;
    soon("a third close to end", a.backend.close()).await??;
    soon("the close of an unused handle to end", unused.backend.close()).await??;
    Ok(())
}

async fn migrate_runs_from_many_at_once(ctx: Ctx) -> Verdict {
    let held = ctx.open().await?;
    let lock = held.locked("x").await?;
    let lease = held.leased("x", LONG).await?;
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let handle = ctx.open().await?;
        tasks.spawn(async move {
            for _ in 0..2 {
                handle.backend.migrate().await?;
            }
            handle
                .admitted(&format!("event-{}", rand::random::<u64>()), DedupeOptions::default())
                .await?
                .complete()
                .await?;
            Ok(())
        });
    }
    all(tasks).await?;
    lease.renew().await?;
    ensure!(lock.is_held(), "expected migrations to spare what is held");
    lock.release().await?;
    Ok(lease.release().await?)
}

async fn housekeep_runs_from_many_at_once(ctx: Ctx) -> Verdict {
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let handle = ctx.open().await?;
        tasks.spawn(async move {
            for round in 0..6 {
                if task % 2 == 0 {
                    handle.backend.housekeep().await?;
                    continue;
                }
                let lease =
                    handle.leased(&format!("key-{}", round % 3), Duration::from_secs(20)).await?;
                let opts =
                    DedupeOptions::default().retain(Duration::from_millis(100)).done_at_once();
                handle.backend.admit(&key(&format!("event-{round}")), opts).await?;
                ensure!(lease.is_held(), "expected housekeeping to spare live leases");
                lease.release().await?;
            }
            Ok(())
        });
    }
    all(tasks).await
}

async fn restart_keeps_what_is_promised(ctx: Ctx) -> Verdict {
    let own = ctx.harness().private().await?;
    let ctx = ctx.on(own);
    let (mut lock, mut lease, mut claim, mut entry) = (0, 0, 0, 0);
    for round in 0..3 {
        let a = ctx.open().await?;
        let guards = (a.locked("x").await?, a.leased_once("x", Duration::from_secs(1)).await?);
        let mut open = a.claimed(&["x"]).await?;
        let name = format!("event-{round}");
        let admitted = a.admitted(&name, DedupeOptions::default()).await?;
        // tokens rise per key: so one that is admitted in each round
        let again = a.admitted("again", DedupeOptions::default()).await?;
        let now = (
            guards.0.token().await?.value(),
            guards.1.token().value(),
            open.token().value(),
            again.token().value(),
        );
        again.abandon().await?;
        let rise = now.0 > lock && now.1 > lease && now.2 > claim && now.3 > entry;
        ensure!(
            rise,
            "expected all tokens to rise across a restart: {:?}, then {now:?}",
            (lock, lease, claim, entry)
        );
        (lock, lease, claim, entry) = now;
        let count = ctx.read(&mut open, "n").await?;
        ensure!(
            count == round,
            "expected what was committed to stay, read {count} in round {round}"
        );
        ctx.write(&mut open, "n", count + 1).await?;
        open.commit().await?;
        admitted.complete().await?;
        ctx.harness().restart().await?;
        drop(guards);
        let b = ctx.open().await?;
        let next = b.admission(&name).await?;
        ensure!(
            matches!(next, Admission::Done { .. }),
            "expected done to stay done, it is {next:?}"
        );
    }
    ctx.nothing_left(PATIENCE).await?;
    ctx.tidy().await;
    Ok(())
}

async fn handle_recovers_from_a_restart(ctx: Ctx) -> Verdict {
    let own = ctx.harness().private().await?;
    let session_locks = ctx.harness().lacks(crate::harness::Need::SessionLocks).is_none();
    let ctx = ctx.on(own);
    let a = ctx.open().await?;
    let lock = a.locked("x").await?;
    let lease = a.leased_once("x", Duration::from_secs(2)).await?;
    ctx.harness().restart().await?;
    if session_locks {
        is_lost(SILENCE_BOUND, "a lock across a restart", &lock.lost()).await?;
    }
    drop((lock, lease));
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let again = within(SILENCE_BOUND * 2, "the handle to work again", async {
            loop {
                if let Ok(Some(held)) = kind.waits(&a, "x", PATIENCE).await {
                    return held;
                }
            }
        });
        again.await?.release().await?;
    }
    ctx.nothing_left(PATIENCE).await?;
    ctx.tidy().await;
    Ok(())
}
