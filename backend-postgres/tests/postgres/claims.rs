//! Claims: transactions and the pool that they come from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::{
    Backend, ClaimLock, ClaimLockExt, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Keys, Lease,
    LeaseOptions, LockOptions, NamedLock,
};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgPool};

use crate::env::{Env, PATIENCE, ask, cancel, got, key, namespace, run, soon, until};
use crate::support::{Tx, mark, read, write};

fn one(name: &str) -> Keys {
    Keys::from(key(name))
}

const SETTINGS: &str = "SELECT string_agg(name || '=' || setting, ',' ORDER BY name) \
    FROM pg_settings WHERE name IN ('lock_timeout', 'statement_timeout', 'synchronous_commit', \
    'client_connection_check_interval', 'transaction_isolation', 'transaction_read_only', \
    'idle_in_transaction_session_timeout', 'application_name')";

/// B23: a claim that succeeds, one that is too late, and one that is cancelled.
pub(crate) async fn nothing_leaks_to_the_pool(env: &Env) {
    let ns = namespace("leak");
    let pool = env.pool(&ns, 1);
    let a = env.builder(&ns).build(pool.clone()).unwrap();
    let b = env.handle(&ns).await;
    let before = ask(&mut pool.acquire().await.unwrap(), SETTINGS).await;
    let same = || async { ask(&mut pool.acquire().await.unwrap(), SETTINGS).await == before };

    got(a.claim(&one("x"), ClaimOptions::default()).await).commit().await.unwrap();
    assert!(same().await, "after a commit");
    got(a.claim(&one("x"), ClaimOptions::default()).await).rollback().await.unwrap();
    assert!(same().await, "after a rollback");
    let held = got(b.claim(&one("x"), ClaimOptions::default()).await);
    let late = a.claim(&one("x"), ClaimOptions::default().wait(Duration::from_millis(50))).await;
    assert!(late.unwrap().is_none());
    assert!(same().await, "after a wait that ended");
    let opts = ClaimOptions::default().wait(PATIENCE);
    let cancelled = cancel(Duration::from_millis(100), a.claim(&one("x"), opts)).await;
    assert!(cancelled.is_none());
    assert!(soon("a connection", same()).await, "after a wait that was cancelled");
    a.lease(&key("x"), LeaseOptions::try_once()).await.unwrap();
    a.admit(&key("x"), DedupeOptions::default()).await.unwrap();
    assert!(soon("a connection", same()).await, "after the statements of leases and dedupe");
    held.rollback().await.unwrap();
}

/// B23: the limit of the wait is not one of the work.
pub(crate) async fn the_callers_limits_hold_within_a_claim(env: &Env) {
    let ns = namespace("limits");
    let options =
        env.options().options([("lock_timeout", "7654ms"), ("statement_timeout", "8765ms")]);
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    let a = env.builder(&ns).build(pool).unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(20), Duration::MAX] {
        let keys = Keys::new(["x", "y"]).unwrap();
        let mut claim = got(a.claim(&keys, ClaimOptions::default().wait(wait)).await);
        let tx = claim.tx::<Tx>().unwrap();
        assert_eq!(ask(&mut *tx, "SHOW lock_timeout").await, "7654ms", "{wait:?}");
        assert_eq!(ask(&mut *tx, "SHOW statement_timeout").await, "8765ms", "{wait:?}");
        assert_eq!(ask(&mut *tx, "SHOW transaction_isolation").await, "read committed");
        claim.commit().await.unwrap();
    }
}

