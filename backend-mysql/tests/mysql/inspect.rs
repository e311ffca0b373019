//! Who holds what, and taking it away.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, HeldName, Holder, Holding,
    HoldingQuery, Inspect, Kind, Lease, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;

use crate::support::MySqlHarness;
use crate::{
    PATIENCE, Verdict, ensure, eventually, key, keys, least_privileged, locked, namespace,
    runs_bytes_that_are_no_text, within,
};

crate::tests!("inspect":
    all_four_are_shown_with_their_holders,
    locks_are_listed_where_the_server_shows_them,
    what_is_not_shown_is_told,
    what_is_released_by_force_is_lost,
    another_users_session_needs_a_privilege_to_end,
    rows_show_the_holders_token,
    entries_of_earlier_connections_are_not_believed,
    entries_of_ended_sessions_are_purged,
    claims_of_one_connection_after_another_are_told_apart,
);

const HOUR: Duration = Duration::from_hours(1);

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A handle under the name of an app.
async fn named(
    harness: &MySqlHarness,
    namespace: &str,
    user_locks: bool,
    app: &str,
) -> Result<(MySqlBackend, Holder), Failure> {
    let holder = Holder::this_process().named(app);
    let mut builder = harness.builder(namespace).holder(holder.clone());
    if !user_locks {
        builder = builder.without_user_locks();
    }
    Ok((builder.connect(harness.url()).await?, holder))
}

async fn of_key(backend: &MySqlBackend, name: &str) -> Result<Vec<Holding>, Failure> {
    Ok(backend.holdings(&HoldingQuery::key(&key(name))).await?)
}

async fn one(backend: &MySqlBackend, kind: Kind, name: &str) -> Result<Holding, Failure> {
    let query = HoldingQuery::key(&key(name)).kinds([kind]).done(true);
    let mut found = backend.holdings(&query).await?;
    ensure!(found.len() == 1, "{kind} {name}: {found:?}");
    found.pop().ok_or_else(|| "nobody holds it".into())
}

/// Each kind with what is known of it, by its key, with and without user-level locks; and leases and
/// entries in lists.
async fn all_four_are_shown_with_their_holders(harness: Arc<MySqlHarness>) -> Verdict {
    for user_locks in [true, false] {
        let namespace = namespace();
        let (one_, ours) = named(&harness, &namespace, user_locks, "billing é").await?;
        let (two, _) = named(&harness, &namespace, user_locks, "other").await?;
        let two = Arc::new(two);
        let lock = locked(&one_, "X").await?;
        let claim = one_.claim(&keys(&["X", "y"]), ClaimOptions::default()).await?;
        let claim = claim.ok_or("not free")?;
        let lease = one_.lease(&key("X"), LeaseOptions::default()).await?.ok_or("not free")?;
        let entry = one_.admit(&key("X"), DedupeOptions::default()).await?;
        let entry = entry.first().ok_or("not the first")?;
        let held = of_key(&two, "X").await?;
        let kinds: Vec<Kind> = held.iter().map(|held| held.kind).collect();
        ensure!(kinds == Kind::ALL, "it shows {held:#?}");
        for held in &held {
            ensure!(held.name == HeldName::Key(key("X")), "it shows {held:?}");
            ensure!(held.holder.as_ref() == Some(&ours), "it shows {held:?}");
            let of_session = held.kind == Kind::Claim || (held.kind == Kind::Lock && user_locks);
            ensure!(held.session.is_some() == of_session, "it shows {held:?}");
            ensure!(held.expires_in.is_none() == of_session, "it shows {held:?}");
            if let Some(session) = &held.session {
                ensure!(session.contains(", test@127.0.0.1"), "it shows {held:?}");
            }
            let since = !of_session || !user_locks;
            ensure!(held.held_for.is_some() == since, "it shows {held:?}");
            ensure!(held.held_for.is_none_or(|time| time < PATIENCE * 6), "it shows {held:?}");
        }
        ensure!(held[1].token == Some(lease.token()), "it shows {:?}", held[1]);
        ensure!(held[3].token == Some(entry.token()), "it shows {:?}", held[3]);
        let rows = [Kind::Lease, Kind::Dedupe];
        let listed = two.holdings(&HoldingQuery::prefix("X").kinds(rows)).await?;
        ensure!(listed.len() == 2, "it lists {listed:?}");
        let listed = two.holdings(&HoldingQuery::prefix("x").kinds(rows)).await?;
        ensure!(listed.is_empty(), "it lists {listed:?}");
        // who waits on the server is counted
        if user_locks {
            ensure!(held[0].waiters == Some(0), "it shows {:?}", held[0]);
            let waiter = two.clone();
            let waiter = tokio::spawn(async move {
                waiter.lock(&key("X"), LockOptions::default().wait(HOUR)).await
            });
            eventually("the waiter to be counted", || async {
                Ok(one(&two, Kind::Lock, "X").await?.waiters == Some(1))
            })
            .await?;
            waiter.abort();
        } else {
            // named locks are leases there, and are not taken for such
            let locks = two.holdings(&HoldingQuery::default().kinds([Kind::Lock])).await?;
            ensure!(locks.len() == 1 && locks[0].kind == Kind::Lock, "it lists {locks:?}");
            let claims = two.holdings(&HoldingQuery::default().kinds([Kind::Claim])).await?;
            ensure!(claims.len() == 2, "it lists {claims:?}");
            ensure!(claims.iter().all(|held| held.name.key().is_none()), "it lists {claims:?}");
        }
        entry.complete().await?;
        ensure!(one(&two, Kind::Dedupe, "X").await?.done, "it is not shown as done");
        lock.release().await?;
        claim.commit().await?;
        lease.release().await?;
        let left = of_key(&two, "X").await?;
        ensure!(left.is_empty(), "it shows {left:?}");
        one_.close().await?;
        let closed = one_.holdings(&HoldingQuery::key(&key("X"))).await;
        let closed = closed.err().ok_or("a closed handle looks")?;
        ensure!(closed.kind() == ErrorKind::Unavailable, "it said {closed}");
    }
    Ok(())
}

