//! [`Limit`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::recipes::{Limit, PerKey, Taken};
use leasehold_core::Claim;
use tokio::task::JoinSet;

use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, key, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    limit_is_never_exceeded = "neither the global limit nor one per key is exceeded by those who take at once";
    limit_that_is_busy_takes_nothing = "one who waited too long to take takes nothing";
    limit_of_an_ended_session_takes_nothing = "a take whose session ended before the commit takes nothing" [EndSessions];
    limit_that_is_dropped = "a take that is dropped at every poll takes whole or not at all, and leaves no claim";
});

const REPOS: [&str; 2] = ["repo-a", "repo-b"];

fn limit(handle: &Handle, max: u64) -> Limit {
    Limit::new(handle.backend.clone(), key("x"), max).wait(PATIENCE)
}

async fn take(ctx: &Ctx, limit: &Limit, repo: &str) -> Result<Taken<()>, Fault> {
    take_slowly(ctx, limit, repo, &AtomicBool::new(false)).await
}

/// A take that, if it is the first to find `slowly` set, lets others take between its count and
/// what it writes.
async fn take_slowly(
    ctx: &Ctx,
    limit: &Limit,
    repo: &str,
    slowly: &AtomicBool,
) -> Result<Taken<()>, Fault> {
    let names = ["all", repo];
    let per_key = [PerKey::new(repo, 3)];
    let count = async |claim: &mut Claim| {
        let mut counts = Vec::new();
        for name in names {
            counts.push(u64::try_from(ctx.read(claim, name).await?).unwrap_or(0));
        }
        if slowly.swap(false, Ordering::Relaxed) {
            reached(ctx, 5).await?;
        }
        Ok(counts)
    };
    let take = async |claim: &mut Claim| {
        for name in names {
            let count = ctx.read(claim, name).await?;
            ctx.write(claim, name, count + 1).await?;
        }
        Ok(())
    };
    limit.take(&per_key, count, take).await
}

async fn limit_is_never_exceeded(ctx: Ctx) -> Verdict {
    let mut tasks = JoinSet::new();
    let slowly = Arc::new(AtomicBool::new(true));
    for _ in 0..3 {
        let handle = ctx.open().await?;
        for task in 0..6 {
            let (ctx, limit, repo) = (ctx.clone(), limit(&handle, 5), REPOS[task % 2]);
            let slowly = slowly.clone();
            tasks.spawn(async move {
                let taken = take_slowly(&ctx, &limit, repo, &slowly);
                let taken = soon("an answer", taken).await??;
                let fits = !matches!(taken, Taken::Busy);
                ensure!(fits, "expected it to be taken or full, not busy");
                Ok(())
            });
        }
    }
    all(tasks).await?;
    let count = ctx.committed("all").await?;
    ensure!(count == 5, "expected 5 to be taken by 18, as the limit is, {count} were");
    for repo in REPOS {
        let count = ctx.committed(repo).await?;
        ensure!(count <= 3, "expected 3 of {repo} at most, {count} were taken");
    }
    Ok(())
}

/// Waits for a moment until so many are taken.
async fn reached(ctx: &Ctx, taken: i64) -> Verdict {
    const MOMENT: Duration = Duration::from_millis(200);
    let reached = async {
        while ctx.committed("all").await? < taken {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    };
    tokio::time::timeout(MOMENT, reached).await.unwrap_or(Ok(()))
}

async fn limit_that_is_busy_takes_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = b.claimed(&["x"]).await?;
    for wait in [Duration::ZERO, Duration::from_millis(200)] {
        let limit = limit(&a, 5).wait(wait);
        let taken = soon("an answer", take(&ctx, &limit, "repo-a")).await??;
        ensure!(taken == Taken::Busy, "expected nothing within {wait:?}, got {taken:?}");
    }
    held.rollback().await?;
    let count = ctx.committed("all").await?;
    ensure!(count == 0, "expected nothing to be taken, {count} are");
    let taken = take(&ctx, &limit(&a, 1), "repo-a").await?;
    ensure!(taken == Taken::Taken(()), "expected one to be taken, got {taken:?}");
    let taken = take(&ctx, &limit(&b, 1), "repo-a").await?;
    let full = Taken::Full { key: None, count: 1, max: 1 };
    ensure!(taken == full, "expected the limit to be reached, got {taken:?}");
    Ok(())
}

async fn limit_of_an_ended_session_takes_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let count = async |_: &mut Claim| Ok(vec![0]);
    let ours = limit(&a, 5);
    let taken = ours.take(&[], count, async |claim| {
        ctx.write(claim, "all", 1).await?;
        Ok::<_, Fault>(a.link.end_sessions().await?)
    });
    let taken = soon("an answer", taken).await?;
    let committed = ctx.committed("all").await?;
    // where a claim is no session it goes on, and is taken whole
    let fits = if taken.is_ok() { committed == 1 } else { committed == 0 };
    ensure!(fits, "expected it whole or not at all: {taken:?}, and {committed} committed");
    let taken = soon("an answer", take(&ctx, &limit(&b, 5), "repo-a")).await??;
    ensure!(taken == Taken::Taken(()), "expected the next to take, got {taken:?}");
    Ok(())
}

async fn limit_that_is_dropped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let limit = limit(&a, 1_000_000);
    let add = async |claim: &mut Claim| {
        for name in ["one", "two"] {
            let count = ctx.read(claim, name).await?;
            ctx.write(claim, name, count + 1).await?;
        }
        Ok::<_, Fault>(())
    };
    let count = async |_: &mut Claim| Ok(vec![0]);
    cancel_at_every_poll(
        || async { Ok(limit.take(&[], count, add)) },
        || async {
            let mut claim = soon("the claim", b.claim_within(&["x"], LONG))
                .await??
                .ok_or_else(|| Fault::new("expected the claim to be to be had"))?;
            let (one, two) =
                (ctx.read(&mut claim, "one").await?, ctx.read(&mut claim, "two").await?);
            ensure!(one == two, "expected it whole or not at all, got {one} and {two}");
            Ok(claim.rollback().await?)
        },
    )
    .await
}
