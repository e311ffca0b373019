//! Freeing for a holder that has ended, by its token.

use std::time::{Duration, Instant};

use leasehold_core::{Backend, DedupeOptions, ErrorKind, FencingToken, Kind};
use tokio::task::JoinSet;

use super::shared::{self, Held};
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, fails, is_lost, key, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Backend in "by_token" {
    frees_what_a_dead_holder_left = "the lease of a holder that died is free at once when it is released by its token" [Inspect];
    its_holder_is_told = "a holder that is alive after all loses what was released by its token, and writes no more" [Inspect];
    a_successor_is_spared = "a release by the token of an earlier holder, or by any other, frees nothing" [Inspect];
    other_names_are_spared = "a release by a token frees that name, kind and namespace only" [Inspect];
    waiters_are_woken = "who waits gets what is released by its token long before its ttl" [Inspect];
    one_release_of_many_frees = "of many releases by one token at once exactly one frees it, and none frees the next holder's" [Inspect];
    what_has_no_token_of_its_own_is_refused = "claims, entries and the locks of sessions are not released by a token" [Inspect];
});

/// What can be released by its token: where a lock belongs to a session, leases only.
fn kinds(backend: &dyn Backend) -> Vec<shared::Kind> {
    let locks = (!backend.capabilities().session_locks).then_some(shared::Kind::Lock);
    [shared::Kind::Lease].into_iter().chain(locks).collect()
}

fn of(kind: shared::Kind) -> Kind {
    match kind {
        shared::Kind::Lock => Kind::Lock,
        shared::Kind::Lease => Kind::Lease,
        shared::Kind::Claim => Kind::Claim,
    }
}

async fn released(handle: &Handle, kind: Kind, name: &str, token: u64) -> Result<bool, Fault> {
    Ok(handle.backend.release_by_token(kind, &key(name), FencingToken(token)).await?)
}

async fn frees_what_a_dead_holder_left(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let token = ctx.vanished_lease("x", LONG).await?;
    ensure!(a.try_lease("x").await?.is_none(), "expected the dead holder's lease to be held");
    ensure!(released(&a, Kind::Lease, "x", token).await?, "expected it to have been held");
    let new = a.try_lease("x").await?;
    let new = new.ok_or_else(|| Fault::new("expected the lease to be free at once"))?;
    ensure!(new.token().value() > token, "expected tokens to rise, got {} after it", new.token());
    let again = released(&a, Kind::Lease, "x", token).await?;
    ensure!(!again, "expected nothing to be left of the dead holder's lease");
    ensure!(new.is_held(), "expected the new holder to be spared");
    new.renew().await?;
    new.release().await?;
    let gone = released(&a, Kind::Lease, "x", token).await?;
    ensure!(!gone, "expected nobody to hold a lease that was released");
    Ok(())
}

async fn its_holder_is_told(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let lease = a.leased("x", Duration::from_secs(9)).await?;
    ensure!(released(&b, Kind::Lease, "x", lease.token().value()).await?, "expected it to be held");
    let new = b.leased("x", LONG).await?;
    is_lost(PATIENCE, "a lease that was released by its token", &lease.lost()).await?;
    let late = ctx.guarded_write(&a, &lease, "x", 1).await;
    fails("a guarded write of a holder that was released", ErrorKind::Lost, late)?;
    drop(lease);
    ensure!(new.is_held(), "expected the next holder to be spared by the drop");
    ctx.guarded_write(&b, &new, "x", 2).await?;
    new.release().await?;
    if b.backend.capabilities().session_locks {
        return Ok(());
    }
    let lock = a.locked("x").await?;
    let token = lock.token().await?.value();
    ensure!(released(&b, Kind::Lock, "x", token).await?, "expected the lock to be held");
    let new = b.locked("x").await?;
    is_lost(PATIENCE, "a lock that was released by its token", &lock.lost()).await?;
    drop(lock);
    ensure!(a.try_lock("x").await?.is_none(), "expected the next holder to be spared");
    Ok(new.release().await?)
}

async fn a_successor_is_spared(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for kind in kinds(&*b.backend) {
        let mut first = kind.takes(&a, "x").await?;
        let old = first.token().await?;
        first.release().await?;
        let mut held = kind.takes(&a, "x").await?;
        let token = held.token().await?;
        for wrong in [old, 0, token - 1, token + 1, u64::MAX >> 1] {
            let freed = released(&b, of(kind), "x", wrong).await?;
            ensure!(!freed, "expected {wrong} not to free what {token} holds");
        }
        let taken = kind.tries(&b, "x").await?;
        ensure!(taken.is_none(), "expected the holder to be spared, another got it");
        ensure!(!held.lost().is_set(), "expected the holder to hear nothing");
        held.release().await?;
    }
    Ok(())
}

