//! Leases and dedupe in tables: clocks, collations, purges, grants, versions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use leasehold_core::{
    Backend, Claim, ClaimLock, ClaimOptions, Dedupe, DedupeExt, DedupeOptions, Error, ErrorKind,
    HoldingQuery, Inspect, Kind, Lease, LeaseOptions, LossReason, MIN_TTL, Severity,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, Transaction};

use crate::support::{MySqlHarness, failed};
use crate::{
    PATIENCE, Verdict, ensure, eventually, key, keys, locked, namespace, with_setup, within,
};

crate::tests!("tables":
    time_zones_do_not_matter,
    collations_of_the_database_do_not_matter,
    long_keys_are_whole,
    purges_end_at_a_constant_and_lower_no_token,
    open_verify_keeps_one_lease_and_spares_the_others,
    missing_and_other_tables_are_told,
    least_privileges_suffice,
    replicas_are_refused,
    passwords_are_not_printed,
    contention_of_rows_is_retried,
    tries_of_others_fail_no_renewal,
);

const DAY: Duration = Duration::from_hours(24);

/// B79, B80: sessions of different time zones agree on leases, dedupe and `verify`.
async fn time_zones_do_not_matter(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let east = with_setup(&harness, &namespace, "SET time_zone = '+09:00'").await?;
    let west = with_setup(&harness, &namespace, "SET time_zone = '-11:00'").await?;
    for (one, two) in [(&east, &west), (&west, &east)] {
        let opts = LeaseOptions::try_once();
        let lease = one.lease(&key("x"), opts).await?.ok_or("not free")?;
        ensure!(two.lease(&key("x"), opts).await?.is_none(), "two have the lease");
        let none = two.claim(&keys(&[]), ClaimOptions::default()).await?;
        let mut claim = none.ok_or("no transaction")?;
        lease.verify(claim.tx::<Transaction<'static>>()?).await?;
        claim.rollback().await?;
        lease.release().await?;
        let short = opts.ttl(Duration::from_millis(300)).manual_renewal();
        let lease = one.lease(&key("x"), short).await?.ok_or("not free")?;
        let next = two.lease(&key("x"), LeaseOptions::default()).await?;
        ensure!(!lease.is_held(), "the holder did not give up first");
        next.ok_or("it never expired")?.release().await?;
        let event = format!("event-{:?}", std::ptr::from_ref(one));
        ensure!(one.first_seen(&key(&event), DAY).await?, "it was not the first");
        ensure!(!two.first_seen(&key(&event), DAY).await?, "two were the first");
        two.housekeep().await?;
        ensure!(!one.first_seen(&key(&event), DAY).await?, "a purge took a live entry");
    }
    Ok(())
}

/// B103: keys that a collation merges are distinct, whatever the database's default is.
async fn collations_of_the_database_do_not_matter(harness: Arc<MySqlHarness>) -> Verdict {
    let mut admin = harness.admin().await?;
    for (database, defaults) in [
        ("test_latin", "CHARACTER SET latin1 COLLATE latin1_swedish_ci"),
        ("test_general", "CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"),
    ] {
        admin.query_drop(format!("CREATE DATABASE IF NOT EXISTS {database} {defaults}")).await?;
        let url = harness.url().rsplit_once('/').ok_or("no database in the url")?.0;
        let namespace = namespace();
        let backend = harness.builder(&namespace).connect(&format!("{url}/{database}")).await?;
        backend.migrate().await?;
        for name in [
            "caf\u{e9}",
            "cafe\u{301}",
            "cafe",
            "CAFE",
            "Cafe",
            "cafe ",
            "\u{df}",
            "ss",
            "a\u{ad}b",
            "ab",
            "a\u{200d}b",
            "\u{1f600}",
            "\u{1f601}",
            "\u{1f363}",
            "\u{1f37a}",
        ] {
            ensure!(backend.first_seen(&key(name), DAY).await?, "{name:?} met another key");
            ensure!(!backend.first_seen(&key(name), DAY).await?, "{name:?} is not known");
            let lease = backend.lease(&key(name), LeaseOptions::try_once()).await?;
            std::mem::forget(lease.ok_or_else(|| format!("{name:?} met another lease"))?);
        }
        backend.close().await?;
    }
    Ok(())
}

/// B102: keys of every length up to the limit are told apart at their last byte.
async fn long_keys_are_whole(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let backend = harness.builder(&namespace).connect(harness.url()).await?;
    for length in [63, 64, 191, 255, 256, 767, 768, 1023] {
        let stem = "\u{e9}x".repeat(length / 3) + &"z".repeat(length % 3);
        for end in ["1", "2"] {
            let name = key(&format!("{stem}{end}"));
            ensure!(backend.first_seen(&name, DAY).await?, "{length} bytes met another key");
            ensure!(!backend.first_seen(&name, DAY).await?, "{length} bytes are not known");
        }
    }
    Ok(())
}

async fn count(harness: &MySqlHarness, text: &str) -> leasehold_core::Result<u64> {
    let count: Option<u64> = harness.conn().await?.query_first(text).await.map_err(failed)?;
    Ok(count.unwrap_or(0))
}

/// B106: after thousands of keys nothing but the live ones is left, and the next tokens are
/// greater all the same.
async fn purges_end_at_a_constant_and_lower_no_token(harness: Arc<MySqlHarness>) -> Verdict {
    let backend =
        harness.builder(&namespace()).table_prefix("purge_").connect(harness.url()).await?;
    backend.migrate().await?;
    let live = backend.lease(&key("live"), LeaseOptions::try_once()).await?.ok_or("not free")?;
    ensure!(backend.first_seen(&key("live"), DAY).await?, "not the first");
    let (mut lease_token, mut dedupe_token) = (0, 0);
    for _ in 0..40 {
        let lease = backend.lease(&key("often"), LeaseOptions::try_once()).await?;
        let lease = lease.ok_or("not free")?;
        lease_token = lease.token().value();
        lease.release().await?;
        let entry = backend.admit(&key("often"), DedupeOptions::default()).await?;
        let entry = entry.first().ok_or("not the first")?;
        dedupe_token = entry.token().value();
        entry.abandon().await?;
    }
    let names: Vec<_> = (0..3_000).map(|n| key(&format!("short-{n}"))).collect();
    let opts = DedupeOptions::default().retain(MIN_TTL).done_at_once();
    for admission in backend.admit_many(&names, opts).await? {
        ensure!(admission.is_first(), "not the first");
    }
    tokio::time::sleep(MIN_TTL * 2).await;
    let purged = backend.housekeep().await?;
    ensure!(purged.dedupe == 3_001 && purged.leases == 1, "it purged {purged:?}");
    let rows = count(&harness, "SELECT COUNT(*) FROM purge_dedupe").await?;
    ensure!(rows == 1, "{rows} rows of dedupe are left");
    let rows = count(&harness, "SELECT COUNT(*) FROM purge_lease").await?;
    ensure!(rows == 1 && live.is_held(), "{rows} rows of leases are left");
    let lease = backend.lease(&key("often"), LeaseOptions::try_once()).await?;
    let token = lease.ok_or("not free")?.token().value();
    ensure!(token > lease_token, "the token fell from {lease_token} to {token}");
    let entry = backend.admit(&key("often"), DedupeOptions::default()).await?;
    let token = entry.first().ok_or("not the first")?.token().value();
    ensure!(token > dedupe_token, "the token fell from {dedupe_token} to {token}");
    ensure!(!backend.first_seen(&key("live"), DAY).await?, "a purge took a live entry");
    // the sequence of named locks and claims too
    let mut last = 0;
    for _ in 0..1_200 {
        let claim = backend.claim(&keys(&["x"]), ClaimOptions::default()).await?;
        let claim = claim.ok_or("not free")?;
        ensure!(claim.token().value() > last, "{} after {last}", claim.token());
        last = claim.token().value();
        claim.rollback().await?;
    }
    backend.housekeep().await?;
    let rows = count(&harness, "SELECT COUNT(*) FROM purge_token").await?;
    ensure!(rows <= 1_001, "{rows} numbers are left");
    let token = locked(&backend, "x").await?.token().await?.value();
    ensure!(token > last, "{token} after {last}");
    Ok(backend.close().await?)
}

/// A transaction that verified a lease and stays open keeps that lease from being taken, and no
/// other lease of the handle is lost for it.
async fn open_verify_keeps_one_lease_and_spares_the_others(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let one = harness.builder(&namespace).connect(harness.url()).await?;
    let two = harness.builder(&namespace).connect(harness.url()).await?;
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(2));
    let kept = one.lease(&key("kept"), opts).await?.ok_or("not free")?;
    let other = one.lease(&key("other"), opts).await?.ok_or("not free")?;
    let none = two.claim(&keys(&[]), ClaimOptions::default()).await?;
    let mut claim: Claim = none.ok_or("no transaction")?;
    kept.verify(claim.tx::<Transaction<'static>>()?).await?;
    let reason = within(PATIENCE, "the kept lease to run out", kept.lost().wait()).await?;
    ensure!(reason == LossReason::Expired, "it says {reason:?}");
    let wait = opts.wait(Duration::from_secs(3));
    ensure!(two.lease(&key("kept"), wait).await?.is_none(), "it was taken from under a verify");
    ensure!(other.is_held(), "another lease was lost");
    claim.commit().await?;
    let next = two.lease(&key("kept"), LeaseOptions::default()).await?;
    next.ok_or("it was not to be had after the transaction")?.release().await?;
    Ok(other.release().await?)
}

/// Missing tables are told with what to do, at the first use or by `check_schema`; those of another
/// version when the handle is made.
async fn missing_and_other_tables_are_told(harness: Arc<MySqlHarness>) -> Verdict {
    let builder = harness.builder(&namespace()).table_prefix("missing_");
    let backend = builder.clone().connect(harness.url()).await?;
    let errors = [
        backend.check_schema().await.err(),
        backend.lease(&key("x"), LeaseOptions::try_once()).await.err(),
        backend.first_seen(&key("x"), DAY).await.err(),
        backend.claim(&keys(&["x"]), ClaimOptions::try_once()).await.err(),
        locked(&backend, "x").await.err().map(|error| *error.downcast().expect("an error of ours")),
        backend.housekeep().await.err(),
    ];
    for error in errors {
        let error = error.ok_or("it worked without its tables")?;
        ensure!(error.kind() == ErrorKind::Schema, "it said {error}");
        ensure!(error.to_string().contains("run migrate"), "it said {error}");
    }
    let other = harness.builder(&namespace()).table_prefix("other_");
    other.clone().connect(harness.url()).await?.migrate().await?;
    harness.conn().await?.query_drop("UPDATE other_meta SET version = 99").await?;
    let error = other.connect(harness.url()).await.err().ok_or("it works with version 99")?;
    ensure!(error.kind() == ErrorKind::Schema, "it said {error}");
    let bad = harness.builder(&namespace()).table_prefix("a`b").connect(harness.url()).await;
    ensure!(bad.is_err_and(|e| e.kind() == ErrorKind::InvalidOptions), "a bad prefix passed");
    Ok(())
}

/// The grants of the README suffice for everything but `migrate`.
async fn least_privileges_suffice(harness: Arc<MySqlHarness>) -> Verdict {
    let (user, url) = crate::least_privileged(&harness).await?;
    let mut admin = harness.admin().await?;
    for user_locks in [true, false] {
        let namespace = namespace();
        let mut builder = harness.builder(&namespace);
        if !user_locks {
            builder = builder.without_user_locks();
        }
        let backend = builder.clone().connect(&url).await?;
        let other = builder.connect(&url).await?;
        backend.check_schema().await?;
        let lock = locked(&backend, "x").await?;
        lock.token().await?;
        // a wait that is cut short kills its own session
        let wait = tokio::time::timeout(Duration::from_millis(100), locked(&other, "x")).await;
        ensure!(wait.is_err(), "two have the lock");
        lock.release().await?;
        eventually("the lock to be free", || async { Ok(crate::is_free(&other, "x").await?) })
            .await?;
        let lease = backend.lease(&key("x"), LeaseOptions::try_once()).await?.ok_or("not free")?;
        lease.renew().await?;
        let claim = backend.claim(&keys(&["x"]), ClaimOptions::default()).await?;
        let mut claim = claim.ok_or("not free")?;
        lease.verify(claim.tx::<Transaction<'static>>()?).await?;
        ensure!(claim.first_seen(&key("in"), DAY).await?, "not the first");
        claim.commit().await?;
        lease.release().await?;
        backend.admit_many(&[key("a"), key("b")], DedupeOptions::default()).await?;
        backend.housekeep().await?;
        // who holds a key, and taking away what one's own user holds, need no more either
        let held = locked(&backend, "x").await?;
        let shown = other.holdings(&HoldingQuery::key(&key("x"))).await?;
        ensure!(shown.len() == 1 && shown[0].holder.is_some(), "it shows {shown:?}");
        ensure!(other.force_release(Kind::Lock, &key("x")).await?.is_some(), "nobody had it");
        within(PATIENCE, "the loss", held.lost().wait()).await?;
        let findings = other.diagnose().await?;
        let mut faults = findings.iter().filter(|one| one.severity == Severity::Fault);
        ensure!(faults.next().is_none(), "it finds {findings:#?}");
    }
    let fresh = MySqlBackend::builder().table_prefix("denied_").connect(&url).await?;
    let error = fresh.migrate().await.err().ok_or("it created tables without the right")?;
    ensure!(error.kind() == ErrorKind::Backend, "it said {error}");
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await?;
    Ok(())
}

/// B31: a server that is read-only gives no lock, and no handle.
async fn replicas_are_refused(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[])).await??;
    let before = own.builder("x").connect(own.url()).await?;
    own.admin().await?.query_drop("SET GLOBAL read_only = 1").await?;
    let refused = own.builder("x").connect(own.url()).await;
    let error = refused.err().ok_or("a handle was made on a replica")?;
    ensure!(error.kind() == ErrorKind::Unavailable, "it said {error}");
    ensure!(error.to_string().contains("not the primary"), "it said {error}");
    let opts = leasehold_core::LockOptions::try_once();
    let lock = leasehold_core::NamedLock::lock(&before, &key("x"), opts).await;
    ensure!(lock.is_err(), "a replica gave {lock:?}");
    let lease = before.lease(&key("x"), LeaseOptions::try_once()).await;
    ensure!(lease.is_err(), "a replica gave {lease:?}");
    own.admin().await?.query_drop("SET GLOBAL read_only = 0").await?;
    eventually("the lock after the promotion", || async {
        Ok(matches!(leasehold_core::NamedLock::lock(&before, &key("x"), opts).await, Ok(Some(_))))
    })
    .await
}

