//! Claims, their transactions and the caller's pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_core::{
    Backend, Claim, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Lease, LeaseOptions,
    LockOptions, MIN_TTL, NamedLock,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts, Transaction};

use crate::support::MySqlHarness;
use crate::{Verdict, ensure, key, keys, namespace, nothing_left};

crate::tests!("claims":
    cancelled_calls_leave_nothing,
    session_settings_are_put_back,
    pool_without_reset_never_gets_a_lock_back,
    reads_nothing_older_than_the_lock,
    killed_connection_is_told_and_frees,
    ended_transaction_is_told_at_the_commit,
    crossed_user_locks_are_a_typed_deadlock,
    kill_query_during_a_wait_only_delays,
    first_seen_never_ends_a_transaction_for_a_deadlock,
);

/// A pool of so many connections to the server, for a look at them too.
fn pool(harness: &MySqlHarness, connections: usize, reset: bool) -> leasehold_core::Result<Pool> {
    let opts = Opts::from_url(harness.url()).map_err(crate::support::failed)?;
    let constraints =
        PoolConstraints::new(connections, connections).expect("equal is not above it");
    let opts = OptsBuilder::from_opts(opts)
        .prefer_socket(false)
        .pool_opts(PoolOpts::default().with_constraints(constraints).with_reset_connection(reset));
    Ok(Pool::new(opts))
}

async fn claimed(
    backend: &MySqlBackend,
    names: &[&str],
) -> Result<Claim, Box<dyn std::error::Error + Send + Sync>> {
    let claim = backend.claim(&keys(names), ClaimOptions::default()).await?;
    claim.ok_or_else(|| format!("{names:?} were not to be had").into())
}

/// B03, B06, B07, B52: 500 calls that are dropped at random moments leave no user-level lock, no
/// open transaction, no lost place in the pool, and no connection that answers an old question.
async fn cancelled_calls_leave_nothing(harness: Arc<MySqlHarness>) -> Verdict {
    for user_locks in [true, false] {
        let namespace = namespace();
        let mut builder = harness.builder(&namespace);
        if !user_locks {
            builder = builder.without_user_locks();
        }
        let (one, _way) = harness.open_with(&namespace, builder.clone(), 4).await?;
        let (two, _way2) = harness.open_with(&namespace, builder, 4).await?;
        let one = Arc::new(one);
        let mut tasks = tokio::task::JoinSet::new();
        for round in 0..500_u64 {
            let one = one.clone();
            tasks.spawn(async move {
                let name = key(&format!("key-{}", round % 5));
                let moment = Duration::from_micros(rand::random_range(0..6_000));
                let call = async {
                    match round % 3 {
                        0 => drop(one.lock(&name, LockOptions::default()).await),
                        1 => drop(one.lease(&name, LeaseOptions::default()).await),
                        _ => {
                            let both = keys(&[name.as_str(), "common"]);
                            if let Ok(Some(mut claim)) =
                                one.claim(&both, ClaimOptions::default()).await
                            {
                                if let Ok(tx) = claim.tx::<Transaction<'static>>() {
                                    drop(tx.query_drop("DO 1").await);
                                }
                                drop(claim.commit().await);
                            }
                        }
                    }
                };
                drop(tokio::time::timeout(moment, call).await);
            });
            if round % 20 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        tasks.join_all().await;
        nothing_left(&harness, &namespace).await?;
        // all four connections are to be had at once, and each answers its own question
        let mut claims = Vec::new();
        for n in 0..4_u32 {
            claims.push(claimed(&one, &[&format!("slot-{n}")]).await?);
        }
        for (n, claim) in claims.iter_mut().enumerate() {
            let tx = claim.tx::<Transaction<'static>>()?;
            let answer: Option<usize> = tx.query_first(format!("SELECT {n} + 1000")).await?;
            ensure!(answer == Some(n + 1000), "connection {n} answered {answer:?}");
        }
        for claim in claims {
            claim.commit().await?;
        }
        for n in 0..5 {
            let name = format!("key-{n}");
            ensure!(crate::is_free(&two, &name).await?, "{name} is still locked");
            claimed(&two, &[&name, "common"]).await?.rollback().await?;
        }
        nothing_left(&harness, &namespace).await?;
    }
    Ok(())
}