/// A user with two more grants sees all names of its namespace, and no other's.
async fn locks_are_listed_where_the_server_shows_them(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one_, ours) = named(&harness, &namespace, true, "holder").await?;
    let (elsewhere, _) = named(&harness, &crate::namespace(), true, "elsewhere").await?;
    let _guards = (
        locked(&one_, "job/1").await?,
        locked(&one_, "Job/1").await?,
        locked(&elsewhere, "job/1").await?,
        locked(&elsewhere, "Job/1").await?,
    );
    let wanted = keys(&["job/2", "other"]);
    let _claims = (
        one_.claim(&wanted, ClaimOptions::default()).await?,
        elsewhere.claim(&wanted, ClaimOptions::default()).await?,
    );
    let (user, url) = least_privileged(&harness).await?;
    let operator = harness.builder(&namespace).connect(&url).await?;
    let error = operator.holdings(&HoldingQuery::default()).await;
    let error = error.err().ok_or("it lists without the right to")?;
    if !matches!(error.kind(), ErrorKind::Backend) {
        return Err(error.into());
    }
    ensure!(error.to_string().contains("SELECT on performance_schema"), "it said {error}");
    let mut admin = harness.admin().await?;
    for table in ["metadata_locks", "threads"] {
        let grant = format!("GRANT SELECT ON performance_schema.{table} TO '{user}'@'%'");
        admin.query_drop(grant).await?;
    }
    let query = HoldingQuery::default().kinds([Kind::Lock, Kind::Claim]);
    let listed = operator.holdings(&query).await?;
    ensure!(listed.iter().all(|held| held.holder.as_ref() == Some(&ours)), "it lists {listed:#?}");
    let names: Vec<_> = listed.iter().map(|held| (held.kind, held.name.clone())).collect();
    let expected = [
        (Kind::Lock, HeldName::Key(key("job/1"))),
        (Kind::Lock, HeldName::Hashed(one_.lock_name(&key("Job/1")))),
        (Kind::Claim, HeldName::Key(key("job/2"))),
        (Kind::Claim, HeldName::Key(key("other"))),
    ];
    ensure!(names == expected, "it lists {names:#?}");
    let some = HoldingQuery::prefix("job/2").kinds([Kind::Claim]);
    let listed = operator.holdings(&some).await?;
    ensure!(listed.len() == 1, "it lists {listed:?}");
    let finding = operator.diagnose().await?;
    let finding = finding.iter().find(|one| one.topic == "inspection").ok_or("no finding")?;
    ensure!(finding.found.starts_with("lists all"), "it found {finding:?}");
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await?;
    Ok(())
}

