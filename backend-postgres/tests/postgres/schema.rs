//! Creating the tables, and the privileges that are needed.

use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, HoldingQuery, Inspect,
    Keys, Kind, Lease, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::PostgresBackend;

use crate::env::{Env, ask, got, key, namespace, run};

fn fresh() -> String {
    format!("schema \"{}'", rand::random::<u32>())
}

fn quoted(schema: &str) -> String {
    format!("\"{}\"", schema.replace('"', "\"\""))
}

async fn drop_schema(env: &Env, schema: &str) {
    run(&mut env.admin().await, format!("DROP SCHEMA {} CASCADE", quoted(schema))).await;
}

/// All services start at the same time after a deployment.
pub(crate) async fn twenty_migrate_at_once(env: &Env) {
    let schema = fresh();
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let (url, builder) = (env.url(), PostgresBackend::builder().schema(&schema));
            tokio::spawn(async move {
                let a = builder.connect(&url).await.unwrap();
                a.migrate().await.unwrap();
                a.check().await.unwrap();
                let lease = got(a.lease(&key("x"), LeaseOptions::default()).await);
                lease.release().await.unwrap();
                a.migrate().await.unwrap();
                a.close().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    drop_schema(env, &schema).await;
}

/// Without the tables, each call says what to do.
pub(crate) async fn missing_tables_are_told(env: &Env) {
    let schema = fresh();
    let a = PostgresBackend::builder().schema(&schema).connect(&env.url()).await.unwrap();
    let missing = |error: leasehold_core::Error| {
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
        assert!(error.to_string().contains("run migrate"), "{error}");
        assert!(!error.is_retryable());
    };
    missing(a.check().await.unwrap_err());
    missing(a.lock(&key("x"), LockOptions::default()).await.unwrap_err());
    missing(a.lease(&key("x"), LeaseOptions::default()).await.unwrap_err());
    missing(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await.unwrap_err());
    missing(a.admit(&key("x"), DedupeOptions::default()).await.unwrap_err());
    missing(a.housekeep().await.unwrap_err());
    // the same handle works as soon as they are there
    a.migrate().await.unwrap();
    got(a.lock(&key(&schema), LockOptions::default()).await).release().await.unwrap();
    got(a.lease(&key("x"), LeaseOptions::default()).await).release().await.unwrap();
    got(a.claim(&Keys::from(key(&schema)), ClaimOptions::default()).await).commit().await.unwrap();
    a.close().await.unwrap();
    drop_schema(env, &schema).await;
}

/// The grants in `schema.sql` are enough, and each of them is needed.
pub(crate) async fn the_granted_role_needs_no_more(env: &Env) {
    let ns = namespace("granted");
    let role = format!("service_{}", rand::random::<u32>());
    let mut admin = env.admin().await;
    run(&mut admin, format!("CREATE ROLE {role} LOGIN")).await;
    let url = env.url().replace("//postgres@", &format!("//{role}@"));

    let a = env.builder(&ns).connect(&url).await.unwrap();
    let error = a.lease(&key("x"), LeaseOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("lacks a privilege"), "{error}");

    let grants: Vec<_> = include_str!("../../src/schema.sql")
        .lines()
        .filter_map(|line| line.strip_prefix("--   GRANT"))
        .collect();
    assert_eq!(grants.len(), 4);
    for grant in grants {
        run(&mut admin, format!("GRANT {}", grant.replace("TO service", &format!("TO {role}"))))
            .await;
    }

    // a handle that was refused goes on
    for a in [a, env.builder(&ns).connect(&url).await.unwrap()] {
        a.migrate().await.unwrap();
        a.check().await.unwrap();
        let guard = got(a.lock(&key("x"), LockOptions::default()).await);
        guard.token().await.unwrap();
        guard.release().await.unwrap();
        let lease = got(a.lease(&key("x"), LeaseOptions::default()).await);
        lease.renew().await.unwrap();
        let mut claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
        lease.verify(claim.tx::<crate::support::Tx>().unwrap()).await.unwrap();
        let day = std::time::Duration::from_secs(86_400);
        assert!(claim.first_seen(&key(&format!("{}", rand::random::<u64>())), day).await.unwrap());
        claim.commit().await.unwrap();
        lease.release().await.unwrap();
        let name = key(&format!("{}", rand::random::<u64>()));
        let entry = a.admit(&name, DedupeOptions::default()).await.unwrap();
        entry.first().unwrap().complete().await.unwrap();
        a.housekeep().await.unwrap();
        // a wait that is given up ends its session: for that the role is enough
        let other = env.handle(&ns).await;
        let held = got(other.lock(&key("y"), LockOptions::default()).await);
        let opts = LockOptions::default().wait(std::time::Duration::from_millis(150));
        assert!(a.lock(&key("y"), opts).await.unwrap().is_none());
        held.release().await.unwrap();
        a.close().await.unwrap();
    }
    // it may create nothing
    let schema = fresh();
    let a = PostgresBackend::builder().schema(&schema).connect(&url).await.unwrap();
    let error = a.migrate().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
}

/// Tables of a version to come are not touched.
pub(crate) async fn a_newer_schema_is_left_alone(env: &Env) {
    let schema = fresh();
    let a = PostgresBackend::builder().schema(&schema).connect(&env.url()).await.unwrap();
    a.migrate().await.unwrap();
    let mut admin = env.admin().await;
    run(&mut admin, format!("UPDATE {}.version SET version = 99", quoted(&schema))).await;
    for error in [a.check().await.unwrap_err(), a.migrate().await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
    }
    let version = format!("SELECT max(version)::text FROM {}.version", quoted(&schema));
    assert_eq!(ask(&mut admin, version).await, "99");
    a.close().await.unwrap();
    drop_schema(env, &schema).await;
}

/// What earlier programs made: their tables are told, upgraded by many at once, and keep their rows.
pub(crate) async fn tables_of_version_1_are_upgraded(env: &Env) {
    let schema = fresh();
    let quoted = quoted(&schema);
    let mut admin = env.admin().await;
    let old = format!(
        "CREATE SCHEMA {quoted}; CREATE SEQUENCE {quoted}.token; \
         CREATE TABLE {quoted}.lease (id bytea NOT NULL PRIMARY KEY, namespace bytea NOT NULL, \
           key bytea NOT NULL, owner bytea NOT NULL, expires_at timestamptz NOT NULL, \
           UNIQUE (id, owner)); \
         CREATE TABLE {quoted}.dedupe (id bytea NOT NULL PRIMARY KEY, namespace bytea NOT NULL, \
           key bytea NOT NULL, owner bytea NOT NULL, done boolean NOT NULL, \
           since timestamptz NOT NULL, expires_at timestamptz NOT NULL); \
         CREATE TABLE {quoted}.version (version integer NOT NULL PRIMARY KEY); \
         INSERT INTO {quoted}.version VALUES (1); \
         INSERT INTO {quoted}.lease VALUES ('\\x01', '', 'old', '', now() + interval '1 hour')"
    );
    run(&mut admin, old).await;
    let a = PostgresBackend::builder().schema(&schema).connect(&env.url()).await.unwrap();
    let error = a.check().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("run migrate"), "{error}");
    let error = a.lease(&key("x"), LeaseOptions::try_once()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (url, builder) = (env.url(), PostgresBackend::builder().schema(&schema));
            tokio::spawn(async move {
                let a = builder.connect(&url).await.unwrap();
                a.migrate().await.unwrap();
                a.check().await.unwrap();
                a.close().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    a.check().await.unwrap();
    let lease = got(a.lease(&key("x"), LeaseOptions::try_once()).await);
    let held = a.holdings(&HoldingQuery::default().kinds([Kind::Lease])).await.unwrap();
    assert_eq!(held.len(), 2, "{held:?}");
    assert_eq!((&held[0].holder, held[0].token), (&None, None), "the old row says no more");
    assert_eq!(held[1].token, Some(lease.token()));
    lease.release().await.unwrap();
    a.close().await.unwrap();
    drop_schema(env, &schema).await;
}
