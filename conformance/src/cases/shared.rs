//! What locks, leases and claims have in common: exclusion, waiting, freeing. Each function here is
//! a case of each of the three.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{Claim, LeaseGuard, LockGuard, Lost};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::ctx::{Ctx, HandleExt, PATIENCE, all, eventually, is_waiting, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;
use crate::history::{History, Interval, monotonic};

/// Which of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Lock,
    Lease,
    Claim,
}

/// What is held.
#[derive(Debug)]
pub(super) enum Held {
    Lock(LockGuard),
    Lease(LeaseGuard),
    Claim(Claim),
}

impl Kind {
    /// Waits for it.
    pub(super) async fn waits(
        self,
        handle: &Handle,
        name: &str,
        wait: Duration,
    ) -> Result<Option<Held>, Fault> {
        Ok(match self {
            Self::Lock => handle.lock_within(name, wait).await?.map(Held::Lock),
            Self::Lease => handle.lease_within(name, wait).await?.map(Held::Lease),
            Self::Claim => handle.claim_within(&[name], wait).await?.map(Held::Claim),
        })
    }

    /// Tries once.
    pub(super) async fn tries(self, handle: &Handle, name: &str) -> Result<Option<Held>, Fault> {
        self.waits(handle, name, Duration::ZERO).await
    }

    /// Takes what must be to be had.
    pub(super) async fn takes(self, handle: &Handle, name: &str) -> Result<Held, Fault> {
        self.waits(handle, name, PATIENCE).await?.ok_or_else(|| {
            let message = format!("expected {self:?} {name:?} to be to be had within {PATIENCE:?}");
            Fault::new(message)
        })
    }
}

impl Held {
    /// Releases or commits.
    pub(super) async fn release(self) -> Verdict {
        match self {
            Self::Lock(guard) => guard.release().await?,
            Self::Lease(guard) => guard.release().await?,
            Self::Claim(claim) => claim.commit().await?,
        }
        Ok(())
    }

    /// The fencing token. (A shared reference to a claim cannot cross threads.)
    pub(super) async fn token(&mut self) -> Result<u64, Fault> {
        Ok(match self {
            Self::Lock(guard) => guard.token().await?.value(),
            Self::Lease(guard) => guard.token().value(),
            Self::Claim(claim) => claim.token().value(),
        })
    }

    pub(super) fn lost(&self) -> Lost {
        match self {
            Self::Lock(guard) => guard.lost(),
            Self::Lease(guard) => guard.lost(),
            Self::Claim(claim) => claim.lost(),
        }
    }
}

pub(super) async fn excludes(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = kind.takes(&a, "x").await?;
    ensure!(!held.lost().is_set(), "expected a fresh guard not to be lost");
    ensure!(kind.tries(&b, "x").await?.is_none(), "expected one holder, both handles got the lock");
    held.release().await?;
    kind.takes(&b, "x").await?.release().await?;
    Ok(())
}

pub(super) async fn different_keys_are_independent(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _x = kind.takes(&a, "x").await?;
    let y = kind.tries(&b, "y").await?;
    ensure!(y.is_some(), "expected \"y\" to be free while only \"x\" is held");
    let z = kind.tries(&a, "z").await?;
    ensure!(z.is_some(), "expected one handle to hold several locks");
    Ok(())
}

pub(super) async fn can_be_taken_again_after_release(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..10 {
        let handle = if round % 3 == 0 { &b } else { &a };
        let guard = kind.tries(handle, "x").await?;
        let Some(guard) = guard else {
            return Err(Fault::new(format!(
                "expected a free lock after its release, round {round}"
            )));
        };
        guard.release().await?;
    }
    Ok(())
}

pub(super) async fn is_not_reentrant(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = kind.takes(&a, "x").await?;
    for _ in 0..3 {
        ensure!(
            kind.tries(&a, "x").await?.is_none(),
            "expected the second entry of one process to be refused"
        );
    }
    let waited = kind.waits(&a, "x", Duration::from_millis(100)).await?;
    ensure!(waited.is_none(), "expected the second entry of one process to wait in vain");
    held.release().await?;
    ensure!(
        kind.tries(&b, "x").await?.is_some(),
        "expected one release to free the lock: the tries counted as entries"
    );
    Ok(())
}

pub(super) async fn release_then_drop_frees_once(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 0..20 {
        let first = kind.takes(&a, "x").await?;
        if round % 2 == 0 {
            first.release().await?;
        } else {
            drop(first);
        }
        let second = kind.takes(&b, "x").await?;
        let third = kind.tries(&a, "x").await?;
        ensure!(third.is_none(), "expected the successor to keep its lock, round {round}");
        second.release().await?;
    }
    Ok(())
}

