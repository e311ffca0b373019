//! Numbers of locks, namespaces, tokens.

use std::time::Duration;

use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Keys, Lease, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::{LockKind, PostgresBackend, hashtext};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions};

use crate::env::{Env, PATIENCE, ask, got, key, namespace, run, until};

/// Ours is the server's, for all lengths and characters.
pub(crate) async fn hashtext_is_the_servers(env: &Env) {
    let letters = ['a', 'Z', '0', '/', ' ', 'é', 'ß', '€', '😀', '\n', '\''];
    let texts: Vec<String> = (0..400)
        .map(|n| (0..n % 40).map(|_| letters[rand::random_range(0..letters.len())]).collect())
        .collect();
    let sql = "SELECT hashtext(t) FROM unnest($1::text[]) WITH ORDINALITY AS u (t, n) ORDER BY n";
    let hashes = sqlx::query_scalar::<_, i32>(sql).bind(&texts);
    let hashes = hashes.fetch_all(&mut env.admin().await).await.unwrap();
    for (text, hash) in texts.iter().zip(hashes) {
        assert_eq!(hashtext(text), hash, "{text:?}");
    }
}

/// A lock and a claim are shared with a program that locks `hashtext(key)`.
pub(crate) async fn a_lock_is_shared_with_hashtext(env: &Env) {
    let ns = namespace("hashtext");
    let builder = env.builder(&ns).key_hash(|_, key| hashtext(key.as_str()).into());
    let a = builder.connect(&env.url()).await.unwrap();
    let name = format!("nightly-{ns}");
    let mut other = env.admin().await;
    let lock = format!("SELECT pg_try_advisory_lock(hashtext('{name}'))::text");
    assert_eq!(ask(&mut other, lock.clone()).await, "true");
    let keys = Keys::from(key(&name));
    assert!(a.lock(&key(&name), LockOptions::try_once()).await.unwrap().is_none());
    assert!(a.claim(&keys, ClaimOptions::try_once()).await.unwrap().is_none());
    run(&mut other, "SELECT pg_advisory_unlock_all()").await;
    let guard = got(a.lock(&key(&name), LockOptions::try_once()).await);
    assert_eq!(ask(&mut other, lock.clone()).await, "false");
    guard.release().await.unwrap();
    let claim = got(a.claim(&keys, ClaimOptions::try_once()).await);
    assert_eq!(ask(&mut other, lock.clone()).await, "false");
    claim.rollback().await.unwrap();
    assert_eq!(ask(&mut other, lock).await, "true");
}

/// B21: all bits of a signed number.
pub(crate) async fn extreme_numbers_are_locks_like_others(env: &Env) {
    let numbers = [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX, 1 << 32, -(1 << 32), 1 << 31];
    let hash = move |_: LockKind, key: &leasehold_core::Key| {
        numbers[key.as_str().parse::<usize>().unwrap()]
    };
    let ns = namespace("numbers");
    let builder = || env.builder(&ns).key_hash(hash);
    let a = builder().connect(&env.url()).await.unwrap();
    let b = builder().connect(&env.url()).await.unwrap();
    let name = |n: usize| key(&n.to_string());
    let mut held = Vec::new();
    for (n, number) in numbers.iter().enumerate() {
        held.push(got(a.lock(&name(n), LockOptions::try_once()).await));
        assert_eq!(a.lock_id(LockKind::Session, &name(n)), *number);
        assert!(b.lock(&name(n), LockOptions::try_once()).await.unwrap().is_none());
    }
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted \
        AND objsubid = 1 AND (classid::int8 << 32) | objid::int8 = $1)";
    for number in numbers {
        let seen = sqlx::query_scalar::<_, bool>(sql).bind(number);
        assert!(seen.fetch_one(&mut env.admin().await).await.unwrap(), "{number}");
    }
    for guard in held {
        guard.release().await.unwrap();
    }
    // as a set they are taken in the order of the numbers
    let keys = Keys::new((0..numbers.len()).map(|n| n.to_string())).unwrap();
    got(a.claim(&keys, ClaimOptions::default()).await).rollback().await.unwrap();
    env.nothing_is_left(&ns).await;
}

/// B22: advisory locks belong to a database; a namespace is what keeps services apart.
pub(crate) async fn databases_are_apart_and_schemas_are_not(env: &Env) {
    let ns = namespace("scope");
    let database = format!("scope_{}", rand::random::<u32>());
    let schema = format!("scope_{}", rand::random::<u32>());
    let mut admin = env.admin().await;
    run(&mut admin, format!("CREATE DATABASE {database}")).await;
    let options: PgConnectOptions = env.options().database(&database);
    let elsewhere = PostgresBackend::builder().namespace(&ns);
    let elsewhere = elsewhere.connect(options.to_url_lossy().as_str()).await.unwrap();
    elsewhere.migrate().await.unwrap();
    let beside = env.builder(&ns).schema(&schema).connect(&env.url()).await.unwrap();
    beside.migrate().await.unwrap();
    let other = env.builder("").connect(&env.url()).await.unwrap();

    let a = env.handle(&ns).await;
    let guard = got(a.lock(&key("x"), LockOptions::try_once()).await);
    let opts = LockOptions::try_once();
    assert!(beside.lock(&key("x"), opts).await.unwrap().is_none(), "another schema");
    got(elsewhere.lock(&key("x"), opts).await).release().await.unwrap();
    got(other.lock(&key(&format!("x-{ns}")), opts).await).release().await.unwrap();
    guard.release().await.unwrap();
    elsewhere.close().await.unwrap();
    beside.close().await.unwrap();
    run(&mut admin, format!("DROP SCHEMA {schema} CASCADE")).await;
    let drop = AssertSqlSafe(format!("DROP DATABASE {database} WITH (FORCE)"));
    sqlx::raw_sql(drop).execute(&mut admin).await.unwrap();
}

/// B81: rows go, tokens rise all the same, over all kinds.
pub(crate) async fn tokens_rise_across_purges(env: &Env) {
    let ns = namespace("tokens");
    let a = env.handle(&ns).await;
    let mut last = None;
    for _ in 0..5 {
        let ttl = Duration::from_millis(100);
        let opts = LeaseOptions::default().ttl(ttl).wait(PATIENCE).manual_renewal();
        let lease = got(a.lease(&key("x"), opts).await);
        assert!(Some(lease.token()) > last);
        last = Some(lease.token());
        std::mem::forget(lease); // nobody releases it
        until("the row is gone", || async {
            a.housekeep().await.unwrap();
            let count = format!(
                "SELECT count(*)::text FROM leasehold.lease WHERE namespace = '{ns}'::bytea"
            );
            ask(&mut env.admin().await, count).await == "0"
        })
        .await;
        let guard = got(a.lock(&key("x"), LockOptions::try_once()).await);
        let token = guard.token().await.unwrap();
        assert!(Some(token) > last);
        last = Some(token);
        guard.release().await.unwrap();
    }
}
