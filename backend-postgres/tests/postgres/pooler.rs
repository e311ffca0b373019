//! Behind a PgBouncer in transaction mode.

use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::servers::PgBouncer;
use leasehold_core::{
    Admission, Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Keys, Lease,
    LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::PostgresBackend;

use crate::env::{Env, PATIENCE, ask, got, key, namespace, soon};
use crate::support::{Tx, leftovers, read, write};

/// B01: named locks are refused with what to do; everything else works, also where the pooler hands
/// each statement to another session and keeps no prepared statements.
pub(crate) async fn a_pooler_refuses_named_locks_only(env: &Env) {
    let round_robin = ["server_round_robin = 1", "default_pool_size = 7"];
    // as one before 1.21, and as one that knows prepared statements
    let old = ["max_prepared_statements = 0", "default_pool_size = 3"];
    let new = ["max_prepared_statements = 100"];
    for settings in [&old[..], &new[..], &round_robin[..]] {
        let (server, settings) = (env.server.clone(), settings.to_vec());
        let pooler =
            tokio::task::spawn_blocking(move || PgBouncer::start_with(&server, &settings)).await;
        let pooler = pooler.unwrap().unwrap();
        let ns = namespace("pooler");
        let open = || async { env.builder(&ns).connect(&pooler.url()).await.unwrap() };
        let (a, b) = (Arc::new(open().await), Arc::new(open().await));
        a.migrate().await.unwrap();
        a.check().await.unwrap();

        let error = a.lock(&key("x"), LockOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("session_options"), "{error}");
        assert!(!error.is_retryable());
        let mut admin = env.admin().await;
        assert_eq!(leftovers(&mut admin, &ns).await.unwrap(), Vec::<String>::new());

        let tasks: Vec<_> = (0..8_usize)
            .map(|task| {
                let backend = if task % 2 == 0 { a.clone() } else { b.clone() };
                let ns = ns.clone();
                tokio::spawn(async move {
                    for _ in 0..5 {
                        use_all(&backend, &ns).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            soon("a task", task).await.unwrap();
        }
        assert_eq!(read(&mut admin, &ns).await.unwrap(), Some(40), "the claims were exclusive");
        a.housekeep().await.unwrap();
        soon("the close", a.close()).await.unwrap();
        soon("the close", b.close()).await.unwrap();
        env.nothing_is_left(&ns).await;
    }
}

/// Everything that works through a pooler.
async fn use_all(a: &PostgresBackend, ns: &str) {
    let day = Duration::from_secs(86_400);
    let opts = ClaimOptions::default().wait(PATIENCE);
    let mut claim = got(a.claim(&Keys::new(["x", "y"]).unwrap(), opts).await);
    let fresh = key(&format!("{}", rand::random::<u64>()));
    assert!(claim.first_seen(&fresh, day).await.unwrap());
    assert!(!claim.first_seen(&fresh, day).await.unwrap());
    let tx = claim.tx::<Tx>().unwrap();
    assert_eq!(ask(&mut *tx, "SHOW lock_timeout").await, "0");
    // the caller's own prepared statements in a transaction are the caller's own concern
    let count = format!(
        "INSERT INTO leasehold_test.number VALUES ('{ns}', 1) \
         ON CONFLICT (name) DO UPDATE SET value = number.value + 1 RETURNING value::text"
    );
    ask(&mut *tx, count).await;
    claim.commit().await.unwrap();

    let opts = LeaseOptions::default().wait(PATIENCE).ttl(Duration::from_secs(20));
    let lease = got(a.lease(&key("x"), opts).await);
    lease.renew().await.unwrap();
    let mut claim = got(a.claim(&Keys::none(), ClaimOptions::default()).await);
    lease.verify(claim.tx::<Tx>().unwrap()).await.unwrap();
    claim.rollback().await.unwrap();
    lease.release().await.unwrap();

    let names = [0; 3].map(|_| key(&format!("{}", rand::random::<u64>())));
    let entries = a.admit_many(&names, DedupeOptions::default()).await.unwrap();
    assert!(entries.iter().all(Admission::is_first));
    for entry in entries.into_iter().filter_map(Admission::first) {
        entry.complete().await.unwrap();
    }
    let again = a.admit(&names[1], DedupeOptions::default()).await.unwrap();
    assert!(matches!(again, Admission::Done { .. }), "{again:?}");
}

/// B01: the pool leads through the pooler, the sessions past it.
pub(crate) async fn sessions_go_past_a_pooler(env: &Env) {
    let server = env.server.clone();
    let pooler = tokio::task::spawn_blocking(move || PgBouncer::start(&server)).await;
    let pooler = pooler.unwrap().unwrap();
    let ns = namespace("past");
    let builder = || env.builder(&ns).session_options(env.options());
    let a = builder().connect(&pooler.url()).await.unwrap();
    let b = builder().connect(&pooler.url()).await.unwrap();
    let guard = got(a.lock(&key("x"), LockOptions::try_once()).await);
    assert!(b.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_none());
    guard.token().await.unwrap();
    guard.release().await.unwrap();
    got(b.lock(&key("x"), LockOptions::default()).await).release().await.unwrap();
    use_all(&a, &ns).await;
    write(&mut env.admin().await, &ns, 0).await.unwrap();
    soon("the close", a.close()).await.unwrap();
    soon("the close", b.close()).await.unwrap();
    env.nothing_is_left(&ns).await;
}
