//! Leases and dedupe: rows, clocks and notifications.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::backend::LeaseLimits;
use leasehold_core::{
    Admission, Backend, ClaimLock, ClaimOptions, Dedupe, DedupeExt, DedupeOptions, ErrorKind, Keys,
    Lease, LeaseOptions,
};
use sqlx::postgres::PgPoolOptions;

use crate::env::{Env, PATIENCE, ask, got, key, namespace, run, soon, until};
use crate::support::{Tx, mark};

/// B27: an expiry that was computed before the wait for the row would be born short.
pub(crate) async fn expiry_is_counted_from_when_the_row_was_ours(env: &Env) {
    let ns = namespace("row");
    let a = Arc::new(env.handle(&ns).await);
    let opts = LeaseOptions::default().ttl(Duration::from_secs(5)).manual_renewal();
    let row = format!("namespace = '{ns}'::bytea");
    for _ in 0..3 {
        let old = got(a.lease(&key("x"), opts).await);
        let mut admin = env.admin().await;
        let expire = "UPDATE leasehold.lease SET expires_at = clock_timestamp() WHERE";
        run(&mut admin, format!("{expire} {row}")).await;
        run(&mut admin, format!("BEGIN; SELECT FROM leasehold.lease WHERE {row} FOR UPDATE")).await;
        let (b, wait) = (env.handle(&ns).await, opts.wait(PATIENCE));
        let waiter = tokio::spawn(async move { got(b.lease(&key("x"), wait).await) });
        until("a wait for the row", || async { waits_for_row(env, &ns).await }).await;
        let start = Instant::now();
        until("some time", || async { start.elapsed() > Duration::from_millis(300) }).await;
        run(&mut admin, "ROLLBACK").await;
        let lease = soon("the lease", waiter).await.unwrap();
        let left = format!(
            "SELECT (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::int8::text \
             FROM leasehold.lease WHERE {row}"
        );
        // asked for first: the holder gives up before the store does
        let remaining = lease.remaining();
        let left: u64 = ask(&mut admin, left).await.parse().unwrap();
        let late = Duration::from_secs(1); // between the two questions, on a busy machine
        assert!(Duration::from_millis(left) + late > remaining, "{left} ms, {remaining:?}");
        assert!(lease.token() > old.token());
        assert!(lease.is_held());
        lease.release().await.unwrap();
        drop(old.release().await);
    }
}

async fn waits_for_row(env: &Env, ns: &str) -> bool {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
        AND starts_with(application_name, $1))";
    sqlx::query_scalar(sql).bind(mark(ns)).fetch_one(&mut env.admin().await).await.unwrap()
}

