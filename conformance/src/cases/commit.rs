//! The transaction of a claim: commit, rollback, hooks, dedupe inside it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::{
    Admission, Claim, ClaimLockExt, ClaimOptions, DedupeExt, DedupeOptions, Error, ErrorKind,
};
use tokio::task::JoinSet;

use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, all, eventually, fails, key, keys, soon};
use crate::fault::{Fault, Verdict, ensure};

cases!(ClaimLock in "commit" {
    writes_appear_at_the_commit = "what a claim writes is seen by itself at once, by others after the commit";
    rollback_and_drop_write_nothing = "a claim that is rolled back or dropped has written nothing";
    with_claim_commits_or_rolls_back = "with_claim commits the work's success and rolls back its error and its panic";
    hooks_run_after_the_commit_in_order_once = "after_commit hooks run in order, once, and see what was committed";
    hooks_are_dropped_on_rollback = "after a rollback or a drop no hook has run, and none is kept";
    hooks_find_the_keys_free = "a hook may claim the same keys again";
    panicking_hook_spares_the_others = "a hook that panics neither undoes the commit nor keeps later hooks from running";
    unknown_commit_drops_its_hooks = "a commit whose answer is lost says so, runs no hook, and frees the keys" [LoseAnswer];
    ended_session_writes_nothing = "a claim whose session ended writes nothing and runs no hook, or commits whole" [EndSessions];
    first_seen_is_remembered_by_the_commit = "a key seen inside a claim is known to all after its commit (B96)";
    first_seen_is_forgotten_by_the_rollback = "a key seen inside a rolled-back or dropped claim is first again (B90)";
    first_seen_knows_what_others_admitted = "a key in progress or done is not the first inside a claim, which goes on (B96)";
    first_seen_has_one_winner = "of many claims that see a key at once exactly one is the first, rollbacks included (B97)";
    an_open_claim_delays_no_lease = "admissions of a key that an open claim has seen first are not answered before its end, and however many there are, the handle takes and frees leases (B97)" [ParallelWriters];
});

#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<u32>>>);

impl Log {
    fn add(&self, number: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(number);
    }

    fn read(&self) -> Vec<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many others hold this log, e.g. hooks.
    fn others(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }

    fn hook(&self, claim: &mut Claim, number: u32) {
        let log = self.clone();
        claim.after_commit(async move {
            tokio::task::yield_now().await;
            log.add(number);
        });
    }
}

async fn writes_appear_at_the_commit(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut claim = a.claimed(&["x"]).await?;
    ctx.write(&mut claim, "n", 5).await?;
    let own = ctx.read(&mut claim, "n").await?;
    ensure!(own == 5, "expected the claim to read its own write, read {own}");
    let early = ctx.committed("n").await?;
    ensure!(early == 0, "expected nothing before the commit, read {early}");
    claim.commit().await?;
    let after = ctx.committed("n").await?;
    ensure!(after == 5, "expected the write after the commit, read {after}");
    Ok(())
}

async fn rollback_and_drop_write_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for by_drop in [false, true] {
        let mut claim = a.claimed(&["x"]).await?;
        ctx.write(&mut claim, "n", 5).await?;
        if by_drop {
            drop(claim);
        } else {
            claim.rollback().await?;
        }
        let mut next = b.claimed(&["x"]).await?;
        let read = ctx.read(&mut next, "n").await?;
        ensure!(read == 0, "expected the rolled-back write to be gone, read {read}");
        next.commit().await?;
    }
    let read = ctx.committed("n").await?;
    ensure!(read == 0, "expected the rolled-back write to be gone, read {read}");
    Ok(())
}

async fn with_claim_commits_or_rolls_back(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, opts) = (keys(&["x"]), ClaimOptions::default());
    let fine: Result<Option<u32>, Fault> = a
        .backend
        .with_claim(&x, opts, async |claim: &mut Claim| {
            ctx.write(claim, "n", 1).await?;
            Ok(7)
        })
        .await;
    ensure!(fine? == Some(7), "expected the work's result");
    let failed: Result<Option<u32>, Fault> = a
        .backend
        .with_claim(&x, opts, async |claim: &mut Claim| {
            ctx.write(claim, "n", 2).await?;
            Err(Fault::new("on purpose"))
        })
        .await;
    let message = failed.err().map(|fault| fault.message().to_owned());
    ensure!(
        message.as_deref() == Some("on purpose"),
        "expected the work's own error, got {message:?}"
    );
    let panics = {
        let (ctx, a) = (ctx.clone(), a.clone());
        tokio::spawn(async move {
            let work = async |claim: &mut Claim| {
                drop(ctx.write(claim, "n", 3).await);
                std::panic::resume_unwind(Box::new("on purpose"));
            };
            let outcome: Result<Option<()>, Error> =
                a.backend.with_claim(&keys(&["x"]), opts, work).await;
            drop(outcome);
        })
    };
    ensure!(panics.await.is_err(), "expected the work's panic to come through");
    b.claimed(&["x"]).await?.commit().await?;
    let read = ctx.committed("n").await?;
    ensure!(read == 1, "expected only the successful work to be committed, read {read}");
    Ok(())
}