pub(super) async fn try_never_waits(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _held = kind.takes(&a, "x").await?;
    let waits = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(300),
        Duration::from_millis(1),
    ];
    for wait in waits {
        for handle in [&a, &b] {
            let start = Instant::now();
            let got = soon("a short wait to end", kind.waits(handle, "x", wait)).await??;
            ensure!(got.is_none(), "expected a wait of {wait:?} to end with nothing");
            let took = start.elapsed();
            ensure!(
                took < Duration::from_secs(4),
                "expected a wait of {wait:?} to end at once, it took {took:?}"
            );
        }
    }
    let free = kind.tries(&b, "y").await?;
    ensure!(free.is_some(), "expected a try to get a free lock");
    Ok(())
}

pub(super) async fn wait_bounds_everything(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let _held = kind.takes(&a, "x").await?;
    let wait = Duration::from_millis(400);
    let mut tasks = JoinSet::new();
    // behind the local holder, behind the other process, and behind local waiters
    for handle in [&a, &b, &b, &b] {
        let handle = handle.clone();
        tasks.spawn(async move {
            let start = Instant::now();
            let got =
                soon("the wait to end at its limit", kind.waits(&handle, "x", wait)).await??;
            ensure!(got.is_none(), "expected a wait behind a holder to end with nothing");
            let took = start.elapsed();
            ensure!(took >= wait * 9 / 10, "expected a wait of {wait:?}, it ended after {took:?}");
            Ok(())
        });
    }
    all(tasks).await
}

pub(super) async fn huge_waits_wait(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let days = Duration::from_secs(40 * 24 * 60 * 60);
    for wait in [days, Duration::from_secs(u64::MAX), Duration::MAX] {
        let held = kind.takes(&a, "x").await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { kind.waits(&b, "x", wait).await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await; // time for a wrong end
        ensure!(
            !waiter.is_finished(),
            "expected a wait of {wait:?} to go on while the lock is held"
        );
        held.release().await?;
        let got = soon("the waiter to get the lock", waiter).await???;
        ensure!(got.is_some(), "expected a wait of {wait:?} to end with the lock");
    }
    Ok(())
}

pub(super) async fn waiter_wakes_on_release(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    for _ in 0..5 {
        let held = kind.takes(&a, "x").await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { kind.waits(&b, "x", Duration::from_secs(60)).await })
        };
        tokio::time::sleep(Duration::from_millis(50)).await; // it waits by now
        held.release().await?;
        let got = soon("the waiter to get the released lock", waiter).await???;
        ensure!(got.is_some(), "expected the waiter to get the released lock");
    }
    Ok(())
}

pub(super) async fn counter_of_100_tasks(ctx: Ctx, kind: Kind) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let counter = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..100 {
        let (handle, counter) = (handles[task % 3].clone(), counter.clone());
        tasks.spawn(async move {
            let guard = kind.waits(&handle, "counter", Duration::from_secs(50)).await?;
            let guard = guard.ok_or_else(|| Fault::new("expected every task to get its turn"))?;
            let count = counter.load(Ordering::SeqCst);
            tokio::task::yield_now().await;
            counter.store(count + 1, Ordering::SeqCst);
            guard.release().await
        });
    }
    all(tasks).await?;
    let count = counter.load(Ordering::SeqCst);
    ensure!(count == 100, "expected 100 increments, {} were lost", 100 - count);
    Ok(())
}

pub(super) async fn fuzz_of_two_names(ctx: Ctx, kind: Kind) -> Verdict {
    let history = Arc::new(History::new());
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let mut tasks = JoinSet::new();
    for task in 0..12 {
        let (handle, history) = (handles[task % 3].clone(), history.clone());
        tasks.spawn(async move {
            for round in 0..12 {
                let name = ["left", "right"][rand::random_range(0..2)];
                let wait = [Duration::ZERO, Duration::from_millis(500)][round % 2];
                let Some(mut guard) = kind.waits(&handle, name, wait).await? else {
                    continue;
                };
                let from = monotonic();
                let token = guard.token().await?;
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..3))).await;
                let to = monotonic();
                match round % 3 {
                    0 => drop(guard),
                    _ => guard.release().await?,
                }
                let (key, holder) = (name.to_owned(), format!("task {task}"));
                history.record(Interval { key, holder, from, to, token });
            }
            Ok(())
        });
    }
    all(tasks).await?;
    history.check_at_least(12)
}