const SETTINGS: &str = "SELECT @@innodb_lock_wait_timeout, @@autocommit, @@wait_timeout";

/// B23: no setting leaks to the next user of a pooled connection, nor into the transaction.
async fn session_settings_are_put_back(harness: Arc<MySqlHarness>) -> Verdict {
    for (user_locks, reset) in [(true, true), (true, false), (false, true), (false, false)] {
        let pool = pool(&harness, 1, reset)?;
        let wanted: Option<(u64, u64, u64)> = pool.get_conn().await?.query_first(SETTINGS).await?;
        let namespace = namespace();
        let mut builder = harness.builder(&namespace);
        if !user_locks {
            builder = builder.without_user_locks();
        }
        let one = builder.clone().from_pool(pool.clone()).await?;
        let two = builder.connect(harness.url()).await?;
        let mut claim = claimed(&one, &["x"]).await?;
        let within: Option<(u64, u64, u64)> =
            claim.tx::<Transaction<'static>>()?.query_first(SETTINGS).await?;
        ensure!(within == wanted, "within a claim {within:?} instead of {wanted:?}");
        claim.commit().await?;
        let held = claimed(&two, &["x"]).await?;
        for wait in [0, 50, 1300] {
            let opts = ClaimOptions::default().wait(Duration::from_millis(wait));
            let busy = one.claim(&keys(&["x"]), opts).await?;
            ensure!(busy.is_none(), "two have the claim");
            let after: Option<(u64, u64, u64)> =
                pool.get_conn().await?.query_first(SETTINGS).await?;
            ensure!(after == wanted, "after a wait of {wait} ms {after:?} instead of {wanted:?}");
        }
        let waiter = keys(&["x"]);
        let wait = one.claim(&waiter, ClaimOptions::default());
        ensure!(
            tokio::time::timeout(Duration::from_millis(200), wait).await.is_err(),
            "two have the claim"
        );
        let after: Option<(u64, u64, u64)> = pool.get_conn().await?.query_first(SETTINGS).await?;
        ensure!(after == wanted, "after a cancelled wait {after:?} instead of {wanted:?}");
        held.rollback().await?;
    }
    Ok(())
}

/// A pool that resets nothing: a connection that comes back has no lock and no transaction.
async fn pool_without_reset_never_gets_a_lock_back(harness: Arc<MySqlHarness>) -> Verdict {
    let pool = pool(&harness, 2, false)?;
    let namespace = namespace();
    let one = harness.builder(&namespace).from_pool(pool.clone()).await?;
    let two = harness.builder(&namespace).connect(harness.url()).await?;
    for round in 0..12 {
        let mut claim = claimed(&one, &["a", "b"]).await?;
        let tx = claim.tx::<Transaction<'static>>()?;
        tx.query_drop(
            "INSERT INTO numbers VALUES ('no-reset', 1) ON DUPLICATE KEY UPDATE value = 1",
        )
        .await?;
        match round % 4 {
            0 => claim.commit().await?,
            1 => claim.rollback().await?,
            2 => drop(claim),
            _ => {
                // a statement that is cut in the middle
                let tx = claim.tx::<Transaction<'static>>()?;
                let sleep = tx.query_drop("DO SLEEP(0.2)");
                drop(tokio::time::timeout(Duration::from_millis(20), sleep).await);
                drop(claim);
            }
        }
        claimed(&two, &["a", "b"]).await?.commit().await?;
        for _ in 0..2 {
            let mut conn = pool.get_conn().await?;
            let names = [one.claim_name(&key("a")), one.claim_name(&key("b"))];
            let held = format!(
                "SELECT IFNULL(IS_USED_LOCK('{}') = CONNECTION_ID(), 0) \
                 + IFNULL(IS_USED_LOCK('{}') = CONNECTION_ID(), 0)",
                names[0], names[1]
            );
            let held: Option<u8> = conn.query_first(held).await?;
            ensure!(held == Some(0), "round {round}: a pooled connection holds {held:?} locks");
        }
    }
    Ok(())
}

