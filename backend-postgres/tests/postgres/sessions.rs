//! Named locks on sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::backend::SessionLimits;
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, ErrorKind, Keys, LockOptions, LossReason, NamedLock,
};
use leasehold_postgres::LockKind;
use sqlx::Row;

use crate::env::{Env, PATIENCE, got, key, namespace, run, soon, until};
use crate::support::mark;

/// No keepalive comes to help within a test.
fn no_keepalive() -> SessionLimits {
    let mut limits = SessionLimits::default();
    limits.keepalive = Duration::from_secs(600);
    limits
}

/// B10, B46: who only keeps a flag would go on believing.
pub(crate) async fn an_ended_idle_session_is_noticed_at_once(env: &Env) {
    let ns = namespace("idle");
    let builder = env.builder(&ns).session_limits(no_keepalive());
    let a = builder.connect(&env.url()).await.unwrap();
    let b = env.handle(&namespace("other")).await; // another namespace's sessions live on
    let kept = got(b.lock(&key("leader"), LockOptions::try_once()).await);
    let guard = got(a.lock(&key("leader"), LockOptions::try_once()).await);
    let token = guard.token().await.unwrap();
    let lost = guard.lost();
    assert!(env.end_sessions(&ns).await > 0);
    assert_eq!(soon("the loss", lost.wait()).await, LossReason::SessionEnded);
    assert!(!guard.is_held() && kept.is_held());
    assert_eq!(guard.token().await.unwrap(), token, "a token once given stays known");
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    // the handle goes on with a new session
    let again = got(a.lock(&key("leader"), LockOptions::default().wait(PATIENCE)).await);
    assert!(again.token().await.unwrap() > token);
    again.release().await.unwrap();
}

/// B12: time-outs of server or role, of which the shortest is far below the hold.
pub(crate) async fn time_outs_of_the_role_end_no_hold_and_no_wait(env: &Env) {
    let ns = namespace("timeouts");
    let role = format!("hasty_{}", rand::random::<u32>());
    let mut admin = env.admin().await;
    run(&mut admin, format!("CREATE ROLE {role} LOGIN SUPERUSER")).await;
    for setting in [
        "statement_timeout",
        "lock_timeout",
        "idle_session_timeout",
        "idle_in_transaction_session_timeout",
    ] {
        run(&mut admin, format!("ALTER ROLE {role} SET {setting} = '300ms'")).await;
    }
    let url = env.url().replace("//postgres@", &format!("//{role}@"));
    let builder = || env.builder(&ns).session_limits(no_keepalive());
    let a = builder().connect(&url).await.unwrap();
    let b = Arc::new(builder().connect(&url).await.unwrap());
    let long = Duration::from_millis(1500);

    let held = got(a.lock(&key("x"), LockOptions::try_once()).await);
    run(&mut admin, format!("SELECT pg_advisory_lock({})", a.lock_id(LockKind::Claim, &key("y"))))
        .await;
    let waiters = {
        let (b, c) = (b.clone(), b.clone());
        let wait = LockOptions::default().wait(PATIENCE);
        let lock = tokio::spawn(async move { b.lock(&key("x"), wait).await });
        let opts = ClaimOptions::default().wait(PATIENCE);
        let claim = tokio::spawn(async move { c.claim(&Keys::from(key("y")), opts).await });
        (lock, claim)
    };
    let start = Instant::now();
    until("the time of the hold", || async { start.elapsed() > long }).await;
    assert!(held.is_held() && !waiters.0.is_finished() && !waiters.1.is_finished());
    held.release().await.unwrap();
    run(&mut admin, "SELECT pg_advisory_unlock_all()").await;
    got(soon("the lock", waiters.0).await.unwrap()).release().await.unwrap();
    got(soon("the claim", waiters.1).await.unwrap()).rollback().await.unwrap();
}

/// A wait whose session is ended is waited for on another.
pub(crate) async fn a_wait_goes_on_when_its_session_is_ended(env: &Env) {
    let (held_in, ns) = (namespace("x"), namespace("x"));
    // both lock the same number
    let shared = |ns: &str| env.builder(ns).key_hash(shared_number);
    let a = shared(&held_in).connect(&env.url()).await.unwrap();
    let b = Arc::new(shared(&ns).connect(&env.url()).await.unwrap());
    let held = got(a.lock(&key(&held_in), LockOptions::try_once()).await);
    let waiter = {
        let (b, name) = (b.clone(), held_in.clone());
        let wait = LockOptions::default().wait(PATIENCE);
        tokio::spawn(async move { b.lock(&key(&name), wait).await })
    };
    for _ in 0..3 {
        until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
        until("its end", || async { env.end_sessions(&ns).await > 0 }).await;
    }
    assert!(held.is_held() && !waiter.is_finished());
    held.release().await.unwrap();
    got(soon("the lock", waiter).await.unwrap()).release().await.unwrap();
    env.nothing_is_left(&ns).await;
}

