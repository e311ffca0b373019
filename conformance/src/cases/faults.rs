//! Faults between a handle and its store: ended sessions, silence, lost answers.

use std::time::{Duration, Instant};

use leasehold_core::{DedupeOptions, ErrorKind, LeaseOptions, LockOptions, NamedLockExt};
use tokio::task::JoinSet;

use super::shared::{Held, Kind};
use crate::case::cases;
use crate::ctx::{
    Ctx, HandleExt, LONG, PATIENCE, SILENCE_BOUND, all, eventually, fails, is_lost, key, pause,
    soon, within,
};
use crate::fault::{Fault, Verdict, ensure};

cases!(Backend in "faults" {
    ended_session_loses_its_locks = "a lock whose session was ended is told as lost at once, and others get it (B10, B46)" [EndSessions, SessionLocks];
    handle_recovers_from_an_ended_session = "after its sessions were ended a handle takes locks again, with greater tokens (B10)" [EndSessions];
    lost_lock_gives_no_token = "the guard of a lost lock refuses its token and its release, and spares the successor (B46)" [EndSessions, SessionLocks];
    work_stops_when_its_lock_is_lost = "with_lock drops its work when the lock is lost, and fails" [EndSessions, SessionLocks];
    waiters_outlive_ended_sessions = "a waiter whose sessions are ended again and again still gets its lock (B38)" [EndSessions];
    lease_outlives_ended_sessions = "a lease whose connections are ended is renewed over new ones (B59)" [EndSessions];
    lease_waiters_outlive_ended_sessions = "a waiter whose subscription is ended gets the released lease all the same (B38, B73)" [EndSessions];
    lost_wake_up_falls_back = "a waiter that missed the news of a release gets the lock all the same (B38, B73)" [Silence];
    silence_loses_locks = "a lock behind a silent network is told as lost within the stated bound, and freed (B13)" [Silence];
    silence_loses_leases = "a lease behind a silent network is lost by its deadline, and others get it after the ttl (B62)" [Silence];
    short_silence_keeps_leases = "a silence much shorter than the ttl loses no lease (B59, B62)" [Silence];
    silence_is_no_contention = "without an answer a wait fails as unavailable and does not say that others have it" [Silence];
    abandoned_calls_take_nothing = "calls that were dropped in silence hold nothing once the network is back (B66)" [Silence];
    late_renewal_spares_the_successor = "renewals that arrive after the loss leave the successor's lease alone (B66, B83)" [Silence];
    late_release_spares_the_successor = "a release that arrives late leaves the successor's lease alone (B66)" [Silence];
    lost_answer_to_an_acquisition = "an acquisition whose answer is lost is had in the end, or freed, by its owner (B65)" [LoseAnswer];
    lost_answer_to_a_release = "a release whose answer is lost frees all the same, and spares the successor (B65)" [LoseAnswer];
    lost_answer_to_an_admission = "an admission whose answer is lost is first for somebody in the end (B65)" [LoseAnswer];
});

async fn ended_session_loses_its_locks(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (x, y) = (a.locked("x").await?, a.locked("y").await?);
    let waiter = {
        let b = b.clone();
        tokio::spawn(async move { b.lock_within("x", Duration::from_secs(60)).await })
    };
    a.link.end_sessions().await?;
    for (name, guard) in [("x", &x), ("y", &y)] {
        is_lost(PATIENCE, &format!("the lock {name:?} of an ended session"), &guard.lost()).await?;
        ensure!(!guard.is_held(), "expected {name:?} not to be held after its loss");
    }
    let next = soon("a waiter to get the lock", waiter).await???;
    let next = next.ok_or_else(|| Fault::new("expected the lock to be free at once"))?;
    fails("the release of a lost lock", ErrorKind::Lost, x.release().await)?;
    ensure!(a.try_lock("x").await?.is_none(), "expected the successor to keep its lock");
    next.release().await?;
    drop(y);
    b.locked("y").await?.release().await?;
    Ok(())
}