async fn hooks_run_after_the_commit_in_order_once(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let log = Log::default();
    let mut claim = a.claimed(&["x"]).await?;
    ctx.write(&mut claim, "n", 1).await?;
    let seen = Arc::new(AtomicUsize::new(0));
    {
        let (ctx, seen) = (ctx.clone(), seen.clone());
        claim.after_commit(async move {
            let committed = ctx.committed("n").await.unwrap_or(-1);
            seen.store(usize::try_from(committed).unwrap_or(99), Ordering::SeqCst);
        });
    }
    for number in 1..=4 {
        log.hook(&mut claim, number);
    }
    ctx.write(&mut claim, "m", 1).await?;
    ensure!(log.read().is_empty(), "expected no hook before the commit, ran {:?}", log.read());
    claim.commit().await?;
    let ran = log.read();
    ensure!(
        ran == [1, 2, 3, 4],
        "expected the hooks in order, once, when the commit returns: {ran:?}"
    );
    ensure!(seen.load(Ordering::SeqCst) == 1, "expected a hook to see what was committed");
    a.claimed(&["x"]).await?.commit().await?;
    ensure!(log.read().len() == 4, "expected hooks to run once, ran {:?}", log.read());
    Ok(())
}

async fn hooks_are_dropped_on_rollback(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let log = Log::default();
    for by_drop in [false, true] {
        let mut claim = a.claimed(&["x"]).await?;
        log.hook(&mut claim, 1);
        if by_drop {
            drop(claim);
        } else {
            claim.rollback().await?;
        }
        b.claimed(&["x"]).await?.commit().await?; // the rollback has ended
        ensure!(log.read().is_empty(), "expected no hook after a rollback, by drop: {by_drop}");
        eventually("the hooks to be dropped", || async { Ok(log.others() == 0) }).await?;
    }
    Ok(())
}

async fn hooks_find_the_keys_free(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let log = Log::default();
    let mut claim = a.claimed(&["x"]).await?;
    {
        let (a, log) = (a.clone(), log.clone());
        claim.after_commit(async move {
            if let Ok(again) = a.claimed(&["x"]).await {
                drop(again.commit().await); // the log tells
                log.add(1);
            }
        });
    }
    soon("a commit whose hook claims the same key", claim.commit()).await??;
    ensure!(log.read() == [1], "expected the hook to get the key");
    Ok(())
}

async fn panicking_hook_spares_the_others(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let log = Log::default();
    let mut claim = a.claimed(&["x"]).await?;
    ctx.write(&mut claim, "n", 1).await?;
    log.hook(&mut claim, 1);
    claim.after_commit(async { std::panic::resume_unwind(Box::new("on purpose")) });
    log.hook(&mut claim, 2);
    claim.commit().await?;
    ensure!(log.read() == [1, 2], "expected the other hooks to run, ran {:?}", log.read());
    let read = ctx.committed("n").await?;
    ensure!(read == 1, "expected the commit to stay, read {read}");
    Ok(())
}

async fn unknown_commit_drops_its_hooks(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut unknown = 0;
    for round in 1..=5 {
        // used for claims only: no other request can lose its answer instead
        let a = ctx.open().await?;
        let log = Log::default();
        let before = ctx.committed("n").await?;
        let mut claim = a.claimed(&["x"]).await?;
        ctx.write(&mut claim, "n", round).await?;
        log.hook(&mut claim, 1);
        a.link.lose_next_answer().await?;
        let outcome = soon("a commit without an answer", claim.commit()).await?;
        match outcome {
            Ok(()) => ensure!(log.read() == [1], "expected the hook of a known commit to run"),
            Err(error) => {
                let kind = error.kind();
                ensure!(
                    kind == ErrorKind::CommitUnknown,
                    "expected the outcome to be unknown, got {error}"
                );
                ensure!(
                    !error.is_retryable(),
                    "expected an unknown commit not to be retried blindly"
                );
                ensure!(log.read().is_empty(), "expected no hook after an unknown commit");
                unknown += 1;
            }
        }
        b.claimed(&["x"]).await?.commit().await?; // free again
        let after = ctx.committed("n").await?;
        ensure!(after == before || after == round, "expected all or nothing, read {after}");
    }
    ensure!(unknown > 0, "expected at least one commit to lose its answer");
    Ok(())
}

async fn ended_session_writes_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for round in 1..=3 {
        let log = Log::default();
        let before = ctx.committed("n").await?;
        let mut claim = a.claimed(&["x"]).await?;
        ctx.write(&mut claim, "n", round).await?;
        log.hook(&mut claim, 1);
        a.link.end_sessions().await?;
        let outcome = soon("the commit of an ended session", claim.commit()).await?;
        let after = ctx.committed("n").await?;
        match outcome {
            Ok(()) => ensure!(
                after == round && log.read() == [1],
                "expected a commit that is reported to be whole, read {after}, hooks {:?}",
                log.read()
            ),
            Err(error) => {
                ensure!(log.read().is_empty(), "expected no hook after {error}");
                let unknown = error.kind() == ErrorKind::CommitUnknown;
                ensure!(
                    after == before || unknown,
                    "expected nothing to be written after {error}, read {after}"
                );
            }
        }
        b.claimed(&["x"]).await?.commit().await?;
        a.claimed(&["x"]).await?.commit().await?; // the handle goes on
    }
    Ok(())
}

