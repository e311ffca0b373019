//! Stated limits, and many of everything.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, ErrorKind, Lease, LeaseOptions, LockOptions, NamedLock};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use tokio::task::JoinSet;

use crate::support::MySqlHarness;
use crate::{
    PATIENCE, Verdict, ensure, eventually, is_free, key, locked, namespace, nothing_left, within,
};

crate::tests!("scale":
    thousands_of_locks_on_one_handle,
    locks_beyond_one_session_are_lost_with_their_own_session_only,
    ten_thousand_leases_in_a_few_statements,
);

/// B30: one handle holds as many locks as it says, refuses the next as exhausted, and all it holds
/// stay good.
async fn thousands_of_locks_on_one_handle(harness: Arc<MySqlHarness>) -> Verdict {
    let most = if harness.kind() == Kind::MySql { 10_000 } else { 2_000 };
    let namespace = namespace();
    let builder = || MySqlBackend::builder().namespace(&namespace);
    let one = Arc::new(builder().connect(harness.url()).await?);
    let two = builder().connect(harness.url()).await?;
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for n in 0..most {
        let one = one.clone();
        tasks.spawn(async move { one.lock(&key(&format!("k{n}")), LockOptions::default()).await });
    }
    let mut guards = Vec::new();
    while let Some(done) = tasks.join_next().await {
        guards.push(done??.ok_or("it is held by nobody else")?);
    }
    println!("{most} locks in {:?}", start.elapsed());
    let refused = one.lock(&key("one more"), LockOptions::try_once()).await;
    let refused = refused.err().ok_or("it went past its limit")?;
    ensure!(refused.kind() == ErrorKind::Exhausted, "it said {refused}");
    ensure!(guards.iter().all(leasehold_core::LockGuard::is_held), "a lock was lost");
    for n in [0, most / 2, most - 1] {
        ensure!(!is_free(&two, &format!("k{n}")).await?, "k{n} is free");
    }
    let mut releases = JoinSet::new();
    for guard in guards {
        releases.spawn(guard.release());
    }
    while let Some(done) = releases.join_next().await {
        done??;
    }
    ensure!(is_free(&two, "k0").await?, "k0 is still held");
    Ok(())
}

/// More locks than one session may hold are on several, each of which is lost and opened again by
/// itself; exclusion holds on all of them.
async fn locks_beyond_one_session_are_lost_with_their_own_session_only(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    let namespace = namespace();
    let builder = || MySqlBackend::builder().namespace(&namespace);
    let one = builder().max_per_session(3).connect(harness.url()).await?;
    let two = builder().connect(harness.url()).await?;
    let mut admin = harness.admin().await?;
    let mut guards = Vec::new();
    let mut sessions: Vec<u64> = Vec::new();
    for n in 0..9 {
        guards.push(locked(&one, &format!("k{n}")).await?);
        let used = format!("SELECT IS_USED_LOCK('{}')", one.lock_name(&key(&format!("k{n}"))));
        let session: Option<Option<u64>> = admin.query_first(used).await?;
        sessions.push(session.flatten().ok_or("it is not held")?);
    }
    let distinct: HashSet<u64> = sessions.iter().copied().collect();
    ensure!(distinct.len() == 3, "nine locks are on {sessions:?}");
    ensure!(sessions.chunks(3).all(|three| three.iter().all(|s| *s == three[0])), "{sessions:?}");
    let mut gone = HashSet::new();
    for ended in [1, 0, 2] {
        admin.query_drop(format!("KILL {}", sessions[3 * ended])).await?;
        gone.insert(sessions[3 * ended]);
        for (n, (guard, session)) in guards.iter().zip(&sessions).enumerate() {
            let name = format!("k{n}");
            if gone.contains(session) {
                within(PATIENCE, "a loss", guard.lost().wait()).await?;
                eventually("a free key", async || Ok(is_free(&two, &name).await?)).await?;
            } else {
                ensure!(guard.is_held(), "{name} was lost with another session");
                ensure!(!is_free(&two, &name).await?, "{name} is free but not lost");
            }
        }
    }
    let refilled: Vec<_> = (0..9).map(|n| format!("k{n}")).collect();
    let mut again = Vec::new();
    for name in &refilled {
        again.push(locked(&one, name).await?);
    }
    for (guard, name) in again.into_iter().zip(&refilled) {
        ensure!(!is_free(&two, name).await?, "{name} is free");
        guard.release().await?;
    }
    drop(guards);
    one.close().await?;
    nothing_left(&harness, &namespace).await
}

/// 10,000 leases of one handle are renewed in at most 10 statements a tick.
async fn ten_thousand_leases_in_a_few_statements(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[])).await??;
    let one = Arc::new(MySqlBackend::connect(own.url()).await?);
    let ttl = Duration::from_secs(30);
    let opts = LeaseOptions::try_once().ttl(ttl);
    let mut tasks = JoinSet::new();
    for n in 0..10_000 {
        let one = one.clone();
        tasks.spawn(async move { one.lease(&key(&format!("k{n}")), opts).await });
    }
    let mut leases = Vec::new();
    while let Some(done) = tasks.join_next().await {
        leases.push(done??.ok_or("it is held by nobody else")?);
    }
    // the first tick brings leases of one ttl into step
    tokio::time::sleep(ttl / 2).await;
    let mut admin = own.admin().await?;
    let before = updates(&mut admin).await?;
    let ticks = 3;
    tokio::time::sleep(ttl / 3 * ticks).await;
    let statements = updates(&mut admin).await? - before;
    ensure!(leases.iter().all(leasehold_core::LeaseGuard::is_held), "a lease was lost");
    let live = "SELECT COUNT(*) FROM leasehold_lease WHERE expires > \
                TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
    let live: Option<usize> = own.conn().await?.query_first(live).await?;
    ensure!(live == Some(leases.len()), "the server has {live:?} of them");
    println!("{statements} statements in {ticks} ticks");
    ensure!(
        (4..=10 * u64::from(ticks)).contains(&statements),
        "{statements} statements in {ticks} ticks"
    );
    Ok(())
}

async fn updates(admin: &mut mysql_async::Conn) -> mysql_async::Result<u64> {
    let status = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_update', 'Com_update_multi')";
    let counts: Vec<(String, u64)> = admin.query(status).await?;
    Ok(counts.into_iter().map(|(_, count)| count).sum())
}
