//! Many who wait or hold, next to what connections and statements that may cost.

use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::Link;
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Lease, LeaseOptions, LockOptions,
    NamedLock,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use tokio::task::JoinSet;

use crate::support::MySqlHarness;
use crate::{
    PATIENCE, Verdict, ensure, eventually, is_free, key, keys, locked, namespace, nothing_left,
    within,
};

crate::tests!("crowds":
    holders_never_need_a_second_connection_of_the_pool,
    hundreds_of_waiters_take_few_connections,
    hundreds_of_waiters_are_no_herd,
    one_server_is_one_space_of_user_locks,
);

/// B29: as many holders of everything as the pool has connections, and twice as many, each of whom
/// uses the pool as well, renews, completes and releases.
async fn holders_never_need_a_second_connection_of_the_pool(harness: Arc<MySqlHarness>) -> Verdict {
    const CONNECTIONS: usize = 4;
    let namespace = namespace();
    let constraints = PoolConstraints::new(0, CONNECTIONS).ok_or("no pool of that size")?;
    let opts = OptsBuilder::from_opts(Opts::from_url(harness.url())?)
        .pool_opts(PoolOpts::default().with_constraints(constraints));
    let pool = Pool::new(opts);
    let builder = MySqlBackend::builder().namespace(&namespace).own_connections(1);
    let backend = Arc::new(builder.from_pool(pool.clone()).await?);
    for (tasks, shared) in [(CONNECTIONS, false), (2 * CONNECTIONS, false), (8, true)] {
        let mut running = JoinSet::<Verdict>::new();
        for task in 0..tasks {
            let (backend, pool) = (backend.clone(), pool.clone());
            running.spawn(async move {
                let name = if shared { "x".to_owned() } else { format!("k{task}") };
                let lock = locked(&*backend, &name).await?;
                let opts = LeaseOptions::default().wait(PATIENCE);
                let lease = backend.lease(&key(&name), opts).await?.ok_or("not to be had")?;
                let entry = backend.admit(&key(&name), DedupeOptions::default()).await?;
                pool.get_conn().await?.query_drop("SELECT 1").await?;
                let opts = ClaimOptions::default().wait(PATIENCE);
                let claim = backend.claim(&keys(&[&name]), opts).await?.ok_or("not to be had")?;
                lease.renew().await?;
                if let Some(entry) = entry.first() {
                    entry.abandon().await?;
                }
                claim.commit().await?;
                pool.get_conn().await?.query_drop("SELECT 1").await?;
                lease.release().await?;
                Ok(lock.release().await?)
            });
        }
        let all = async {
            while let Some(done) = running.join_next().await {
                done??;
            }
            Verdict::Ok(())
        };
        within(3 * PATIENCE, "the end of all holders", all).await??;
    }
    backend.close().await?;
    Ok(pool.disconnect().await?)
}

/// B74: hundreds who wait for tens of keys take the stated number of connections, whatever comes of
/// their waits, and leave no place in the server's queues.
async fn hundreds_of_waiters_take_few_connections(harness: Arc<MySqlHarness>) -> Verdict {
    const WAITERS: usize = 3;
    let namespace = namespace();
    let holder = harness.builder(&namespace).connect(harness.url()).await?;
    let builder = harness.builder(&namespace).max_waiters(WAITERS).own_connections(2);
    let (backend, link) = harness.open_with(&namespace, builder, 2).await?;
    let backend = Arc::new(backend);
    let mut held = Vec::new();
    for n in 0..60 {
        held.push(locked(&holder, &format!("k{n}")).await?);
    }
    // the main session's and the waiters' with a watch each, the handle's pool and the caller's
    let bound = 2 + 2 * WAITERS + 2 + 2;
    for round in 0..3 {
        let mut waits = JoinSet::new();
        for n in 0..300 {
            let backend = backend.clone();
            let opts = LockOptions::default().wait(Duration::from_secs(2));
            waits.spawn(async move { backend.lock(&key(&format!("k{}", n % 60)), opts).await });
        }
        while !waits.is_empty() {
            let sessions = harness.sessions(&link.name).await?.len();
            ensure!(sessions <= bound, "{sessions} connections wait in round {round}");
            let ended = tokio::time::timeout(Duration::from_millis(50), waits.join_next()).await;
            if let Ok(Some(done)) = ended {
                ensure!(done??.is_none(), "two have a lock");
            }
        }
    }
    let place = |(_, name, status): &(String, String, String)| {
        status == "PENDING" && name.contains(namespace.as_str())
    };
    eventually("the end of all places in the queue", || async {
        Ok(!harness.locks().await?.iter().any(place))
    })
    .await?;
    drop(held);
    for n in [0, 59] {
        eventually("a free lock", || async { Ok(is_free(&*backend, &format!("k{n}")).await?) })
            .await?;
    }
    link.end_sessions().await?;
    backend.close().await?;
    nothing_left(&harness, &namespace).await
}

