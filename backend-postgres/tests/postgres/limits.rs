//! Limits of the server, standbys, messages.

use std::fs;
use std::time::Duration;

use leasehold_conformance::servers::Server;
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Keys, Lease, LeaseOptions,
    LockOptions, NamedLock,
};
use leasehold_postgres::PostgresBackend;

use crate::env::{Env, PATIENCE, got, key, namespace, run};

/// B30: a handle refuses long before anybody else is hurt.
pub(crate) async fn a_handle_keeps_to_its_share_of_the_lock_table(env: &Env) {
    let ns = namespace("share");
    let a = env.builder(&ns).lock_table_share(0.001).connect(&env.url()).await.unwrap();
    let mut held = Vec::new();
    let error = loop {
        match a.lock(&key(&format!("k{}", held.len())), LockOptions::try_once()).await {
            Ok(guard) => held.push(guard.expect("it is free")),
            Err(error) => break error,
        }
        assert!(held.len() < 1_000, "no limit at all");
    };
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().contains("lock_table_share"), "{error}");
    assert!(!held.is_empty() && held.iter().all(leasehold_core::LockGuard::is_held));
    // one that is freed makes room for one, also in a batch of many
    held.pop().unwrap().release().await.unwrap();
    let names: Vec<_> = (0..50).map(|n| key(&format!("more-{n}"))).collect();
    let more = names.iter().map(|name| a.lock(name, LockOptions::try_once()));
    let more = futures_util::future::join_all(more).await;
    let (more, refused): (Vec<_>, Vec<_>) = more.into_iter().partition(Result::is_ok);
    assert_eq!((more.len(), refused.len()), (1, 49));
    for guard in held {
        guard.release().await.unwrap();
    }
    drop(more);
    let keys = Keys::new((0..1_000).map(|n| n.to_string())).unwrap();
    let error = a.claim(&keys, ClaimOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    env.nothing_is_left(&ns).await;
}

/// B30: somebody else has filled the server's table. What is held stays held and can be released.
pub(crate) async fn a_full_lock_table_ends_no_hold(env: &Env) {
    let settings = ["-c", "max_locks_per_transaction=10", "-c", "max_connections=20"];
    let kind = env.server.kind();
    let server = tokio::task::spawn_blocking(move || Server::start_with(kind, &settings)).await;
    let small = Env::over(server.unwrap().unwrap());
    let ns = namespace("full");
    let a = small.builder(&ns).lock_table_share(1.0).connect(&small.url()).await.unwrap();
    let mut held = Vec::new();
    for n in 0..20 {
        held.push(got(a.lock(&key(&format!("k{n}")), LockOptions::try_once()).await));
    }
    let mut hog = small.admin().await;
    let fill = "SELECT pg_advisory_lock(n) FROM generate_series(1, 100000) n";
    assert!(sqlx::raw_sql(fill).execute(&mut hog).await.is_err(), "the table is full now");
    let names: Vec<_> = (0..40).map(|n| key(&format!("more-{n}"))).collect();
    let more = names.iter().map(|name| a.lock(name, LockOptions::try_once()));
    let more = futures_util::future::join_all(more).await;
    let refused = more.iter().filter_map(|outcome| outcome.as_ref().err()).collect::<Vec<_>>();
    assert!(!refused.is_empty());
    assert!(refused.iter().all(|error| error.kind() == ErrorKind::Exhausted), "{refused:?}");
    for guard in held.into_iter().chain(more.into_iter().filter_map(|more| more.ok().flatten())) {
        assert!(guard.is_held());
        guard.release().await.unwrap();
    }
    run(&mut hog, "SELECT pg_advisory_unlock_all()").await;
    got(a.lock(&key("after"), LockOptions::try_once()).await).release().await.unwrap();
    small.nothing_is_left(&ns).await;
}

/// B31: a standby grants advisory locks that exclude nobody on the primary.
pub(crate) async fn a_standby_is_refused(env: &Env) {
    let kind = env.server.kind();
    let server = tokio::task::spawn_blocking(move || Server::start(kind)).await.unwrap().unwrap();
    let primary = Env::over(server.clone());
    let before = primary.handle("standby").await;
    got(before.lock(&key("x"), LockOptions::try_once()).await);
    let standby = tokio::task::spawn_blocking(move || {
        server.stop().unwrap();
        fs::write(server.data_dir().unwrap().join("standby.signal"), "").unwrap();
        server.restart().unwrap();
        server
    });
    let standby = standby.await.unwrap();
    let refused = |error: leasehold_core::Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    };
    refused(PostgresBackend::connect(&standby.url()).await.unwrap_err());
    let pool = sqlx::PgPool::connect_lazy(&standby.url()).unwrap();
    // both one that is new and one that knew it as a primary
    for a in [PostgresBackend::builder().build(pool).unwrap(), before] {
        let wait = LockOptions::default().wait(PATIENCE);
        refused(a.lock(&key("x"), wait).await.unwrap_err());
        let keys = Keys::from(key("x"));
        refused(a.claim(&keys, ClaimOptions::try_once()).await.unwrap_err());
        refused(a.lease(&key("x"), LeaseOptions::try_once()).await.unwrap_err());
        refused(a.admit(&key("x"), DedupeOptions::default()).await.unwrap_err());
    }
}

/// No password in any message, whatever fails.
pub(crate) async fn no_message_tells_a_password(env: &Env) {
    let secret = "hunter2-s3cret";
    let port = env.server.port();
    let mut texts = Vec::new();
    for url in [
        format!("postgres://nobody:{secret}@127.0.0.1:{port}/postgres"),
        format!("postgres://postgres:{secret}@127.0.0.1:{port}/no_such_database"),
        format!("postgres://postgres:{secret}@127.0.0.1:1/postgres"),
        format!("postgres://postgres:{secret}@127.0.0.1:99999/postgres"),
        format!("postgres://postgres:{secret}@[/postgres"),
        format!("postgres://postgres:{secret}@127.0.0.1:{port}/postgres?sslmode=no"),
    ] {
        let connected = PostgresBackend::connect(&url).await;
        let error = connected.expect_err("none of these is right");
        texts.push(format!("{error} {error:?}"));
    }
    let options = env.options().password(secret);
    let builder = PostgresBackend::builder().session_options(options.clone());
    texts.push(format!("{builder:?}"));
    let pool = sqlx::PgPool::connect_lazy_with(options);
    let a = builder.build(pool).unwrap();
    let guard = got(a.lock(&key("password"), LockOptions::try_once()).await);
    texts.push(format!("{a:?} {guard:?}"));
    for text in texts {
        assert!(!text.contains(secret), "{text}");
    }
}

/// B85: the runtime is gone, the guards are not.
pub(crate) async fn drops_after_the_runtime_do_not_panic(env: &Env) {
    let ns = namespace("runtime");
    let (url, builder) = (env.url(), env.builder(&ns));
    let dropped = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let held = runtime.block_on(async {
            let a = builder.connect(&url).await.unwrap();
            let lock = got(a.lock(&key("x"), LockOptions::try_once()).await);
            let lease =
                got(a.lease(&key("x"), LeaseOptions::try_once().ttl(Duration::from_secs(1))).await);
            let claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::try_once()).await);
            let entry = a.admit(&key("x"), DedupeOptions::default()).await.unwrap();
            (lock, lease, claim, entry, a)
        });
        runtime.shutdown_timeout(Duration::from_secs(5));
        drop(held);
    });
    tokio::task::spawn_blocking(move || dropped.join().expect("no panic")).await.unwrap();
    env.nothing_is_left(&ns).await;
}
