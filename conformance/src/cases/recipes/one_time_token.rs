//! [`OneTimeTokens`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::recipes::{OneTimeTokens, Redemption};
use tokio::sync::{Barrier, Mutex};
use tokio::task::JoinSet;

use crate::cancel::cancel_at_every_poll;
use crate::case::cases;
use crate::ctx::{Ctx, LONG, key, pause};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Recipes in "recipes" {
    token_is_accepted_once = "of many who present a one-time token at once exactly one is accepted, and nobody later";
    token_that_was_never_issued_stays_unknown = "presenting what was never issued leaves nothing that would validate it";
    token_expires = "a one-time token is good for its ttl by the store's clock, used or not, and never again";
    token_that_is_dropped = "a redemption that is dropped at every poll never lets a token be accepted twice";
});

fn tokens(handle: &Handle) -> OneTimeTokens {
    OneTimeTokens::new(handle.backend.clone(), key("upgrade"))
}

async fn token_is_accepted_once(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    for _ in 0..5 {
        let token = tokens(&handles[0]).issue(LONG).await?;
        let start = Arc::new(Barrier::new(18));
        let mut tasks = JoinSet::new();
        for task in 0..18 {
            let (tokens, token) = (tokens(&handles[task % 3]), token.clone());
            let start = start.clone();
            tasks.spawn(async move {
                start.wait().await;
                tokens.redeem(token.expose_secret()).await
            });
        }
        let mut accepted = 0;
        while let Some(answer) = tasks.join_next().await {
            match answer?? {
                Redemption::Accepted { .. } => accepted += 1,
                Redemption::Used => {}
                other => return Err(Fault::new(format!("expected it to be known, not {other:?}"))),
            }
        }
        ensure!(accepted == 1, "expected one of 18 to be accepted, {accepted} were");
        for handle in &handles {
            let later = tokens(handle).redeem(token.expose_secret()).await?;
            ensure!(later == Redemption::Used, "expected it to be used up, it is {later:?}");
        }
    }
    Ok(())
}

async fn token_that_was_never_issued_stays_unknown(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let others = OneTimeTokens::new(b.backend.clone(), key("reset"));
    let elsewhere = others.issue(LONG).await?;
    let made_up = format!("{}.{:x}", "ab".repeat(32), 60_000);
    for presented in [elsewhere.expose_secret(), &made_up, "", "x"] {
        for handle in [&a, &b, &a, &b] {
            let answer = tokens(handle).redeem(presented).await?;
            ensure!(answer == Redemption::Unknown, "expected it to be unknown, it is {answer:?}");
        }
        let (ours, others) = (tokens(&a), tokens(&b));
        let (one, two) = tokio::join!(ours.redeem(presented), others.redeem(presented));
        let (one, two) = (one?, two?);
        let accepted = one.is_accepted() || two.is_accepted();
        ensure!(!accepted, "expected neither to be accepted: {one:?}, {two:?}");
    }
    let answer = others.redeem(elsewhere.expose_secret()).await?;
    ensure!(answer.is_accepted(), "expected it to be good for its purpose, it is {answer:?}");
    Ok(())
}

async fn token_expires(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let ttl = Duration::from_secs(1);
    let (used, unused) = (tokens(&a).issue(ttl).await?, tokens(&a).issue(ttl).await?);
    let since = Instant::now(); // both are issued by now
    let first = tokens(&b).redeem(used.expose_secret()).await?;
    ensure!(
        first.is_accepted() || since.elapsed() > ttl / 2,
        "expected it to be good, not {first:?}"
    );
    // through the time in which its traces are forgotten
    let mut accepted = 0;
    while since.elapsed() < ttl * 4 {
        let again = tokens(&a).redeem(used.expose_secret()).await?;
        ensure!(!again.is_accepted(), "expected it not to be accepted after {:?}", since.elapsed());
        if since.elapsed() > ttl {
            let late = tokens(&b).redeem(unused.expose_secret()).await?;
            accepted += usize::from(late.is_accepted());
        }
        pause().await;
    }
    ensure!(accepted == 0, "expected an expired token to be refused, {accepted} were accepted");
    Ok(())
}

async fn token_that_is_dropped(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (ours, others) = (tokens(&a), tokens(&b));
    let issued = Mutex::new(None);
    cancel_at_every_poll(
        || async {
            let token = ours.issue(LONG).await?;
            *issued.lock().await = Some(token.clone());
            let ours = ours.clone();
            Ok(async move { ours.redeem(token.expose_secret()).await })
        },
        || async {
            let Some(token) = issued.lock().await.take() else { return Ok(()) };
            let mut accepted = 0;
            for _ in 0..5 {
                let answer = others.redeem(token.expose_secret()).await?;
                ensure!(answer != Redemption::Unknown, "expected it to be known");
                accepted += usize::from(answer.is_accepted());
                pause().await;
            }
            ensure!(accepted <= 1, "expected it to be accepted once, it was {accepted} times");
            Ok(())
        },
    )
    .await
}
