//! Named locks: exclusion, waiting, freeing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{LockOptions, NamedLockExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::case::{Case, case};
use crate::ctx::{Ctx, HandleExt, PATIENCE, all, eventually, is_waiting, key, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::history::{History, Interval, monotonic};

pub(super) const CASES: &[Case] = &[
    case!(
        NamedLock,
        "named",
        excludes,
        "a lock that one handle holds is not to be had by another"
    ),
    case!(
        NamedLock,
        "named",
        different_keys_are_independent,
        "holding one key does not keep others from another"
    ),
    case!(
        NamedLock,
        "named",
        can_be_taken_again_after_release,
        "a released lock is free at once, for the same handle and for others"
    ),
    case!(
        NamedLock,
        "named",
        is_not_reentrant,
        "a handle does not get a lock that it holds itself (B08)"
    ),
    case!(
        NamedLock,
        "named",
        release_then_drop_frees_once,
        "ending a guard twice over does not free its successor's lock"
    ),
    case!(
        NamedLock,
        "named",
        try_never_waits,
        "a wait of zero, a nanosecond or a millisecond ends at once (B25)"
    ),
    case!(
        NamedLock,
        "named",
        wait_bounds_everything,
        "a wait ends at its limit, behind a local holder and behind another process"
    ),
    case!(
        NamedLock,
        "named",
        huge_waits_wait,
        "a wait of 40 days or Duration::MAX neither overflows nor ends early (B25, B43)"
    ),
    case!(
        NamedLock,
        "named",
        waiter_wakes_on_release,
        "a waiter on another handle gets the lock soon after its release"
    ),
    case!(
        NamedLock,
        "named",
        counter_of_100_tasks,
        "100 tasks on three handles increment a counter without a lost update"
    ),
    case!(
        NamedLock,
        "named",
        fuzz_of_two_names,
        "holds of two names by many tasks never overlap and tokens rise with them"
    ),
    case!(
        NamedLock,
        "named",
        tokens_rise,
        "each later acquisition has a greater token, on whichever handle"
    ),
    case!(
        NamedLock,
        "named",
        token_stays_for_the_hold,
        "asking a guard for its token again gives the same one"
    ),
    case!(
        NamedLock,
        "named",
        local_waiters_are_served_in_order,
        "waiters of one process get the lock in the order in which they came"
    ),
    case!(
        NamedLock,
        "named",
        other_processes_get_their_turn,
        "local hand-overs do not keep another process from the lock for ever"
    ),
    case!(
        NamedLock,
        "named",
        drop_frees,
        "a dropped guard frees its lock soon, without being released (B54)"
    ),
    case!(
        NamedLock,
        "named",
        panic_frees,
        "a task that panics or is aborted while it holds a lock frees it"
    ),
    case!(
        NamedLock,
        "named",
        cancelled_waiters_leave_nothing,
        "waits that are dropped at any time leave no lock and no queue place (B03, B07)"
    ),
    case!(
        NamedLock,
        "named",
        lost_is_silent_on_release,
        "releasing or dropping a guard is not told as a loss"
    ),
    case!(
        NamedLock,
        "named",
        with_lock_gives_the_result_and_frees,
        "with_lock runs its work under the lock, or not at all, and frees it"
    ),
    case!(
        NamedLock,
        "named",
        many_locks_on_one_handle,
        "one handle holds hundreds of locks, each of which excludes (B30)"
    ),
    case!(
        NamedLock,
        "named",
        many_contended_keys_at_once,
        "waiting for more keys than there are waiter sessions ends well (B74)"
    ),
    case!(
        NamedLock,
        "named",
        crossed_waits_end,
        "two tasks that want each other's lock end at their limits and keep their own (B16, B49)"
    ),
];

async fn excludes(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = a.locked("x").await?;
    ensure!(held.is_held(), "expected the guard to say that it is held");
    ensure!(
        held.key() == &key("x"),
        "expected the guard to know its key"
    );
    ensure!(
        b.try_lock("x").await?.is_none(),
        "expected one holder, both handles got the lock"
    );
    held.release().await?;
    b.locked("x").await?.release().await?;
    Ok(())
}

async fn different_keys_are_independent(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _x = a.locked("x").await?;
    let y = b.try_lock("y").await?;
    ensure!(
        y.is_some(),
        "expected \"y\" to be free while only \"x\" is held"
    );
    let z = a.try_lock("z").await?;
    ensure!(z.is_some(), "expected one handle to hold several locks");
    Ok(())
}

async fn can_be_taken_again_after_release(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..10 {
        let handle = if round % 3 == 0 { &b } else { &a };
        let guard = handle.try_lock("x").await?;
        let Some(guard) = guard else {
            return Err(Fault::new(format!(
                "expected a free lock after its release, round {round}"
            )));
        };
        guard.release().await?;
    }
    Ok(())
}

async fn is_not_reentrant(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = a.locked("x").await?;
    for _ in 0..3 {
        ensure!(
            a.try_lock("x").await?.is_none(),
            "expected the second entry of one process to be refused"
        );
    }
    let waited = a.lock_within("x", Duration::from_millis(100)).await?;
    ensure!(
        waited.is_none(),
        "expected the second entry of one process to wait in vain"
    );
    held.release().await?;
    ensure!(
        b.try_lock("x").await?.is_some(),
        "expected one release to free the lock: the tries counted as entries"
    );
    Ok(())
}

async fn release_then_drop_frees_once(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..20 {
        let first = a.locked("x").await?;
        if round % 2 == 0 {
            first.release().await?;
        } else {
            drop(first);
        }
        let second = b.locked("x").await?;
        let third = a.try_lock("x").await?;
        ensure!(
            third.is_none(),
            "expected the successor to keep its lock, round {round}"
        );
        second.release().await?;
    }
    Ok(())
}

async fn try_never_waits(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _held = a.locked("x").await?;
    let waits = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(300),
        Duration::from_millis(1),
    ];
    for wait in waits {
        for handle in [&a, &b] {
            let start = Instant::now();
            let got = soon("a short wait to end", handle.lock_within("x", wait)).await??;
            ensure!(
                got.is_none(),
                "expected a wait of {wait:?} to end with nothing"
            );
            let took = start.elapsed();
            ensure!(
                took < Duration::from_secs(4),
                "expected a wait of {wait:?} to end at once, it took {took:?}"
            );
        }
    }
    let free = b.try_lock("y").await?;
    ensure!(free.is_some(), "expected a try to get a free lock");
    Ok(())
}