/// B06, B52: a `BEGIN` that nobody waited for, an answer that nobody read.
pub(crate) async fn cancelled_claims_poison_no_connection(env: &Env) {
    let ns = namespace("poison");
    let pool = env.pool(&ns, 2);
    let a = env.builder(&ns).build(pool.clone()).unwrap();
    for round in 0..150_u64 {
        let limit = Duration::from_micros(rand::random_range(0..5_000));
        drop(cancel(limit, a.claim(&one("x"), ClaimOptions::default())).await);
        drop(cancel(limit, a.admit(&key("x"), DedupeOptions::default())).await);
        if round % 10 == 0 {
            // what is written through the pool is there for everybody
            let (name, value) = (format!("{ns}-{round}"), i64::try_from(round).unwrap());
            let mut conn = soon("a connection", pool.acquire()).await.unwrap();
            write(&mut conn, &name, value).await.unwrap();
            let marker = ask(&mut conn, format!("SELECT 'marker {round}'")).await;
            assert_eq!(marker, format!("marker {round}"));
            drop(conn);
            assert_eq!(read(&mut env.admin().await, &name).await.unwrap(), Some(value));
        }
    }
    env.nothing_is_left(&ns).await;
    let both = (soon("one", pool.acquire()).await, soon("two", pool.acquire()).await);
    assert!(both.0.is_ok() && both.1.is_ok());
}

/// `BEGIN` is the test of an idle connection, and one that fails it is nobody's concern.
pub(crate) async fn a_cut_idle_connection_is_replaced(env: &Env) {
    let ns = namespace("idle");
    let a = env.handle(&ns).await;
    for _ in 0..3 {
        let all: Vec<_> = (0..4).map(|n| format!("k{n}")).collect();
        let claims = all.iter().map(|name| {
            let keys = one(name);
            let a = &a;
            async move { got(a.claim(&keys, ClaimOptions::default()).await).commit().await.unwrap() }
        });
        futures_util::future::join_all(claims).await;
        assert!(env.end_sessions(&ns).await > 0);
        got(a.claim(&one("x"), ClaimOptions::default()).await).commit().await.unwrap();
    }
}

/// The server answers `COMMIT` in a failed transaction as one that succeeded.
pub(crate) async fn an_aborted_transaction_never_counts_as_committed(env: &Env) {
    let ns = namespace("aborted");
    let a = env.handle(&ns).await;
    let ran = Arc::new(AtomicBool::new(false));
    let mut claim = got(a.claim(&one("x"), ClaimOptions::default()).await);
    let tx = claim.tx::<Tx>().unwrap();
    write(&mut *tx, &ns, 1).await.unwrap();
    // an error that the caller does not look at
    assert!(sqlx::raw_sql("SELECT 1/0").execute(&mut **tx).await.is_err());
    let hook = ran.clone();
    claim.after_commit(async move { hook.store(true, Ordering::SeqCst) });
    let error = claim.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert!(!ran.load(Ordering::SeqCst));
    assert_eq!(read(&mut env.admin().await, &ns).await.unwrap(), None);
    got(a.claim(&one("x"), ClaimOptions::try_once()).await).commit().await.unwrap();

    // a constraint that is checked by the commit itself
    let mut admin = env.admin().await;
    let table = format!("leasehold_test.deferred_{}", rand::random::<u32>());
    let ddl = format!("CREATE TABLE {table} (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)");
    run(&mut admin, ddl).await;
    let mut claim = got(a.claim(&one("x"), ClaimOptions::default()).await);
    let insert = format!("INSERT INTO {table} VALUES (1), (1)");
    run(claim.tx::<Tx>().unwrap(), insert).await;
    assert_eq!(claim.commit().await.unwrap_err().kind(), ErrorKind::Backend);
    env.nothing_is_left(&ns).await;
}

/// Claims in a transaction that the caller began: held to its end, and a failed one leaves the
/// transaction as it was.
pub(crate) async fn claims_in_the_callers_transaction(env: &Env) {
    let ns = namespace("own");
    let (a, b) = (env.handle(&ns).await, env.handle(&ns).await);
    let mut tx = a.pool().begin().await.unwrap();
    write(&mut tx, &ns, 1).await.unwrap();
    let keys = Keys::new(["x", "y"]).unwrap();
    let token = got(a.claim_in(&mut tx, &keys, ClaimOptions::default()).await);
    assert!(b.claim(&one("y"), ClaimOptions::try_once()).await.unwrap().is_none());

    let held = got(b.claim(&one("z"), ClaimOptions::default()).await);
    assert!(held.token() > token);
    for wait in [Duration::ZERO, Duration::from_millis(30)] {
        let opts = ClaimOptions::default().wait(wait);
        let keys = Keys::new(["w", "z"]).unwrap();
        let busy = soon("an answer", a.claim_in(&mut tx, &keys, opts)).await;
        assert!(busy.unwrap().is_none(), "{wait:?}");
        assert_eq!(ask(&mut tx, "SHOW lock_timeout").await, "0");
        let free = b.claim(&one("w"), ClaimOptions::try_once()).await;
        got(free).rollback().await.unwrap(); // nothing of the failed set is held
    }
    tx.commit().await.unwrap();
    assert_eq!(read(&mut env.admin().await, &ns).await.unwrap(), Some(1));
    got(b.claim(&keys, ClaimOptions::try_once()).await).rollback().await.unwrap();
}