/// B76: the server's clock jumps (here by the expiry, seen from the other side). Forwards, the
/// lease is over at once, and its holder hears that at the next renewal; backwards, it stays the
/// holder's, and nobody believes in it longer than the local deadline says.
pub(crate) async fn a_jump_of_the_servers_clock_makes_no_second_holder(env: &Env) {
    let ns = namespace("jump");
    let (a, b) = (env.handle(&ns).await, env.handle(&ns).await);
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(3));
    let mut admin = env.admin().await;
    let mut jump = async |by: &str| {
        let update = "UPDATE leasehold.lease SET expires_at = expires_at + interval";
        run(&mut admin, format!("{update} '{by}' WHERE namespace = '{ns}'::bytea")).await;
    };
    let held = got(a.lease(&key("x"), opts).await);
    jump("10 minutes").await;
    assert!(b.lease(&key("x"), opts).await.unwrap().is_none());
    assert!(held.is_held() && held.remaining() <= Duration::from_secs(3));
    jump("-20 minutes").await;
    let next = got(b.lease(&key("x"), opts.wait(PATIENCE)).await);
    soon("the loss", async { held.lost().wait().await }).await;
    assert!(next.token() > held.token());
    assert_eq!(held.renew().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(held.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(b.lease(&key("x"), opts).await.unwrap().is_none(), "a stale release hit the next one");
    next.release().await.unwrap();
}

/// B38: the subscription's session is ended, and the release falls into the gap.
pub(crate) async fn a_missed_notification_is_made_up_for(env: &Env) {
    let ns = namespace("missed");
    let mut limits = LeaseLimits::default();
    limits.max_poll = Duration::from_secs(3_600); // polling does not help here
    let builder = env.builder(&ns).lease_limits(limits);
    let a = env.builder(&ns).application_name("holder").connect(&env.url()).await.unwrap();
    let b = Arc::new(builder.connect(&env.url()).await.unwrap());
    let opts = LeaseOptions::default().ttl(Duration::from_secs(600)).wait(PATIENCE);
    for gap in [false, true, true] {
        let held = got(a.lease(&key("x"), opts).await);
        let waiter = {
            let b = b.clone();
            tokio::spawn(async move { b.lease(&key("x"), opts).await })
        };
        let listens = "SELECT EXISTS (SELECT 1 FROM pg_stat_activity \
            WHERE query LIKE 'LISTEN%' AND starts_with(application_name, $1))";
        until("a subscription", || async {
            let query = sqlx::query_scalar::<_, bool>(listens).bind(mark(&ns));
            query.fetch_one(&mut env.admin().await).await.unwrap()
        })
        .await;
        // the waiter looks once more after it has subscribed, then it sleeps
        let start = Instant::now();
        until("the last look", || async { start.elapsed() > Duration::from_millis(300) }).await;
        if gap {
            env.end_sessions(&ns).await;
        }
        held.release().await.unwrap();
        let lease = got(soon("the lease", waiter).await.unwrap());
        lease.release().await.unwrap();
    }
}

/// B79, B80: sessions of different time zones, one of them in the hour that daylight saving repeats.
pub(crate) async fn time_zones_do_not_matter(env: &Env) {
    let ns = namespace("zones");
    let handle = |zone: &'static str| {
        let pool = PgPoolOptions::new().max_connections(2).after_connect(move |conn, _| {
            Box::pin(async move {
                let sql = sqlx::AssertSqlSafe(format!("SET TimeZone = '{zone}'"));
                sqlx::raw_sql(sql).execute(conn).await.map(drop)
            })
        });
        env.builder(&ns).build(pool.connect_lazy_with(env.options())).unwrap()
    };
    let (east, west) = (handle("Asia/Tokyo"), handle("America/New_York"));
    let year = Duration::from_secs(366 * 24 * 3600);
    for (n, ttl) in [Duration::from_secs(60), year].into_iter().enumerate() {
        for (a, b) in [(&east, &west), (&west, &east)] {
            let opts = LeaseOptions::try_once().ttl(ttl);
            let lease = got(a.lease(&key("x"), opts).await);
            assert!(b.lease(&key("x"), opts).await.unwrap().is_none());
            let sql = format!(
                "SELECT (extract(epoch FROM expires_at - clock_timestamp()))::int8::text \
                 FROM leasehold.lease WHERE namespace = '{ns}'::bytea"
            );
            let left: u64 = ask(&mut env.admin().await, sql).await.parse().unwrap();
            let given = ttl.as_secs();
            assert!((given - 30..=given).contains(&left), "{left} s of {given} s");
            lease.release().await.unwrap();
            // a row of before is admitted again: its expiry goes through an interval
            let name = key(&format!("d{n}-{}", rand::random::<u32>()));
            let short = DedupeOptions::default().in_progress(Duration::from_millis(100));
            let first = a.admit(&name, short).await.unwrap();
            until("a takeover", || async {
                let opts = DedupeOptions::default().in_progress(ttl);
                let admitted = b.admit(&name, opts).await.unwrap();
                admitted.first().is_some_and(|guard| {
                    std::mem::forget(guard); // it stays in progress
                    true
                })
            })
            .await;
            drop(first);
            let sql = format!(
                "SELECT (extract(epoch FROM expires_at - clock_timestamp()))::int8::text \
                 FROM leasehold.dedupe WHERE key = '{name}'::bytea"
            );
            let left: u64 = ask(&mut env.admin().await, sql).await.parse().unwrap();
            assert!((given - 30..=given).contains(&left), "{left} s of {given} s");
            let Admission::InProgress { since } = a.admit(&name, short).await.unwrap() else {
                panic!("it is in progress");
            };
            let now = "SELECT extract(epoch FROM now())::int8::text";
            let now = ask(&mut env.admin().await, now).await;
            let now = Duration::from_secs(now.parse().unwrap());
            let since = since.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
            assert!(now.abs_diff(since) < Duration::from_secs(30));
        }
    }
}

/// The lock of a guarded write keeps others away, not the heartbeat: neither of this lease nor of
/// those that are renewed together with it.
pub(crate) async fn renewals_go_on_while_a_guarded_transaction_is_open(env: &Env) {
    let ns = namespace("guarded");
    let (a, b) = (env.handle(&ns).await, env.handle(&ns).await);
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(1));
    let guarded = got(a.lease(&key("x"), opts).await);
    let other = got(a.lease(&key("y"), opts).await);
    let mut tx = a.pool().begin().await.unwrap();
    guarded.verify(&mut tx).await.unwrap();
    let start = Instant::now();
    until("three ttls", || async { start.elapsed() > Duration::from_secs(3) }).await;
    assert!(guarded.is_held() && other.is_held());
    // to try for it is answered at once, too
    assert!(soon("an answer", b.lease(&key("x"), opts)).await.unwrap().is_none());
    guarded.verify(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    guarded.release().await.unwrap();
    other.release().await.unwrap();
}

