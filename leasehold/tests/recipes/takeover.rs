use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::recipes::{Pickup, Recovery, Takeover, Turns};
use leasehold::{Dedupe, DedupeOptions, Error, ErrorKind};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{key, processes, secs, settle, soon};

#[tokio::test(start_paused = true)]
async fn what_a_crash_left_is_picked_up_by_exactly_one() {
    let all = processes::<3>();
    let opts = DedupeOptions::default().in_progress(secs(600));
    let crashed = all[0].admit(&key("work/7"), opts).await.unwrap();
    let since = Instant::now();
    std::mem::forget(crashed);
    let done = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..30 {
        let (takeover, done) = (Takeover::new(all[task % 3].clone(), key("work")), done.clone());
        tasks.spawn(async move {
            loop {
                let work = takeover.run("7", async |_| {
                    done.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(secs(1)).await;
                    Ok::<_, Error>(())
                });
                match work.await.unwrap() {
                    Pickup::InProgress { .. } => tokio::time::sleep(secs(1)).await,
                    Pickup::Done(()) => return true,
                    _ => return false,
                }
            }
        });
    }
    let did = tasks.join_all().await.into_iter().filter(|did| *did).count();
    assert_eq!((did, done.load(Ordering::SeqCst)), (1, 1));
    assert!(since.elapsed() >= secs(600), "not before its time");
}

#[tokio::test(start_paused = true)]
async fn failed_and_dropped_work_is_free_at_once() {
    let [a, b] = processes();
    let (a, b) = (Takeover::new(a, key("work")), Takeover::new(b, key("work")));
    let failed = a.run("7", async |_| Err::<(), _>(Error::new(ErrorKind::Backend, "on purpose")));
    assert_eq!(failed.await.unwrap_err().detail(), "on purpose");
    let dropped = a.run("7", async |_| std::future::pending::<Result<(), Error>>().await);
    assert!(tokio::time::timeout(secs(1), dropped).await.is_err());
    settle().await;
    let busy = b
        .run("7", async |_| Ok::<_, Error>(a.run("7", async |_| Ok::<_, Error>(())).await?))
        .await
        .unwrap();
    assert!(matches!(busy, Pickup::Done(Pickup::InProgress { .. })), "{busy:?}");
    let again = a.run("7", async |_| Ok::<_, Error>(())).await.unwrap();
    assert!(matches!(again, Pickup::AlreadyDone { .. }), "{again:?}");
    assert_eq!(a.run("8", async |_| Ok::<_, Error>(1)).await.unwrap().done(), Some(1));
}

#[tokio::test(start_paused = true)]
async fn work_is_stopped_when_others_may_take_it_over() {
    let [a] = processes();
    let takeover = Takeover::new(a, key("work")).after(secs(60)).retain(secs(5));
    let start = Instant::now();
    let stopped = takeover.run("7", async |_| std::future::pending::<Result<(), Error>>().await);
    assert_eq!(stopped.await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(start.elapsed() <= secs(60) && start.elapsed() > secs(58));
    tokio::time::sleep(secs(2)).await;
    assert_eq!(takeover.run("7", async |_| Ok::<_, Error>(1)).await.unwrap().done(), Some(1));
    tokio::time::sleep(secs(6)).await;
    let again = takeover.run("7", async |_| Ok::<_, Error>(2)).await.unwrap();
    assert_eq!(again.done(), Some(2), "it is forgotten after its time");
}

#[tokio::test(start_paused = true)]
async fn only_the_rows_of_the_dead_are_settled_and_once() {
    let all = processes::<3>();
    let turns = |process: usize| Turns::new(all[process].clone(), key("turn")).ttl(secs(60));
    let living = turns(0).begin("living").await.unwrap().unwrap();
    let dead = turns(0).begin("dead").await.unwrap().unwrap();
    tokio::time::sleep(secs(600)).await;
    all[0].store().delete_lease("", dead.key()); // as if its ttl had passed
    soon("the loss", dead.lost().wait()).await;

    let settled = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let (turns, settled) = (turns(1 + task % 2), settled.clone());
        tasks.spawn(async move {
            let settle = turns.recover(
                "dead",
                async |_| Ok(settled.load(Ordering::SeqCst) == 0),
                async |_| {
                    tokio::time::sleep(secs(1)).await;
                    settled.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, Error>(())
                },
            );
            settle.await.unwrap()
        });
    }
    let found = tasks.join_all().await;
    assert_eq!(settled.load(Ordering::SeqCst), 1);
    assert_eq!(found.iter().filter(|found| **found == Recovery::Settled(())).count(), 1);

    let turns = turns(1);
    let found = turns.recover("living", async |_| Ok(true), async |_| Ok::<_, Error>(()));
    assert_eq!(found.await.unwrap(), Recovery::Alive, "it is renewed for as long as it likes");
    assert!(living.is_held());
    living.release().await.unwrap();
    let found = turns.recover("living", async |_| Ok(false), async |_| Ok::<_, Error>(()));
    assert_eq!(found.await.unwrap(), Recovery::NothingToDo);
}

#[tokio::test(start_paused = true)]
async fn a_lost_turn_stops_the_work() {
    let [a] = processes();
    let turns = Turns::new(a.clone(), key("turn"));
    let lost = turns.run("7", async |turn| {
        a.store().delete_lease("", turn.key());
        std::future::pending::<Result<(), Error>>().await
    });
    assert_eq!(soon("the loss", lost).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(turns.run("7", async |_| Ok::<_, Error>(1)).await.unwrap(), Some(1));
    let busy = turns.run("7", async |_| turns.run("7", async |_| Ok::<_, Error>(1)).await);
    assert_eq!(busy.await.unwrap(), Some(None));
}