async fn wait_bounds_everything(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _held = a.locked("x").await?;
    let wait = Duration::from_millis(400);
    let mut tasks = JoinSet::new();
    // behind the local holder, behind the other process, and behind local waiters
    for handle in [&a, &b, &b, &b] {
        let handle = handle.clone();
        tasks.spawn(async move {
            let start = Instant::now();
            let got = soon(
                "the wait to end at its limit",
                handle.lock_within("x", wait),
            )
            .await??;
            ensure!(
                got.is_none(),
                "expected a wait behind a holder to end with nothing"
            );
            let took = start.elapsed();
            ensure!(
                took >= wait * 9 / 10,
                "expected a wait of {wait:?}, it ended after {took:?}"
            );
            Ok(())
        });
    }
    all(tasks).await
}

async fn huge_waits_wait(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let days = Duration::from_secs(40 * 24 * 60 * 60);
    for wait in [days, Duration::MAX - Duration::from_nanos(1), Duration::MAX] {
        let held = a.locked("x").await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { b.lock_within("x", wait).await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await; // time for a wrong end
        ensure!(
            !waiter.is_finished(),
            "expected a wait of {wait:?} to go on while the lock is held"
        );
        held.release().await?;
        let got = soon("the waiter to get the lock", waiter).await???;
        ensure!(
            got.is_some(),
            "expected a wait of {wait:?} to end with the lock"
        );
    }
    Ok(())
}

async fn waiter_wakes_on_release(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for _ in 0..5 {
        let held = a.locked("x").await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { b.lock_within("x", Duration::from_secs(60)).await })
        };
        tokio::time::sleep(Duration::from_millis(50)).await; // it waits by now
        held.release().await?;
        let got = soon("the waiter to get the released lock", waiter).await???;
        ensure!(
            got.is_some(),
            "expected the waiter to get the released lock"
        );
    }
    Ok(())
}