/// No output of a handle, a guard or an error holds the password.
async fn passwords_are_not_printed(harness: Arc<MySqlHarness>) -> Verdict {
    let user = format!("secretive{:08x}", rand::random::<u32>());
    let password = "hunter2hunter2";
    let mut admin = harness.admin().await?;
    admin.query_drop(format!("CREATE USER '{user}'@'%' IDENTIFIED BY '{password}'")).await?;
    admin.query_drop(format!("GRANT ALL ON test.* TO '{user}'@'%'")).await?;
    let port = Opts::from_url(harness.url())?.tcp_port();
    let url = format!("mysql://{user}:{password}@127.0.0.1:{port}/test");
    let backend = harness.builder(&namespace()).connect(&url).await?;
    let lock = locked(&backend, "x").await?;
    let lease = backend.lease(&key("x"), LeaseOptions::try_once()).await?;
    let claim = backend.claim(&keys(&["x"]), ClaimOptions::default()).await?;
    let mut printed = format!("{backend:?} {lock:?} {lease:?} {claim:?}");
    for bad in [
        format!("mysql://{user}:{password}@127.0.0.1:1/test"),
        format!("mysql://{user}:{password}x@127.0.0.1:{port}/test"),
        format!("mysql://{user}:{password}@127.0.0.1:{port}/nosuchdatabase"),
        format!("mysql://{user}:{password}@127.0.0.1:{port}/test?pool_min={password}"),
        format!("mysql://{user}:{password}@:::/"),
    ] {
        let error = MySqlBackend::connect(&bad).await.err().ok_or("a bad url worked")?;
        printed.extend([error.to_string(), format!("{error:?}")]);
    }
    ensure!(!printed.contains(password), "it printed {printed}");
    drop((lock, lease, claim));
    backend.close().await?;
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await?;
    Ok(())
}

