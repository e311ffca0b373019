//! Cancellation: every async method is dropped after every number of polls; whatever it had begun
//! is ended in the background, and everything can be had again (B03, B06, B52, B66).

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use leasehold_core::{
    Admission, ClaimLockExt, ClaimOptions, DedupeExt, DedupeOptions, Key, LeaseExt, LeaseOptions,
    LockOptions, NamedLockExt,
};
use tokio::sync::Mutex;

use super::shared::Kind;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, eventually, key, keys, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Backend in "cancel" {
    lock = "NamedLock::lock of a free key, dropped at every poll, leaves no lock";
    lock_that_waits = "NamedLock::lock behind a holder, dropped at every poll, leaves no queue place";
    lock_token = "LockGuard::token, dropped at every poll, leaves the lock held and usable";
    lock_release = "LockGuard::release, dropped at every poll, frees the lock";
    with_lock = "with_lock, dropped at every poll, frees the lock";
    lease = "Lease::lease of a free key, dropped at every poll, leaves no lease";
    lease_that_waits = "Lease::lease behind a holder, dropped at every poll, leaves no queue place";
    lease_renew = "LeaseGuard::renew, dropped at every poll, leaves the lease held and usable";
    lease_verify = "a guarded write, dropped at every poll, leaves the lease held and its record free";
    lease_release = "LeaseGuard::release, dropped at every poll, frees the lease";
    with_lease = "with_lease, dropped at every poll, frees the lease";
    claim = "ClaimLock::claim of free keys, dropped at every poll, leaves no lock and no transaction";
    claim_that_waits = "ClaimLock::claim behind a holder, dropped at every poll, leaves no queue place";
    claim_first_seen = "Claim::first_seen, dropped at every poll, leaves no entry once the claim is dropped";
    claim_commit = "Claim::commit, dropped at every poll, commits whole with its hook or not at all";
    claim_rollback = "Claim::rollback, dropped at every poll, frees the keys and writes nothing";
    with_claim = "with_claim, dropped at every poll, frees the keys";
    admit = "Dedupe::admit, dropped at every poll, leaves the key to be first again";
    admit_many = "Dedupe::admit_many, dropped at every poll, leaves all keys to be first again";
    admit_in_one_step = "first_seen, dropped at every poll, leaves the key first or done, never in progress";
    complete = "DedupeGuard::complete, dropped at every poll, completes once it was polled";
    abandon = "DedupeGuard::abandon, dropped at every poll, leaves the key to be first again";
    housekeep = "Backend::housekeep, dropped at every poll, leaves the handle usable";
    migrate = "Backend::migrate, dropped at every poll, leaves a store that works";
    close = "Backend::close, dropped at every poll, still frees what was held once it was polled";
});

/// Both handles can take and free the key.
async fn can_be_had(kind: Kind, a: &Handle, b: &Handle) -> Verdict {
    for handle in [b, a] {
        kind.takes(handle, "x").await?.release().await?;
    }
    Ok(())
}

async fn lock(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (key("x"), LockOptions::default());
    cancel_at_every_poll(
        || async { Ok(a.backend.lock(&x, opts)) },
        || can_be_had(Kind::Lock, &a, &b),
    )
    .await
}

async fn lease(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (key("x"), LeaseOptions::default());
    cancel_at_every_poll(
        || async { Ok(a.backend.lease(&x, opts)) },
        || can_be_had(Kind::Lease, &a, &b),
    )
    .await
}

async fn claim(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (set, opts) = (keys(&["x", "y"]), ClaimOptions::default());
    cancel_at_every_poll(
        || async { Ok(a.backend.claim(&set, opts)) },
        || can_be_had(Kind::Claim, &a, &b),
    )
    .await
}

/// A wait on `a`, dropped at every poll, behind a hold of `b`, and one behind a hold of `a`.
async fn waits(ctx: &Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    for holder in [&a, &b] {
        let held = Mutex::new(Some(kind.takes(holder, "x").await?));
        cancel_at_every_poll(
            || async { Ok(kind.waits(&a, "x", PATIENCE)) },
            || async {
                let mut held = held.lock().await;
                if let Some(held) = held.take() {
                    held.release().await?;
                }
                can_be_had(kind, &a, &b).await?;
                *held = Some(kind.takes(holder, "x").await?);
                Ok(())
            },
        )
        .await?;
    }
    Ok(())
}

async fn lock_that_waits(ctx: Ctx) -> Verdict {
    waits(&ctx, Kind::Lock).await
}