/// A server that shows no locks is not taken for one that has none.
async fn what_is_not_shown_is_told(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    for blind in [
        "--performance-schema=OFF",
        "--performance-schema-instrument=wait/lock/metadata/sql/mdl=OFF",
    ] {
        let own = tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &[blind]));
        let own = own.await??;
        let admin = mysql_async::OptsBuilder::from_opts(own.admin().await?.opts().clone());
        let admin = mysql_async::Pool::new(admin.db_name(Some("test")));
        let backend = own.builder("x").from_pool(admin).await?;
        let _guard = locked(&backend, "x").await?;
        let error = backend.holdings(&HoldingQuery::default()).await;
        let error = error.err().ok_or("it lists what it cannot see")?;
        ensure!(error.kind() == ErrorKind::Unsupported, "it said {error}");
        ensure!(error.to_string().contains("performance_schema"), "it said {error}");
        one(&backend, Kind::Lock, "x").await?;
        let rows = HoldingQuery::default().kinds([Kind::Lease, Kind::Dedupe]);
        ensure!(backend.holdings(&rows).await?.is_empty(), "it lists rows that are not there");
        let findings = backend.diagnose().await?;
        let finding = findings.iter().find(|one| one.topic == "inspection").ok_or("no finding")?;
        ensure!(finding.advice.contains("performance_schema = ON"), "it found {finding:?}");
    }
    Ok(())
}

/// Sessions are ended, rows freed, the displaced told and those who wait woken.
async fn what_is_released_by_force_is_lost(harness: Arc<MySqlHarness>) -> Verdict {
    for user_locks in [true, false] {
        let namespace = namespace();
        let (a, ours) = named(&harness, &namespace, user_locks, "displaced").await?;
        let (b, _) = named(&harness, &namespace, user_locks, "operator").await?;
        let force = async |kind| {
            let displaced = b.force_release(kind, &key("x")).await?.ok_or("nobody had it")?;
            ensure!(displaced.kind == kind, "it displaced {displaced:?}");
            ensure!(displaced.holder.as_ref() == Some(&ours), "it displaced {displaced:?}");
            let query = HoldingQuery::key(&key("x")).kinds([kind]).done(true);
            let left = b.holdings(&query).await?;
            ensure!(left.is_empty(), "it left {left:?}");
            let again = b.force_release(kind, &key("x")).await?;
            ensure!(again.is_none(), "it displaced {again:?}");
            Ok::<_, Failure>(displaced)
        };
        let lock = locked(&a, "x").await?;
        force(Kind::Lock).await?;
        within(PATIENCE, "the loss of the lock", lock.lost().wait()).await?;
        let next = b.lock(&key("x"), LockOptions::try_once()).await?.ok_or("it is not free")?;
        next.release().await?;

        let claim = a.claim(&keys(&["x", "z"]), ClaimOptions::default()).await?;
        let claim = claim.ok_or("not free")?;
        force(Kind::Claim).await?;
        ensure!(claim.commit().await.is_err(), "it committed");
        let next = b.claim(&keys(&["x", "z"]), ClaimOptions::default()).await?;
        next.ok_or("it is not free")?.rollback().await?;

        let opts = LeaseOptions::default().ttl(Duration::from_secs(3));
        let lease = a.lease(&key("x"), opts).await?.ok_or("not free")?;
        let displaced = force(Kind::Lease).await?;
        ensure!(displaced.token == Some(lease.token()), "it displaced {displaced:?}");
        within(PATIENCE, "the loss of the lease", lease.lost().wait()).await?;
        let next = b.lease(&key("x"), LeaseOptions::try_once()).await?.ok_or("it is not free")?;
        ensure!(next.token() > lease.token(), "{} after {}", next.token(), lease.token());

        let entry = a.admit(&key("x"), DedupeOptions::default()).await?;
        let entry = entry.first().ok_or("not the first")?;
        ensure!(!force(Kind::Dedupe).await?.done, "it was done");
        let late = entry.complete().await.err().ok_or("a displaced owner completed it")?;
        ensure!(late.kind() == ErrorKind::Lost, "it said {late}");
        let again = a.admit(&key("x"), DedupeOptions::default()).await?;
        again.first().ok_or("not the first")?.complete().await?;
        ensure!(force(Kind::Dedupe).await?.done, "it was not done");
    }

    // who waits hears of it long before it would look
    let namespace = namespace();
    let builder = || harness.builder(&namespace).max_poll(HOUR);
    let a = builder().connect(harness.url()).await?;
    let (b, link) = harness.open_with(&namespace, builder(), 4).await?;
    let _lease = a.lease(&key("x"), LeaseOptions::default().ttl(HOUR)).await?.ok_or("not free")?;
    let waiter = tokio::spawn(async move {
        b.lease(&key("x"), LeaseOptions::default().wait(HOUR)).await.map(|lease| lease.is_some())
    });
    eventually("the waiter to listen", || async {
        Ok(!harness.bells(&link.name, "PENDING").await?.is_empty())
    })
    .await?;
    ensure!(a.force_release(Kind::Lease, &key("x")).await?.is_some(), "nobody had it");
    ensure!(within(PATIENCE, "the waiter's turn", waiter).await???, "the waiter gave up");
    Ok(())
}

