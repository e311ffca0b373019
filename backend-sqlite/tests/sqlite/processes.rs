//! Processes: killed, many at once, and with children of their own.

use std::time::Duration;

use leasehold_core::{
    ClaimLock, ClaimOptions, HoldingQuery, Inspect, Kind, LockOptions, NamedLock, Severity,
};

use crate::lab::{LONG, Lab, claim_within, key, keys, lock_within, soon};
use crate::support::{Tx, read, write};

/// B86, B109: no ttl passes, and nobody cleans up: the kernel does.
#[tokio::test(flavor = "multi_thread")]
async fn kill_frees_locks_and_claims_under_their_waiters() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut lock = lab.process("lock x");
    let mut claim = lab.process("claim x");
    let (lock_token, claim_token): (u64, u64) =
        (lock.says().await.parse().unwrap(), claim.says().await.parse().unwrap());
    assert!(store.lock(&key("x"), LockOptions::try_once()).await.unwrap().is_none());
    assert!(store.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().is_none());
    let (x, set) = (key("x"), keys(&["x"]));
    let waits = async {
        let (locked, claimed) =
            tokio::join!(store.lock(&x, lock_within(LONG)), store.claim(&set, claim_within(LONG)),);
        (locked.unwrap().unwrap(), claimed.unwrap().unwrap())
    };
    let ((locked, mut claimed), ()) = soon("both to be had", async {
        tokio::join!(waits, async {
            tokio::time::sleep(Duration::from_millis(50)).await; // they wait by now
            lock.dies().await;
            claim.dies().await;
        })
    })
    .await;
    assert!(locked.token().await.unwrap().value() > lock_token);
    assert!(claimed.token().value() > claim_token);
    // the killed transaction has written nothing, and is in nobody's way
    let tx = claimed.tx::<Tx>().unwrap();
    assert_eq!(read(tx, "n").await.unwrap(), None);
    write(tx, "n", 1).await.unwrap();
    claimed.commit().await.unwrap();
    locked.release().await.unwrap();
}

/// A program that the holder had started keeps nothing of it: the files are close-on-exec.
#[tokio::test(flavor = "multi_thread")]
async fn kill_frees_though_a_child_lives_on() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut process = lab.process("lock-and-spawn x");
    let program: i32 = process.says().await.parse().unwrap();
    process.dies().await;
    let locked = soon("the lock", store.lock(&key("x"), lock_within(LONG))).await;
    let claimed = soon("the claim", store.claim(&keys(&["x"]), claim_within(LONG))).await;
    let lives = std::path::Path::new(&format!("/proc/{program}")).exists();
    let killed = std::process::Command::new("kill").arg(program.to_string()).status().unwrap();
    assert!(lives && killed.success(), "expected the program to live on until now");
    assert!(locked.unwrap().is_some() && claimed.unwrap().is_some());
}

/// Everything at once from several processes on a file that none of them has prepared: nothing
/// fails, nothing is counted twice or lost.
#[tokio::test(flavor = "multi_thread")]
async fn processes_hammer_one_file() {
    const PROCESSES: i64 = 4;
    const ROUNDS: i64 = 25;
    let lab = Lab::new().await;
    let mut processes = Vec::new();
    for _ in 0..PROCESSES {
        processes.push(lab.process(&format!("hammer {ROUNDS}")));
    }
    for mut process in processes {
        assert_eq!(process.says().await, "done");
        process.ends().await;
    }
    let mut admin = lab.harness.admin().await.unwrap();
    assert_eq!(read(&mut admin, "count").await.unwrap(), Some(PROCESSES * ROUNDS));
    assert_eq!(read(&mut admin, "first").await.unwrap(), Some(ROUNDS));
    let sound: String =
        sqlx::query_scalar("PRAGMA integrity_check").fetch_one(&mut admin).await.unwrap();
    assert_eq!(sound, "ok");
}

/// Killed anywhere in its work, a process leaves the files sound and everything free.
#[tokio::test(flavor = "multi_thread")]
async fn kill_at_any_moment_leaves_the_files_sound() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    for round in 0..8_u64 {
        let process = lab.process("hammer 100000");
        tokio::time::sleep(Duration::from_millis(100 + 23 * round)).await;
        process.dies().await;
        soon("the survivor to go on", crate::lab::hammer(&store, 3)).await;
    }
    for path in [lab.main(), lab.locks(), lab.leases()] {
        let mut conn = crate::support::connect(&path).await.unwrap();
        let sound: String =
            sqlx::query_scalar("PRAGMA integrity_check").fetch_one(&mut conn).await.unwrap();
        assert_eq!(sound, "ok", "{}", path.display());
    }
}

/// A process that is stopped lives: its lock is nobody else's, and it still has it when it goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_holder_keeps_its_lock() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut process = lab.process("lock x");
    process.says().await;
    tokio::time::sleep(Duration::from_millis(50)).await; // idle, not within a write
    process.signal("STOP");
    let tried = store.lock(&key("x"), lock_within(Duration::from_secs(2))).await;
    process.signal("CONT");
    assert!(tried.unwrap().is_none(), "expected a stopped holder to keep its lock");
    process.ends().await; // in the ordinary way
    soon("the lock", store.lock(&key("x"), lock_within(LONG)))
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// Who is dead is not shown as a holder, whatever its rows and files say.
#[tokio::test(flavor = "multi_thread")]
async fn the_dead_are_not_shown() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let mut lock = lab.process("lock x");
    let mut claim = lab.process("claim x");
    lock.says().await;
    claim.says().await;
    let query = HoldingQuery::key(&key("x"));
    let shown = store.holdings(&query).await.unwrap();
    let pids: Vec<_> = shown.iter().map(|held| held.holder.as_ref().unwrap().pid).collect();
    assert_eq!(pids, [lock.pid(), claim.pid()]);
    assert!(shown.iter().all(|held| held.token.is_some() && held.held_for.is_some()));
    lock.dies().await;
    claim.dies().await;
    assert_eq!(store.holdings(&query).await.unwrap(), []);
    for kind in [Kind::Lock, Kind::Claim] {
        assert_eq!(store.force_release(kind, &key("x")).await.unwrap(), None);
    }
    let findings = store.diagnose().await.unwrap();
    assert!(findings.iter().all(|finding| finding.severity == Severity::Fine), "{findings:?}");
    assert!(findings.iter().any(|finding| finding.found.contains("1 dead")), "{findings:?}");
}