/// B16, B17: where the order is the caller's own, the server's deadlock has a kind of its own, and
/// the transaction goes on.
pub(crate) async fn crossed_claims_in_transactions_end_in_a_deadlock(env: &Env) {
    let ns = namespace("crossed");
    let a = env.handle(&ns).await;
    let wait = ClaimOptions::default().wait(PATIENCE);
    let mut one_tx = a.pool().begin().await.unwrap();
    let mut two_tx = a.pool().begin().await.unwrap();
    got(a.claim_in(&mut one_tx, &one("a"), wait).await);
    got(a.claim_in(&mut two_tx, &one("b"), wait).await);
    let crossed = async {
        let first = async {
            let outcome = a.claim_in(&mut one_tx, &one("b"), wait).await;
            write(&mut one_tx, &ns, 1).await.unwrap();
            one_tx.commit().await.unwrap();
            outcome
        };
        let second = async {
            let outcome = a.claim_in(&mut two_tx, &one("a"), wait).await;
            write(&mut two_tx, &format!("{ns}-2"), 1).await.unwrap();
            two_tx.commit().await.unwrap();
            outcome
        };
        tokio::join!(first, second)
    };
    let (first, second) = Box::pin(soon("an end", crossed)).await;
    let errors: Vec<_> = [first, second].into_iter().filter_map(Result::err).collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert_eq!(errors[0].kind(), ErrorKind::Deadlock);
    assert!(errors[0].is_retryable());
}

/// B26.
pub(crate) async fn a_snapshot_older_than_the_lock_is_refused(env: &Env) {
    let ns = namespace("snapshot");
    let a = env.handle(&ns).await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut tx = a.pool().begin_with(begin).await.unwrap();
        let error = a.claim_in(&mut tx, &one("x"), ClaimOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        tx.rollback().await.unwrap();
    }
    // a claim's own transaction reads what was committed while it waited, whatever the default is
    let options = env.options().options([("default_transaction_isolation", "serializable")]);
    let mut url = env.options().to_url_lossy();
    url.query_pairs_mut().append_pair("options[default_transaction_isolation]", "serializable");
    let own = env.builder(&ns).connect(url.as_str()).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    for b in [own, env.builder(&ns).build(pool).unwrap()].map(Arc::new) {
        let mut conn = b.pool().acquire().await.unwrap();
        assert_eq!(ask(&mut conn, "SHOW default_transaction_isolation").await, "serializable");
        drop(conn);
        // the first one on a connection, and one on a connection that has been used
        for round in 1..=3 {
            let mut held = got(a.claim(&one("x"), ClaimOptions::default()).await);
            let waiter = {
                let b = b.clone();
                let opts = ClaimOptions::default().wait(PATIENCE);
                tokio::spawn(async move { b.claim(&one("x"), opts).await })
            };
            until("a wait on the server", || waits(env)).await;
            write(held.tx::<Tx>().unwrap(), &ns, round).await.unwrap();
            held.commit().await.unwrap();
            let mut claim = got(soon("the claim", waiter).await.unwrap());
            assert_eq!(read(claim.tx::<Tx>().unwrap(), &ns).await.unwrap(), Some(round));
            claim.commit().await.unwrap();
        }
    }
}

async fn waits(env: &Env) -> bool {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)";
    sqlx::query_scalar(sql).fetch_one(&mut env.admin().await).await.unwrap()
}