/// Whoever may not end another user's session is told what it lacks, and nothing is lost.
async fn another_users_session_needs_a_privilege_to_end(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (a, ours) = named(&harness, &namespace, true, "holder").await?;
    let (user, url) = least_privileged(&harness).await?;
    let operator = harness.builder(&namespace).connect(&url).await?;
    let lock = locked(&a, "x").await?;
    ensure!(one(&operator, Kind::Lock, "x").await?.holder == Some(ours), "it shows another");
    let error = operator.force_release(Kind::Lock, &key("x")).await;
    let error = error.err().ok_or("it ended another user's session")?;
    ensure!(error.kind() == ErrorKind::Backend, "it said {error}");
    ensure!(error.to_string().contains("CONNECTION_ADMIN"), "it said {error}");
    ensure!(error.to_string().contains("(connection "), "it said {error}");
    ensure!(lock.is_held() && !crate::is_free(&operator, "x").await?, "it was freed");
    let mut admin = harness.admin().await?;
    let privilege = match harness.kind() {
        leasehold_conformance::servers::Kind::MariaDb => "CONNECTION ADMIN",
        _ => "CONNECTION_ADMIN",
    };
    admin.query_drop(format!("GRANT {privilege} ON *.* TO '{user}'@'%'")).await?;
    let operator = harness.builder(&namespace).connect(&url).await?;
    ensure!(operator.force_release(Kind::Lock, &key("x")).await?.is_some(), "nobody had it");
    within(PATIENCE, "the loss", lock.lost().wait()).await?;
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await?;
    Ok(())
}