/// What the tasks do together, in at most [`ROUNDS_LIMIT`].
const ROUNDS: u32 = 1000;
const ROUNDS_LIMIT: Duration = Duration::from_secs(60);

fn ensure_in_time(start: std::time::Instant) -> leasehold_core::Result<()> {
    if start.elapsed() < ROUNDS_LIMIT {
        return Ok(());
    }
    let detail = format!("the rounds were not done within {ROUNDS_LIMIT:?}");
    Err(Error::new(ErrorKind::Unavailable, detail))
}

/// B97, B100: many tasks admit, complete, abandon and purge a few keys, and lease them: the
/// server's deadlocks and time-outs are nobody's business.
async fn contention_of_rows_is_retried(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let mut tasks = tokio::task::JoinSet::<leasehold_core::Result<()>>::new();
    let start = std::time::Instant::now();
    let rounds = Arc::new(AtomicU32::new(0));
    for _ in 0..2 {
        let builder = MySqlBackend::builder().namespace(&namespace);
        let backend = Arc::new(builder.connect(harness.url()).await?);
        for task in 0..25_u32 {
            let (backend, rounds) = (backend.clone(), rounds.clone());
            tasks.spawn(async move {
                while rounds.fetch_add(1, Ordering::Relaxed) < ROUNDS {
                    ensure_in_time(start)?;
                    let name = key(&format!("k{}", rand::random_range(0..20)));
                    match task % 5 {
                        0 => drop(backend.housekeep().await?),
                        1 => drop(backend.lease(&name, LeaseOptions::try_once()).await?),
                        2 => {
                            let names: Vec<_> = (0..20).map(|n| key(&format!("k{n}"))).collect();
                            let opts = DedupeOptions::default().retain(MIN_TTL);
                            drop(backend.admit_many(&names, opts).await?);
                        }
                        _ => {
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
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// A statement of somebody else keeps the row for a moment: who tries for the lease all the time, or
/// purges next to it, fails no renewal.
async fn tries_of_others_fail_no_renewal(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let holder = harness.builder(&namespace).connect(harness.url()).await?;
    let lease = holder.lease(&key("x"), LeaseOptions::try_once()).await?.ok_or("not free")?;
    let ends = Arc::new(AtomicBool::new(false));
    let mut others = tokio::task::JoinSet::<leasehold_core::Result<bool>>::new();
    for task in 0..4 {
        // each a handle of its own, whose tries reach the server
        let other = harness.builder(&namespace).connect(harness.url()).await?;
        let ends = ends.clone();
        others.spawn(async move {
            let mut got = false;
            while !ends.load(Ordering::Relaxed) {
                if task == 0 {
                    other.housekeep().await?;
                } else {
                    got |= other.lease(&key("x"), LeaseOptions::try_once()).await?.is_some();
                }
            }
            Ok(got)
        });
    }
    let mut failed = 0;
    for _ in 0..300 {
        match lease.renew().await {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable => failed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    ends.store(true, Ordering::Relaxed);
    while let Some(done) = others.join_next().await {
        ensure!(!done??, "two have the lease");
    }
    ensure!(failed == 0, "{failed} of 300 renewals failed");
    Ok(lease.release().await?)
}