pub(super) async fn tokens_rise(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut last = 0;
    for round in 0..12 {
        let handle = if round % 2 == 0 { &a } else { &b };
        let mut guard = kind.takes(handle, "x").await?;
        let token = guard.token().await?;
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

pub(super) async fn local_waiters_are_served_in_order(ctx: Ctx, kind: Kind) -> Verdict {
    let a = ctx.open().await?;
    let held = kind.takes(&a, "x").await?;
    let (served, mut order) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..10 {
        let (a, served) = (a.clone(), served.clone());
        let mut wait = Box::pin(async move {
            let guard = kind.takes(&a, "x").await?;
            served.send(number).map_err(|_| Fault::new("nobody listens"))?;
            guard.release().await
        });
        // it has its place before the next one comes
        ensure!(is_waiting(&mut wait).await, "expected waiter {number} to wait");
        tasks.spawn(wait);
    }
    held.release().await?;
    all(tasks).await?;
    for number in 0..10 {
        let next = order.recv().await;
        ensure!(next == Some(number), "expected waiter {number} next, it was {next:?}");
    }
    Ok(())
}

pub(super) async fn drop_frees(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    drop(kind.takes(&a, "x").await?);
    let next = kind.takes(&b, "x").await?;
    drop(next);
    kind.takes(&a, "x").await?.release().await?;
    Ok(())
}

pub(super) async fn panic_frees(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let panics = {
        let a = a.clone();
        tokio::spawn(async move {
            let _guard = kind.takes(&a, "x").await;
            std::panic::resume_unwind(Box::new("on purpose"));
        })
    };
    ensure!(panics.await.is_err(), "expected the task to panic");
    let guard = kind.takes(&b, "x").await?;
    let aborted = {
        let a = a.clone();
        tokio::spawn(async move {
            let _guard = kind.takes(&a, "y").await;
            std::future::pending::<()>().await;
        })
    };
    eventually("the task to hold the lock", || async { Ok(kind.tries(&b, "y").await?.is_none()) })
        .await?;
    aborted.abort();
    kind.takes(&b, "y").await?.release().await?;
    guard.release().await
}

pub(super) async fn cancelled_waiters_leave_nothing(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = kind.takes(&a, "x").await?;
    let mut tasks = JoinSet::new();
    for task in 0..40 {
        let handle = if task % 2 == 0 { a.clone() } else { b.clone() };
        tasks.spawn(async move {
            let cut = Duration::from_micros(rand::random_range(0..20_000));
            let wait = kind.waits(&handle, "x", PATIENCE);
            drop(tokio::time::timeout(cut, wait).await); // dropped in the middle
            Ok(())
        });
    }
    // some of them are dropped while the lock is on its way to them
    tokio::time::sleep(Duration::from_millis(10)).await;
    held.release().await?;
    all(tasks).await?;
    for handle in [&a, &b] {
        kind.takes(handle, "x").await?.release().await?;
    }
    Ok(())
}

pub(super) async fn lost_is_silent_on_release(ctx: Ctx, kind: Kind) -> Verdict {
    let a = ctx.open().await?;
    let (released, dropped) = (kind.takes(&a, "x").await?, kind.takes(&a, "y").await?);
    let (first, second) = (released.lost(), dropped.lost());
    released.release().await?;
    drop(dropped);
    for name in ["x", "y"] {
        kind.takes(&a, name).await?.release().await?;
    }
    ensure!(!first.is_set(), "expected a release not to be told as a loss: {:?}", first.reason());
    ensure!(!second.is_set(), "expected a drop not to be told as a loss: {:?}", second.reason());
    Ok(())
}

pub(super) async fn one_winner_of_many(ctx: Ctx, kind: Kind) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    for round in 0..5 {
        let start = Arc::new(tokio::sync::Barrier::new(24));
        let mut tasks = JoinSet::new();
        for task in 0..24 {
            let (handle, start) = (handles[task % 3].clone(), start.clone());
            tasks.spawn(async move {
                start.wait().await;
                kind.tries(&handle, "x").await
            });
        }
        let mut winners = Vec::new();
        while let Some(tried) = tasks.join_next().await {
            winners.extend(tried??);
        }
        let count = winners.len();
        ensure!(count == 1, "expected one winner of 24, round {round} had {count}");
        for winner in winners {
            winner.release().await?;
        }
    }
    Ok(())
}
