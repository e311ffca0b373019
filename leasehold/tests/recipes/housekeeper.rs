use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold::recipes::{Housekeeper, Sweep};
use leasehold::{Dedupe, DedupeOptions, Error, ErrorKind};

use crate::{key, processes, secs, soon};

#[tokio::test(start_paused = true)]
async fn the_fleet_sweeps_once_in_an_interval() {
    let count = Arc::new(AtomicU64::new(0));
    let keepers = processes::<3>().map(|store| {
        let keeper = Housekeeper::new(store, key("housekeeping"));
        let count = count.clone();
        keeper.register_sweep("mine", move || {
            let count = count.clone();
            async move { Ok::<_, Error>(count.fetch_add(1, Ordering::SeqCst)) }
        });
        keeper
    });
    let [a, b, c] = &keepers;
    let late = async |keeper: &Housekeeper, by| {
        tokio::time::sleep(secs(by)).await;
        keeper.run().await
    };
    tokio::select! {
        ended = a.run() => panic!("{ended:?}"),
        ended = late(b, 11) => panic!("{ended:?}"),
        ended = late(c, 22) => panic!("{ended:?}"),
        () = tokio::time::sleep(secs(599)) => {}
    }
    let count = count.load(Ordering::SeqCst);
    assert!((19..=21).contains(&count), "{count} in 20 intervals");
}

#[tokio::test(start_paused = true)]
async fn each_sweep_is_reported_whatever_the_others_do() {
    let [a] = processes();
    let keeper = Housekeeper::new(a.clone(), key("housekeeping")).limit(secs(5));
    keeper.register_sweep("fails", async || Err::<u64, _>("on purpose"));
    keeper.register_sweep("panics", async || -> Result<u64, Error> {
        std::panic::resume_unwind(Box::new("on purpose"))
    });
    keeper.register_sweep("hangs", std::future::pending::<Result<u64, Error>>);
    keeper.register_sweep("replaced", async || Ok::<_, Error>(1));
    keeper.register_sweep("replaced", async || Ok::<_, Error>(2));
    let opts = DedupeOptions::default().retain(secs(1)).done_at_once();
    a.admit(&key("expires"), opts).await.unwrap();
    tokio::time::sleep(secs(2)).await;

    let reports = soon("the sweep", keeper.sweep()).await.unwrap().expect("nobody else sweeps");
    let outcomes: Vec<_> =
        reports.iter().map(|report| (report.name.as_str(), &report.outcome)).collect();
    let failed = |why: &str| Sweep::Failed(why.to_owned());
    assert_eq!(
        outcomes,
        [
            ("store", &Sweep::Removed(1)),
            ("fails", &failed("on purpose")),
            ("panics", &failed("it panicked")),
            ("hangs", &failed("it took longer than 5s")),
            ("replaced", &Sweep::Removed(2)),
        ]
    );
    assert!(format!("{keeper:?}").contains("hangs"));
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_stops_the_sweep() {
    let [a] = processes();
    let keeper = Housekeeper::new(a.clone(), key("housekeeping"));
    let store = a.clone();
    keeper.register_sweep("loses", move || {
        store.store().delete_lease("", &key("housekeeping"));
        std::future::pending::<Result<u64, Error>>()
    });
    let lost = soon("the loss", keeper.sweep()).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);
}
