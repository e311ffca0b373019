//! Rows that an open transaction keeps: a lease that it has verified, while others want that lease.
//! It costs that lease, and no other one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold_conformance::Harness;
use leasehold_core::{
    Backend, ErrorKind, Inspect, Kind, Lease, LeaseGuard, LeaseOptions, LossReason,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, Pool, Transaction, TxOpts};
use tokio::task::JoinSet;

use crate::support::MySqlHarness;
use crate::{Failure, PATIENCE, Verdict, ensure, eventually, key, namespace, within};

crate::tests!("kept":
    open_verification_costs_only_its_lease,
    takers_of_a_kept_lease_delay_no_renewal_of_their_handle,
    kept_row_costs_few_statements,
    a_free_lease_is_not_busy_while_a_purge_is_stuck,
);

const TTL: Duration = Duration::from_secs(3);
/// Rows of several pages.
const MANY: usize = 400;
/// What a renewal may take on a busy machine; it waits for a kept row for a tenth of that at most.
const PROMPT: Duration = Duration::from_secs(1);

/// A transaction of the application's own pool, at the isolation level of the server's default, which
/// locks the most.
async fn transaction(harness: &MySqlHarness) -> Result<Transaction<'static>, Failure> {
    let pool = Pool::new(Opts::from_url(harness.url())?);
    Ok(pool.start_transaction(TxOpts::default()).await?)
}

async fn held(
    backend: &MySqlBackend,
    name: &str,
    opts: LeaseOptions,
) -> Result<LeaseGuard, Failure> {
    // a purge of another test may keep the floor for a moment
    let lease = backend.lease(&key(name), opts.wait(PATIENCE)).await?;
    lease.ok_or_else(|| format!("{name} is not free").into())
}

async fn held_many(
    backend: &Arc<MySqlBackend>,
    count: usize,
    ttl: Duration,
) -> Result<Vec<LeaseGuard>, Failure> {
    let mut leases = Vec::new();
    // by and by: each is bounded by what an answer may take
    for start in (0..count).step_by(50) {
        let mut tasks = JoinSet::new();
        for n in start..count.min(start + 50) {
            let backend = backend.clone();
            let opts = LeaseOptions::try_once().ttl(ttl);
            tasks.spawn(async move { held(&backend, &format!("n{n}"), opts).await });
        }
        while let Some(done) = tasks.join_next().await {
            leases.push(done??);
        }
    }
    Ok(leases)
}

/// The names of the leases whose rows are next to that of another one, before and after it.
async fn neighbours(
    harness: &MySqlHarness,
    namespace: &str,
    of: &str,
) -> Result<Vec<String>, Failure> {
    let mut conn = harness.conn().await?;
    let names = "SELECT CAST(name AS CHAR) FROM leasehold_lease WHERE scope = ? ORDER BY id";
    let names: Vec<String> = conn.exec(names, (namespace.as_bytes(),)).await?;
    let at = names.iter().position(|name| name == of).ok_or("it has no row")?;
    let near = names.iter().enumerate().filter(|(n, name)| n.abs_diff(at) <= 8 && *name != of);
    Ok(near.map(|(_, name)| name.clone()).filter(|name| name.starts_with('n')).collect())
}