async fn other_names_are_spared(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let other = ctx.harness().open(&format!("{}-other", ctx.namespace())).await?;
    let (lock, lease) = (a.locked("x").await?, a.leased("x", LONG).await?);
    let (lock_token, token) = (lock.token().await?.value(), lease.token().value());
    let elsewhere = released(&other, Kind::Lease, "x", token).await?;
    ensure!(!elsewhere, "expected another namespace's lease to be spared");
    ensure!(!released(&a, Kind::Lease, "y", token).await?, "expected another name to be spared");
    if lock_token != token {
        let mixed = released(&a, Kind::Lease, "x", lock_token).await?;
        ensure!(!mixed, "expected the token of the lock to free no lease");
    }
    ensure!(released(&a, Kind::Lease, "x", token).await?, "expected the lease to be held");
    ensure!(lock.is_held(), "expected the lock of that name to be spared");
    lock.release().await?;
    drop(lease);
    Ok(other.backend.close().await?)
}

/// Those who look once a second would not all happen to look soon after one moment: see the case of
/// that name of leases.
async fn waiters_are_woken(ctx: Ctx) -> Verdict {
    const SOON: Duration = Duration::from_millis(400);
    let (a, b) = ctx.two().await?;
    let mut waiters = Vec::new();
    for _ in 0..10 {
        waiters.push(ctx.open().await?);
    }
    for kind in kinds(&*b.backend) {
        let mut slowest = Vec::new();
        // a busy machine may be late now and then, those who only look always are
        while slowest.len() < 3 {
            let late = latest(kind, &a, &b, &waiters).await?;
            if late < SOON {
                break;
            }
            slowest.push(late);
        }
        ensure!(
            slowest.len() < 3,
            "expected waiters to get what was released by its token within {SOON:?}, the slowest \
             took {slowest:?}"
        );
    }
    Ok(())
}

/// What `a` holds and others wait for is released by `b`: how long the slowest takes to get it.
async fn latest(
    kind: shared::Kind,
    a: &Handle,
    b: &Handle,
    waiters: &[Handle],
) -> Result<Duration, Fault> {
    let mut waiting = Vec::new();
    for (n, handle) in waiters.iter().cloned().enumerate() {
        let name = format!("x{n}");
        let held = kind.takes(a, &name).await?;
        let waiter = tokio::spawn(async move {
            let taken = kind.waits(&handle, &name, PATIENCE * 2).await?;
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
    let (mut late, mut past) = (Duration::ZERO, Vec::new());
    for (n, (mut held, waiter)) in waiting.into_iter().enumerate() {
        let (name, token) = (format!("x{n}"), held.token().await?);
        let start = Instant::now();
        ensure!(released(b, of(kind), &name, token).await?, "expected {name} to be held");
        let got = soon("a waiter to get it", waiter).await???;
        late = late.max(got.saturating_duration_since(start));
        // dropped now, it could wake the next waiter
        past.push(held);
    }
    past.into_iter().for_each(forget);
    Ok(late)
}

/// It is not held any more: a release would be an error.
fn forget(held: Held) {
    match held {
        Held::Lock(guard) => drop(guard),
        Held::Lease(guard) => drop(guard),
        Held::Claim(claim) => drop(claim),
    }
}

async fn one_release_of_many_frees(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let others = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    for kind in kinds(&*b.backend) {
        for round in 0..10 {
            let mut held = kind.takes(&a, "x").await?;
            let token = held.token().await?;
            let mut releases = JoinSet::new();
            let mut release = |handle: &Handle| {
                let handle = handle.clone();
                releases.spawn(async move { released(&handle, of(kind), "x", token).await });
            };
            others.iter().cycle().take(9).for_each(&mut release);
            let start = Instant::now();
            let next = kind.takes(&b, "x").await?;
            others.iter().for_each(&mut release); // late ones
            let mut count = 0;
            while let Some(freed) = releases.join_next().await {
                count += u32::from(freed??);
            }
            ensure!(count == 1, "expected one of 12 releases to free it, round {round}: {count}");
            let taken = kind.tries(&others[0], "x").await?;
            ensure!(taken.is_none(), "expected the next holder to be spared, round {round}");
            ensure!(!next.lost().is_set(), "expected it to hold, {:?} later", start.elapsed());
            forget(held);
            next.release().await?;
        }
    }
    Ok(())
}

async fn what_has_no_token_of_its_own_is_refused(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let claim = a.claimed(&["x"]).await?;
    let entry = a.admitted("x", DedupeOptions::default()).await?;
    let lock = a.locked("x").await?;
    let mut refused = vec![(Kind::Claim, claim.token()), (Kind::Dedupe, entry.token())];
    if b.backend.capabilities().session_locks {
        refused.push((Kind::Lock, lock.token().await?));
    }
    for (kind, token) in refused {
        let answer = b.backend.release_by_token(kind, &key("x"), token).await;
        fails(&format!("a release of a {kind} by its token"), ErrorKind::Unsupported, answer)?;
    }
    ensure!(lock.is_held(), "expected the lock to be spared");
    ensure!(b.try_claim(&["x"]).await?.is_none(), "expected the claim to be spared");
    claim.commit().await?;
    entry.complete().await?;
    Ok(lock.release().await?)
}
