use std::sync::Arc;
use std::time::Duration;

use leasehold::memory::{MemoryBackend, MemoryTx};
use leasehold::recipes::{Limit, PerKey, Taken};
use leasehold::{Claim, ClaimLock, ClaimOptions, Error, ErrorKind};
use tokio::task::JoinSet;

use crate::{key, processes, secs, soon};

fn read(claim: &mut Claim, name: &str) -> Result<u64, Error> {
    let value = claim.tx::<MemoryTx>()?.read(name);
    Ok(value.map_or(0, |value| value.parse().unwrap()))
}

async fn count(claim: &mut Claim, names: &[&str]) -> Result<Vec<u64>, Error> {
    // others get a chance to spoil it
    tokio::task::yield_now().await;
    names.iter().map(|name| read(claim, name)).collect()
}

async fn all(claim: &mut Claim) -> Result<Vec<u64>, Error> {
    count(claim, &["all"]).await
}

async fn take(claim: &mut Claim, names: &[&str]) -> Result<(), Error> {
    tokio::task::yield_now().await;
    for name in names {
        let value = read(claim, name)? + 1;
        claim.tx::<MemoryTx>()?.write(*name, value.to_string());
    }
    Ok(())
}

fn limit(store: &Arc<MemoryBackend>) -> Limit {
    Limit::new(store.clone(), key("tasks"), 6)
}

#[tokio::test(start_paused = true)]
async fn no_limit_is_ever_exceeded() {
    let stores = processes::<3>();
    let mut tasks = JoinSet::new();
    for task in 0..45 {
        let limit = limit(&stores[task % 3]).wait(Duration::MAX);
        let repo = ["repo-a", "repo-b", "repo-c"][task / 3 % 3];
        tasks.spawn(async move {
            let per_key = [PerKey::new(repo, 3)];
            let names = ["all", repo];
            let taken = limit.take(
                &per_key,
                async |claim: &mut Claim| count(claim, &names).await,
                async |claim: &mut Claim| take(claim, &names).await,
            );
            taken.await.unwrap().taken().is_some()
        });
    }
    let taken = soon("all", tasks.join_all()).await.into_iter().filter(|taken| *taken).count();
    assert_eq!(taken, 6);
    let value = |name: &str| stores[0].store().read(name).map_or(0, |value| value.parse().unwrap());
    assert_eq!(value("all"), 6);
    let each = ["repo-a", "repo-b", "repo-c"].map(value);
    assert!(each.iter().all(|count| *count <= 3) && each.iter().sum::<u64>() == 6, "{each:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_full_says_which() {
    let [a] = processes();
    let limit = limit(&a);
    let repo = [PerKey::new("repo-a", 1)];
    let names = ["all", "repo-a"];
    let counter = async |claim: &mut Claim| count(claim, &names).await;
    let taker = async |claim: &mut Claim| take(claim, &names).await;
    assert_eq!(limit.take(&repo, counter, taker).await.unwrap(), Taken::Taken(()));
    let full = limit.take(&repo, counter, taker).await.unwrap();
    assert_eq!(full, Taken::Full { key: Some("repo-a".into()), count: 1, max: 1 });
    let none = Limit::new(a.clone(), key("tasks"), 0);
    let full = none.take(&[], all, taker).await.unwrap();
    assert_eq!(full, Taken::Full { key: None, count: 1, max: 0 });
    let short = limit.take(&repo, all, taker).await.unwrap_err();
    assert_eq!(short.kind(), ErrorKind::InvalidOptions);
    assert_eq!(a.store().read("all").as_deref(), Some("1"));
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_over_and_a_failure_take_nothing() {
    let [a, b] = processes();
    let limit = limit(&a).wait(secs(2));
    let held = b.claim(&key("tasks").into(), ClaimOptions::default()).await.unwrap().unwrap();
    let taken = limit.take(&[], all, async |_| panic!("it is not to be had")).await.unwrap();
    assert_eq!(taken, Taken::<()>::Busy);
    held.rollback().await.unwrap();

    let failed = limit.take(&[], all, async |claim| {
        take(claim, &["all"]).await?;
        Err::<(), _>(Error::new(ErrorKind::Backend, "on purpose"))
    });
    assert_eq!(failed.await.unwrap_err().detail(), "on purpose");
    let uncounted = limit.take(
        &[],
        async |_| Err(Error::new(ErrorKind::Backend, "on purpose")),
        async |claim| take(claim, &["all"]).await,
    );
    assert!(uncounted.await.is_err());
    let dropped = limit.take(&[], all, async |claim| {
        take(claim, &["all"]).await?;
        std::future::pending::<Result<(), Error>>().await
    });
    assert!(tokio::time::timeout(secs(1), dropped).await.is_err());
    assert_eq!(a.store().read("all"), None);
    let taken = limit.take(&[], all, async |claim| take(claim, &["all"]).await).await.unwrap();
    assert_eq!(taken, Taken::Taken(()), "nothing was left behind");
}

#[tokio::test]
async fn closures_that_borrow_work_in_a_spawned_task() {
    let [a] = processes();
    let limit = limit(&a);
    let task = tokio::spawn(async move {
        let name = String::from("all");
        let count = async |claim: &mut Claim| count(claim, &[&name]).await;
        let taker = async |claim: &mut Claim| take(claim, &[&name]).await;
        limit.take(&[], count, taker).await
    });
    assert_eq!(task.await.unwrap().unwrap(), Taken::Taken(()));
}