fn shared_number(_: LockKind, key: &leasehold_core::Key) -> i64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish().cast_signed()
}

/// Sessions are ended in the middle of batches: what was taken is lost and known as such, and two
/// never hold at a time what the server granted.
pub(crate) async fn batches_go_on_when_sessions_are_ended(env: &Env) {
    let ns = namespace("batch");
    let backend = Arc::new(env.handle(&ns).await);
    let rounds = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let (backend, rounds) = (backend.clone(), rounds.clone());
            tokio::spawn(async move {
                let name = key(&format!("k{}", task % 16));
                for _ in 0..20 {
                    match backend.lock(&name, LockOptions::default().wait(PATIENCE)).await {
                        Ok(guard) => drop(guard.expect("all are released soon").release().await),
                        Err(error) => assert!(error.is_retryable(), "{error}"),
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for round in 1..=6_u64 {
        let goal = round * 150;
        until("progress", || async { rounds.load(Ordering::Relaxed) > goal }).await;
        env.end_sessions(&ns).await;
    }
    for task in tasks {
        soon("a task", task).await.unwrap();
    }
    for name in 0..16 {
        let name = key(&format!("k{name}"));
        got(backend.lock(&name, LockOptions::default().wait(PATIENCE)).await);
    }
    env.nothing_is_left(&ns).await;
}

/// B14: a wait is cut into short statements, so that no snapshot lasts as long as it.
pub(crate) async fn a_long_wait_holds_back_no_vacuum(env: &Env) {
    let ns = namespace("vacuum");
    let mut limits = SessionLimits::default();
    limits.max_wait = Duration::from_millis(200);
    let a = env.handle(&ns).await;
    let held = got(a.lock(&key("leader"), LockOptions::try_once()).await);
    let b = Arc::new(env.builder(&ns).session_limits(limits).connect(&env.url()).await.unwrap());
    let waiter = {
        let b = b.clone();
        tokio::spawn(
            async move { b.lock(&key("leader"), LockOptions::default().wait(PATIENCE)).await },
        )
    };
    until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
    let mut admin = env.admin().await;
    run(&mut admin, "CREATE TABLE IF NOT EXISTS leasehold_test.churn (n int)").await;
    let oldest = "SELECT coalesce(max(age(backend_xmin)), 0)::int8 FROM pg_stat_activity \
        WHERE starts_with(application_name, $1)";
    for _ in 0..5 {
        for _ in 0..20 {
            run(&mut admin, "INSERT INTO leasehold_test.churn VALUES (1)").await;
        }
        until("a new snapshot of the waiter", || async {
            let age = sqlx::query_scalar::<_, i64>(oldest).bind(mark(&ns));
            age.fetch_one(&mut env.admin().await).await.unwrap() < 20
        })
        .await;
        assert!(!waiter.is_finished());
    }
    held.release().await.unwrap();
    got(soon("the lock", waiter).await.unwrap()).release().await.unwrap();
}

/// B07, B13: a client that is gone does not stay in the server's queue.
pub(crate) async fn a_waiter_that_vanished_leaves_the_queue(env: &Env) {
    let ns = namespace("vanish");
    let a = env.handle(&ns).await;
    let held = got(a.lock(&key("x"), LockOptions::try_once()).await);
    // a runtime that ends takes its sockets along, without a good-bye
    let (url, builder) = (env.url(), env.builder(&ns));
    let gone = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let waiting = runtime.block_on(async move {
            let b = Arc::new(builder.connect(&url).await.unwrap());
            let waiter = b.clone();
            let wait = LockOptions::default().wait(Duration::MAX);
            tokio::spawn(async move { waiter.lock(&key("x"), wait).await });
            b
        });
        (runtime, waiting)
    });
    let (runtime, backend) = gone.join().unwrap();
    until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
    runtime.shutdown_background();
    until("no wait on the server", || async { env.waiting(&ns).await == 0 }).await;
    drop(backend);
    assert!(held.is_held());
    held.release().await.unwrap();
    env.nothing_is_left(&ns).await;
}

/// B36: a session's number is used again: one that is ended late must not be another's.
pub(crate) async fn an_outdated_kill_hits_nobody(env: &Env) {
    let ns = namespace("kill");
    let a = env.handle(&ns).await;
    let held = got(a.lock(&key("x"), LockOptions::try_once()).await);
    let b = Arc::new(env.handle(&ns).await);
    // a wait that is given up has its session ended by the main session
    for _ in 0..5 {
        let waiter = b.clone();
        let wait = LockOptions::default().wait(PATIENCE);
        let waiter = tokio::spawn(async move { waiter.lock(&key("x"), wait).await });
        until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
        waiter.abort();
        let start = Instant::now();
        until("no wait on the server", || async { env.waiting(&ns).await == 0 }).await;
        assert!(start.elapsed() < Duration::from_secs(15));
    }
    assert!(held.is_held());
    held.release().await.unwrap();
    got(b.lock(&key("x"), LockOptions::try_once()).await);
}

/// B25: zero means no limit to the server, and less than a millisecond is cut to it.
pub(crate) async fn tiny_waits_are_short(env: &Env) {
    let ns = namespace("tiny");
    let (a, b) = (env.handle(&ns).await, env.handle(&ns).await);
    let _lock = got(a.lock(&key("x"), LockOptions::try_once()).await);
    let keys = Keys::new(["x", "y", "z"]).unwrap();
    let _claim = got(a.claim(&keys, ClaimOptions::try_once()).await);
    for wait in [0, 1, 300_000, 999_999, 1_000_000, 5_000_000].map(Duration::from_nanos) {
        let lock = soon("a short wait", b.lock(&key("x"), LockOptions::default().wait(wait))).await;
        assert!(lock.unwrap().is_none(), "{wait:?}");
        let claim = soon("a short wait", b.claim(&keys, ClaimOptions::default().wait(wait))).await;
        assert!(claim.unwrap().is_none(), "{wait:?}");
    }
}

/// B21, and that operators find what is held, by whom.
pub(crate) async fn locks_are_seen_in_the_servers_view(env: &Env) {
    let ns = namespace("view");
    let a = env.handle(&ns).await;
    let _lock = got(a.lock(&key("x"), LockOptions::try_once()).await);
    let _claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::try_once()).await);
    let sql = "SELECT (classid::int8 << 32) | objid::int8, a.application_name FROM pg_locks \
        JOIN pg_stat_activity a USING (pid) WHERE locktype = 'advisory' AND objsubid = 1 \
        AND mode = 'ExclusiveLock' \
        AND starts_with(a.application_name, $1)";
    let rows = sqlx::query(sql).bind(mark(&ns)).fetch_all(&mut env.admin().await).await.unwrap();
    let mut seen: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    seen.sort_unstable();
    let mut ours = [LockKind::Session, LockKind::Claim].map(|kind| a.lock_id(kind, &key("x")));
    ours.sort_unstable();
    assert_eq!(seen, ours);
}