/// A tick of the heartbeat is a few statements, however many leases there are.
pub(crate) async fn ten_thousand_leases_are_renewed_in_few_statements(env: &Env) {
    let ns = namespace("many");
    let schema = format!("many_{}", rand::random::<u32>());
    let a = Arc::new(env.builder(&ns).schema(&schema).connect(&env.url()).await.unwrap());
    a.migrate().await.unwrap();
    let mut admin = env.admin().await;
    run(
        &mut admin,
        format!(
            "CREATE SEQUENCE {schema}.updates; \
             CREATE FUNCTION {schema}.count() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM nextval('{schema}.updates'); RETURN NULL; END $$; \
             CREATE TRIGGER count AFTER UPDATE ON {schema}.lease FOR EACH STATEMENT \
             WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION {schema}.count()"
        ),
    )
    .await;
    // Acquisitions fire it as well, by their `ON CONFLICT DO UPDATE`: when all are held, count.
    let ttl = Duration::from_secs(9);
    let opts = LeaseOptions::default().ttl(ttl).wait(PATIENCE);
    let mut held = Vec::new();
    for batch in 0..100 {
        let leases = (0..100).map(|n| {
            let (a, name) = (a.clone(), key(&format!("k{batch}-{n}")));
            async move { got(a.lease(&name, opts).await) }
        });
        held.extend(futures_util::future::join_all(leases).await);
    }
    let count = || async {
        let last = format!("SELECT last_value::text FROM {schema}.updates");
        ask(&mut env.admin().await, last).await.parse::<u64>().unwrap()
    };
    // after a ttl, renewals have got into step
    let settled = Instant::now();
    until("a ttl", || async { settled.elapsed() > ttl }).await;
    let (before, start) = (count().await, Instant::now());
    until("two ttls", || async { start.elapsed() > 2 * ttl }).await;
    let statements = count().await - before;
    assert!(held.iter().all(leasehold_core::LeaseGuard::is_held));
    // six ticks, of which one may fall on each end
    let ticks = 8;
    assert!(statements >= 6 && statements <= 5 * ticks, "{statements} statements in {ticks} ticks");
    drop(held);
    a.close().await.unwrap();
    run(&mut admin, format!("DROP SCHEMA {schema} CASCADE")).await;
}

/// B97: another transaction's entry is neither there nor not there until it ends.
pub(crate) async fn an_open_transaction_is_waited_for(env: &Env) {
    let ns = namespace("open");
    let (a, b) = (Arc::new(env.handle(&ns).await), env.handle(&ns).await);
    for commits in [true, false] {
        let name = key(if commits { "committed" } else { "rolled back" });
        let mut claim = got(b.claim(&Keys::none(), ClaimOptions::default()).await);
        assert!(claim.first_seen(&name, Duration::from_secs(60)).await.unwrap());
        let admit = {
            let (a, name) = (a.clone(), name.clone());
            tokio::spawn(async move { a.admit(&name, DedupeOptions::default()).await })
        };
        until("a wait for the row", || async { waits_for_row(env, &ns).await }).await;
        if commits {
            claim.commit().await.unwrap();
        } else {
            claim.rollback().await.unwrap();
        }
        let admitted = soon("an answer", admit).await.unwrap().unwrap();
        match commits {
            true => assert!(matches!(admitted, Admission::Done { .. }), "{admitted:?}"),
            false => assert!(admitted.is_first(), "{admitted:?}"),
        }
    }
    // B96: a conflict leaves the caller's transaction as it was
    let mut claim = got(b.claim(&Keys::none(), ClaimOptions::default()).await);
    assert!(!claim.first_seen(&key("committed"), Duration::from_secs(60)).await.unwrap());
    run(claim.tx::<Tx>().unwrap(), "SELECT 1").await;
    claim.commit().await.unwrap();
}