async fn counter_of_100_tasks(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let counter = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..100 {
        let (handle, counter) = (handles[task % 3].clone(), counter.clone());
        tasks.spawn(async move {
            let guard = handle
                .lock_within("counter", Duration::from_secs(50))
                .await?;
            let guard = guard.ok_or_else(|| Fault::new("expected every task to get its turn"))?;
            let count = counter.load(Ordering::SeqCst);
            tokio::task::yield_now().await;
            counter.store(count + 1, Ordering::SeqCst);
            Ok(guard.release().await?)
        });
    }
    all(tasks).await?;
    let count = counter.load(Ordering::SeqCst);
    ensure!(
        count == 100,
        "expected 100 increments, {} were lost",
        100 - count
    );
    Ok(())
}

async fn fuzz_of_two_names(ctx: Ctx) -> Verdict {
    let history = Arc::new(History::new());
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let mut tasks = JoinSet::new();
    for task in 0..12 {
        let (handle, history) = (handles[task % 3].clone(), history.clone());
        tasks.spawn(async move {
            for round in 0..12 {
                let name = ["left", "right"][rand::random_range(0..2)];
                let wait = [Duration::ZERO, Duration::from_millis(500)][round % 2];
                let Some(guard) = handle.lock_within(name, wait).await? else {
                    continue;
                };
                let from = monotonic();
                let token = guard.token().await?.value();
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..3))).await;
                let to = monotonic();
                match round % 3 {
                    0 => drop(guard),
                    _ => guard.release().await?,
                }
                let (key, holder) = (name.to_owned(), format!("task {task}"));
                history.record(Interval {
                    key,
                    holder,
                    from,
                    to,
                    token,
                });
            }
            Ok(())
        });
    }
    all(tasks).await?;
    history.check_at_least(12)
}

async fn tokens_rise(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut last = 0;
    for round in 0..12 {
        let handle = if round % 2 == 0 { &a } else { &b };
        let guard = handle.locked("x").await?;
        let token = guard.token().await?.value();
        ensure!(
            token > last,
            "expected a token greater than {last}, acquisition {round} has {token}"
        );
        last = token;
        match round % 3 {
            0 => drop(guard),
            _ => guard.release().await?,
        }
    }
    Ok(())
}

async fn token_stays_for_the_hold(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let guard = a.locked("x").await?;
    let token = guard.token().await?;
    let _other = a.locked("y").await?;
    let again = guard.token().await?;
    ensure!(
        token == again,
        "expected one token for one hold, got {token} and then {again}"
    );
    Ok(())
}

async fn local_waiters_are_served_in_order(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let held = a.locked("x").await?;
    let (served, mut order) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..10 {
        let (a, served) = (a.clone(), served.clone());
        let mut wait = Box::pin(async move {
            let guard = a.locked("x").await?;
            served
                .send(number)
                .map_err(|_| Fault::new("nobody listens"))?;
            Ok(guard.release().await?)
        });
        // it has its place before the next one comes
        ensure!(
            is_waiting(&mut wait).await,
            "expected waiter {number} to wait"
        );
        tasks.spawn(wait);
    }
    held.release().await?;
    all(tasks).await?;
    for number in 0..10 {
        let next = order.recv().await;
        ensure!(
            next == Some(number),
            "expected waiter {number} next, it was {next:?}"
        );
    }
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
        ensure!(
            got.is_some(),
            "expected another process to get its turn {turn} within 10s"
        );
    }
    let ended = busy.try_join_next();
    let ended: Option<Result<Verdict, _>> = ended;
    ensure!(
        ended.is_none(),
        "expected the local tasks to go on: {ended:?}"
    );
    busy.shutdown().await;
    Ok(())
}