async fn handle_recovers_from_an_ended_session(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut last = 0;
    for round in 0..5 {
        // one that is handed over before the end of its session is noticed is lost at once
        let (guard, token) = soon("a lock that stays", async {
            loop {
                let guard = a.locked("x").await?;
                match guard.token().await {
                    Ok(token) => return Ok::<_, Fault>((guard, token.value())),
                    Err(error) if error.kind() == ErrorKind::Lost => {}
                    Err(error) => return Err(error.into()),
                }
            }
        })
        .await??;
        ensure!(token > last, "expected a token over {last} in round {round}, got {token}");
        last = token;
        a.link.end_sessions().await?;
        drop(guard);
    }
    eventually("the handle to work as before", || async {
        Ok(a.locked("x").await?.release().await.is_ok())
    })
    .await
}

async fn lost_lock_gives_no_token(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.locked("x").await?;
    a.link.end_sessions().await?;
    let next = b.locked("x").await?;
    is_lost(PATIENCE, "the lock of an ended session", &guard.lost()).await?;
    // a token that came with the acquisition is older than the successor's
    match guard.token().await {
        Ok(token) => {
            let later = next.token().await?;
            ensure!(
                token < later,
                "expected no new token for a lost lock: {token}, successor {later}"
            );
        }
        Err(error) => {
            ensure!(error.kind() == ErrorKind::Lost, "expected the token to be refused: {error}");
        }
    }
    drop(guard);
    a.locked("other").await?.release().await?; // what the drop sent has been carried out
    ensure!(a.try_lock("x").await?.is_none(), "expected the successor to keep its lock");
    Ok(next.release().await?)
}

async fn work_stops_when_its_lock_is_lost(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let (begun, begins) = tokio::sync::oneshot::channel();
    let work = {
        let a = a.clone();
        tokio::spawn(async move {
            let work = async move |_: &_| {
                begun.send(()).ok(); // nobody hears it if the case has ended
                std::future::pending::<()>().await;
            };
            a.backend.with_lock(&key("x"), LockOptions::default(), work).await
        })
    };
    soon("the work to begin under its lock", begins)
        .await?
        .map_err(|error| Fault::new(error.to_string()))?;
    a.link.end_sessions().await?;
    let ended = soon("the work to be stopped", work).await??;
    fails("with_lock under a lost lock", ErrorKind::Lost, ended)?;
    Ok(())
}

async fn waiters_outlive_ended_sessions(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let held = a.locked("x").await?;
    let waiter = {
        let b = b.clone();
        tokio::spawn(async move { b.lock_within("x", Duration::from_secs(60)).await })
    };
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(40)).await; // it waits again by now
        b.link.end_sessions().await?;
    }
    held.release().await?;
    let got = soon("the waiter to get the lock", waiter).await?;
    let got = got??.ok_or_else(|| Fault::new("expected the waiter to get the lock in the end"))?;
    Ok(got.release().await?)
}

async fn lease_outlives_ended_sessions(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.leased("x", Duration::from_secs(4)).await?;
    let end = Instant::now() + Duration::from_secs(7); // past the ttl
    while Instant::now() < end {
        a.link.end_sessions().await?;
        ensure!(
            b.try_lease("x").await?.is_none(),
            "expected the lease to be renewed over new connections"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    ensure!(guard.is_held(), "expected the lease to be held: {:?}", guard.lost().reason());
    Ok(guard.release().await?)
}

async fn lease_waiters_outlive_ended_sessions(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for _ in 0..4 {
        let held = a.leased("x", LONG).await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { b.lease_within("x", Duration::from_secs(60)).await })
        };
        tokio::time::sleep(Duration::from_millis(60)).await; // it waits by now
        b.link.end_sessions().await?;
        held.release().await?;
        b.link.end_sessions().await?;
        let got = soon("the waiter to get the lease", waiter).await?;
        let got =
            got??.ok_or_else(|| Fault::new("expected the waiter to get the lease in the end"))?;
        got.release().await?;
    }
    Ok(())
}

async fn lost_wake_up_falls_back(ctx: Ctx) -> Verdict {
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let (a, b) = ctx.two().await?;
        let held = kind.takes(&a, "x").await?;
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { kind.waits(&b, "x", SILENCE_BOUND * 2).await })
        };
        tokio::time::sleep(Duration::from_millis(100)).await; // it waits by now
        b.link.silence().await?;
        held.release().await?; // no news of it arrives
        b.link.heal().await?;
        let got = within(SILENCE_BOUND, "the waiter to find that it is free", waiter).await??;
        let got = got?.ok_or_else(|| Fault::new(format!("expected the {kind:?} to be had")))?;
        got.release().await?;
    }
    Ok(())
}

