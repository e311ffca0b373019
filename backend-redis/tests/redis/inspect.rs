//! Who holds what, and taking it away.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::servers::redis::cluster;
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, HeldName, Holder, Holding,
    HoldingQuery, Inspect, Kind, Lease, LeaseOptions, LockOptions, LossReason, NamedLock,
};
use leasehold_redis::{RedisBackend, RedisTx};

use crate::lab::{Lab, PATIENCE, blocking, key, keys, kind_of, once, soon, until};
use crate::support::kind;

const HOUR: Duration = Duration::from_secs(3_600);

async fn labelled(lab: &Lab, app: &str) -> (Arc<RedisBackend>, Holder) {
    let holder = Holder::this_process().named(app);
    let builder = lab.builder().holder(holder.clone());
    (Arc::new(builder.connect(&lab.server.url()).await.unwrap()), holder)
}

async fn of_key(handle: &RedisBackend, name: &str) -> Vec<Holding> {
    handle.holdings(&HoldingQuery::key(&key(name)).done(true)).await.unwrap()
}

/// Names of a list.
fn names(holdings: &[Holding]) -> BTreeSet<String> {
    holdings.iter().map(|holding| holding.name.to_string()).collect()
}

/// All that the server knows of each kind: whose, since when, until when, and the token.
#[tokio::test(flavor = "multi_thread")]
async fn all_four_are_shown_with_their_holders() {
    let lab = Lab::shared();
    let (a, ours) = labelled(&lab, "app one").await;
    let (b, _) = labelled(&lab, "other").await;
    let opts = LockOptions::try_once();
    let lock = a.lock(&key("x"), opts).await.unwrap().unwrap();
    let lease = a.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let claim = a.claim(&keys(&["x", "y"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let entry = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    let tokens =
        [lock.token().await.unwrap(), lease.token(), claim.token(), entry.token()].map(Some);
    // somebody has wanted it, which is noted at its end
    assert!(b.lock(&key("x"), opts).await.unwrap().is_none());

    let held = of_key(&b, "x").await;
    assert_eq!(held.iter().map(|one| one.kind).collect::<Vec<_>>(), Kind::ALL);
    assert_eq!(held.iter().map(|one| one.token).collect::<Vec<_>>(), tokens);
    for one in &held {
        assert_eq!(one.name, HeldName::Key(key("x")));
        assert_eq!(one.holder.as_ref(), Some(&ours), "{one:?}");
        assert!(one.held_for.unwrap() < PATIENCE, "{one:?}");
        assert!(one.expires_in.unwrap() <= DedupeOptions::default().retain, "{one:?}");
        assert!(one.session.is_none() && !one.done, "{one:?}");
    }
    assert!(held[1].expires_in.unwrap() <= Duration::from_secs(60));
    until("time passes", || async {
        of_key(&b, "x").await[1].held_for.unwrap() > held[1].held_for.unwrap()
    })
    .await;

    let listed = b.holdings(&HoldingQuery::default()).await.unwrap();
    assert_eq!(listed.len(), 5, "{listed:?}");
    assert!(listed.iter().all(|one| one.holder.as_ref() == Some(&ours)), "{listed:?}");
    let none = b.holdings(&HoldingQuery::default().kinds([])).await.unwrap();
    assert_eq!(none, []);
    entry.complete().await.unwrap();
    assert_eq!(b.holdings(&HoldingQuery::default()).await.unwrap().len(), 4);
    claim.rollback().await.unwrap();
    lock.release().await.unwrap();
    lease.release().await.unwrap();
    assert_eq!(names(&b.holdings(&HoldingQuery::default().done(true)).await.unwrap()).len(), 1);
    a.close().await.unwrap();
    assert_eq!(kind_of(a.holdings(&HoldingQuery::default()).await), ErrorKind::Unavailable);
    assert_eq!(kind_of(a.force_release(Kind::Lock, &key("x")).await), ErrorKind::Unavailable);
}

/// A long list comes in pages, in order, and is cut to what is asked for; wildcards in namespace
/// and prefix mean nothing, and other keys of the server are not shown.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_just_what_is_asked_for() {
    let lab = Lab::private(&[]);
    let open = async |namespace: &str| {
        lab.builder().namespace(namespace).connect(&lab.server.url()).await.unwrap()
    };
    let (a, wild, shorter) = (open("n[1]*").await, open("n1xx").await, open("n").await);
    let opts = DedupeOptions::default();
    let _theirs = wild.admit(&key("job/1"), opts).await.unwrap();
    let _theirs = shorter.admit(&key("job/1"), opts).await.unwrap();
    let many: Vec<_> = (0..3_000).map(|n| key(&format!("job/{n:04}"))).collect();
    let _ours = a.admit_many(&many, opts).await.unwrap();
    let odd = ["job*", "job?", "job[0]", "}:lease:job", "{x}:dedupe:job", "a:b:c"];
    let mut leases = Vec::new();
    for name in odd {
        leases.push(a.lease(&key(name), once(60_000)).await.unwrap().unwrap());
    }
    lab.ask(&["SET", "leasehold:n[1]*:{1}:lease:job-in-no-slot-of-ours", "x"]).await;
    lab.ask(&["SET", "leasehold:n[1]*:no:lease:job", "x"]).await;

    let all = a.holdings(&HoldingQuery::default().limit(usize::MAX)).await.unwrap();
    assert_eq!(all.len(), many.len() + odd.len());
    let few = a.holdings(&HoldingQuery::prefix("job/").limit(10)).await.unwrap();
    let expected: BTreeSet<String> = many[..10].iter().map(ToString::to_string).collect();
    assert_eq!(names(&few), expected);
    for (prefix, count) in [("job*", 1), ("job?", 1), ("job[", 1), ("}", 1), ("{x", 1), ("a:", 1)] {
        let found = a.holdings(&HoldingQuery::prefix(prefix)).await.unwrap();
        assert_eq!(found.len(), count, "{prefix}: {found:?}");
    }
    let claims = HoldingQuery::default().kinds([Kind::Claim]);
    assert_eq!(a.holdings(&claims).await.unwrap(), []);
    assert_eq!(wild.holdings(&HoldingQuery::default()).await.unwrap().len(), 1);
}

/// What is in the way of a lock is shown, whoever wrote it, and can be taken away.
#[tokio::test(flavor = "multi_thread")]
async fn what_others_wrote_is_shown_and_released() {
    let lab = Lab::shared();
    let a = lab.open().await;
    let lease = a.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let name = lab.the_key("lease").await;
    lab.ask(&["SET", &name, "somebody's"]).await;
    let held = &of_key(&a, "x").await[0];
    assert_eq!((held.token, held.expires_in, held.held_for), (None, None, None));
    assert_eq!(held.session.as_deref(), Some("not leasehold's"));
    drop(lease);
    let displaced = a.force_release(Kind::Lease, &key("x")).await.unwrap().unwrap();
    assert_eq!(displaced.session.as_deref(), Some("not leasehold's"));
    // what is no string is in nobody's way
    lab.ask(&["RPUSH", &name, "a"]).await;
    assert_eq!(of_key(&a, "x").await, []);
    assert_eq!(a.force_release(Kind::Lease, &key("x")).await.unwrap(), None);
    assert!(a.lease(&key("x"), once(1_000)).await.unwrap().is_some());
}

/// Everything that is taken away is lost to its holder; tokens go on rising; a claim writes
/// nothing, and its other keys are freed with it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_released_by_force_is_lost() {
    let lab = Lab::shared();
    let (a, ours) = labelled(&lab, "displaced").await;
    let (b, _) = labelled(&lab, "operator").await;
    let force = async |kind| {
        let displaced = b.force_release(kind, &key("x")).await.unwrap().expect("it is held");
        assert_eq!((displaced.kind, displaced.holder.as_ref()), (kind, Some(&ours)));
        assert_eq!(b.force_release(kind, &key("x")).await.unwrap(), None);
        displaced
    };
    let lock = a.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let displaced = force(Kind::Lock).await;
    assert_eq!(displaced.token, Some(lock.token().await.unwrap()));
    assert_eq!(soon("the loss of the lock", lock.lost().wait()).await, LossReason::Taken);
    let next = b.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    assert!(next.token().await.unwrap() > lock.token().await.unwrap());

    let lease = a.lease(&key("x"), once(3_000)).await.unwrap().unwrap();
    force(Kind::Lease).await;
    let next = b.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    assert!(next.token() > lease.token());
    assert_eq!(soon("the loss of the lease", lease.lost().wait()).await, LossReason::Taken);
    drop(lease);
    assert!(a.lease(&key("x"), once(1_000)).await.unwrap().is_none());

    let opts = ClaimOptions::try_once();
    let mut claim = a.claim(&keys(&["x", "z"]), opts).await.unwrap().unwrap();
    claim.tx::<RedisTx>().unwrap().incr_by(lab.data("n"), 1).unwrap();
    let token = claim.token();
    force(Kind::Claim).await;
    assert_eq!(kind_of(claim.commit().await), ErrorKind::Lost);
    assert_eq!(lab.ask(&["EXISTS", &lab.data("n")]).await.number(), 0);
    let both = b.claim(&keys(&["x", "z"]), ClaimOptions::default().wait(PATIENCE)).await;
    let both = both.unwrap().unwrap();
    assert!(both.token() > token);
    both.rollback().await.unwrap();

    let entry = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    assert!(!force(Kind::Dedupe).await.done);
    assert_eq!(kind_of(entry.complete().await), ErrorKind::Lost);
    let again = a.admit(&key("x"), DedupeOptions::default()).await.unwrap().first().unwrap();
    again.complete().await.unwrap();
    assert!(force(Kind::Dedupe).await.done);
}

/// Waiters get it at once, and a displaced holder that listens hears of it long before its next
/// renewal.
#[tokio::test(flavor = "multi_thread")]
async fn who_listens_hears_of_it_at_once() {
    let lab = Lab::shared();
    let (a, b) = (lab.open().await, lab.open().await);
    let opts = LeaseOptions::default().ttl(HOUR);
    let held = a.lease(&key("x"), opts).await.unwrap().unwrap();
    let other = a.lease(&key("other"), opts).await.unwrap().unwrap();
    // its handle listens as soon as somebody there waits for something
    let theirs = b.lease(&key("theirs"), opts).await.unwrap().unwrap();
    let waits = tokio::spawn({
        let a = a.clone();
        async move { a.lease(&key("theirs"), opts.wait(HOUR)).await }
    });
    let waits_too = tokio::spawn({
        let b = b.clone();
        async move { b.lease(&key("x"), opts.wait(HOUR)).await }
    });
    let channel = format!("leasehold:{}:wake", lab.namespace);
    until("both listen", || async {
        let listening = lab.ask(&["PUBSUB", "NUMSUB", &channel]).await;
        format!("{listening:?}").contains("Number(2)")
    })
    .await;
    assert!(b.force_release(Kind::Lease, &key("x")).await.unwrap().is_some());
    assert_eq!(soon("the loss", held.lost().wait()).await, LossReason::Taken);
    let next = soon("the waiter", waits_too).await.unwrap().unwrap().unwrap();
    assert!(next.token() > held.token());
    assert!(other.is_held());
    // a waiter for a claim as well
    let claim = a.claim(&keys(&["x"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let waiter = tokio::spawn({
        let b = b.clone();
        async move { b.claim(&keys(&["x"]), ClaimOptions::default().wait(HOUR)).await }
    });
    until("it is wanted", || async {
        lab.ask(&["GET", &lab.the_key("claim").await]).await.text().unwrap().ends_with('!')
    })
    .await;
    assert!(b.force_release(Kind::Claim, &key("x")).await.unwrap().is_some());
    let next = soon("the waiter", waiter).await.unwrap().unwrap().unwrap();
    next.rollback().await.unwrap();
    drop(claim);
    theirs.release().await.unwrap();
    soon("the other waiter", waits).await.unwrap().unwrap().unwrap();
}

/// Many release one lease by force while others take it: one holder at a time, by rising tokens,
/// and whoever was displaced is told.
#[tokio::test(flavor = "multi_thread")]
async fn forced_releases_race_with_takers() {
    let lab = Lab::shared();
    let operator = lab.open().await;
    let mut takers = Vec::new();
    for _ in 0..4 {
        let handle = lab.open().await;
        takers.push(tokio::spawn(async move {
            let mut tokens = Vec::new();
            for _ in 0..10 {
                let opts = LeaseOptions::default().ttl(Duration::from_secs(1)).wait(PATIENCE);
                let lease = handle.lease(&key("x"), opts).await.unwrap().expect("it is given on");
                tokens.push(lease.token());
                let lost = lease.lost();
                let told = tokio::time::timeout(Duration::from_millis(20), lost.wait()).await;
                let told = told.is_ok();
                let released = lease.release().await;
                // told, or not displaced, or displaced and told by the release
                assert!(!told || released.is_err(), "{released:?}");
            }
            tokens
        }));
    }
    let force = tokio::spawn(async move {
        let mut displaced = Vec::new();
        loop {
            if let Some(held) = operator.force_release(Kind::Lease, &key("x")).await.unwrap() {
                displaced.push(held.token.unwrap());
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
            if displaced.len() == 20 {
                return displaced;
            }
        }
    });
    let mut tokens = Vec::new();
    for taker in takers {
        let own = soon("the taker", taker).await.unwrap();
        assert!(own.is_sorted(), "{own:?}");
        tokens.extend(own);
    }
    force.abort();
    let count = tokens.len();
    assert_eq!(tokens.into_iter().collect::<BTreeSet<_>>().len(), count, "a token was given twice");
}

/// The server has forgotten everything, or was started anew: the holder is told again.
#[tokio::test(flavor = "multi_thread")]
async fn the_holder_is_told_again_to_a_server_that_forgot_it() {
    let lab = Lab::private(&[]);
    let (a, ours) = labelled(&lab, "kept").await;
    blocking(|| lab.server.kill().and_then(|()| lab.server.restart())).unwrap();
    let opts = LeaseOptions::default().ttl(HOUR).wait(PATIENCE);
    let _held = a.lease(&key("x"), opts).await.unwrap().unwrap();
    until("it is told", || async { of_key(&a, "x").await[0].holder.as_ref() == Some(&ours) }).await;
    // for longer than what it holds
    let name = lab.ask(&["KEYS", "*:holder:*"]).await.texts().remove(0);
    until("it is kept", || async {
        lab.ask(&["PTTL", &name]).await.number() > i64::try_from(HOUR.as_millis()).unwrap()
    })
    .await;
    lab.ask(&["DEL", &name]).await;
    let held = &of_key(&a, "x").await[0];
    let instance = format!("instance {:08x}", ours.instance);
    assert_eq!((held.holder.as_ref(), held.session.as_ref()), (None, Some(&instance)));
}

/// Connections of ours have the holder's name, also those opened anew; the caller's keep theirs.
#[tokio::test(flavor = "multi_thread")]
async fn connections_have_the_holders_name() {
    let lab = Lab::private(&[]);
    let holder = Holder::this_process().named("my app");
    let name = format!("name={}", holder.to_string().replace(' ', "-"));
    let a = lab.builder().holder(holder).connections(2).connect(&lab.server.url()).await.unwrap();
    let named = async || {
        let list = lab.ask(&["CLIENT", "LIST"]).await.text().unwrap().to_owned();
        list.matches(&name).count()
    };
    until("both are named", || async { named().await == 2 }).await;
    let _lease = a.lease(&key("x"), once(60_000)).await.unwrap().unwrap();
    let waits = LeaseOptions::try_once().wait(Duration::from_millis(50));
    assert!(a.lease(&key("x"), waits).await.unwrap().is_none());
    lab.ask(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    until("they are named again", || async { named().await >= 2 }).await;
}

/// All masters of a cluster are asked, and keys in any slot are found and taken away.
#[tokio::test(flavor = "multi_thread")]
async fn all_slots_of_a_cluster_are_shown() {
    let cluster = blocking(|| cluster(kind())).unwrap();
    let holder = Holder::this_process().named("spread");
    let builder = RedisBackend::builder().command_limit(Duration::from_secs(2));
    let a = builder.clone().holder(holder.clone()).connect(&cluster.url()).await.unwrap();
    let b = builder.connect(&cluster.url()).await.unwrap();
    let mut held = Vec::new();
    for n in 0..300 {
        held.push(a.lease(&key(&format!("job/{n}")), once(60_000)).await.unwrap().unwrap());
    }
    let _claim = a.claim(&keys(&["a", "{b}"]), ClaimOptions::try_once()).await.unwrap().unwrap();
    let listed = b.holdings(&HoldingQuery::default()).await.unwrap();
    assert_eq!(listed.len(), 302);
    assert!(listed.iter().all(|one| one.holder.as_ref() == Some(&holder)), "{:?}", listed[0]);
    let claims = b.holdings(&HoldingQuery::default().kinds([Kind::Claim])).await.unwrap();
    assert_eq!(claims.len(), 2, "{claims:?}");
    for (n, lease) in held.iter().enumerate().take(20) {
        let name = key(&format!("job/{n}"));
        let displaced = b.force_release(Kind::Lease, &name).await.unwrap().unwrap();
        assert_eq!(displaced.token, Some(lease.token()));
        assert!(b.lease(&name, once(60_000)).await.unwrap().unwrap().token() > lease.token());
    }
    a.close().await.unwrap();
}
