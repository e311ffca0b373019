//! Named locks and the sessions that hold them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold_conformance::Link;
use leasehold_core::{ErrorKind, LockOptions, LossReason, NamedLock};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;

use crate::support::{MySqlHarness, MySqlLink};
use crate::{PATIENCE, Verdict, ensure, is_free, key, locked, namespace, nothing_left, within};

crate::tests!("sessions":
    names_are_distinct_on_the_server,
    names_are_seen_by_administrators,
    idle_session_is_kept_alive,
    killed_idle_session_is_told_at_once,
    killed_waiter_session_is_told_at_once,
    loss_of_the_watching_connection_is_no_loss,
    kills_while_waiting_only_delay,
    kill_query_while_waiting_is_survived,
    kill_query_while_batching_loses_nothing,
    kills_while_batching_leave_nothing,
    vanished_host_frees_within_the_bound,
    tokens_come_from_the_session_that_holds,
    leftovers_see_a_held_lock,
);

/// One whose keepalive alone would take long to notice anything.
async fn slow_keepalive(
    harness: &MySqlHarness,
    namespace: &str,
) -> leasehold_core::Result<(MySqlBackend, MySqlLink)> {
    let builder = MySqlBackend::builder().namespace(namespace).keepalive(Duration::from_secs(100));
    harness.open_with(namespace, builder, 4).await
}

async fn open(
    harness: &MySqlHarness,
    namespace: &str,
) -> leasehold_core::Result<(MySqlBackend, MySqlLink)> {
    harness.open_with(namespace, harness.builder(namespace), 4).await
}

/// The connection that holds a lock.
async fn holder(
    harness: &MySqlHarness,
    backend: &MySqlBackend,
    name: &str,
) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    let text = format!("SELECT IS_USED_LOCK('{}')", backend.lock_name(&key(name)));
    let id: Option<Option<u64>> = harness.admin().await?.query_first(text).await?;
    id.flatten().ok_or_else(|| format!("nobody holds {name:?}").into())
}

/// B39, B41, B103: keys that a server would fold, pad or cut are different locks.
async fn names_are_distinct_on_the_server(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, _way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let long = "x".repeat(1000);
    let mut names: Vec<String> = [
        "job",
        "Job",
        "JOB",
        "caf\u{e9}",
        "cafe\u{301}",
        "cafe",
        "CAF\u{c9}",
        "\u{df}",
        "ss",
        "a",
        "a ",
        " a",
        "a\u{ad}",
        "a\u{200d}",
        "\u{1f600}",
        "\u{1f601}",
        "it's",
        "\\",
        "%",
        "?",
        ":x",
    ]
    .map(str::to_owned)
    .into();
    names.extend([63, 64, 65, 192, 193].map(|length| "y".repeat(length)));
    names.extend(["1", "2"].map(|end| format!("{long}{end}")));
    let mut guards = Vec::new();
    for name in &names {
        guards.push(locked(&one, name).await?);
    }
    for name in &names {
        ensure!(!is_free(&two, name).await?, "{name:?} is not excluded");
    }
    for (guard, name) in guards.into_iter().zip(&names) {
        guard.release().await?;
        ensure!(is_free(&two, name).await?, "{name:?} was held by another name");
    }
    nothing_left(&harness, &namespace).await
}

/// A plain key is readable in `performance_schema.metadata_locks`.
async fn names_are_seen_by_administrators(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, _way) = open(&harness, &namespace).await?;
    let _guards = (locked(&one, "jobs/7").await?, locked(&one, "Jobs/7").await?);
    let locks = harness.locks().await?;
    let mut names: Vec<&str> = locks
        .iter()
        .filter(|(of, ..)| *of == namespace)
        .map(|(_, name, _)| name.as_str())
        .collect();
    names.sort_unstable();
    let plain = format!("lh:l:{namespace}:jobs/7");
    ensure!(names.len() == 2 && names[0].starts_with("lh:l#jobs/7#"), "it lists {names:?}");
    ensure!(names[1] == plain && one.lock_name(&key("jobs/7")) == plain, "it lists {names:?}");
    Ok(())
}

/// The look for leftovers is not blind.
async fn leftovers_see_a_held_lock(harness: Arc<MySqlHarness>) -> Verdict {
    use leasehold_conformance::Harness;
    let namespace = namespace();
    let (one, _way) = open(&harness, &namespace).await?;
    let _guard = locked(&one, "x").await?;
    let left = harness.leftovers(&namespace).await?;
    ensure!(left.len() == 1, "it sees {left:?}");
    Ok(())
}