async fn lease_that_waits(ctx: Ctx) -> Verdict {
    waits(&ctx, Kind::Lease).await
}

async fn claim_that_waits(ctx: Ctx) -> Verdict {
    waits(&ctx, Kind::Claim).await
}

async fn lock_token(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async {
            let guard = a.locked("x").await?;
            let b = &b;
            Ok(async move {
                drop(guard.token().await); // dropped in here, and the guard with it
                drop((guard, b));
            })
        },
        || can_be_had(Kind::Lock, &a, &b),
    )
    .await?;
    // and with a guard that stays
    let guard = a.locked("y").await?;
    cancel_at_every_poll(
        || async { Ok(guard.token()) },
        || async {
            ensure!(guard.is_held(), "expected the lock to stay held");
            ensure!(b.try_lock("y").await?.is_none(), "expected the lock to exclude");
            Ok(())
        },
    )
    .await?;
    soon("a token", guard.token()).await??;
    Ok(guard.release().await?)
}

async fn lock_release(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async { Ok(a.locked("x").await?.release()) },
        || can_be_had(Kind::Lock, &a, &b),
    )
    .await
}

async fn with_lock(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let x = key("x");
    cancel_at_every_poll(
        || async {
            let work = async |_: &_| tokio::task::yield_now().await;
            Ok(a.backend.with_lock(&x, LockOptions::default(), work))
        },
        || can_be_had(Kind::Lock, &a, &b),
    )
    .await
}

async fn lease_renew(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.leased_once("x", LONG).await?;
    cancel_at_every_poll(
        || async { Ok(guard.renew()) },
        || async {
            ensure!(guard.is_held(), "expected the lease to stay held");
            ensure!(b.try_lease("x").await?.is_none(), "expected the lease to exclude");
            Ok(())
        },
    )
    .await?;
    guard.renew().await?;
    Ok(guard.release().await?)
}

async fn lease_verify(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async {
            let guard = a.leased_once("x", LONG).await?;
            let (ctx, a) = (&ctx, &a);
            Ok(async move {
                drop(ctx.guarded_write(a, &guard, "n", 1).await); // whole or not at all
                drop(guard);
            })
        },
        || can_be_had(Kind::Lease, &a, &b),
    )
    .await?;
    let guard = a.leased("x", LONG).await?;
    ctx.guarded_write(&a, &guard, "n", 2).await?;
    let value = ctx.committed("n").await?;
    ensure!(value == 2, "expected guarded writes to go on, read {value}");
    Ok(guard.release().await?)
}

async fn lease_release(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async { Ok(a.leased("x", LONG).await?.release()) },
        || can_be_had(Kind::Lease, &a, &b),
    )
    .await
}

async fn with_lease(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let x = key("x");
    cancel_at_every_poll(
        || async {
            let work = async |_: &_| tokio::task::yield_now().await;
            Ok(a.backend.with_lease(&x, LeaseOptions::default(), work))
        },
        || can_be_had(Kind::Lease, &a, &b),
    )
    .await
}

async fn claim_first_seen(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let event = key("event");
    cancel_at_every_poll(
        || async {
            let mut claim = a.claimed(&["x"]).await?;
            let event = &event;
            Ok(async move {
                drop(claim.first_seen(event, LONG).await); // the claim is dropped with it
            })
        },
        || async {
            can_be_had(Kind::Claim, &a, &b).await?;
            is_first_soon(&b, "event").await
        },
    )
    .await
}

async fn claim_commit(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (round, hooks) = (AtomicI64::new(0), std::sync::Arc::new(AtomicI64::new(0)));
    cancel_at_every_poll(
        || async {
            let value = round.fetch_add(1, Ordering::SeqCst) + 1;
            let mut claim = a.claimed(&["x"]).await?;
            ctx.write(&mut claim, "n", value).await?;
            let hooks = hooks.clone();
            claim.after_commit(async move {
                hooks.store(value, Ordering::SeqCst);
            });
            Ok(claim.commit())
        },
        || async {
            can_be_had(Kind::Claim, &a, &b).await?;
            // the first round drops it unpolled: a rollback. All others commit.
            let round = round.load(Ordering::SeqCst);
            let expected = if round == 1 { 0 } else { round };
            let value = ctx.committed("n").await?;
            ensure!(value == expected, "expected {expected} to be committed, read {value}");
            eventually("the hook of a commit to run", || async {
                Ok(hooks.load(Ordering::SeqCst) == expected)
            })
            .await
        },
    )
    .await
}

