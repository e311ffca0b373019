//! Claims: the fenced batch.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Claim, ClaimLock, ClaimLockExt, ClaimOptions, Error, ErrorKind, Keys, Lease, LossReason,
};
use leasehold_redis::{RedisBackend, RedisTx};

use crate::lab::{Lab, key, keys, kind_of, once, soon, until};

async fn claim(handle: &RedisBackend, names: &[&str]) -> Claim {
    let claimed = handle.claim(&keys(names), ClaimOptions::default()).await.unwrap();
    claimed.expect("the keys are to be had")
}

fn tx(claim: &mut Claim) -> &mut RedisTx {
    claim.tx::<RedisTx>().unwrap()
}

/// The writes and the release are one step, after which the next one has the keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_writes_and_frees() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let mut open = claim(&handle, &["b", "a"]).await;
    let tx = tx(&mut open);
    tx.set(lab.data("s"), "text").unwrap();
    tx.incr_by(lab.data("n"), 3).unwrap().incr_by(lab.data("n"), 4).unwrap();
    tx.hset(lab.data("h"), "field", 5).unwrap();
    tx.sadd(lab.data("set"), "member").unwrap();
    tx.zadd(lab.data("z"), 1.5, "member").unwrap();
    tx.queue("RPUSH", [lab.data("l"), "1".into(), "2".into()]).unwrap();
    tx.expire(lab.data("l"), Duration::from_secs(60)).unwrap();
    assert_eq!(lab.ask(&["EXISTS", &lab.data("s")]).await.number(), 0);
    open.commit().await.unwrap();
    assert_eq!(lab.ask(&["GET", &lab.data("s")]).await.text(), Some("text"));
    assert_eq!(lab.ask(&["GET", &lab.data("n")]).await.text(), Some("7"));
    assert_eq!(lab.ask(&["LLEN", &lab.data("l")]).await.number(), 2);
    assert!(lab.keys("claim").await.is_empty());

    let mut next = claim(&handle, &["a"]).await;
    let tx = next.tx::<RedisTx>().unwrap();
    assert_eq!(tx.get::<i64>(lab.data("n")).await.unwrap(), 7);
    assert_eq!(tx.hget::<Option<i64>>(lab.data("h"), "field").await.unwrap(), Some(5));
    assert_eq!(tx.hlen(lab.data("h")).await.unwrap(), 1);
    assert_eq!(tx.scard(lab.data("set")).await.unwrap(), 1);
    assert!(tx.sismember(lab.data("set"), "member").await.unwrap());
    assert_eq!(tx.zcard(lab.data("z")).await.unwrap(), 1);
    assert!(tx.exists(lab.data("s")).await.unwrap());
    let list: Vec<String> =
        tx.read("LRANGE", [lab.data("l"), "0".into(), "-1".into()]).await.unwrap();
    assert_eq!(list, ["1", "2"]);
    next.rollback().await.unwrap();
}

/// A key that was taken away: nothing is written, the new holder's is left alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_writes_nothing() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let mut lost = claim(&a, &["x", "y"]).await;
    tx(&mut lost).set(lab.data("n"), 1).unwrap();
    for name in lab.keys("claim").await {
        if name.ends_with(":y") {
            lab.ask(&["DEL", &name]).await;
        }
    }
    let other = claim(&b, &["y"]).await;
    assert!(other.token() > lost.token());
    assert_eq!(kind_of(lost.commit().await), ErrorKind::Lost);
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    other.commit().await.unwrap();
    // what the lost one still had was freed
    drop(claim(&b, &["x"]).await);
}

/// An open claim is renewed; without renewals it is lost at its deadline, and its commit writes
/// nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_claim_is_renewed_and_a_cut_off_one_is_lost() {
    let lab = Lab::shared();
    let builder = lab.builder().claim_ttl(Duration::from_millis(1_800));
    let (handle, proxy) = lab.open_behind(builder).await;
    let other = lab.open().await;
    let mut open = claim(&handle, &["x"]).await;
    tx(&mut open).set(lab.data("n"), 1).unwrap();
    let end = tokio::time::Instant::now() + Duration::from_secs(5);
    while tokio::time::Instant::now() < end {
        let taken = other.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap();
        assert!(taken.is_none(), "it was not renewed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    proxy.silence();
    let reason = soon("the loss", open.lost().wait()).await;
    assert_eq!(reason, LossReason::Expired);
    let taken = claim(&other, &["x"]).await;
    proxy.heal();
    assert_eq!(kind_of(open.commit().await), ErrorKind::Lost);
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    taken.commit().await.unwrap();
}

/// What cannot run is found before anything is written.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_cannot_run_is_found_first() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    lab.ask(&["SET", &lab.data("text"), "words"]).await;
    lab.ask(&["HSET", &lab.data("hash"), "words", "words"]).await;
    let bad: [(&str, Vec<String>); 6] = [
        ("HSET", vec![lab.data("text"), "f".into(), "1".into()]),
        ("RPUSH", vec![lab.data("hash"), "1".into()]),
        ("INCRBY", vec![lab.data("text"), "1".into()]),
        ("HINCRBY", vec![lab.data("hash"), "words".into(), "1".into()]),
        ("INCRBY", vec![lab.data("hash"), "1".into()]),
        ("ZADD", vec![lab.data("first"), "1".into(), "m".into()]),
    ];
    for (command, args) in bad {
        let mut open = claim(&handle, &["x"]).await;
        let tx = tx(&mut open);
        tx.set(lab.data("first"), 1).unwrap();
        tx.queue(command, args.clone()).unwrap();
        let error = open.commit().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{command} {args:?}");
        assert!(error.to_string().contains("nothing was written"), "{error}");
        assert_eq!(lab.ask(&["EXISTS", &lab.data("first")]).await.number(), 0, "{command}");
        assert!(lab.keys("claim").await.is_empty(), "{command} left the keys locked");
    }
    // and what looks wrong at first sight runs
    let mut open = claim(&handle, &["x"]).await;
    let tx = tx(&mut open);
    tx.del(lab.data("text")).unwrap();
    tx.hset(lab.data("text"), "f", 1).unwrap();
    tx.set(lab.data("hash"), 1).unwrap().incr_by(lab.data("hash"), 1).unwrap();
    open.commit().await.unwrap();
    assert_eq!(lab.ask(&["GET", &lab.data("hash")]).await.text(), Some("2"));
}

