//! Dedupe: first one wins, and a crash between claim and effect is repaired.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::{Admission, DedupeExt, DedupeOptions, ErrorKind, Key};
use tokio::task::JoinSet;

use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, eventually, fails, key, soon};
use crate::fault::{Fault, Verdict, ensure};

pub(super) const SHORT: Duration = Duration::from_millis(400);

cases!(Dedupe in "dedupe" {
    admits_once = "a key is admitted once: in progress for others, then done";
    one_winner_of_many = "of many that admit a key at once exactly one is the first (B97)";
    abandon_makes_it_first_again = "an abandoned key is first again at once (B90, B93)";
    drop_abandons = "a dropped guard abandons its key soon (B90)";
    panic_abandons = "a task that panics or is aborted before it completes leaves its key to be first again (B90)";
    complete_is_kept_for_retain = "a completed key is done for its retain, and first again afterwards (B93)";
    done_at_once_is_one_step = "with done_at_once a key is done when it is admitted";
    first_seen_is_true_once = "first_seen is true once within its retain";
    many_keys_in_one_call = "admit_many answers in order, each key on its own, repeats included";
    thousands_of_keys_do_not_meet = "thousands of keys are all distinct (B19, B102)";
    batches_in_opposite_orders_end = "batches of the same keys in opposite orders do not deadlock (B100)";
    times_are_told = "the times of an entry stay the same however often they are asked for";
    options_out_of_range_are_refused = "a retain or in_progress out of range is an invalid option";
    accepts_when_silent = "first_seen_or_accept accepts without an answer, and knows otherwise" [Silence];
});

pub(super) fn in_progress(admission: &Admission) -> bool {
    matches!(admission, Admission::InProgress { .. })
}

pub(super) fn done(admission: &Admission) -> bool {
    matches!(admission, Admission::Done { .. })
}

pub(super) fn short() -> DedupeOptions {
    DedupeOptions::default().in_progress(SHORT)
}

async fn admits_once(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.admitted("event", DedupeOptions::default()).await?;
    ensure!(guard.is_held() && guard.key() == &key("event"), "expected a held guard of its key");
    for handle in [&a, &b] {
        let next = handle.admission("event").await?;
        ensure!(in_progress(&next), "expected the key to be in progress, it is {next:?}");
    }
    guard.complete().await?;
    for handle in [&a, &b] {
        let next = handle.admission("event").await?;
        ensure!(done(&next), "expected the key to be done, it is {next:?}");
    }
    b.admitted("other", DedupeOptions::default()).await?.complete().await?;
    Ok(())
}

pub(super) async fn count_winners(
    ctx: &Ctx,
    name: &str,
    opts: DedupeOptions,
) -> Result<usize, Fault> {
    let handles = [ctx.open().await?, ctx.open().await?, ctx.open().await?];
    let start = Arc::new(tokio::sync::Barrier::new(24));
    let mut tasks = JoinSet::new();
    for task in 0..24 {
        let (handle, start, key) = (handles[task % 3].clone(), start.clone(), key(name));
        tasks.spawn(async move {
            start.wait().await;
            handle.backend.admit(&key, opts).await
        });
    }
    let mut winners = Vec::new();
    while let Some(admitted) = tasks.join_next().await {
        winners.extend(admitted??.first());
    }
    let count = winners.len();
    for winner in winners {
        winner.complete().await?;
    }
    Ok(count)
}

async fn one_winner_of_many(ctx: Ctx) -> Verdict {
    for round in 0..5 {
        let opts = DedupeOptions::default();
        let opts = if round % 2 == 0 { opts } else { opts.done_at_once() };
        let count = count_winners(&ctx, &format!("event-{round}"), opts).await?;
        ensure!(count == 1, "expected one winner of 24, round {round} had {count}");
    }
    Ok(())
}

async fn abandon_makes_it_first_again(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut last = 0;
    for _ in 0..3 {
        for handle in [&a, &b] {
            let guard = handle.admitted("event", DedupeOptions::default()).await?;
            ensure!(guard.token().value() > last, "expected a greater token for each admission");
            last = guard.token().value();
            guard.abandon().await?;
        }
    }
    Ok(())
}

