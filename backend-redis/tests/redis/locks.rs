//! Leases and named locks.

use std::time::Duration;

use leasehold_core::{
    Admission, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Lease, LeaseOptions,
    LockOptions, LossReason, NamedLock,
};

use crate::lab::{Lab, key, keys, kind_of, once, soon, until};
use crate::support::Reply;

/// B55: no key without a ttl ever exists, whatever is dropped or cut.
#[tokio::test(flavor = "multi_thread")]
async fn every_key_has_a_ttl() {
    let lab = Lab::shared();
    let (handle, proxy) = lab.open_behind(lab.builder()).await;
    for round in 0..200_u64 {
        let (handle, name) = (handle.clone(), format!("k{}", round % 7));
        let work = async move {
            let lease = handle.lease(&key(&name), once(1_000)).await;
            let claim = handle.claim(&keys(&[&name]), ClaimOptions::try_once()).await;
            drop(handle.admit(&key(&name), DedupeOptions::default()).await);
            drop((lease, claim));
        };
        let limit = Duration::from_micros(37 * (round % 61));
        let _: Result<(), _> = tokio::time::timeout(limit, work).await;
        if round % 20 == 19 {
            proxy.cut();
        }
        let mut raw = lab.raw().await;
        let pattern = format!("leasehold:{}:*", lab.namespace);
        for name in raw.tell(&["KEYS", &pattern]).await.unwrap().texts() {
            // -2: it is gone by now
            let ttl = raw.tell(&["PTTL", &name]).await.unwrap().number();
            assert_ne!(ttl, -1, "{name} never expires");
        }
    }
    let free = || async {
        let held = handle.lease(&key("k0"), once(1_000)).await;
        matches!(held, Ok(Some(_)))
    };
    until("the lease is free", free).await;
}

/// B57: an owner is fresh for each acquisition: the old guard neither renews nor frees the new.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_guard_is_not_the_new_owner() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let old = handle.lease(&key("x"), once(200).manual_renewal()).await.unwrap().unwrap();
    soon("the loss", old.lost().wait()).await;
    let opts = once(5_000).wait(Duration::from_secs(5));
    let new = handle.lease(&key("x"), opts).await.unwrap().unwrap();
    assert!(new.token() > old.token());
    assert_eq!(kind_of(old.renew().await), ErrorKind::Lost);
    assert_eq!(kind_of(old.release().await), ErrorKind::Lost);
    new.renew().await.unwrap();
    new.release().await.unwrap();
}

/// B65: a request whose answer was lost is recognised when it is repeated: our own lock is not
/// somebody else's.
#[tokio::test(flavor = "multi_thread")]
async fn our_own_lock_is_not_foreign_after_a_lost_answer() {
    let lab = Lab::shared();
    let (handle, proxy) = lab.open_behind(lab.builder()).await;
    let wait = Duration::from_secs(10);

    proxy.lose_next_answer();
    let lease = handle.lease(&key("x"), once(30_000).wait(wait)).await.unwrap();
    lease.expect("the lease is ours").release().await.unwrap();

    proxy.lose_next_answer();
    let lock = handle.lock(&key("x"), LockOptions::default().wait(wait)).await.unwrap();
    lock.expect("the lock is ours").release().await.unwrap();

    proxy.lose_next_answer();
    let claim = handle.claim(&keys(&["x"]), ClaimOptions::default().wait(wait)).await.unwrap();
    claim.expect("the claim is ours").commit().await.unwrap();

    proxy.lose_next_answer();
    let admission = handle.admit(&key("x"), DedupeOptions::default()).await.unwrap();
    let Admission::First(first) = admission else {
        panic!("a duplicate of its own: {admission:?}");
    };
    proxy.lose_next_answer();
    first.complete().await.unwrap();

    // a release that was done and not answered is no loss, and frees it
    let lease = handle.lease(&key("y"), once(30_000)).await.unwrap().unwrap();
    proxy.lose_next_answer();
    if let Err(error) = lease.release().await {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    assert!(handle.lease(&key("y"), once(1_000).wait(wait)).await.unwrap().is_some());
}

/// B66: an acquisition that was given up and arrives late leaves no lock behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_was_given_up_leaves_nothing() {
    let lab = Lab::shared();
    let limit = Duration::from_millis(300);
    let (handle, proxy) = lab.open_behind(lab.builder().command_limit(limit)).await;
    let other = lab.open().await;
    // the scripts are known, and the connection is warm
    drop(handle.lease(&key("warm"), once(1_000)).await.unwrap());
    proxy.silence();
    let given_up = [
        tokio::time::timeout(Duration::from_millis(100), async {
            handle.lease(&key("x"), once(60_000)).await.map(drop)
        })
        .await
        .is_err(),
        handle.lease(&key("y"), once(60_000)).await.is_err(),
        handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.is_err(),
        handle.admit(&key("x"), DedupeOptions::default()).await.is_err(),
    ];
    assert!(given_up.into_iter().all(|given_up| given_up), "{given_up:?}");
    proxy.heal();
    for name in ["x", "y"] {
        until("the lease is free", || async {
            other.lease(&key(name), once(1_000)).await.unwrap().is_some()
        })
        .await;
    }
    until("the claim is free", || async {
        other.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().is_some()
    })
    .await;
    until("the key is not seen", || async {
        other.admit(&key("x"), DedupeOptions::default()).await.unwrap().is_first()
    })
    .await;
}