/// The wait covers the pool as well.
pub(crate) async fn an_exhausted_pool_is_told(env: &Env) {
    let ns = namespace("exhausted");
    let pool = env.pool(&ns, 1);
    let a = env.builder(&ns).build(pool.clone()).unwrap();
    let taken = pool.acquire().await.unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(50)] {
        let start = Instant::now();
        let opts = ClaimOptions::default().wait(wait);
        let error = soon("an answer", a.claim(&one("x"), opts)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(start.elapsed() < Duration::from_secs(4));
    }
    drop(taken);
    got(a.claim(&one("x"), ClaimOptions::default()).await).commit().await.unwrap();
}

/// B29: locks and renewals have connections of their own, waiters sit on none.
pub(crate) async fn holders_need_no_second_connection(env: &Env) {
    let ns = namespace("second");
    let pool = env.pool(&ns, 4);
    let a = Arc::new(env.builder(&ns).build(pool.clone()).unwrap());
    let tasks: Vec<_> = (0..24)
        .map(|n| {
            let (a, pool): (_, PgPool) = (a.clone(), pool.clone());
            tokio::spawn(async move {
                // distinct names, then one name for all
                for name in [format!("k{n}"), "one".to_owned()] {
                    let wait = LockOptions::default().wait(PATIENCE);
                    let guard = got(a.lock(&key(&name), wait).await);
                    run(&mut pool.acquire().await.unwrap(), "SELECT 1").await;
                    guard.release().await.unwrap();
                    let opts = ClaimOptions::default().wait(PATIENCE);
                    let worked: Result<_, leasehold_core::Error> = a
                        .with_claim(&one(&name), opts, async |claim| {
                            run(claim.tx::<Tx>().unwrap(), "SELECT 1").await;
                            Ok(())
                        })
                        .await;
                    assert_eq!(worked.unwrap(), Some(()));
                    let opts = LeaseOptions::default().wait(PATIENCE);
                    let lease = got(a.lease(&key(&name), opts).await);
                    lease.renew().await.unwrap();
                    lease.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        soon("a task", task).await.unwrap();
    }
    a.close().await.unwrap();
    env.nothing_is_left(&ns).await;
}

/// B07: a wait that is cancelled gives its connection back and its place in the queue up.
pub(crate) async fn a_cancelled_wait_leaves_the_queue(env: &Env) {
    let ns = namespace("cancelled");
    let b = env.handle(&namespace("holder")).await;
    let pool = env.pool(&ns, 3);
    let a = Arc::new(env.builder(&ns).key_hash(|_, _| 4_711).build(pool.clone()).unwrap());
    let mut holder = b.pool().begin().await.unwrap();
    run(&mut holder, "SELECT pg_advisory_xact_lock(4711)").await;
    for _ in 0..3 {
        let waiter = a.clone();
        let opts = ClaimOptions::default().wait(PATIENCE);
        let waiter = tokio::spawn(async move { waiter.claim(&one("x"), opts).await.map(drop) });
        until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
        waiter.abort();
        // at once, whatever the server does about it
        let conn = tokio::time::timeout(Duration::from_secs(5), pool.acquire()).await;
        run(&mut conn.expect("a connection").unwrap(), "SELECT 1").await;
        until("no wait on the server", || async { env.waiting(&ns).await == 0 }).await;
    }
    holder.rollback().await.unwrap();
    got(a.claim(&one("x"), ClaimOptions::default()).await).rollback().await.unwrap();
}

/// Hooks run after a commit that is known to have happened: not one that the server might forget.
pub(crate) async fn a_durable_commit(env: &Env) {
    let ns = namespace("durable");
    for (setting, within) in [("off", "on"), ("local", "local"), ("on", "on")] {
        let options = env.options().application_name(&mark(&ns));
        let options = options.options([("synchronous_commit", setting)]);
        let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
        let a = env.builder(&ns).build(pool).unwrap();
        let mut claim = got(a.claim(&one("x"), ClaimOptions::default()).await);
        assert_eq!(ask(claim.tx::<Tx>().unwrap(), "SHOW synchronous_commit").await, within);
        claim.commit().await.unwrap();
    }
}