/// B77: two hundred waiters for a lock and for a lease, in two processes: while it is held they
/// hardly cost a statement, and each hand-over costs a few.
async fn hundreds_of_waiters_are_no_herd(harness: Arc<MySqlHarness>) -> Verdict {
    const EACH: usize = 100;
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[])).await??;
    let holder = MySqlBackend::connect(own.url()).await?;
    let mut handles = Vec::new();
    for _ in 0..2 {
        handles.push(Arc::new(MySqlBackend::connect(own.url()).await?));
    }
    let mut admin = own.admin().await?;
    for leases in [false, true] {
        let ttl = Duration::from_secs(60);
        let lock = if leases { None } else { Some(locked(&holder, "x").await?) };
        let lease = match leases {
            true => holder.lease(&key("x"), LeaseOptions::try_once().ttl(ttl)).await?,
            false => None,
        };
        let mut tasks = JoinSet::<Verdict>::new();
        for n in 0..2 * EACH {
            let backend = handles[n % 2].clone();
            tasks.spawn(async move {
                let wait = Duration::from_secs(60);
                if leases {
                    let opts = LeaseOptions::default().ttl(ttl).wait(wait);
                    let lease = backend.lease(&key("x"), opts).await?.ok_or("not to be had")?;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    Ok(lease.release().await?)
                } else {
                    let opts = LockOptions::default().wait(wait);
                    let lock = backend.lock(&key("x"), opts).await?.ok_or("not to be had")?;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    Ok(lock.release().await?)
                }
            });
        }
        // the first pauses are short
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = questions(&mut admin).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let waiting = questions(&mut admin).await? - before;
        ensure!(waiting <= 60, "{waiting} statements in 3 s of waiting, leases: {leases}");
        ensure!(tasks.try_join_next().is_none(), "somebody did not wait");
        let before = questions(&mut admin).await?;
        match (lock, lease) {
            (Some(lock), _) => lock.release().await?,
            (_, Some(lease)) => lease.release().await?,
            (None, None) => return Err("nothing was held".into()),
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        let handed = questions(&mut admin).await? - before;
        println!("{waiting} statements in 3 s of waiting, {handed} for {} hand-overs", 2 * EACH);
        // a try, a release and the wake-up's looks; the keepalives are the rest
        let most = 12 * 2 * EACH as u64 + 100;
        ensure!(handed <= most, "{handed} statements for {} hand-overs", 2 * EACH);
    }
    Ok(())
}

async fn questions(admin: &mut mysql_async::Conn) -> Result<u64, crate::Failure> {
    let row: Option<(String, u64)> =
        admin.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await?;
    Ok(row.ok_or("no such status")?.1)
}

/// B22: user-level locks are one space per server: handles of two databases meet on named locks and
/// claims where they share a namespace, and only there; tables are each database's own.
async fn one_server_is_one_space_of_user_locks(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let mut admin = harness.admin().await?;
    admin.query_drop("CREATE DATABASE IF NOT EXISTS test_space").await?;
    let url = harness.url().rsplit_once('/').ok_or("no database in the url")?.0;
    let url = format!("{url}/test_space");
    let here = harness.builder(&namespace).connect(harness.url()).await?;
    let there = harness.builder(&namespace).connect(&url).await?;
    there.migrate().await?;
    let apart = harness.builder(&format!("{namespace}-2")).connect(&url).await?;
    let lock = locked(&here, "x").await?;
    ensure!(!is_free(&there, "x").await?, "one namespace, two holders");
    ensure!(is_free(&apart, "x").await?, "two namespaces met");
    lock.release().await?;
    ensure!(is_free(&there, "x").await?, "it is not free");
    let claim = here.claim(&keys(&["x"]), ClaimOptions::default()).await?.ok_or("not free")?;
    let tried = there.claim(&keys(&["x"]), ClaimOptions::try_once()).await?;
    ensure!(tried.is_none(), "one namespace, two claims");
    let other = apart.claim(&keys(&["x"]), ClaimOptions::try_once()).await?;
    other.ok_or("two namespaces met")?.rollback().await?;
    claim.commit().await?;
    let opts = LeaseOptions::try_once();
    let lease = here.lease(&key("x"), opts).await?.ok_or("not free")?;
    let theirs = there.lease(&key("x"), opts).await?.ok_or("the tables of two databases met")?;
    let again = here.lease(&key("x"), opts).await;
    ensure!(matches!(again, Ok(None)), "two have the lease of one database");
    lease.release().await?;
    theirs.release().await?;
    // a lock of the server that is not ours
    let name = here.lock_name(&key("raw"));
    let taken = format!("SELECT GET_LOCK('{name}', 0)");
    let mut raw = harness.conn().await?;
    ensure!(raw.query_first::<Option<u8>, _>(taken).await? == Some(Some(1)), "not free");
    ensure!(!is_free(&here, "raw").await?, "another program has it");
    raw.disconnect().await?;
    eventually("the lock of the other program", || async { Ok(is_free(&here, "raw").await?) }).await
}
