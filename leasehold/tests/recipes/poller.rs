use std::cell::Cell;

use leasehold::recipes::Poller;
use leasehold::{ErrorKind, Lease, LeaseOptions};
use tokio::time::Instant;

use crate::{key, processes, secs, settle, soon};

#[tokio::test(start_paused = true)]
async fn one_ticks_at_a_time() {
    let [a, b] = processes();
    let (a, b) = (Poller::new(a, key("x")), Poller::new(b, key("x")));
    let inner = a.tick(async |_| b.tick(async |_| ()).await.unwrap()).await.unwrap();
    assert_eq!(inner, Some(None));
    assert_eq!(b.tick(async |_| 1).await.unwrap(), Some(1), "it is free at once");
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_kept_at_least_so_long_whatever_becomes_of_the_work() {
    let [a, b] = processes();
    let least = |store| Poller::new(store, key("x")).at_least(secs(20)).at_most(secs(60));
    let (a, b) = (least(a), least(b));
    for ending in 0..3 {
        let start = Instant::now();
        match ending {
            0 => assert_eq!(a.tick(async |_| 1).await.unwrap(), Some(1)),
            1 => {
                let tick = a.tick(async |_| std::future::pending::<()>().await);
                assert!(tokio::time::timeout(secs(1), tick).await.is_err(), "dropped");
            }
            _ => {
                let a = a.clone();
                let panics = tokio::spawn(async move {
                    a.tick(async |_| std::panic::resume_unwind(Box::new("on purpose"))).await
                });
                assert!(panics.await.is_err());
            }
        }
        soon("the other ticks", async {
            while b.tick(async |_| ()).await.unwrap().is_none() {
                tokio::time::sleep(secs(1)).await;
            }
        })
        .await;
        let after = start.elapsed();
        assert!(after >= secs(20) && after < secs(30), "{ending}: {after:?}");
        tokio::time::sleep(secs(60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_work_is_stopped_at_most_after_so_long() {
    let [a, b] = processes();
    for keep_alive in [false, true] {
        let poller = Poller::new(a.clone(), key("x")).at_most(secs(60));
        let poller = if keep_alive { poller.keep_alive(secs(10)) } else { poller };
        let start = Instant::now();
        let stopped = poller.tick(async |_| std::future::pending::<()>().await).await;
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Lost);
        assert!(start.elapsed() <= secs(60) && start.elapsed() > secs(58), "{keep_alive}");
        let next = soon("the next", b.lease(&key("x"), LeaseOptions::default())).await.unwrap();
        next.unwrap().release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_process_is_followed_after_the_ttl_where_it_is_kept_alive() {
    let [a, b] = processes();
    let alive = |store| Poller::new(store, key("x")).at_most(secs(3600)).keep_alive(secs(10));
    let poller = alive(a.clone());
    let ended = tokio::select! {
        tick = poller.tick(async |_| std::future::pending::<()>().await) => tick,
        () = tokio::time::sleep(secs(100)) => {
            assert_eq!(alive(b.clone()).tick(async |_| ()).await.unwrap(), None);
            a.link().silence();
            Ok(None)
        }
    };
    assert_eq!(ended.unwrap(), None);
    tokio::time::sleep(secs(11)).await;
    assert_eq!(alive(b).tick(async |_| 2).await.unwrap(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn it_ticks_in_every_interval() {
    let [a, b] = processes();
    let ticks = Cell::new(0);
    let least = |store| Poller::new(store, key("x")).at_least(secs(8)).at_most(secs(60));
    let (a, b) = (least(a), least(b));
    let count = |_| async { ticks.set(ticks.get() + 1) };
    let late = async {
        tokio::time::sleep(secs(3)).await;
        b.run(secs(10), count).await
    };
    tokio::select! {
        ended = a.run(secs(10), count) => panic!("{ended:?}"),
        ended = late => panic!("{ended:?}"),
        () = tokio::time::sleep(secs(96)) => {}
    }
    assert_eq!(ticks.get(), 10, "once in each interval, over both");
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_refused() {
    let [a] = processes();
    let poller = Poller::new(a.clone(), key("x")).at_most(secs(5)).at_least(secs(6));
    let refused = poller.tick(async |_| ()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidOptions);
    let refused = poller.run(secs(1), async |_| ()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidOptions);
    let poller = Poller::new(a, key("x")).at_most(secs(0));
    assert_eq!(poller.tick(async |_| ()).await.unwrap_err().kind(), ErrorKind::InvalidOptions);
}

#[tokio::test]
async fn it_works_in_a_spawned_task() {
    let [a] = processes();
    let poller = Poller::new(a, key("x"));
    let task = tokio::spawn(async move { poller.tick(async |lease| lease.token()).await });
    assert!(task.await.unwrap().unwrap().is_some());
}
