//! Who holds what, and taking it away.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::backend::LeaseLimits;
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, HeldName, Holder, Holding,
    HoldingQuery, Inspect, Keys, Kind, Lease, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::{LockKind, PostgresBackend};

use crate::env::{Env, PATIENCE, ask, got, key, namespace, run, soon, until};
use crate::support::{Tx, holder};

const HOUR: Duration = Duration::from_secs(3_600);

/// A handle whose holder is told by its label, and the holder as others read it.
async fn labelled(env: &Env, ns: &str) -> (PostgresBackend, Holder) {
    let ours = holder(ns);
    let told = ours.label(63).parse().unwrap();
    let builder = PostgresBackend::builder().namespace(ns).holder(ours);
    (builder.connect(&env.url()).await.unwrap(), told)
}

async fn of_key(a: &PostgresBackend, name: &str) -> Vec<Holding> {
    a.holdings(&HoldingQuery::key(&key(name))).await.unwrap()
}

async fn one(a: &PostgresBackend, kind: Kind, name: &str) -> Holding {
    let query = HoldingQuery::key(&key(name)).kinds([kind]).done(true);
    let found = a.holdings(&query).await.unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

/// Each kind with what the server knows of it, by its key and in lists.
pub(crate) async fn all_four_are_shown_with_their_holders(env: &Env) {
    let ns = namespace("shown");
    let (a, ours) = labelled(env, &ns).await;
    let (b, _) = labelled(env, &ns).await;
    assert_eq!(of_key(&b, "x").await, []);
    let lock = got(a.lock(&key("x"), LockOptions::default()).await);
    let claim = got(a.claim(&Keys::new(["x", "y"]).unwrap(), ClaimOptions::default()).await);
    let lease = got(a.lease(&key("x"), LeaseOptions::default()).await);
    let entry = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();

    let held = of_key(&b, "x").await;
    let kinds: Vec<_> = held.iter().map(|holding| holding.kind).collect();
    assert_eq!(kinds, Kind::ALL);
    for holding in &held {
        assert_eq!(holding.name, HeldName::Key(key("x")));
        assert_eq!(holding.holder.as_ref(), Some(&ours), "{holding:?}");
        let by_session = matches!(holding.kind, Kind::Lock | Kind::Claim);
        assert_eq!(holding.session.is_some(), by_session, "{holding:?}");
        assert_eq!(holding.expires_in.is_none(), by_session, "{holding:?}");
        assert_eq!(holding.held_for.is_some(), holding.kind != Kind::Lock, "{holding:?}");
        assert_eq!(holding.waiters.is_some(), by_session, "{holding:?}");
    }
    assert_eq!(held[1].token, Some(lease.token()));
    assert!(held[1].expires_in.unwrap() <= LeaseOptions::default().ttl);
    let of_b = b.holdings(&HoldingQuery::default().kinds([Kind::Lease])).await.unwrap();
    assert_eq!(of_b.len(), 1);

    // lists show the numbers of locks, whatever prefix is asked for, and no other namespace's
    let (elsewhere, _) = labelled(env, &namespace("elsewhere")).await;
    let _other = got(elsewhere.lock(&key("x"), LockOptions::default()).await);
    let _other = got(elsewhere.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
    let listed = b.holdings(&HoldingQuery::prefix("no such")).await.unwrap();
    let mut names: Vec<_> = listed.iter().map(|held| (held.kind, held.name.to_string())).collect();
    names.sort();
    let hashed = |kind, of, name| {
        let hash = HeldName::Hashed(a.lock_id(of, &key(name)).to_string());
        (kind, hash.to_string())
    };
    let mut expected = vec![
        hashed(Kind::Lock, LockKind::Session, "x"),
        hashed(Kind::Claim, LockKind::Claim, "x"),
        hashed(Kind::Claim, LockKind::Claim, "y"),
    ];
    expected.sort();
    assert_eq!(names, expected);
    assert!(listed.iter().all(|held| held.holder.as_ref() == Some(&ours)), "{listed:?}");
    let prefixed = HoldingQuery::prefix("").kinds([Kind::Lease, Kind::Dedupe]);
    let prefixed = b.holdings(&prefixed).await.unwrap();
    assert_eq!(prefixed.len(), 2, "{prefixed:?}");
    let few = b.holdings(&HoldingQuery::default().limit(2)).await.unwrap();
    assert_eq!(few.len(), 2);

    entry.complete().await.unwrap();
    assert_eq!(of_key(&b, "x").await.len(), 3, "what is done is not listed unless asked for");
    assert!(one(&b, Kind::Dedupe, "x").await.done);
    lock.release().await.unwrap();
    claim.rollback().await.unwrap();
    lease.release().await.unwrap();
    assert_eq!(b.holdings(&HoldingQuery::default()).await.unwrap(), []);
    a.close().await.unwrap();
    assert_eq!(
        a.holdings(&HoldingQuery::default()).await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
}

/// A pool of the service's own shows its own name; who waits is counted.
pub(crate) async fn a_name_of_the_users_is_shown_with_the_connection(env: &Env) {
    let ns = namespace("named");
    let options = env.options().application_name("billing");
    let pool = sqlx::PgPool::connect_lazy_with(options);
    let a = PostgresBackend::builder().namespace(&ns).application_name("invoices").build(pool);
    let a = a.unwrap();
    let _lock = got(a.lock(&key("x"), LockOptions::default()).await);
    let mut claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
    let pid = ask(claim.tx::<Tx>().unwrap(), "SELECT pg_backend_pid()::text").await;
    let b = Arc::new(env.handle(&ns).await);
    for (kind, name) in [(Kind::Lock, "invoices"), (Kind::Claim, "billing")] {
        let held = one(&b, kind, "x").await;
        assert_eq!(held.holder, None);
        let session = held.session.unwrap();
        assert!(session.ends_with(&format!(", {name}, 127.0.0.1")), "{session}");
        assert!(kind == Kind::Lock || session.starts_with(&format!("pid {pid},")), "{session}");
    }
    let waits = b.clone();
    let waiter =
        tokio::spawn(
            async move { waits.lock(&key("x"), LockOptions::default().wait(PATIENCE)).await },
        );
    until("the waiter is counted", || async { one(&b, Kind::Lock, "x").await.waiters == Some(1) })
        .await;
    waiter.abort();
    // the name of a service's pool becomes that of its sessions' holder
    let options = env.options().application_name("shop");
    let c = PostgresBackend::builder().namespace(&ns);
    let c = c.build(sqlx::PgPool::connect_lazy_with(options)).unwrap();
    let _lock = got(c.lock(&key("y"), LockOptions::default()).await);
    let held = one(&b, Kind::Lock, "y").await;
    let ours = held.holder.unwrap();
    assert_eq!((ours.app.as_str(), ours.pid), ("shop", std::process::id()));
}

/// Sessions are ended, rows deleted, and the displaced are told.
pub(crate) async fn what_is_released_by_force_is_lost(env: &Env) {
    let ns = namespace("forced");
    let (a, ours) = labelled(env, &ns).await;
    let (b, _) = labelled(env, &ns).await;
    for kind in Kind::ALL {
        assert_eq!(b.force_release(kind, &key("x")).await.unwrap(), None);
    }
    let force = async |kind| {
        let displaced = b.force_release(kind, &key("x")).await.unwrap().expect("it is held");
        assert_eq!((displaced.kind, displaced.holder.as_ref()), (kind, Some(&ours)));
        assert_eq!(displaced.name, HeldName::Key(key("x")));
        let query = HoldingQuery::key(&key("x")).kinds([kind]).done(true);
        assert_eq!(b.holdings(&query).await.unwrap(), []);
        assert_eq!(b.force_release(kind, &key("x")).await.unwrap(), None);
        displaced
    };

    let lock = got(a.lock(&key("x"), LockOptions::default()).await);
    let beside = got(a.lock(&key("beside"), LockOptions::default()).await);
    force(Kind::Lock).await;
    soon("the loss of the lock", lock.lost().wait()).await;
    soon("the loss of what its session held", beside.lost().wait()).await;
    got(b.lock(&key("x"), LockOptions::try_once()).await).release().await.unwrap();

    let mut claim = got(a.claim(&Keys::new(["x", "z"]).unwrap(), ClaimOptions::default()).await);
    force(Kind::Claim).await;
    let tx = claim.tx::<Tx>().unwrap();
    assert!(sqlx::raw_sql("SELECT 1").execute(&mut **tx).await.is_err());
    claim.commit().await.expect_err("nothing is committed");
    got(b.claim(&Keys::new(["x", "z"]).unwrap(), ClaimOptions::try_once()).await)
        .rollback()
        .await
        .unwrap();

    let lease = got(a.lease(&key("x"), LeaseOptions::default().ttl(Duration::from_secs(3))).await);
    let displaced = force(Kind::Lease).await;
    assert_eq!(displaced.token, Some(lease.token()));
    soon("the loss of the lease", lease.lost().wait()).await;
    let next = got(b.lease(&key("x"), LeaseOptions::try_once()).await);
    assert!(next.token() > lease.token());

    let entry = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    assert!(!force(Kind::Dedupe).await.done);
    assert_eq!(entry.complete().await.unwrap_err().kind(), ErrorKind::Lost);
    let again = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    again.complete().await.unwrap();
    assert!(force(Kind::Dedupe).await.done);
}

/// Long before the next renewal, where the handle listens; a waiter gets it at once.
pub(crate) async fn who_listens_hears_of_a_lease_taken_by_force(env: &Env) {
    let ns = namespace("hears");
    let mut limits = LeaseLimits::default();
    limits.watch_held = true;
    let a = env.builder(&ns).lease_limits(limits).connect(&env.url()).await.unwrap();
    let b = env.handle(&ns).await;
    let opts = LeaseOptions::default().ttl(HOUR);
    let lease = got(a.lease(&key("x"), opts).await);
    let listening = "SELECT (count(*) > 0)::text FROM pg_stat_activity \
        WHERE query LIKE 'LISTEN%' AND starts_with(application_name, '";
    let listening = format!("{listening}{}')", crate::support::mark(&ns));
    until("the subscription", || async {
        ask(&mut env.admin().await, listening.clone()).await == "true"
    })
    .await;
    assert!(b.force_release(Kind::Lease, &key("x")).await.unwrap().is_some());
    soon("the loss", lease.lost().wait()).await;
}

/// The role of a service may look, and may end what its own role holds.
pub(crate) async fn another_roles_session_needs_a_privilege_to_end(env: &Env) {
    let ns = namespace("roles");
    let role = format!("operator_{}", rand::random::<u32>());
    let mut admin = env.admin().await;
    run(
        &mut admin,
        format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA leasehold TO {role}; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON leasehold.lease, leasehold.dedupe TO {role}; \
             GRANT SELECT ON leasehold.version TO {role}; \
             GRANT USAGE ON SEQUENCE leasehold.token TO {role}"
        ),
    )
    .await;
    let url = env.url().replace("//postgres@", &format!("//{role}@"));
    let (a, ours) = labelled(env, &ns).await;
    let b = env.builder(&ns).connect(&url).await.unwrap();
    let lock = got(a.lock(&key("x"), LockOptions::default()).await);
    assert_eq!(one(&b, Kind::Lock, "x").await.holder, Some(ours));
    let error = b.force_release(Kind::Lock, &key("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("pg_signal_backend"), "{error}");
    assert!(error.to_string().contains("pid "), "{error}");
    assert!(lock.is_held());

    let own = env.builder(&ns).connect(&url).await.unwrap();
    let lock = got(own.lock(&key("y"), LockOptions::default()).await);
    assert!(b.force_release(Kind::Lock, &key("y")).await.unwrap().is_some());
    soon("the loss", lock.lost().wait()).await;
}

/// The token that the row shows is its holder's, and greater than all before it, however many take
/// the lease, release it and delete it by force.
pub(crate) async fn the_row_shows_the_holders_token(env: &Env) {
    let ns = namespace("tokens");
    let handles = [Arc::new(env.handle(&ns).await), Arc::new(env.handle(&ns).await)];
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..8_usize)
        .map(|task| {
            let (a, tokens) = (handles[task % 2].clone(), tokens.clone());
            tokio::spawn(async move {
                for round in 0..25 {
                    let opts = LeaseOptions::default().wait(PATIENCE);
                    let lease = got(a.lease(&key("x"), opts).await);
                    tokens.lock().unwrap().push(lease.token());
                    assert_eq!(one(&a, Kind::Lease, "x").await.token, Some(lease.token()));
                    if round % 5 == task % 5 {
                        a.force_release(Kind::Lease, &key("x")).await.unwrap().unwrap();
                        drop(lease);
                    } else {
                        lease.release().await.unwrap();
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        soon("a task", task).await.unwrap();
    }
    let tokens = tokens.lock().unwrap();
    assert_eq!(tokens.len(), 200);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// Where the caller's mapping gives a lock and a claim one number, the session tells which it is.
pub(crate) async fn one_number_for_both_kinds(env: &Env) {
    let ns = namespace("one");
    let number: i64 = rand::random();
    let builder = || env.builder(&ns).key_hash(move |_, _| number);
    let a = builder().connect(&env.url()).await.unwrap();
    let lock = got(a.lock(&key("x"), LockOptions::default()).await);
    let kinds = async || of_key(&a, "x").await.iter().map(|held| held.kind).collect::<Vec<_>>();
    assert_eq!(kinds().await, [Kind::Lock]);
    assert_eq!(a.force_release(Kind::Claim, &key("x")).await.unwrap(), None);
    lock.release().await.unwrap();
    let claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
    assert_eq!(kinds().await, [Kind::Claim]);
    claim.rollback().await.unwrap();
    // another program's
    let mut other = env.admin().await;
    run(&mut other, format!("SELECT pg_advisory_lock({number})")).await;
    let held = of_key(&a, "x").await;
    assert_eq!(held.len(), 1);
    assert!(held[0].session.as_ref().unwrap().contains("admin"), "{held:?}");
    let all = HoldingQuery::default();
    assert_eq!(a.holdings(&all).await.unwrap(), [], "no list shows another program's");
}

/// Somebody draws a token for a lease and is slow to insert the row. Nobody else has the lease in
/// between with a greater one.
pub(crate) async fn a_slow_insertion_is_not_overtaken(env: &Env) {
    let schema = format!("slow_{}", rand::random::<u32>());
    let number: i64 = rand::random();
    let builder = |app: &str| {
        let holder = Holder::this_process().named(app);
        PostgresBackend::builder().schema(&schema).namespace(&schema).holder(holder)
    };
    let a = Arc::new(builder("slow").connect(&env.url()).await.unwrap());
    let b = builder("quick").connect(&env.url()).await.unwrap();
    a.migrate().await.unwrap();
    let mut admin = env.admin().await;
    let trigger = format!(
        "CREATE FUNCTION {schema}.pause() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           PERFORM set_config('lock_timeout', '0', true); \
           PERFORM pg_advisory_xact_lock({number}); RETURN NEW; END $$; \
         CREATE TRIGGER pause BEFORE INSERT ON {schema}.lease FOR EACH ROW \
           WHEN (convert_from(NEW.holder, 'UTF8') LIKE 'slow@%') \
           EXECUTE FUNCTION {schema}.pause(); \
         SELECT pg_advisory_lock({number})"
    );
    run(&mut admin, trigger).await;
    let slow = a.clone();
    let slow =
        tokio::spawn(
            async move { slow.lease(&key("x"), LeaseOptions::default().wait(PATIENCE)).await },
        );
    let pauses = format!(
        "SELECT (count(*) > 0)::text FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
         AND (classid::int8 << 32) | objid::int8 = {number}"
    );
    until("the insertion is about to be made", || async {
        ask(&mut env.admin().await, pauses.clone()).await == "true"
    })
    .await;
    let quick = b.lease(&key("x"), LeaseOptions::try_once()).await.unwrap();
    let overtook = match quick {
        Some(lease) => {
            let token = lease.token();
            lease.release().await.unwrap();
            Some(token)
        }
        None => None,
    };
    run(&mut admin, format!("SELECT pg_advisory_unlock({number})")).await;
    let lease = got(soon("the slow one", slow).await.unwrap());
    assert!(Some(lease.token()) > overtook, "{:?} after {overtook:?}", lease.token());
    assert_eq!(one(&b, Kind::Lease, "x").await.token, Some(lease.token()));
    let before = lease.token();
    lease.release().await.unwrap();
    let lease = got(b.lease(&key("x"), LeaseOptions::default().wait(PATIENCE)).await);
    assert!(lease.token() > before);
    lease.release().await.unwrap();
    a.close().await.unwrap();
    b.close().await.unwrap();
    run(&mut admin, format!("DROP SCHEMA {schema} CASCADE")).await;
}