/// The server writes to its disk for each 32 tokens, and so they are drawn as seldom as can be.
pub(crate) async fn a_batch_draws_one_token_and_a_wait_none(env: &Env) {
    let (ns, other) = (namespace("draws"), namespace("draws"));
    let schema = format!("draws_{:08x}", rand::random::<u32>());
    let open = |ns: &str| {
        env.builder(ns).schema(&schema).key_hash(|_, key| {
            use std::hash::{DefaultHasher, Hash, Hasher};
            let mut hasher = DefaultHasher::new();
            key.as_str().hash(&mut hasher);
            hasher.finish().cast_signed()
        })
    };
    let a = Arc::new(open(&ns).connect(&env.url()).await.unwrap());
    a.migrate().await.unwrap();
    let b = open(&other).connect(&env.url()).await.unwrap();
    let drawn = async || -> i64 {
        let sql = format!("SELECT last_value - 1 + is_called::int FROM {schema}.token");
        let row = sqlx::raw_sql(sqlx::AssertSqlSafe(sql));
        row.fetch_one(&mut env.admin().await).await.unwrap().try_get(0).unwrap()
    };

    // all that is asked for while the session is opened goes out together
    let names: Vec<_> = (0..100).map(|n| key(&format!("{ns}-{n}"))).collect();
    let all = async || {
        let locks = names.iter().map(|name| a.lock(name, LockOptions::try_once()));
        futures_util::future::join_all(locks).await.into_iter().map(got).collect::<Vec<_>>()
    };
    let mut tokens = Vec::new();
    for round in 0..2 {
        let before = drawn().await;
        let guards = all().await;
        let draws = drawn().await - before;
        assert!(draws < 20 && (round > 0 || draws == 1), "{draws} draws for 100 locks");
        let mut now = Vec::new();
        for guard in guards {
            now.push(guard.token().await.unwrap());
            guard.release().await.unwrap();
        }
        assert_eq!(drawn().await - before, draws, "a token came with each lock");
        assert!(tokens.iter().zip(&now).all(|(before, now)| before < now), "{tokens:?}, {now:?}");
        tokens = now;
    }

    let held = got(b.lock(&names[0], LockOptions::try_once()).await);
    let token = held.token().await.unwrap();
    assert!(token > tokens[0]);
    let waiter = {
        let (a, name) = (a.clone(), names[0].clone());
        tokio::spawn(async move { a.lock(&name, LockOptions::default().wait(PATIENCE)).await })
    };
    until("a wait on the server", || async { env.waiting(&ns).await == 1 }).await;
    let before = drawn().await;
    held.release().await.unwrap();
    let next = got(soon("the lock", waiter).await.unwrap());
    assert_eq!(drawn().await, before, "the wait drew a token");
    assert!(next.token().await.unwrap() > token);
    assert_eq!(drawn().await, before + 1);
    next.release().await.unwrap();
    run(&mut env.admin().await, format!("DROP SCHEMA {schema} CASCADE")).await;
}