async fn claim_rollback(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async {
            let mut claim = a.claimed(&["x"]).await?;
            ctx.write(&mut claim, "n", 1).await?;
            Ok(claim.rollback())
        },
        || async {
            can_be_had(Kind::Claim, &a, &b).await?;
            let value = ctx.committed("n").await?;
            ensure!(value == 0, "expected nothing to be written, read {value}");
            Ok(())
        },
    )
    .await
}

async fn with_claim(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let x = keys(&["x"]);
    cancel_at_every_poll(
        || async {
            let work = async |_: &mut leasehold_core::Claim| {
                tokio::task::yield_now().await;
                Ok::<_, Fault>(())
            };
            Ok(a.backend.with_claim(&x, ClaimOptions::default(), work))
        },
        || can_be_had(Kind::Claim, &a, &b),
    )
    .await
}

async fn is_first_soon(handle: &Handle, name: &str) -> Verdict {
    eventually(&format!("{name:?} to be first again"), || async {
        match handle.admission(name).await? {
            Admission::First(guard) => Ok(guard.abandon().await.map(|()| true)?),
            _ => Ok(false),
        }
    })
    .await
}

async fn admit(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let event = key("event");
    cancel_at_every_poll(
        || async { Ok(a.backend.admit(&event, DedupeOptions::default())) },
        || is_first_soon(&b, "event"),
    )
    .await
}

async fn admit_many(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let events: Vec<Key> = ["one", "two", "one", "three"].into_iter().map(key).collect();
    cancel_at_every_poll(
        || async { Ok(a.backend.admit_many(&events, DedupeOptions::default())) },
        || async {
            for name in ["one", "two", "three"] {
                is_first_soon(&b, name).await?;
            }
            Ok(())
        },
    )
    .await
}

async fn admit_in_one_step(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let event = key("event");
    let retain = Duration::from_millis(100);
    cancel_at_every_poll(
        || async { Ok(a.backend.first_seen(&event, retain)) },
        || async {
            let next = b.admission("event").await?;
            let between = matches!(next, Admission::InProgress { .. });
            ensure!(!between, "expected first or done, never in progress: {next:?}");
            drop(next);
            is_first_soon(&b, "event").await
        },
    )
    .await
}

async fn complete(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let round = AtomicI64::new(0);
    cancel_at_every_poll(
        || async {
            let name = format!("event-{}", round.fetch_add(1, Ordering::SeqCst));
            Ok(a.admitted(&name, DedupeOptions::default()).await?.complete())
        },
        || async {
            let last = round.load(Ordering::SeqCst) - 1;
            let name = format!("event-{last}");
            if last == 0 {
                return is_first_soon(&b, &name).await; // dropped unpolled: abandoned
            }
            eventually("a complete that was polled to take effect", || async {
                Ok(matches!(b.admission(&name).await?, Admission::Done { .. }))
            })
            .await
        },
    )
    .await
}

async fn abandon(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async { Ok(a.admitted("event", DedupeOptions::default()).await?.abandon()) },
        || is_first_soon(&b, "event"),
    )
    .await
}

async fn housekeep(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(
        || async { Ok(a.backend.housekeep()) },
        || can_be_had(Kind::Lease, &a, &b),
    )
    .await?;
    soon("housekeeping", a.backend.housekeep()).await??;
    Ok(())
}

async fn migrate(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    cancel_at_every_poll(|| async { Ok(a.backend.migrate()) }, || can_be_had(Kind::Lease, &a, &b))
        .await?;
    soon("a migration", a.backend.migrate()).await??;
    Ok(())
}

async fn close(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let guards = Mutex::new(Vec::new());
    cancel_at_every_poll(
        || async {
            let a = ctx.open_for_now().await?;
            let held = (a.locked("x").await?, a.leased("x", LONG).await?);
            guards.lock().await.push(Some(held));
            Ok(async move { a.backend.close().await })
        },
        || async {
            let mut guards = guards.lock().await;
            if guards.len() == 1 {
                guards.clear(); // that future was never polled and has closed nothing
                guards.push(None);
            }
            for kind in [Kind::Lock, Kind::Lease] {
                kind.takes(&b, "x").await?.release().await?;
            }
            for (lock, lease) in guards.iter().flatten() {
                let held = lock.is_held() || lease.is_held();
                ensure!(!held, "expected the guards of a closed handle to be lost");
            }
            Ok(())
        },
    )
    .await
}