async fn silence_loses_locks(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let guard = a.locked("x").await?;
    a.link.silence().await?;
    is_lost(SILENCE_BOUND, "a lock behind a silent network", &guard.lost()).await?;
    ensure!(!guard.is_held(), "expected a lost lock not to be held");
    a.link.heal().await?;
    drop(guard);
    let freed = within(SILENCE_BOUND, "the lost lock to be freed", async {
        loop {
            if let Some(next) = b.lock_within("x", PATIENCE).await? {
                return Ok::<_, Fault>(next);
            }
        }
    });
    freed.await??.release().await?;
    let again = within(SILENCE_BOUND, "the handle to work again", a.locked("x")).await??;
    Ok(again.release().await?)
}

async fn silence_loses_leases(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let ttl = Duration::from_millis(1200);
    let guard = a.leased("x", ttl).await?;
    let token = guard.token();
    a.link.silence().await?;
    let next = b.leased("x", LONG).await?;
    ensure!(
        !guard.is_held(),
        "expected the silent holder to have given up before another got the lease"
    );
    ensure!(next.token() > token, "expected the successor's token to be greater");
    fails("a renewal after the loss", ErrorKind::Lost, guard.renew().await)?;
    a.link.heal().await?;
    drop(guard);
    next.renew().await?;
    next.release().await?;
    a.leased("x", LONG).await?.release().await?;
    Ok(())
}

async fn short_silence_keeps_leases(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let ttl = Duration::from_secs(6);
    let guard = a.leased("x", ttl).await?;
    let start = Instant::now();
    tokio::time::sleep(Duration::from_millis(1850)).await; // a renewal is due at a third
    a.link.silence().await?;
    tokio::time::sleep(Duration::from_millis(600)).await;
    a.link.heal().await?;
    while start.elapsed() < ttl + Duration::from_secs(1) {
        ensure!(
            b.try_lease("x").await?.is_none(),
            "expected a short silence not to lose the lease"
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ensure!(guard.is_held(), "expected the lease to be held: {:?}", guard.lost().reason());
    Ok(guard.release().await?)
}

async fn silence_is_no_contention(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        kind.takes(&a, "x").await?.release().await?; // connected
    }
    a.link.silence().await?;
    let mut tasks = JoinSet::new();
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let a = a.clone();
        tasks.spawn(async move {
            let what = format!("a {kind:?} without an answer to fail");
            let tried =
                within(SILENCE_BOUND, &what, kind.waits(&a, "x", Duration::from_millis(300)))
                    .await?;
            let Err(fault) = tried else {
                return Err(Fault::new(format!("expected {what}, got {tried:?}")));
            };
            let told = fault.message().contains("unavailable");
            ensure!(told, "expected {what} as unavailable, it says: {fault}");
            Ok(())
        });
    }
    let b = a.clone();
    tasks.spawn(async move {
        let event = key("event");
        let admitted = b.backend.admit(&event, DedupeOptions::default());
        let admitted =
            within(SILENCE_BOUND, "an admission without an answer to fail", admitted).await?;
        fails("an admission without an answer", ErrorKind::Unavailable, admitted)?;
        Ok(())
    });
    all(tasks).await?;
    a.link.heal().await?;
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let what = format!("a {kind:?} to be had again");
        let again = within(SILENCE_BOUND, &what, async {
            loop {
                // what it had begun may be in its own way for a while
                if let Ok(Some(held)) = kind.waits(&a, "x", PATIENCE).await {
                    return held;
                }
                pause().await;
            }
        });
        again.await?.release().await?;
    }
    Ok(())
}

async fn abandoned_calls_take_nothing(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        kind.takes(&a, "x").await?.release().await?; // connected
        a.link.silence().await?;
        let dropped =
            tokio::time::timeout(Duration::from_millis(150), kind.waits(&a, "x", PATIENCE));
        ensure!(dropped.await.is_err(), "expected no answer in silence");
        a.link.heal().await?;
        for _ in 0..3 {
            let next = within(SILENCE_BOUND, "the key to be free for another", async {
                loop {
                    if let Some(next) = kind.waits(&b, "x", PATIENCE).await? {
                        return Ok::<Held, Fault>(next);
                    }
                }
            });
            next.await??.release().await?;
        }
    }
    Ok(())
}