/// The order in which a paused server gets to its connections is not ours: a release may overtake
/// the acquisition that it takes back.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_overtakes_its_acquisition_wins() {
    let lab = Lab::shared();
    let tag = lab.namespace.as_str();
    let name = |what: &str| format!("leasehold:{tag}:{{{tag}}}:{what}");
    let (lock, other, last) = (name("lease:x"), name("lease:y"), name("last:lease"));
    let (first, second) = ("1".repeat(32), "2".repeat(32));
    let release = async |owner: &str, mark: &str| {
        let script = include_str!("../../src/scripts/release.lua");
        let words = ["EVAL", script, "2", &last, &lock, mark, "PUBLISH", "c", owner, "1"];
        lab.ask(&words).await
    };
    // two locks in one request: each has an answer of its own
    let acquire = async |owner: &str| match lab
        .ask(&[
            "EVAL",
            include_str!("../../src/scripts/acquire.lua"),
            "3",
            &last,
            &lock,
            &other,
            "60000",
            owner,
            "60000",
            &second,
            "60000",
        ])
        .await
    {
        Reply::List(answers) => answers,
        strange => panic!("{strange:?}"),
    };
    let token = |answer: &Reply| answer.text().unwrap().parse::<u64>().unwrap();
    let [not_freed, freed, freed_for_others] =
        [0, 1, 2].map(|code| Reply::List(vec![Reply::Number(code)]));

    assert_eq!(release(&first, "60000").await, not_freed);
    let late = acquire(&first).await;
    assert_eq!(late[0].number(), -3, "it was taken after it had been given up");
    assert_eq!(lab.ask(&["EXISTS", &lock]).await.number(), 0);
    let mut highest = token(&late[1]);
    // an acquisition between the two leaves the marks in force, and those of others go on
    let taken = acquire(&second).await;
    assert!(token(&taken[0]) > highest);
    assert_eq!(token(&taken[1]), highest, "a repeated request was given another token");
    highest = token(&taken[0]);
    assert!(acquire(&first).await[0].number() > 0, "it is held by somebody else");
    assert_eq!(release(&second, "60000").await, freed_for_others);
    assert_eq!(acquire(&first).await[0].number(), -3);
    assert_eq!(lab.ask(&["EXISTS", &lock]).await.number(), 0);

    // once the marks are over nothing looks for them any more
    for mark in lab.keys("gone").await {
        lab.ask(&["DEL", &mark]).await;
    }
    lab.ask(&["SET", &last, &format!("{highest}!{}", highest + 1)]).await;
    let taken = acquire(&first).await;
    assert!(token(&taken[0]) > highest);
    assert_eq!(lab.ask(&["GET", &last]).await.text(), taken[0].text());
    assert!(lab.ask(&["PTTL", &last]).await.number() > 0);
    assert_eq!(release(&first, "60000").await, freed);
    assert_eq!(release(&first, "0").await, not_freed);
    assert!(lab.keys("gone").await.is_empty(), "a mark that nobody asked for");

    // the marks are remembered at least as long as they last
    lab.ask(&["PEXPIRE", &last, "1000"]).await;
    assert_eq!(release(&first, "60000").await, not_freed);
    assert!(lab.ask(&["PTTL", &last]).await.number() > 50_000);
    lab.ask(&["DEL", &last]).await;
    assert_eq!(release(&first, "60000").await, not_freed);
    assert_eq!(acquire(&first).await[0].number(), -3);
}

/// B12: a server (or something in between) that cuts idle connections costs no lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_while_idle_costs_no_lock() {
    let lab = Lab::private(&["--timeout", "1"]);
    let handle = lab.open().await;
    let lease = handle.lease(&key("x"), once(12_000)).await.unwrap().unwrap();
    let connections = async || {
        let stats = lab.ask(&["INFO", "stats"]).await;
        let stats = stats.text().unwrap().to_owned();
        let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().trim().parse::<u64>().unwrap()
    };
    let before = connections().await;
    // the look itself is one connection
    let looks = std::sync::atomic::AtomicU64::new(0);
    until("it was connected anew", || async {
        let looks = looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        connections().await >= before + looks + 2
    })
    .await;
    lease.renew().await.unwrap();
    lease.release().await.unwrap();
    assert!(handle.lease(&key("x"), once(1_000)).await.unwrap().is_some());
}

