use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::recipes::SingleFlight;
use leasehold::{Error, ErrorKind, Lease, LeaseOptions};
use tokio::task::JoinSet;

use crate::{key, processes, secs, soon};

/// What is stored, and how often the work was done.
#[derive(Debug, Default)]
struct Stored {
    value: Mutex<Option<u32>>,
    works: AtomicUsize,
    reads: AtomicUsize,
}

impl Stored {
    async fn run(&self, flights: &SingleFlight) -> Result<Option<u32>, Error> {
        flights
            .run(
                &key("x"),
                || self.read(),
                async |_| {
                    self.works.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(secs(5)).await;
                    *self.value.lock().unwrap() = Some(7);
                    Ok(7)
                },
            )
            .await
    }

    async fn read(&self) -> Result<Option<u32>, Error> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        Ok(*self.value.lock().unwrap())
    }

    fn works(&self) -> usize {
        self.works.load(Ordering::SeqCst)
    }
}

#[tokio::test(start_paused = true)]
async fn one_does_it_for_all() {
    let stored = Arc::new(Stored::default());
    let flights = processes::<3>().map(|store| Arc::new(SingleFlight::new(store)));
    let mut tasks = JoinSet::new();
    for task in 0..60 {
        let (stored, flights) = (stored.clone(), flights[task % 3].clone());
        tasks.spawn(async move { stored.run(&flights).await });
    }
    let start = tokio::time::Instant::now();
    for got in tasks.join_all().await {
        assert_eq!(got.unwrap(), Some(7));
    }
    assert_eq!(stored.works(), 1);
    assert!(start.elapsed() < secs(7), "{:?}", start.elapsed());
    let asked = stored.reads.swap(0, Ordering::SeqCst);
    assert_eq!(stored.run(&flights[0]).await.unwrap(), Some(7));
    assert_eq!(stored.reads.load(Ordering::SeqCst), 1, "what is there is read once ({asked})");
}

#[tokio::test(start_paused = true)]
async fn who_waited_too_long_gets_what_is_stored_or_nothing() {
    let [a, b] = processes();
    let held = a.lease(&key("x"), LeaseOptions::default()).await.unwrap().unwrap();
    let stored = Stored::default();
    let flights = SingleFlight::new(b).wait(secs(3));
    assert_eq!(stored.run(&flights).await.unwrap(), None);
    // also those who wait behind one of their own process
    let (one, two) = tokio::join!(stored.run(&flights), stored.run(&flights));
    assert_eq!((one.unwrap(), two.unwrap()), (None, None));
    let store = async {
        tokio::time::sleep(secs(2)).await;
        *stored.value.lock().unwrap() = Some(8);
    };
    let (got, ()) = tokio::join!(stored.run(&flights), store);
    assert_eq!(got.unwrap(), Some(8));
    assert_eq!(stored.works(), 0, "never without the lease");
    held.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn failed_lost_and_dropped_work_is_done_by_the_next() {
    let ([a, b], x) = (processes(), key("x"));
    let stored = Stored::default();
    let flights = SingleFlight::new(a.clone()).ttl(secs(10));
    let failed = flights.run(
        &x,
        || stored.read(),
        async |_| Err::<u32, _>(Error::new(ErrorKind::Backend, "on purpose")),
    );
    assert_eq!(failed.await.unwrap_err().detail(), "on purpose");

    let dropped = tokio::time::timeout(secs(1), stored.run(&flights)).await;
    assert!(dropped.is_err());

    let lost = flights.run(
        &x,
        || stored.read(),
        async |_| {
            a.store().delete_lease("", &x);
            std::future::pending::<Result<u32, Error>>().await
        },
    );
    assert_eq!(soon("the loss", lost).await.unwrap_err().kind(), ErrorKind::Lost);

    let flights = SingleFlight::new(b).wait(Duration::MAX);
    assert_eq!(soon("the next", stored.run(&flights)).await.unwrap(), Some(7));
}

#[tokio::test(start_paused = true)]
async fn keys_do_not_wait_for_each_other_and_are_forgotten() {
    let [a] = processes();
    let flights = SingleFlight::new(a).wait(Duration::ZERO);
    for n in 0..500 {
        let key = key(&n.to_string());
        let done = flights.run(&key, async || Ok::<_, Error>(None), async |_| Ok(n)).await;
        assert_eq!(done.unwrap(), Some(n));
    }
    let shown = format!("{flights:?}");
    assert!(shown.len() < 20_000, "the queues of ended callers pile up: {}", shown.len());
}