/// What cannot be found in advance is said plainly: the earlier writes stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_fails_late_is_told() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let mut open = claim(&handle, &["x"]).await;
    let batch = tx(&mut open);
    batch.set(lab.data("n"), 1).unwrap();
    batch.queue("ZADD", [lab.data("z"), "no number".into(), "m".into()]).unwrap();
    let error = open.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("write 2 (ZADD) failed"), "{error}");
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 1);
    assert!(lab.keys("claim").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_never_answers_from_before_a_queued_write() {
    let lab = Lab::shared();
    let handle = lab.open().await;
    let mut open = claim(&handle, &["x"]).await;
    let tx = tx(&mut open);
    tx.set(lab.data("n"), 5).unwrap();
    assert_eq!(tx.get::<i64>(lab.data("n")).await.unwrap(), 5);
    tx.incr_by(lab.data("n"), 1).unwrap();
    assert_eq!(kind_of(tx.get::<i64>(lab.data("n")).await), ErrorKind::Unsupported);
    assert_eq!(kind_of(tx.exists(lab.data("n")).await), ErrorKind::Unsupported);
    tx.del(lab.data("n")).unwrap();
    assert_eq!(tx.get::<Option<i64>>(lab.data("n")).await.unwrap(), None);
    let args = [lab.data("n"), "1".into()];
    assert_eq!(kind_of(tx.read::<i64>("INCRBY", args).await), ErrorKind::Unsupported);
    open.rollback().await.unwrap();
}

/// The same count is never seen by two: a limit holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_counted_under_a_claim() {
    const LIMIT: u64 = 7;
    let lab = Lab::shared();
    let handles = [lab.open().await, lab.open().await, lab.open().await];
    let slots: Arc<str> = lab.data("slots").into();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..60 {
        let (handle, slots) = (handles[n % 3].clone(), slots.clone());
        tasks.spawn(async move {
            let opts = ClaimOptions::default().wait(Duration::from_secs(60));
            let names = keys(&["slots"]);
            let taken = handle.with_claim(&names, opts, async |claim| {
                let tx = claim.tx::<RedisTx>()?;
                if tx.scard(&*slots).await? >= LIMIT {
                    return Ok::<_, Error>(false);
                }
                tx.sadd(&*slots, n.to_string())?;
                Ok(true)
            });
            taken.await.unwrap().expect("it waits long enough")
        });
    }
    let taken = tasks.join_all().await.into_iter().filter(|taken| *taken).count();
    assert_eq!(taken as u64, LIMIT);
    assert_eq!(lab.ask(&["SCARD", &slots]).await.number() as u64, LIMIT);
}

/// B81: a guarded write under a lease that moved on meanwhile is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_verified_at_the_commit() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let lease = a.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let guarded = |value: i64| {
        let (a, lease, lab) = (a.clone(), &lease, &lab);
        async move {
            let mut open = a.claim(&Keys::none(), ClaimOptions::default()).await?.unwrap();
            let tx = open.tx::<RedisTx>()?;
            lease.verify(tx).await?;
            tx.set(lab.data("n"), value)?;
            Ok::<_, Error>(open)
        }
    };
    guarded(1).await.unwrap().commit().await.unwrap();
    let late = guarded(2).await.unwrap();
    lab.ask(&["DEL", &lab.the_key("lease").await]).await;
    let successor = b.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    assert_eq!(kind_of(late.commit().await), ErrorKind::Lost);
    assert_eq!(lab.ask(&["GET", &lab.data("n")]).await.text(), Some("1"));
    let refused = guarded(3).await;
    assert_eq!(refused.map(drop).unwrap_err().kind(), ErrorKind::Lost);
    successor.release().await.unwrap();
}

/// Waiters for overlapping sets all get their turn, none deadlocks (B17), and nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn overlapping_sets_do_not_deadlock() {
    let lab = Lab::shared();
    let handles = [lab.open().await, lab.open().await];
    let sets: [&[&str]; 4] = [&["a", "b"], &["b", "c"], &["c", "a"], &["a", "b", "c"]];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..40 {
        let (handle, set) = (handles[n % 2].clone(), keys(sets[n % 4]));
        tasks.spawn(async move {
            let opts = ClaimOptions::default().wait(Duration::from_secs(60));
            let open = handle.claim(&set, opts).await.unwrap().expect("its turn comes");
            open.commit().await.unwrap();
        });
    }
    soon("all have had their turn", tasks.join_all()).await;
    assert!(lab.keys("claim").await.is_empty());
}

/// The answer to a commit is lost: that is said, and the keys do not stay locked.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_without_an_answer_is_unknown() {
    let lab = Lab::shared();
    let (handle, proxy) = lab.open_behind(lab.builder()).await;
    let mut open = claim(&handle, &["x"]).await;
    tx(&mut open).set(lab.data("n"), 1).unwrap();
    proxy.lose_next_answer();
    assert_eq!(kind_of(open.commit().await), ErrorKind::CommitUnknown);
    until("the keys are free", || async { lab.keys("claim").await.is_empty() }).await;
}