async fn late_renewal_spares_the_successor(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let c = ctx.open().await?;
    for _ in 0..2 {
        let guard = a.leased("x", Duration::from_millis(600)).await?;
        a.link.silence().await?;
        let next = b.leased("x", LONG).await?; // renewals of a are on their way
        a.link.heal().await?;
        let end = Instant::now() + Duration::from_millis(600);
        while Instant::now() < end {
            ensure!(
                c.try_lease("x").await?.is_none(),
                "expected late renewals to spare the successor's lease"
            );
            ensure!(!guard.is_held(), "expected the lost lease to stay lost");
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        next.renew().await?;
        next.release().await?;
        drop(guard);
        // nothing of the late ones holds it
        c.leased("x", LONG).await?.release().await?;
    }
    Ok(())
}

async fn late_release_spares_the_successor(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let c = ctx.open().await?;
    let guard = a.leased_once("x", Duration::from_millis(600)).await?;
    a.link.silence().await?;
    drop(guard); // its release is on its way
    let next = b.leased("x", LONG).await?;
    a.link.heal().await?;
    let end = Instant::now() + Duration::from_millis(800);
    while Instant::now() < end {
        ensure!(
            c.try_lease("x").await?.is_none(),
            "expected a late release to spare the successor's lease"
        );
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    next.renew().await?;
    Ok(next.release().await?)
}

async fn lost_answer_to_an_acquisition(ctx: Ctx) -> Verdict {
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let b = ctx.open().await?;
        for round in 0..4 {
            let a = ctx.open().await?;
            if round % 2 == 0 {
                kind.takes(&a, "other").await?.release().await?; // connected
            }
            a.link.lose_next_answer().await?;
            let what = format!("a {kind:?} with a lost answer to end");
            match within(SILENCE_BOUND, &what, kind.waits(&a, "x", Duration::from_secs(3))).await? {
                Ok(Some(held)) => {
                    let taken = kind.tries(&b, "x").await?;
                    ensure!(
                        taken.is_none(),
                        "expected a {kind:?} that was had in the end to exclude"
                    );
                    held.release().await?;
                }
                Ok(None) => {
                    return Err(Fault::new(format!(
                        "expected a {kind:?} with a lost answer to be had or to fail: its own looked like another's"
                    )));
                }
                Err(_) => {} // it does not know
            }
            let next = within(
                SILENCE_BOUND,
                "the key to be free for another",
                kind.waits(&b, "x", SILENCE_BOUND),
            );
            let next = next
                .await??
                .ok_or_else(|| Fault::new(format!("expected the {kind:?} to be free")))?;
            next.release().await?;
        }
    }
    Ok(())
}

async fn lost_answer_to_a_release(ctx: Ctx) -> Verdict {
    for kind in [Kind::Lock, Kind::Lease] {
        let (a, b) = ctx.two().await?;
        let c = ctx.open().await?;
        let held = kind.takes(&a, "x").await?;
        a.link.lose_next_answer().await?;
        // it may say that it does not know
        drop(within(SILENCE_BOUND, "a release with a lost answer to end", held.release()).await?);
        let next = kind.waits(&b, "x", SILENCE_BOUND).await?;
        let next = next.ok_or_else(|| Fault::new(format!("expected the {kind:?} to be freed")))?;
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(30)).await; // repeated releases
            let taken = kind.tries(&c, "x").await?;
            ensure!(
                taken.is_none(),
                "expected repeated releases to spare the successor's {kind:?}"
            );
        }
        next.release().await?;
    }
    Ok(())
}

async fn lost_answer_to_an_admission(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    a.admitted("other", DedupeOptions::default()).await?.complete().await?; // connected
    a.link.lose_next_answer().await?;
    let event = key("event");
    let admitted = a.backend.admit(&event, DedupeOptions::default());
    let what = "an admission with a lost answer to end";
    match within(SILENCE_BOUND, what, admitted).await? {
        Ok(admission) => {
            let guard = admission.first();
            guard
                .ok_or_else(|| Fault::new("expected its own entry not to look like another's"))?
                .complete()
                .await?;
        }
        Err(_) => {
            eventually("an entry that nobody knows of to be abandoned", || async {
                Ok(b.admission("event").await?.is_first())
            })
            .await?;
        }
    }
    let opts = LeaseOptions::default();
    let works = a.backend.lease(&key("x"), opts).await?;
    ensure!(works.is_some(), "expected the handle to go on");
    Ok(())
}