async fn is_first_soon(handle: &crate::harness::Handle, name: &str) -> Verdict {
    let what = format!("{name:?} to be first again");
    eventually(&what, || async {
        match handle.admission(name).await? {
            Admission::First(guard) => guard.abandon().await.map(|()| true).map_err(Fault::from),
            _ => Ok(false),
        }
    })
    .await
}

async fn drop_abandons(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    drop(a.admitted("event", DedupeOptions::default()).await?);
    is_first_soon(&b, "event").await?;
    let completed = a.admitted("other", DedupeOptions::default()).await?;
    completed.complete().await?;
    let next = b.admission("other").await?;
    ensure!(done(&next), "expected a completed key not to be abandoned by the drop: {next:?}");
    Ok(())
}

async fn panic_abandons(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let panics = {
        let a = a.clone();
        tokio::spawn(async move {
            let _guard = a.admitted("event", DedupeOptions::default()).await;
            std::panic::resume_unwind(Box::new("on purpose"));
        })
    };
    ensure!(panics.await.is_err(), "expected the task to panic");
    is_first_soon(&b, "event").await?;
    let (tell, at_it) = tokio::sync::oneshot::channel();
    let aborted = {
        let a = a.clone();
        tokio::spawn(async move {
            let guard = a.admitted("other", DedupeOptions::default()).await;
            let _ = tell.send(guard.is_ok()); // the case has failed otherwise
            std::future::pending::<()>().await;
            drop(guard);
        })
    };
    ensure!(
        soon("the task to be at it", at_it).await?.is_ok_and(|first| first),
        "expected the task to be first"
    );
    aborted.abort();
    is_first_soon(&b, "other").await
}

async fn complete_is_kept_for_retain(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let opts = DedupeOptions::default().retain(Duration::from_millis(700));
    let guard = a.admitted("event", opts).await?;
    let start = Instant::now();
    guard.complete().await?;
    eventually("the key to be first again after its retain", || async {
        Ok(b.backend.admit(&key("event"), opts).await?.is_first())
    })
    .await?;
    let kept = start.elapsed();
    ensure!(
        kept >= Duration::from_millis(650),
        "expected the key to be kept for 700ms, it was {kept:?}"
    );
    Ok(())
}

async fn done_at_once_is_one_step(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let opts = DedupeOptions::default().done_at_once();
    let guard = a.admitted("event", opts).await?;
    let next = b.admission("event").await?;
    ensure!(done(&next), "expected the key to be done at once, it is {next:?}");
    drop(guard); // done stays done
    let next = b.admission("event").await?;
    ensure!(done(&next), "expected a dropped guard not to undo it, the key is {next:?}");
    Ok(())
}

async fn first_seen_is_true_once(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let retain = Duration::from_millis(600);
    let start = Instant::now();
    ensure!(
        a.backend.first_seen(&key("event"), retain).await?,
        "expected the first to be the first"
    );
    for handle in [&a, &b] {
        let again = handle.backend.first_seen(&key("long"), LONG).await?;
        ensure!(
            again == Arc::ptr_eq(&handle.backend, &a.backend),
            "expected one first of \"long\""
        );
    }
    eventually("the key to be first again after its retain", || async {
        Ok(b.backend.first_seen(&key("event"), retain).await?)
    })
    .await?;
    let kept = start.elapsed();
    ensure!(
        kept >= Duration::from_millis(560),
        "expected the key to be kept for {retain:?}, it was {kept:?}"
    );
    Ok(())
}

async fn many_keys_in_one_call(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    a.admitted("done", DedupeOptions::default()).await?.complete().await?;
    let _busy = a.admitted("busy", DedupeOptions::default()).await?;
    let names = ["new", "done", "busy", "new", "other"];
    let keys: Vec<Key> = names.into_iter().map(key).collect();
    let answers = b.backend.admit_many(&keys, DedupeOptions::default()).await?;
    ensure!(answers.len() == 5, "expected five answers, got {}", answers.len());
    let fits = answers[0].is_first() && done(&answers[1]) && in_progress(&answers[2]);
    ensure!(fits, "expected first, done, in progress, got {:?}", &answers[..3]);
    ensure!(
        in_progress(&answers[3]),
        "expected a repeat to find the first one's entry: {:?}",
        answers[3]
    );
    ensure!(answers[4].is_first(), "expected the last one to be the first: {:?}", answers[4]);
    for guard in answers.into_iter().filter_map(Admission::first) {
        guard.complete().await?;
    }
    let none = b.backend.admit_many(&[], DedupeOptions::default()).await?;
    ensure!(none.is_empty(), "expected no answers to no keys");
    let again = a.admission("other").await?;
    ensure!(done(&again), "expected each key to be completed on its own, it is {again:?}");
    Ok(())
}

