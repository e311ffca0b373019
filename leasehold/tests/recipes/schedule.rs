use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::memory::MemoryBackend;
use leasehold::recipes::{Every, MissedTicks, Schedule, Tick, Timetable};
use leasehold::{Admission, Dedupe, DedupeOptions, Error, ErrorKind};

use crate::{key, processes, secs};

type Fired = Arc<Mutex<Vec<Tick>>>;

fn every(seconds: u64) -> Every {
    Every::new(secs(seconds)).unwrap()
}

fn schedule(store: &Arc<MemoryBackend>, missed: MissedTicks) -> Schedule {
    Schedule::new(store.clone(), key("x"), every(10)).missed(missed)
}

/// Runs it for so long and gives what it fired.
async fn fired(schedule: &Schedule, time: Duration) -> Vec<Tick> {
    let fired = Fired::default();
    let run = schedule.run(async |tick| fired.lock().unwrap().push(tick));
    assert!(tokio::time::timeout(time, run).await.is_err(), "it runs until it is dropped");
    let fired = fired.lock().unwrap();
    fired.clone()
}

#[tokio::test(start_paused = true)]
async fn each_tick_fires_once_across_the_fleet_and_never_early() {
    let all = processes::<3>();
    let fired: Arc<Mutex<BTreeMap<SystemTime, Vec<usize>>>> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for (process, store) in all.iter().enumerate() {
        let (schedule, fired) = (schedule(store, MissedTicks::Skip), fired.clone());
        tasks.spawn(async move {
            // they start one after the other
            tokio::time::sleep(secs(33 * process as u64)).await;
            schedule
                .run(async |tick| {
                    assert!(tick.late < secs(1), "{tick:?}");
                    fired.lock().unwrap().entry(tick.due).or_default().push(process);
                })
                .await
        });
    }
    tokio::time::sleep(secs(3600)).await;
    tasks.shutdown().await;
    let fired = fired.lock().unwrap();
    assert!((358..=361).contains(&fired.len()), "{}", fired.len());
    assert!(fired.values().all(|processes| processes.len() == 1), "{fired:?}");
    for (one, two) in fired.keys().zip(fired.keys().skip(1)) {
        assert_eq!(two.duration_since(*one).unwrap(), secs(10), "none is left out");
        assert_eq!(one.duration_since(UNIX_EPOCH).unwrap().as_nanos() % 10_000_000_000, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn missed_ticks_go_by_their_policy() {
    for (missed, expected) in
        [(MissedTicks::Skip, 1), (MissedTicks::FireOnce, 1), (MissedTicks::All, 30)]
    {
        let [a, b] = processes();
        let first = fired(&schedule(&a, missed), secs(25)).await;
        assert!((2..=3).contains(&first.len()), "{missed:?}: {first:?}");
        assert!(first.iter().all(|tick| tick.late < secs(1)), "{missed:?}: {first:?}");
        tokio::time::sleep(secs(300)).await; // nobody is there
        let (one, two) = tokio::join!(
            async { fired(&schedule(&a, missed), Duration::from_millis(1)).await },
            async { fired(&schedule(&b, missed), Duration::from_millis(1)).await },
        );
        let caught_up = one.len() + two.len();
        assert!((expected..=expected + 1).contains(&caught_up), "{missed:?}: {one:?} {two:?}");
        let mut due: Vec<_> = one.iter().chain(&two).chain(&first).map(|tick| tick.due).collect();
        due.sort_unstable();
        due.dedup();
        assert_eq!(due.len(), caught_up + first.len(), "{missed:?}: each fired once");
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_too_late_is_skipped() {
    let [a] = processes();
    let hourly = |missed| {
        let schedule = Schedule::new(a.clone(), key("x"), every(3600)).missed(missed);
        schedule.grace(secs(60)).catch_up(secs(600))
    };
    for missed in [MissedTicks::Skip, MissedTicks::FireOnce, MissedTicks::All] {
        let on_time = fired(&hourly(MissedTicks::Skip), secs(3600)).await;
        assert!(on_time.len() == 1 && on_time[0].late < secs(1), "{on_time:?}");
        // to 601 s after the next, when nobody is there
        let late = on_time[0].due + secs(3600 + 601);
        let wait = late.duration_since(store_time(&a).await).unwrap();
        tokio::time::sleep(wait).await;
        assert_eq!(fired(&hourly(missed), secs(60)).await, [], "{missed:?}");
    }
}

/// What the store's clock shows.
async fn store_time(store: &Arc<MemoryBackend>) -> SystemTime {
    let probe = key(&format!("probe-{:?}", tokio::time::Instant::now()));
    let opts = DedupeOptions::default().done_at_once();
    drop(store.admit(&probe, opts).await.unwrap());
    match store.admit(&probe, opts).await.unwrap() {
        Admission::Done { at } => at,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_tick_passes_the_next_on_to_others() {
    let [a, b] = processes();
    let slow = async |schedule: Schedule, ticks: &Fired| {
        schedule
            .run(async |tick| {
                ticks.lock().unwrap().push(tick);
                tokio::time::sleep(secs(15)).await;
            })
            .await
    };
    let (one, two) = (Fired::default(), Fired::default());
    tokio::select! {
        _ = slow(schedule(&a, MissedTicks::Skip), &one) => panic!("it ended"),
        _ = slow(schedule(&b, MissedTicks::Skip), &two) => panic!("it ended"),
        () = tokio::time::sleep(secs(605)) => {}
    }
    let (one, two) = (one.lock().unwrap(), two.lock().unwrap());
    assert!(one.len() + two.len() >= 60, "{} and {}", one.len(), two.len());
    assert!(!one.is_empty() && !two.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_holds_it_up_and_no_longer() {
    let [a] = processes();
    let schedule = schedule(&a, MissedTicks::All);
    let ticks = Fired::default();
    let fault = async {
        tokio::time::sleep(secs(35)).await;
        a.link().silence();
        tokio::time::sleep(secs(100)).await;
        a.link().heal();
        tokio::time::sleep(secs(60)).await;
    };
    tokio::select! {
        ended = schedule.run(async |tick| ticks.lock().unwrap().push(tick)) => panic!("{ended:?}"),
        () = fault => {}
    }
    let ticks = ticks.lock().unwrap();
    // one may have been recorded by a request whose answer was lost
    assert!((18..=20).contains(&ticks.len()), "{ticks:?}");
    assert!(ticks.is_sorted_by_key(|tick| tick.due));
}

#[derive(Debug)]
struct Once(SystemTime);

impl Timetable for Once {
    fn next(&self, time: SystemTime) -> Option<SystemTime> {
        (time < self.0).then_some(self.0)
    }
}

#[tokio::test(start_paused = true)]
async fn it_ends_with_its_timetable() {
    let [a] = processes();
    let due = store_time(&a).await + secs(30);
    let ticks = Fired::default();
    let once = Schedule::new(a.clone(), key("x"), Once(due));
    once.run(async |tick| ticks.lock().unwrap().push(tick)).await.unwrap();
    assert_eq!(ticks.lock().unwrap().len(), 1);
    assert_eq!(ticks.lock().unwrap()[0].due, due);
    let refused =
        once.grace(Duration::MAX).run(async |_| ()).await.map_err(|error: Error| error.kind());
    assert_eq!(refused, Err(ErrorKind::InvalidOptions));
}