async fn first_seen_is_remembered_by_the_commit(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut claim = a.claimed(&["x"]).await?;
    ensure!(claim.first_seen(&key("event"), LONG).await?, "expected the key to be the first");
    let again = claim.first_seen(&key("event"), LONG).await?;
    ensure!(!again, "expected the same claim to know its own key");
    ctx.write(&mut claim, "n", 1).await?;
    claim.commit().await?;
    let done = b.admission("event").await?;
    ensure!(
        matches!(done, Admission::Done { .. }),
        "expected the committed key to be done, it is {done:?}"
    );
    let mut next = b.claimed(&["x"]).await?;
    ensure!(
        !next.first_seen(&key("event"), LONG).await?,
        "expected the key to be known in a claim"
    );
    ctx.write(&mut next, "n", 2).await?; // the transaction goes on
    next.commit().await?;
    let read = ctx.committed("n").await?;
    ensure!(read == 2, "expected a duplicate not to abort the transaction, read {read}");
    Ok(())
}

async fn first_seen_is_forgotten_by_the_rollback(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for by_drop in [false, true] {
        let mut claim = a.claimed(&["x"]).await?;
        let first = claim.first_seen(&key("event"), LONG).await?;
        ensure!(first, "expected the key to be the first, by drop: {by_drop}");
        if by_drop {
            drop(claim);
        } else {
            claim.rollback().await?;
        }
        b.claimed(&["x"]).await?.rollback().await?; // the rollback has ended
    }
    ensure!(
        b.backend.first_seen(&key("event"), LONG).await?,
        "expected a rolled-back key to be forgotten"
    );
    Ok(())
}

async fn first_seen_knows_what_others_admitted(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = b.admission("event").await?.first();
    let guard = guard.ok_or_else(|| Fault::new("expected the key to be admitted"))?;
    let mut claim = a.claimed(&["x"]).await?;
    ensure!(
        !claim.first_seen(&key("event"), LONG).await?,
        "expected a key in progress not to be the first"
    );
    guard.complete().await?;
    ensure!(
        !claim.first_seen(&key("event"), LONG).await?,
        "expected a done key not to be the first"
    );
    let refused = claim.first_seen(&key("other"), Duration::ZERO).await;
    fails("a retain of zero", ErrorKind::InvalidOptions, refused)?;
    ctx.write(&mut claim, "n", 1).await?;
    claim.commit().await?;
    let read = ctx.committed("n").await?;
    ensure!(read == 1, "expected the transaction to go on, read {read}");
    Ok(())
}

async fn first_seen_has_one_winner(ctx: Ctx) -> Verdict {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let won = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..24 {
        let (handle, won) = (handles[task % 3].clone(), won.clone());
        tasks.spawn(async move {
            // claims of different keys meet in the dedupe key only
            let mut claim = handle.claimed(&[&format!("own-{task}")]).await?;
            let first = claim.first_seen(&key("event"), LONG).await?;
            tokio::time::sleep(Duration::from_millis(2)).await;
            if first && rand::random_bool(0.5) {
                return Ok(claim.rollback().await?);
            }
            claim.commit().await?;
            won.fetch_add(usize::from(first), Ordering::SeqCst);
            Ok(())
        });
    }
    all(tasks).await?;
    let won = won.load(Ordering::SeqCst);
    ensure!(won <= 1, "expected one claim at most to see the key first, {won} did");
    let left = handles[0].backend.first_seen(&key("event"), LONG).await?;
    ensure!(left == (won == 0), "expected the key to be known exactly if a claim committed it");
    Ok(())
}

/// On some stores an admission waits for the claim on the server, with a connection.
async fn an_open_claim_delays_no_lease(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut claim = a.claimed(&[]).await?;
    ensure!(claim.first_seen(&key("event"), LONG).await?, "expected it to be the first");
    let mut duplicates = JoinSet::new();
    for _ in 0..40 {
        let a = a.clone();
        duplicates
            .spawn(async move { a.backend.admit(&key("event"), DedupeOptions::default()).await });
    }
    let leases = async {
        for n in 0..20 {
            a.leased(&format!("x{n}"), LONG).await?.release().await?;
        }
        Verdict::Ok(())
    };
    soon("20 leases, one after the other", leases).await??;
    claim.commit().await?;
    let mut first = 0;
    while let Some(admitted) = duplicates.join_next().await {
        match admitted? {
            Ok(Admission::First(guard)) => {
                first += 1;
                guard.complete().await?;
            }
            Ok(_) => {}
            // it may not have been told within the limit of an answer
            Err(error) => ensure!(error.is_retryable(), "expected it to be told later: {error}"),
        }
    }
    ensure!(first == 0, "expected the claim to have been the first, {first} others were");
    let late = a.backend.first_seen(&key("event"), LONG).await?;
    ensure!(!late, "expected the key to be known after the commit");
    Ok(())
}