/// B97, B100: entries expire, are purged, completed and abandoned all the time: each question has
/// one of three answers.
pub(crate) async fn an_answer_while_rows_come_and_go(env: &Env) {
    let ns = namespace("churn");
    let a = Arc::new(env.handle(&ns).await);
    let end = Instant::now() + Duration::from_secs(3);
    let mut tasks: Vec<_> = (0..24)
        .map(|task| {
            let a = a.clone();
            tokio::spawn(async move {
                let moment = Duration::from_millis(100);
                let opts = DedupeOptions::default().retain(moment).in_progress(moment);
                while Instant::now() < end {
                    let keys = ["a", "b", "c"].map(key);
                    let admitted = match task % 3 {
                        0 => a.admit_many(&keys, opts).await.unwrap(),
                        1 => {
                            let reversed: Vec<_> = keys.into_iter().rev().collect();
                            a.admit_many(&reversed, opts).await.unwrap()
                        }
                        _ => vec![a.admit(&keys[task % 2], opts).await.unwrap()],
                    };
                    for guard in admitted.into_iter().filter_map(Admission::first) {
                        match rand::random_range(0..3) {
                            0 => drop(guard.complete().await),
                            1 => drop(guard.abandon().await),
                            _ => drop(guard),
                        }
                    }
                }
            })
        })
        .collect();
    let purger = a.clone();
    tasks.push(tokio::spawn(async move {
        while Instant::now() < end {
            purger.housekeep().await.unwrap();
        }
    }));
    for task in tasks {
        soon("a task", task).await.unwrap();
    }
}

/// B106: what has expired goes, in batches, and what lives stays.
pub(crate) async fn rows_do_not_pile_up(env: &Env) {
    let ns = namespace("pile");
    let schema = format!("pile_{}", rand::random::<u32>());
    let a = env.builder(&ns).schema(&schema).connect(&env.url()).await.unwrap();
    a.migrate().await.unwrap();
    let mut admin = env.admin().await;
    run(
        &mut admin,
        format!(
            "INSERT INTO {schema}.lease SELECT sha256(n::text::bytea), '', '', '', now() \
             FROM generate_series(1, 2500) n; \
             INSERT INTO {schema}.dedupe SELECT sha256(n::text::bytea), '', '', '', n % 2 = 0, \
             now(), now() FROM generate_series(1, 3000) n"
        ),
    )
    .await;
    let lease = got(a.lease(&key("live"), LeaseOptions::try_once()).await);
    let entry = a.admit(&key("live"), DedupeOptions::default()).await.unwrap().first().unwrap();
    let purged = a.housekeep().await.unwrap();
    assert_eq!((purged.leases, purged.dedupe), (2500, 3000));
    let count = format!(
        "SELECT ((SELECT count(*) FROM {schema}.lease) + (SELECT count(*) FROM {schema}.dedupe))::text"
    );
    assert_eq!(ask(&mut admin, count.clone()).await, "2");
    lease.renew().await.unwrap();
    lease.release().await.unwrap();
    entry.abandon().await.unwrap();
    assert_eq!(ask(&mut admin, count).await, "0");
    run(&mut admin, format!("DROP SCHEMA {schema} CASCADE")).await;
}

/// Connections that were used a moment ago are not asked whether they live: what is cut meanwhile
/// is asked again on another one.
pub(crate) async fn connections_that_are_cut_between_calls_are_replaced(env: &Env) {
    let ns = namespace("cut");
    let a = env.handle(&ns).await;
    let opts = LeaseOptions::default().wait(PATIENCE);
    let retain = Duration::from_secs(60);
    for round in 0..3 {
        let names: Vec<_> = (0..6).map(|n| key(&format!("{round}-{n}"))).collect();
        let seen = names.iter().map(|name| a.first_seen(name, retain));
        for first in futures_util::future::join_all(seen).await {
            assert!(first.unwrap());
        }
        assert!(env.end_sessions(&ns).await > 1, "several connections stood ready");
        let lease = got(a.lease(&names[0], opts).await);
        for name in &names {
            assert!(!a.first_seen(name, retain).await.unwrap());
        }
        assert!(env.end_sessions(&ns).await > 0);
        lease.release().await.unwrap();
    }
}

/// What stands ready for the next call goes back to the pool soon, for whoever else uses it.
pub(crate) async fn the_pool_has_all_its_connections_for_others(env: &Env) {
    let ns = namespace("pool");
    let a = env.handle(&ns).await;
    let names: Vec<_> = (0..10).map(|n| key(&n.to_string())).collect();
    let seen = names.iter().map(|name| a.first_seen(name, Duration::from_secs(60)));
    for first in futures_util::future::join_all(seen).await {
        assert!(first.unwrap());
    }
    let all = futures_util::future::join_all((0..10).map(|_| a.pool().acquire()));
    let all = soon("all connections of the pool", all).await;
    assert!(all.iter().all(Result::is_ok));
}