async fn drop_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    drop(a.locked("x").await?);
    let next = b.locked("x").await?;
    drop(next);
    a.locked("x").await?.release().await?;
    Ok(())
}

async fn panic_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let panics = {
        let a = a.clone();
        tokio::spawn(async move {
            let _guard = a.locked("x").await;
            std::panic::resume_unwind(Box::new("on purpose"));
        })
    };
    ensure!(panics.await.is_err(), "expected the task to panic");
    let guard = b.locked("x").await?;
    let aborted = {
        let a = a.clone();
        tokio::spawn(async move {
            let _guard = a.locked("y").await;
            std::future::pending::<()>().await;
        })
    };
    eventually("the task to hold the lock", || async {
        Ok(b.try_lock("y").await?.is_none())
    })
    .await?;
    aborted.abort();
    b.locked("y").await?.release().await?;
    Ok(guard.release().await?)
}

async fn cancelled_waiters_leave_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = a.locked("x").await?;
    let mut tasks = JoinSet::new();
    for task in 0..40 {
        let handle = if task % 2 == 0 { a.clone() } else { b.clone() };
        tasks.spawn(async move {
            let cut = Duration::from_micros(rand::random_range(0..20_000));
            let wait = handle.lock_within("x", PATIENCE);
            drop(tokio::time::timeout(cut, wait).await); // dropped in the middle
            Ok(())
        });
    }
    // some of them are dropped while the lock is on its way to them
    tokio::time::sleep(Duration::from_millis(10)).await;
    held.release().await?;
    all(tasks).await?;
    for handle in [&a, &b] {
        handle.locked("x").await?.release().await?;
    }
    Ok(())
}

async fn lost_is_silent_on_release(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let (released, dropped) = (a.locked("x").await?, a.locked("y").await?);
    let (first, second) = (released.lost(), dropped.lost());
    released.release().await?;
    drop(dropped);
    for name in ["x", "y"] {
        a.locked(name).await?.release().await?;
    }
    ensure!(
        !first.is_set(),
        "expected a release not to be told as a loss: {:?}",
        first.reason()
    );
    ensure!(
        !second.is_set(),
        "expected a drop not to be told as a loss: {:?}",
        second.reason()
    );
    Ok(())
}

async fn with_lock_gives_the_result_and_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (key("x"), LockOptions::default());
    let done = a
        .backend
        .with_lock(&x, opts, async |guard| {
            let other = b.try_lock("x").await?;
            ensure!(
                other.is_none(),
                "expected the lock to be held while the work runs"
            );
            ensure!(guard.is_held(), "expected the work's guard to be held");
            Ok(7)
        })
        .await?;
    ensure!(
        matches!(done, Some(Ok(7))),
        "expected the work's result, got {done:?}"
    );
    let held = b.locked("x").await?;
    let ran = a
        .backend
        .with_lock(&x, LockOptions::try_once(), async |_| ())
        .await?;
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
    ensure!(
        panics.await.is_err(),
        "expected the work's panic to come through"
    );
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
        ensure!(
            taken.is_none(),
            "expected each of many locks to exclude, number {number} did not"
        );
    }
    ensure!(
        guards.iter().all(|guard| guard.is_held()),
        "expected all locks to be held"
    );
    let opts = LockOptions::try_once();
    ensure!(
        a.backend.lock(&key("free"), opts).await?.is_some(),
        "expected room for one more"
    );
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
    ensure!(
        left.is_held() && right.is_held(),
        "expected both to keep what they hold"
    );
    left.release().await?;
    right.release().await?;
    Ok(())
}
