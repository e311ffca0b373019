//! [`Leader`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::recipes::{Campaign, Leader, Term};
use leasehold_core::LossReason;
use tokio::task::JoinSet;

use super::Inside;
use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, is_lost, key, pause, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    leader_is_one = "of all candidates one leads at a time, and each later one has a greater token";
    leader_of_an_ended_session_is_told = "a leader whose session ends is told, its work is dropped, and somebody leads again" [EndSessions, SessionLocks];
    leader_of_a_deleted_lease_is_told = "a leader whose lease is gone is told, its work is dropped, and somebody leads again" [DeleteLease];
    leader_that_is_dropped_leaves_nothing = "a candidate that is dropped at any moment leaves no lock, no lease and no queue place";
    leader_resigns_whatever_becomes_of_the_call = "a resignation that is dropped at every poll leaves the leadership to be had";
});

const TTL: Duration = Duration::from_secs(3);

fn over_locks(handle: &Handle) -> Campaign {
    Leader::over_locks(handle.backend.clone(), key("x")).retry(Duration::from_millis(50))
}

fn over_leases(handle: &Handle, ttl: Duration) -> Campaign {
    Leader::over_leases(handle.backend.clone(), key("x"), ttl).retry(Duration::from_millis(50))
}

async fn leader_is_one(ctx: Ctx) -> Verdict {
    for kind in 0..2 {
        let (inside, tokens) = (Arc::new(Inside::default()), Arc::new(Mutex::new(Vec::new())));
        let mut tasks = JoinSet::new();
        for _ in 0..3 {
            let handle = ctx.open().await?;
            let campaign = if kind == 0 { over_locks(&handle) } else { over_leases(&handle, LONG) };
            let (inside, tokens) = (inside.clone(), tokens.clone());
            tasks.spawn(async move {
                let leader = campaign.start();
                for _ in 0..4 {
                    let led = leader.lead(|term| {
                        let (inside, tokens) = (inside.clone(), tokens.clone());
                        async move {
                            let _entered = inside.enter();
                            let token = term.token().value();
                            tokens.lock().unwrap_or_else(PoisonError::into_inner).push(token);
                            pause().await;
                        }
                    });
                    soon("to lead in turn", led).await?;
                    soon("a resignation", leader.resign()).await?;
                    pause().await;
                    leader.campaign();
                }
                soon("a resignation", leader.resign()).await
            });
        }
        all(tasks).await?;
        let most = inside.most();
        ensure!(most == 1, "expected one leader at a time, there were {most}");
        let tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(tokens.len() >= 12, "expected each to lead four times, there were {tokens:?}");
        ensure!(
            tokens.is_sorted_by(|one, two| one < two),
            "expected tokens to rise from leader to leader: {tokens:?}"
        );
    }
    Ok(())
}

/// `a` leads, `b` is a candidate: `lose` makes `a` lose it.
async fn told_of_a_loss(
    a: &Leader,
    b: &Leader,
    lose: impl AsyncFnOnce() -> Verdict,
) -> Result<(LossReason, [Term; 2]), Fault> {
    let term = soon("a to lead", a.elected()).await?;
    let mut news = a.watch();
    news.mark_unchanged();
    let inside = Inside::default();
    let works = a.lead(|_| async {
        let _entered = inside.enter();
        std::future::pending::<()>().await;
    });
    let (reason, next) = {
        let mut works = std::pin::pin!(works);
        let told = async {
            lose().await?;
            is_lost(PATIENCE, "the leadership", &term.lost()).await
        };
        let reason = tokio::select! {
            () = &mut works => return Err(Fault::new("the work ended by itself")),
            reason = told => reason?,
        };
        // it may lead again by now, in another term
        let stale = a.term().is_some_and(|now| now == term);
        ensure!(!stale, "expected a leader that is told of its loss not to believe in it");
        let next = async {
            tokio::select! {
                () = works => None,
                next = a.elected() => Some(next),
                next = b.elected() => Some(next),
            }
        };
        let next = soon("somebody to lead again", next).await?;
        (reason, next.ok_or_else(|| Fault::new("the work ended by itself"))?)
    };
    ensure!(next != term, "expected another term after the loss");
    ensure!(inside.most() == 1, "expected the work of one term at a time");
    soon("the news of the loss", news.changed()).await?.unwrap_or_default();
    Ok((reason, [term, next]))
}

async fn leader_of_an_ended_session_is_told(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let leader = over_locks(&a).start();
    soon("a to lead", leader.elected()).await?;
    let other = over_locks(&b).start();
    let lose = async || Ok(a.link.end_sessions().await?);
    let (reason, [old, next]) = told_of_a_loss(&leader, &other, lose).await?;
    let (old, next) = (old.token(), next.token());
    ensure!(next > old, "expected a greater token than {old}, got {next}");
    let fits = matches!(reason, LossReason::SessionEnded | LossReason::Silent);
    ensure!(fits, "expected the session to be named as the reason, not {reason:?}");
    Ok(())
}

async fn leader_of_a_deleted_lease_is_told(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let leader = over_leases(&a, TTL).start();
    soon("a to lead", leader.elected()).await?;
    let other = over_leases(&b, TTL).start();
    let lose = async || Ok(ctx.harness().delete_lease(ctx.namespace(), &key("x")).await?);
    told_of_a_loss(&leader, &other, lose).await?;
    Ok(())
}

async fn leader_that_is_dropped_leaves_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for micros in [0, 100, 300, 1_000, 3_000, 10_000, 100_000] {
        for leases in [false, true] {
            let campaign = if leases { over_leases(&a, LONG) } else { over_locks(&a) };
            let (leader, waits) = (campaign.clone().start(), campaign.start());
            tokio::time::sleep(Duration::from_micros(micros)).await; // where it is then
            let mut news = leader.watch();
            drop((leader, waits));
            let told = news.wait_for(Option::is_none);
            drop(soon("a dropped leader to be told as none", told).await?);
            b.locked("x").await?.release().await?;
            b.leased("x", LONG).await?.release().await?;
        }
    }
    Ok(())
}

async fn leader_resigns_whatever_becomes_of_the_call(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let leader = over_locks(&a).start();
    cancel_at_every_poll(
        || async {
            leader.campaign();
            soon("it to lead", leader.elected()).await?;
            Ok(leader.resign())
        },
        || async {
            soon("a resignation", leader.resign()).await?;
            ensure!(!leader.is_leader(), "expected it not to lead after its resignation");
            Ok(b.locked("x").await?.release().await?)
        },
    )
    .await
}