/// Several handles wait and try for the kept lease, others purge, and release and delete next to it:
/// for several ttls, all other leases are renewed, in batches and by hand, and can be had.
async fn open_verification_costs_only_its_lease(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let open = async || {
        let builder = harness.builder(&namespace).answer(PATIENCE); // on a busy machine
        builder.connect(harness.url()).await.map(Arc::new)
    };
    let many = open().await?;
    let leases = held_many(&many, MANY, TTL).await?;
    let opts = LeaseOptions::try_once().ttl(TTL);
    let holder = open().await?;
    // one in the middle of the others: rows are in the order of a hash
    let (kept, near) = loop {
        let name = format!("kept{:x}", rand::random::<u32>());
        let kept = held(&holder, &name, opts.manual_renewal()).await?;
        let near = neighbours(&harness, &namespace, &name).await?;
        if near.len() >= 14 {
            break (kept, near);
        }
        kept.release().await?;
    };
    let wanted = kept.key().clone();
    let near: Vec<&LeaseGuard> = leases
        .iter()
        .filter(|lease| near.iter().any(|name| name == lease.key().as_str()))
        .collect();
    let mut tx = transaction(&harness).await?;
    kept.verify(&mut tx).await?;

    let ends = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::<Verdict>::new();
    for task in 0..6 {
        let (other, ends, wanted) = (open().await?, ends.clone(), wanted.clone());
        others.spawn(async move {
            // some are cut short, others reach the server's own limit
            let wait = Duration::from_millis([0, 250, 3000][task % 3]);
            while !ends.load(Ordering::Relaxed) {
                let taken = other.lease(&wanted, opts.wait(wait)).await?;
                ensure!(taken.is_none() || ends.load(Ordering::Relaxed), "it was taken");
            }
            Ok(())
        });
    }
    for task in 0..3 {
        let (other, ends, harness) = (open().await?, ends.clone(), harness.clone());
        let namespace = namespace.clone();
        others.spawn(async move {
            let name = format!("o{task}");
            while !ends.load(Ordering::Relaxed) {
                let lease = held(&other, &name, opts).await?;
                let gone = async {
                    match task {
                        0 => harness.delete_lease(&namespace, &key(&name)).await?,
                        1 => drop(other.force_release(Kind::Lease, &key(&name)).await?),
                        _ => return Ok(lease.release().await?),
                    }
                    drop(lease);
                    Verdict::Ok(())
                };
                within(PROMPT, "the end of a lease", gone).await??;
                // which may leave the floor to the next one, after a while
                within(PATIENCE, "a purge", other.housekeep()).await??;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        });
    }

    let start = Instant::now();
    let mut longest = Duration::ZERO;
    while start.elapsed() < TTL * 4 {
        for lease in &near {
            let asked = Instant::now();
            let renewed = lease.renew().await;
            ensure!(renewed.is_ok(), "a renewal next to the kept row failed: {renewed:?}");
            longest = longest.max(asked.elapsed());
        }
        let lost = leases.iter().filter(|lease| !lease.is_held()).count();
        ensure!(lost == 0, "{lost} leases were lost after {:?}", start.elapsed());
        while let Some(ended) = others.try_join_next() {
            ended??;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(longest < PROMPT, "a renewal took {longest:?}");
    ensure!(kept.lost().is_set(), "the kept one was renewed by nobody");
    ends.store(true, Ordering::Relaxed);
    tx.rollback().await?;
    while let Some(ended) = others.join_next().await {
        ended??;
    }
    drop(kept);
    eventually("the kept lease", || async { Ok(many.lease(&wanted, opts).await?.is_some()) })
        .await?;
    drop(leases);
    Ok(many.close().await?)
}

/// Who tries for a lease that is kept waits on the server, on a connection of the handle: with one,
/// and with as many takers as there are connections, also such as give up, renewals have theirs.
async fn takers_of_a_kept_lease_delay_no_renewal_of_their_handle(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    for connections in [1, 4] {
        let namespace = namespace();
        let holder = harness.builder(&namespace).connect(harness.url()).await?;
        let builder = harness.builder(&namespace).own_connections(connections);
        let one = Arc::new(builder.connect(harness.url()).await?);
        let leases = held_many(&one, 20, TTL).await?;
        let opts = LeaseOptions::try_once().ttl(TTL);
        let mut tx = transaction(&harness).await?;
        let mut kept = Vec::new();
        for n in 0..8 {
            let lease = held(&holder, &format!("kept{n}"), opts).await?;
            lease.verify(&mut tx).await?;
            kept.push(lease);
        }
        let mut takers = JoinSet::<Verdict>::new();
        for n in 0..8 {
            let one = one.clone();
            takers.spawn(async move {
                let (start, name) = (Instant::now(), key(&format!("kept{n}")));
                while start.elapsed() < TTL * 4 {
                    let wait = opts.wait(if n % 2 == 0 { PATIENCE } else { TTL / 10 });
                    let taking = one.lease(&name, wait);
                    if let Ok(taken) = tokio::time::timeout(TTL, taking).await {
                        // there may be no connection for it in time
                        ensure!(!matches!(taken, Ok(Some(_))), "a kept lease was taken");
                    }
                }
                Ok(())
            });
        }
        while let Some(ended) = takers.join_next().await {
            ended??;
            let lost = leases.iter().filter(|lease| !lease.is_held()).count();
            ensure!(lost == 0, "{lost} leases were lost next to takers on {connections}");
        }
        tx.rollback().await?;
        drop(kept);
        drop(leases);
        one.close().await?;
    }
    Ok(())
}

/// Who takes a lease reads the floor, which a purge on a stalled server may keep for long: that is no
/// holder of the lease, so a try fails, and who waits has it once the server goes on.
async fn a_free_lease_is_not_busy_while_a_purge_is_stuck(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[])).await??;
    let one = Arc::new(own.builder("x").answer(PATIENCE).connect(own.url()).await?);
    let mut purge = transaction(&own).await?;
    purge.query_drop("UPDATE leasehold_meta SET floor = floor + 1 WHERE id = 1").await?;
    let tried = one.lease(&key("free"), LeaseOptions::try_once().ttl(TTL)).await;
    let error = tried.err().ok_or("a try was told that somebody has it")?;
    ensure!(error.kind() == ErrorKind::Unavailable, "it said {error}");
    ensure!(error.to_string().contains("purge"), "it said {error}");
    let waiter = one.clone();
    let mut waiter = tokio::spawn(async move {
        waiter.lease(&key("free"), LeaseOptions::default().ttl(TTL).wait(PATIENCE * 3)).await
    });
    let early = tokio::time::timeout(Duration::from_secs(2), &mut waiter).await;
    ensure!(early.is_err(), "it did not wait: {early:?}");
    purge.rollback().await?;
    let lease = within(PATIENCE, "the lease", waiter).await???.ok_or("it was told busy")?;
    Ok(lease.release().await?)
}

/// A batch with a kept row is not sent again and again.
async fn kept_row_costs_few_statements(harness: Arc<MySqlHarness>) -> Verdict {
    const LONG: Duration = Duration::from_secs(9);
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[])).await??;
    let one = Arc::new(MySqlBackend::connect(own.url()).await?);
    let leases = held_many(&one, 500, LONG).await?;
    let mut tx = transaction(&own).await?;
    leases[0].verify(&mut tx).await?;
    let mut admin = own.admin().await?;
    let before = questions(&mut admin).await?;
    let reason = within(LONG * 2, "the kept lease to run out", leases[0].lost().wait()).await?;
    ensure!(reason == LossReason::Expired, "it says {reason:?}");
    let statements = questions(&mut admin).await? - before;
    println!("{statements} statements");
    // three ticks, and one of the kept lease alone each second: two tries for all that are due, and
    // one more statement each time for what is kept
    ensure!(statements <= 20 * (3 + 7), "{statements} statements in {LONG:?}");
    let lost = leases.iter().skip(1).filter(|lease| !lease.is_held()).count();
    ensure!(lost == 0, "{lost} other leases were lost");
    Ok(tx.rollback().await?)
}

async fn questions(admin: &mut mysql_async::Conn) -> Result<u64, Failure> {
    let text = "SHOW GLOBAL STATUS LIKE 'Questions'";
    let row: Option<(String, u64)> = admin.query_first(text).await?;
    Ok(row.ok_or("no such status")?.1)
}