/// B26: what an earlier holder committed while this one waited is read.
async fn reads_nothing_older_than_the_lock(harness: Arc<MySqlHarness>) -> Verdict {
    for user_locks in [true, false] {
        let namespace = namespace();
        let mut builder = harness.builder(&namespace);
        if !user_locks {
            builder = builder.without_user_locks();
        }
        let one = builder.clone().connect(harness.url()).await?;
        let two = builder.connect(harness.url()).await?;
        let row = format!("{namespace}-n");
        for round in 1..=5_i64 {
            let mut first = claimed(&one, &["x"]).await?;
            let (second, committed) = tokio::join!(claimed(&two, &["x"]), async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let tx = first.tx::<Transaction<'static>>()?;
                let write = format!(
                    "INSERT INTO numbers VALUES ('{row}', {round}) \
                     ON DUPLICATE KEY UPDATE value = {round}"
                );
                tx.query_drop(write).await.map_err(crate::support::failed)?;
                first.commit().await
            });
            committed?;
            let mut second = second?;
            let read = format!("SELECT value FROM numbers WHERE name = '{row}'");
            let value: Option<i64> = second.tx::<Transaction<'static>>()?.query_first(read).await?;
            ensure!(value == Some(round), "round {round} read {value:?}");
            second.commit().await?;
        }
    }
    Ok(())
}

/// The claim's connection is killed: statements and the commit fail, and others get the key.
async fn killed_connection_is_told_and_frees(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let one = harness.builder(&namespace).connect(harness.url()).await?;
    let two = harness.builder(&namespace).connect(harness.url()).await?;
    let mut claim = claimed(&one, &["x"]).await?;
    let id = claim.tx::<Transaction<'static>>()?.id();
    harness.admin().await?.query_drop(format!("KILL {id}")).await?;
    claimed(&two, &["x"]).await?.commit().await?;
    let committed = claim.commit().await.map_err(|error| error.kind());
    ensure!(
        matches!(committed, Err(ErrorKind::CommitUnknown | ErrorKind::Unavailable)),
        "the commit said {committed:?}"
    );
    claimed(&one, &["x"]).await?.commit().await?;
    Ok(())
}

/// B100: a deadlock between rows ends the whole transaction. What follows would be committed on its
/// own: the commit says so instead of passing for whole.
async fn ended_transaction_is_told_at_the_commit(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let one = harness.builder(&namespace).connect(harness.url()).await?;
    let rows = [format!("{namespace}-1"), format!("{namespace}-2")];
    for row in &rows {
        let insert = format!("INSERT INTO numbers VALUES ('{row}', 0)");
        harness.conn().await?.query_drop(insert).await?;
    }
    let mut claims = [claimed(&one, &["a"]).await?, claimed(&one, &["b"]).await?];
    let add = |row: &String| format!("UPDATE numbers SET value = value + 1 WHERE name = '{row}'");
    for (claim, row) in claims.iter_mut().zip(&rows) {
        claim.tx::<Transaction<'static>>()?.query_drop(add(row)).await?;
    }
    let [first, second] = &mut claims;
    let (x, y) = tokio::join!(
        first.tx::<Transaction<'static>>()?.query_drop(add(&rows[1])),
        second.tx::<Transaction<'static>>()?.query_drop(add(&rows[0])),
    );
    ensure!(x.is_err() != y.is_err(), "expected one deadlock: {x:?}, {y:?}");
    let [first, second] = claims;
    let (victim, winner) = if x.is_err() { (first, second) } else { (second, first) };
    winner.commit().await?;
    let mut victim = victim;
    victim.tx::<Transaction<'static>>()?.query_drop("DO 1").await?;
    let committed = victim.commit().await.map_err(|error| error.kind());
    ensure!(committed == Err(ErrorKind::CommitUnknown), "the commit said {committed:?}");
    Ok(())
}