async fn thousands_of_keys_do_not_meet(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let opts = DedupeOptions::default().retain(Duration::from_secs(60)).done_at_once();
    let keys: Vec<Key> = (0..3000).map(|n| key(&format!("job/{n}"))).collect();
    for expected in [true, false] {
        for part in keys.chunks(1000) {
            let answers = a.backend.admit_many(part, opts).await?;
            let first = answers.iter().filter(|answer| answer.is_first()).count();
            let all = if expected { part.len() } else { 0 };
            ensure!(
                first == all,
                "expected {all} of {} distinct keys to be first, {first} are",
                part.len()
            );
        }
    }
    Ok(())
}

async fn batches_in_opposite_orders_end(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut tasks = JoinSet::new();
    for task in 0..6 {
        let handle = if task % 2 == 0 { a.clone() } else { b.clone() };
        tasks.spawn(async move {
            for _ in 0..10 {
                let mut keys: Vec<Key> = (0..20).map(|n| key(&format!("event-{n}"))).collect();
                if task % 3 == 0 {
                    keys.reverse();
                }
                let answers = handle.backend.admit_many(&keys, DedupeOptions::default()).await?;
                for guard in answers.into_iter().filter_map(Admission::first) {
                    guard.abandon().await?;
                }
            }
            Ok(())
        });
    }
    all(tasks).await
}

async fn times_are_told(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.admitted("event", DedupeOptions::default()).await?;
    let mut since = Vec::new();
    for handle in [&a, &b, &b] {
        match handle.admission("event").await? {
            Admission::InProgress { since: time } => since.push(time),
            other => {
                return Err(Fault::new(format!("expected it in progress, it is {other:?}")));
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await; // a time that moves is seen to move
    }
    ensure!(since.iter().all(|time| *time == since[0]), "expected one time, got {since:?}");
    guard.complete().await?;
    match b.admission("event").await? {
        Admission::Done { at } => {
            ensure!(at >= since[0], "expected it done after its begin: {at:?} and {since:?}");
        }
        other => {
            return Err(Fault::new(format!("expected it to be done, it is {other:?}")));
        }
    }
    Ok(())
}

async fn options_out_of_range_are_refused(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    for time in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
        let default = DedupeOptions::default();
        for opts in [default.retain(time), default.in_progress(time)] {
            let refused = a.backend.admit(&key("event"), opts).await;
            fails(&format!("{opts:?}"), ErrorKind::InvalidOptions, refused)?;
        }
    }
    let longest = DedupeOptions::default().retain(leasehold_core::MAX_RETAIN);
    Ok(a.admitted("event", longest).await?.complete().await?)
}

async fn accepts_when_silent(ctx: Ctx) -> Verdict {
    use leasehold_core::Seen;
    let a = ctx.open().await?;
    let seen = a.backend.first_seen_or_accept(&key("event"), LONG, PATIENCE).await?;
    ensure!(matches!(seen, Seen::First), "expected the first to be the first, it is {seen:?}");
    let seen = a.backend.first_seen_or_accept(&key("event"), LONG, PATIENCE).await?;
    ensure!(!seen.is_accepted(), "expected the second to be known, it is {seen:?}");
    a.link.silence().await?;
    let within = Duration::from_millis(300);
    let start = Instant::now();
    let seen = a.backend.first_seen_or_accept(&key("event"), LONG, within).await?;
    let took = start.elapsed();
    ensure!(
        matches!(seen, Seen::Accepted(_)),
        "expected it to be accepted without an answer: {seen:?}"
    );
    ensure!(
        took < within + PATIENCE,
        "expected it to be accepted within {within:?}, it took {took:?}"
    );
    a.link.heal().await?;
    Ok(())
}