/// B67: a deleted key is a loss at the next renewal; the old holder leaves the new one alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_key_is_lost_at_the_next_renewal() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let held = a.lease(&key("x"), once(1_500)).await.unwrap().unwrap();
    lab.ask(&["DEL", &lab.the_key("lease").await]).await;
    let successor = b.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    assert!(successor.token() > held.token());
    assert_eq!(soon("the loss", held.lost().wait()).await, LossReason::Taken);
    assert_eq!(kind_of(held.release().await), ErrorKind::Lost);
    successor.renew().await.expect("the old holder freed the new one's");
    successor.release().await.unwrap();

    let lock = a.lock(&key("y"), LockOptions::try_once()).await.unwrap().unwrap();
    lab.ask(&["DEL", &lab.the_key("lock").await]).await;
    soon("the loss", lock.lost().wait()).await;
    assert!(!lock.is_held());
}

/// B69: the server forgot the scripts; nothing notices.
#[tokio::test(flavor = "multi_thread")]
async fn forgotten_scripts_are_sent_again() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let forget = || async { drop(lab.ask(&["SCRIPT", "FLUSH"]).await) };
    let lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    forget().await;
    lease.renew().await.unwrap();
    forget().await;
    lease.release().await.unwrap();
    forget().await;
    let mut claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    claim.tx::<leasehold_redis::RedisTx>().unwrap().set(lab.data("n"), 1).unwrap();
    forget().await;
    claim.commit().await.unwrap();
    forget().await;
    let first = handle.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    forget().await;
    first.complete().await.unwrap();
    forget().await;
    assert!(handle.lease(&key("x"), once(30_000)).await.unwrap().is_some());
}

/// B71: a server without free memory refuses by an error of its own; what is held can still be
/// renewed and freed.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_still_renews_and_frees() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let lease = handle.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    let claim = handle.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let mut full = handle.claim(&keys(&["y"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let first = handle.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    lab.ask(&["CONFIG", "SET", "maxmemory", "1"]).await;
    assert_eq!(kind_of(handle.lease(&key("z"), once(1_000)).await), ErrorKind::Exhausted);
    full.tx::<leasehold_redis::RedisTx>().unwrap().set(lab.data("n"), 1).unwrap();
    assert_eq!(kind_of(full.commit().await), ErrorKind::Exhausted);
    lease.renew().await.unwrap();
    lease.release().await.unwrap();
    claim.rollback().await.unwrap();
    first.complete().await.unwrap();
    lab.ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    let free = || async { lab.keys("lease").await.len() + lab.keys("claim").await.len() == 0 };
    until("everything is free", free).await;
}

/// B102: long names are neither cut nor confused.
#[tokio::test(flavor = "multi_thread")]
async fn long_names_count_to_the_last_byte() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let long = "x".repeat(1_023);
    let (a, b) = (key(&format!("{long}a")), key(&format!("{long}b")));
    let _a = handle.lease(&a, once(30_000)).await.unwrap().unwrap();
    let _b = handle.lease(&b, once(30_000)).await.unwrap().unwrap();
    assert!(handle.lease(&a, once(30_000)).await.unwrap().is_none());
}

/// B106: nothing is kept for each name that was ever used.
#[tokio::test(flavor = "multi_thread")]
async fn names_leave_no_keys_behind() {
    let lab = Lab::private(&[]);
    let handle = lab.open().await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16 {
        let handle = handle.clone();
        tasks.spawn(async move {
            for n in 0..500 {
                let name = key(&format!("{task}-{n}"));
                let lease = handle.lease(&name, once(30_000)).await.unwrap().unwrap();
                let lock = handle.lock(&name, LockOptions::try_once()).await.unwrap().unwrap();
                let opts = DedupeOptions::default();
                let first = handle.admit(&name, opts).await.unwrap().first().unwrap();
                first.abandon().await.unwrap();
                lock.release().await.unwrap();
                lease.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let left = lab.ask(&["DBSIZE"]).await.number();
    // the last token of each slot and kind, whatever the number of names
    assert!(left <= 3 * 256, "{left} keys are left of 24,000");
}

/// Sub-millisecond rests of a ttl are rounded up, not cut off (B25).
#[tokio::test(flavor = "multi_thread")]
async fn a_ttl_is_not_truncated() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let ttl = Duration::from_micros(60_000_999);
    let opts = LeaseOptions::try_once().ttl(ttl);
    let lease = handle.lease(&key("x"), opts).await.unwrap().unwrap();
    let at = lab.ask(&["PTTL", &lab.the_key("lease").await]).await.number();
    assert!((30_000..=60_001).contains(&at), "{at}");
    assert!(lease.remaining() < ttl);
}