/// B49: a cycle of user-level locks is told as a deadlock, whoever the server picks.
async fn crossed_user_locks_are_a_typed_deadlock(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let one = harness.builder(&namespace).connect(harness.url()).await?;
    let mut names = [one.claim_name(&key("a")), one.claim_name(&key("b"))];
    names.sort();
    let mut raw = harness.conn().await?;
    let held: Option<u8> = raw.query_first(format!("SELECT GET_LOCK('{}', 0)", names[1])).await?;
    ensure!(held == Some(1), "the raw session got {held:?}");
    let both = keys(&["a", "b"]);
    let (claim, raw) = tokio::join!(one.claim(&both, ClaimOptions::default()), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let crossed = format!("SELECT GET_LOCK('{}', 5)", names[0]);
        let outcome = raw.query_first::<Option<u8>, _>(crossed).await;
        let free = format!("DO RELEASE_LOCK('{}'), RELEASE_LOCK('{}')", names[0], names[1]);
        raw.query_drop(free).await.map(|()| outcome)
    });
    match (claim, raw?) {
        (Err(error), Ok(Some(Some(1)))) => {
            ensure!(error.kind() == ErrorKind::Deadlock && error.is_retryable(), "it said {error}");
        }
        (Ok(Some(claim)), Err(mysql_async::Error::Server(error))) => {
            ensure!([3058, 1213].contains(&error.code), "the raw session was told {error}");
            claim.commit().await?;
        }
        other => return Err(format!("expected one deadlock: {other:?}").into()),
    }
    claimed(&one, &["a", "b"]).await?.commit().await?;
    Ok(())
}

async fn kill_query_during_a_wait_only_delays(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = harness.open_with(&namespace, harness.builder(&namespace), 4).await?;
    let two = harness.builder(&namespace).connect(harness.url()).await?;
    let first = claimed(&two, &["x"]).await?;
    let waiter = keys(&["x"]);
    let wait = one.claim(&waiter, ClaimOptions::default().wait(Duration::from_secs(60)));
    let (claim, freed) = tokio::join!(wait, async {
        let mut admin = harness.admin().await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        for _ in 0..10 {
            for id in harness.sessions(&way.name).await? {
                // one that has just ended is fine
                drop(admin.query_drop(format!("KILL QUERY {id}")).await);
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        first.commit().await
    });
    freed?;
    claim?.ok_or("the wait ended without the claim")?.commit().await?;
    nothing_left(&harness, &namespace).await
}

/// B97: claims that see one key after another first, roll back or commit, next to admissions and
/// purges of the same keys and of others: no transaction is the victim of a deadlock.
async fn first_seen_never_ends_a_transaction_for_a_deadlock(harness: Arc<MySqlHarness>) -> Verdict {
    const ROUNDS: usize = 40;
    let namespace = namespace();
    let mut handles = Vec::new();
    for _ in 0..3 {
        handles.push(Arc::new(harness.builder(&namespace).connect(harness.url()).await?));
    }
    let mut tasks = tokio::task::JoinSet::<Verdict>::new();
    for task in 0..24 {
        let backend = handles[task % handles.len()].clone();
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let mut claim = claimed(&backend, &[&format!("own-{task}")]).await?;
                let event = key(&format!("event-{round}"));
                let first = claim.first_seen(&event, Duration::from_secs(60)).await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                if first && rand::random_bool(0.5) {
                    claim.rollback().await?;
                } else {
                    claim.commit().await?;
                }
            }
            Ok(())
        });
    }
    let ends = Arc::new(AtomicBool::new(false));
    let mut others = tokio::task::JoinSet::<Verdict>::new();
    for (task, backend) in handles.iter().enumerate() {
        let (backend, ends) = (backend.clone(), ends.clone());
        others.spawn(async move {
            while !ends.load(Ordering::Relaxed) {
                match task {
                    0 => drop(backend.housekeep().await?),
                    1 => {
                        let names: Vec<_> = (0..20).map(|n| key(&format!("k{n}"))).collect();
                        let opts = DedupeOptions::default().retain(MIN_TTL);
                        drop(backend.admit_many(&names, opts).await?);
                    }
                    _ => {
                        let name = key(&format!("k{}", rand::random_range(0..20)));
                        let opts = DedupeOptions::default().retain(MIN_TTL);
                        if let Some(entry) = backend.admit(&name, opts).await?.first() {
                            entry.complete().await?;
                        }
                    }
                }
            }
            Ok(())
        });
    }
    let mut outcome = Ok(());
    while let Some(done) = tasks.join_next().await {
        outcome = outcome.and(done?);
    }
    ends.store(true, Ordering::Relaxed);
    while let Some(done) = others.join_next().await {
        outcome = outcome.and(done?);
    }
    outcome
}