/// B12, B45: a session that is idle for longer than its `wait_timeout` is not reaped, because the
/// keepalive speaks in between.
async fn idle_session_is_kept_alive(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, _way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let guard = locked(&one, "x").await?;
    let session = holder(&harness, &one, "x").await?;
    // three keepalives of 500 ms and an answer of 2 s
    let idle = Duration::from_secs(4);
    let start = Instant::now();
    while start.elapsed() < idle * 2 {
        ensure!(guard.is_held(), "lost after {:?}", start.elapsed());
        ensure!(!is_free(&two, "x").await?, "freed after {:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ensure!(holder(&harness, &one, "x").await? == session, "it is on another session");
    Ok(guard.release().await?)
}

/// B10, B46: an idle session that an administrator kills is told at once, not by the keepalive; the
/// guard never comes back, and the handle goes on with a new session.
async fn killed_idle_session_is_told_at_once(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, _way) = slow_keepalive(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let guard = locked(&one, "x").await?;
    let session = holder(&harness, &one, "x").await?;
    harness.admin().await?.query_drop(format!("KILL {session}")).await?;
    let reason = within(PATIENCE, "the loss to be told", guard.lost().wait()).await?;
    ensure!(reason == LossReason::SessionEnded && !guard.is_held(), "it says {reason:?}");
    let successor = locked(&two, "x").await?;
    let token = guard.token().await.map_err(|error| error.kind());
    ensure!(token == Err(ErrorKind::Lost), "a lost holder got {token:?}");
    let released = guard.release().await.map_err(|error| error.kind());
    ensure!(released == Err(ErrorKind::Lost), "release said {released:?}");
    ensure!(!is_free(&one, "x").await? && successor.is_held(), "the old release hit the new lock");
    successor.release().await?;
    locked(&one, "x").await?.release().await?;
    nothing_left(&harness, &namespace).await
}

/// As above for a lock that was waited for: it is on a session that waited.
async fn killed_waiter_session_is_told_at_once(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, _way) = slow_keepalive(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let other = locked(&one, "other").await?;
    let first = locked(&two, "x").await?;
    let (guard, freed) = tokio::join!(locked(&one, "x"), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        first.release().await
    });
    let guard = guard?;
    freed?;
    let session = holder(&harness, &one, "x").await?;
    ensure!(session != holder(&harness, &one, "other").await?, "it was not waited for");
    harness.admin().await?.query_drop(format!("KILL {session}")).await?;
    within(PATIENCE, "the loss to be told", guard.lost().wait()).await?;
    ensure!(other.is_held(), "the other session's lock was lost too");
    Ok(other.release().await?)
}

/// The connection that watches the session may break: nothing is lost, and it is opened again.
async fn loss_of_the_watching_connection_is_no_loss(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = slow_keepalive(&harness, &namespace).await?;
    let guard = locked(&one, "x").await?;
    let session = holder(&harness, &one, "x").await?;
    for _ in 0..3 {
        let watcher = watcher(&harness, &way).await?;
        ensure!(watcher != session, "the session watches itself");
        harness.admin().await?.query_drop(format!("KILL {watcher}")).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        ensure!(guard.is_held(), "the lock was lost with the watching connection");
    }
    // and the new one still tells
    watcher(&harness, &way).await?;
    harness.admin().await?.query_drop(format!("KILL {session}")).await?;
    within(PATIENCE, "the loss to be told", guard.lost().wait()).await?;
    Ok(())
}

/// The connection of a handle that waits for a session's marker.
async fn watcher(
    harness: &MySqlHarness,
    way: &MySqlLink,
) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    // nothing else of this handle waits
    let watching = "SELECT PROCESSLIST_ID FROM performance_schema.threads \
                    WHERE PROCESSLIST_STATE = 'User lock'";
    let start = Instant::now();
    loop {
        let all: Vec<u64> = harness.admin().await?.query(watching).await?;
        let ours = harness.sessions(&way.name).await?;
        if let Some(id) = all.into_iter().find(|id| ours.contains(id)) {
            return Ok(id);
        }
        ensure!(start.elapsed() < PATIENCE, "no connection watches the session");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A waiter whose sessions are killed waits on with new ones.
async fn kills_while_waiting_only_delay(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let first = locked(&two, "x").await?;
    let waiter = key("x");
    let wait = one.lock(&waiter, LockOptions::default().wait(Duration::from_secs(60)));
    let (guard, freed) = tokio::join!(wait, async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            way.end_sessions().await?;
        }
        first.release().await
    });
    freed?;
    guard?.ok_or("the wait ended without the lock")?.release().await?;
    nothing_left(&harness, &namespace).await
}

/// B36: MySQL answers a `KILL QUERY` with an error, MariaDB with NULL: neither is the lock, nor
/// the end of the wait.
async fn kill_query_while_waiting_is_survived(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let other = locked(&one, "other").await?;
    let first = locked(&two, "x").await?;
    let waiter = key("x");
    let wait = one.lock(&waiter, LockOptions::default().wait(Duration::from_secs(60)));
    let (guard, freed) = tokio::join!(wait, async {
        let mut admin = harness.admin().await.map_err(|error| error.to_string())?;
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            for id in harness.sessions(&way.name).await.map_err(|error| error.to_string())? {
                // one that has just ended is fine
                drop(admin.query_drop(format!("KILL QUERY {id}")).await);
            }
        }
        first.release().await.map_err(|error| error.to_string())
    });
    freed?;
    let guard = guard?.ok_or("the wait ended without the lock")?;
    ensure!(guard.is_held() && other.is_held(), "a killed query lost a lock");
    guard.release().await?;
    other.release().await?;
    nothing_left(&harness, &namespace).await
}

