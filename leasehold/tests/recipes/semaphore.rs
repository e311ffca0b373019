use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::memory::MemoryBackend;
use leasehold::recipes::Semaphore;
use tokio::task::JoinSet;

use crate::{key, processes, secs, settle, soon};

fn semaphores(store: &Arc<MemoryBackend>, permits: usize) -> [Arc<Semaphore>; 2] {
    [
        Arc::new(Semaphore::over_locks(store.clone(), &key("x"), permits).unwrap()),
        Arc::new(Semaphore::over_leases(store.clone(), &key("x"), permits, secs(30)).unwrap()),
    ]
}

#[tokio::test(start_paused = true)]
async fn never_more_than_there_are_permits() {
    for kind in 0..2 {
        let all = processes::<3>().map(|store| semaphores(&store, 4)[kind].clone());
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        for task in 0..60 {
            let (semaphore, now, most) = (all[task % 3].clone(), now.clone(), most.clone());
            tasks.spawn(async move {
                let work = semaphore.with_permit(Duration::MAX, async |_| {
                    let holders = now.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(holders, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(1 + task as u64 % 7)).await;
                    now.fetch_sub(1, Ordering::SeqCst);
                });
                work.await.unwrap().expect("it waits for ever");
            });
        }
        soon("all to have had one", tasks.join_all()).await;
        assert_eq!(most.load(Ordering::SeqCst), 4, "all are used, and no more");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_woken_by_whichever_slot_is_freed() {
    let [a, b] = processes();
    for (a, b) in semaphores(&a, 5).into_iter().zip(semaphores(&b, 5)) {
        for freed in 0..5 {
            let mut held = Vec::new();
            for _ in 0..5 {
                held.push(a.acquire(Duration::ZERO).await.unwrap().expect("there are five"));
            }
            held.sort_by_key(leasehold::recipes::Permit::slot);
            assert!(b.acquire(Duration::ZERO).await.unwrap().is_none());
            assert!(b.acquire(secs(3)).await.unwrap().is_none());
            let (got, ()) = tokio::join!(b.acquire(secs(60)), async {
                tokio::time::sleep(secs(2)).await;
                held.remove(freed).release().await.unwrap();
            });
            let got = got.unwrap().expect("one is free");
            assert_eq!(got.slot(), freed);
            got.release().await.unwrap();
            for permit in held {
                permit.release().await.unwrap();
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_gives_up_leaves_nothing_behind() {
    let [a, b] = processes();
    for (a, b) in semaphores(&a, 2).into_iter().zip(semaphores(&b, 2)) {
        let held =
            [a.acquire(Duration::ZERO).await.unwrap(), a.acquire(Duration::ZERO).await.unwrap()];
        for _ in 0..3 {
            let given_up = tokio::time::timeout(secs(1), b.acquire(Duration::MAX)).await;
            assert!(given_up.is_err());
        }
        drop(held);
        settle().await;
        let one = soon("one", b.acquire(secs(60))).await.unwrap().expect("both are free");
        let two = soon("two", b.acquire(secs(60))).await.unwrap().expect("both are free");
        assert_ne!(one.slot(), two.slot());
        drop((one, two));
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_permit_stops_the_work() {
    let [a, _] = processes();
    let semaphore = Semaphore::over_locks(a.clone(), &key("x"), 1).unwrap();
    let work = semaphore.with_permit(secs(1), async |_| {
        a.link().end_sessions();
        std::future::pending::<()>().await;
    });
    assert_eq!(soon("the loss", work).await.unwrap_err().kind(), ErrorKind::Lost);
    let permit = soon("the next", semaphore.acquire(secs(60))).await.unwrap().unwrap();
    assert!(permit.is_held() && permit.token().await.unwrap().value() > 0);
}

#[tokio::test]
async fn options_out_of_range_are_refused() {
    let [a] = processes();
    for permits in [0, Semaphore::MAX_PERMITS + 1] {
        let refused = Semaphore::over_locks(a.clone(), &key("x"), permits).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidOptions);
    }
    assert!(Semaphore::over_leases(a, &key("x"), 1, Duration::ZERO).is_err());
}