/// The token that the row shows is its holder's, and greater than all before it, however many take
/// the lease, release it, take it away and purge.
async fn rows_show_the_holders_token(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let open = || harness.builder(&namespace).connect(harness.url());
    let handles = [Arc::new(open().await?), Arc::new(open().await?)];
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = tokio::task::JoinSet::<Verdict>::new();
    for task in 0..8_usize {
        let (handle, tokens) = (handles[task % 2].clone(), tokens.clone());
        tasks.spawn(async move {
            for round in 0..25 {
                let opts = LeaseOptions::default().wait(PATIENCE * 6);
                let lease = handle.lease(&key("x"), opts).await?.ok_or("it was never free")?;
                tokens.lock().unwrap_or_else(PoisonError::into_inner).push(lease.token());
                let shown = one(&handle, Kind::Lease, "x").await?;
                ensure!(shown.token == Some(lease.token()), "{shown:?} for {}", lease.token());
                if round % 5 == task % 5 {
                    let displaced = handle.force_release(Kind::Lease, &key("x")).await?;
                    let displaced = displaced.ok_or("nobody had it")?;
                    ensure!(displaced.token == Some(lease.token()), "it displaced {displaced:?}");
                    drop(lease);
                    handle.housekeep().await?;
                } else {
                    lease.release().await?;
                }
            }
            Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
    ensure!(tokens.len() == 200 && tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    Ok(())
}

/// A connection of another program has the lock, and the number of one that has ended.
async fn entries_of_earlier_connections_are_not_believed(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (backend, ours) = named(&harness, &namespace, true, "looker").await?;
    let mut other = harness.conn().await?;
    let take = format!("SELECT GET_LOCK('{}', 0)", backend.lock_name(&key("x")));
    ensure!(other.query_first::<u8, _>(take).await? == Some(1), "it is not free");
    let entry = format!(
        "REPLACE INTO leasehold_session (connection, scope, holder, marker, since) \
         VALUES (CONNECTION_ID(), '{namespace}', '{ours}', 'lh:session:of-another', 0)"
    );
    other.query_drop(entry).await?;
    let shown = one(&backend, Kind::Lock, "x").await?;
    ensure!(shown.holder.is_none(), "it believes {shown:?}");
    let connection = format!("connection {}, test@", other.id());
    ensure!(shown.session.is_some_and(|text| text.starts_with(&connection)), "no {connection}");
    ensure!(backend.force_release(Kind::Lock, &key("x")).await?.is_some(), "nobody had it");
    ensure!(crate::is_free(&backend, "x").await?, "it is not free");
    Ok(())
}

/// What a session that lives says stays, and what others said goes.
async fn entries_of_ended_sessions_are_purged(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (backend, ours) = named(&harness, &namespace, true, "living").await?;
    let lock = locked(&backend, "x").await?;
    let claim = backend.claim(&keys(&["x"]), ClaimOptions::default()).await?;
    claim.ok_or("not free")?.rollback().await?;
    let rows = format!("SELECT COUNT(*) FROM leasehold_session WHERE scope = '{namespace}'");
    let mut conn = harness.conn().await?;
    let count = conn.query_first::<u64, _>(&rows).await?;
    ensure!(count == Some(2), "{count:?} of a session and a connection of the pool");
    backend.housekeep().await?;
    let count = conn.query_first::<u64, _>(&rows).await?;
    ensure!(count == Some(2), "{count:?} are left of what is new");
    // of a while ago: one of a pool that has ended meanwhile, and one that is still open
    let ended = format!(
        "INSERT INTO leasehold_session (connection, scope, holder, marker, since) \
         SELECT 4294967295, scope, holder, '', since FROM leasehold_session \
         WHERE scope = '{namespace}' AND marker = ''"
    );
    conn.query_drop(&ended).await?;
    let earlier = format!(
        "UPDATE leasehold_session SET since = since - 180 * 1000000 WHERE scope = '{namespace}'"
    );
    conn.query_drop(&earlier).await?;
    let busy = runs_bytes_that_are_no_text(&harness).await?;
    backend.housekeep().await?;
    busy.abort();
    let count = conn.query_first::<u64, _>(&rows).await?;
    ensure!(count == Some(2), "{count:?} are left of what is open, and of a connection that ended");
    let age = format!("UPDATE leasehold_session SET since = 0 WHERE scope = '{namespace}'");
    conn.query_drop(&age).await?;
    backend.housekeep().await?;
    let count = conn.query_first::<u64, _>(&rows).await?;
    ensure!(count == Some(1), "{count:?} are left of what is old");
    ensure!(one(&backend, Kind::Lock, "x").await?.holder == Some(ours), "the session's is gone");
    lock.release().await?;
    backend.close().await?;
    let (backend, _) = named(&harness, &namespace, true, "next").await?;
    eventually("the ended session to be purged", || async {
        backend.housekeep().await?;
        let count = harness.conn().await?.query_first::<u64, _>(&rows).await?;
        Ok(count == Some(0))
    })
    .await
}

/// Rows that a claim has left behind, as it committed, are nobody's; also while a purge or somebody
/// else's statement locks them.
async fn claims_of_one_connection_after_another_are_told_apart(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    let namespace = namespace();
    let (backend, _) = named(&harness, &namespace, false, "claims").await?;
    for how in ["commit", "rollback", "both"] {
        let claim = backend.claim(&keys(&["x"]), ClaimOptions::default()).await?;
        let claim = claim.ok_or("not free")?;
        one(&backend, Kind::Claim, "x").await?;
        if how == "rollback" {
            claim.rollback().await?;
        } else {
            claim.commit().await?;
        }
        let mut other = harness.conn().await?;
        let lock = format!(
            "START TRANSACTION; SELECT id FROM leasehold_claim WHERE scope = '{namespace}' FOR UPDATE"
        );
        other.query_drop(lock).await?;
        let shown = of_key(&backend, "x").await?;
        ensure!(shown.is_empty(), "it shows {shown:?} after a {how}");
        let displaced = backend.force_release(Kind::Claim, &key("x")).await?;
        ensure!(displaced.is_none(), "it displaced {displaced:?}");
        other.query_drop("ROLLBACK").await?;
    }
    Ok(())
}