/// Runs `tasks` tasks that take and free locks, while something is done to the handle's sessions.
async fn under_fire(
    harness: &MySqlHarness,
    backend: &Arc<MySqlBackend>,
    way: &MySqlLink,
    order: &str,
    tolerate: fn(ErrorKind) -> bool,
) -> Verdict {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16 {
        let (backend, stop) = (backend.clone(), stop.clone());
        tasks.spawn(async move {
            let mut rounds = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let name = key(&format!("key-{task}-{}", rounds % 3));
                let opts = LockOptions::default().wait(Duration::from_secs(20));
                let outcome = match backend.lock(&name, opts).await {
                    Ok(Some(guard)) => guard.release().await,
                    Ok(None) => return Err(format!("{name} is held by nobody else")),
                    Err(error) => Err(error),
                };
                match outcome {
                    Err(error) if !tolerate(error.kind()) => return Err(error.to_string()),
                    _ => rounds += 1,
                }
            }
            Ok(rounds)
        });
    }
    let mut admin = harness.admin().await?;
    let mut shots = 0;
    let start = Instant::now();
    while shots < 200 && start.elapsed() < Duration::from_secs(5) {
        for id in harness.sessions(&way.name).await? {
            shots += u32::from(admin.query_drop(format!("{order} {id}")).await.is_ok());
        }
        // so that a session that was killed can be opened anew
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..40))).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut rounds = 0;
    while let Some(done) = tasks.join_next().await {
        rounds += done??;
    }
    ensure!(rounds > 50 && shots > 10, "only {rounds} rounds and {shots} kills");
    Ok(())
}

/// `KILL QUERY` in the middle of a batch: what it did is found out, nothing is lost or leaked.
async fn kill_query_while_batching_loses_nothing(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let one = Arc::new(one);
    let kept = locked(&*one, "kept").await?;
    under_fire(&harness, &one, &way, "KILL QUERY", |_| false).await?;
    ensure!(kept.is_held() && !is_free(&two, "kept").await?, "a held lock was lost");
    kept.release().await?;
    nothing_left(&harness, &namespace).await
}

/// `KILL` in the middle of a batch: held locks are told as lost, nothing is left on the server.
async fn kills_while_batching_leave_nothing(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = open(&harness, &namespace).await?;
    let one = Arc::new(one);
    under_fire(&harness, &one, &way, "KILL", |kind| kind == ErrorKind::Lost).await?;
    nothing_left(&harness, &namespace).await
}

/// B13: the host vanishes without a word. The holder knows within keepalive and answer, the server
/// frees within three keepalives and an answer.
async fn vanished_host_frees_within_the_bound(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = open(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let guard = locked(&one, "x").await?;
    way.silence().await?;
    let start = Instant::now();
    let waiter = key("x");
    let wait = two.lock(&waiter, LockOptions::default().wait(Duration::from_secs(60)));
    let (told, next) = tokio::join!(
        async {
            guard.lost().wait().await;
            start.elapsed()
        },
        async {
            let next = wait.await;
            (next, start.elapsed())
        }
    );
    let successor = next.0?.ok_or("the lock was never freed")?;
    ensure!(told < next.1, "told after {told:?}, freed after {:?}", next.1);
    // 0.5 s and 2 s; 4 s of wait_timeout; both on a busy machine
    ensure!(told < Duration::from_secs(8), "told after {told:?}");
    ensure!(next.1 < Duration::from_secs(20), "freed after {:?}", next.1);
    successor.release().await?;
    way.heal().await?;
    nothing_left(&harness, &namespace).await
}

/// Tokens rise, are the same for the hold, and none is given on another session than the one that
/// holds.
async fn tokens_come_from_the_session_that_holds(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (one, way) = slow_keepalive(&harness, &namespace).await?;
    let (two, _way2) = open(&harness, &namespace).await?;
    let mut last = 0;
    for round in 0..6 {
        let backend = if round % 2 == 0 { &one } else { &two };
        let guard = locked(backend, "x").await?;
        let token = guard.token().await?.value();
        ensure!(token > last && guard.token().await?.value() == token, "{token} after {last}");
        last = token;
        guard.release().await?;
    }
    let guard = locked(&one, "x").await?;
    // the network takes the answer: the session is over, and so is the lock
    way.lose_next_answer().await?;
    let token = guard.token().await.map_err(|error| error.kind());
    ensure!(token == Err(ErrorKind::Lost), "it gave {token:?}");
    ensure!(!guard.is_held(), "it is believed to be held");
    nothing_left(&harness, &namespace).await
}
