//! A majority of independent servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_conformance::servers::Server;
use leasehold_core::backend::Owner;
use leasehold_core::{
    ClaimLock, ClaimOptions, ErrorKind, Finding, HoldingQuery, Inspect, Keys, Kind, Lease,
    LockOptions, LossReason, NamedLock, Severity,
};
use leasehold_redis::{RedisBackend, RedisQuorum, RedisTx};

use crate::lab::{PATIENCE, blocking, key, kind_of, once, soon, until};
use crate::support::{Raw, kind};

/// Three servers and a namespace.
struct Three {
    servers: Vec<Server>,
    namespace: String,
}

impl Three {
    fn start() -> Self {
        let start = || Server::start(kind()).expect("a server can be started");
        let servers = blocking(|| (0..3).map(|_| start()).collect());
        Self { servers, namespace: format!("q{:x}", Owner::fresh().0) }
    }

    async fn try_open(&self) -> leasehold_core::Result<RedisQuorum> {
        let builder = RedisBackend::builder()
            .namespace(&self.namespace)
            .command_limit(Duration::from_secs(1))
            .lock_ttl(Duration::from_secs(3));
        builder.connect_quorum(self.servers.iter().map(Server::url)).await
    }

    async fn open(&self) -> Arc<RedisQuorum> {
        Arc::new(self.try_open().await.expect("the quorum opens"))
    }

    /// The keys of a kind on one server.
    async fn keys(&self, server: usize, kind: &str) -> Vec<String> {
        let mut raw = Raw::open(self.servers[server].port()).await.unwrap();
        let pattern = format!("leasehold:{}:*:{kind}:*", self.namespace);
        raw.tell(&["KEYS", &pattern]).await.unwrap().texts()
    }

    async fn ask(&self, server: usize, words: &[&str]) {
        let mut raw = Raw::open(self.servers[server].port()).await.unwrap();
        raw.tell(words).await.unwrap();
    }

    fn pause(&self, server: usize) {
        blocking(|| self.servers[server].pause()).unwrap();
    }

    fn resume(&self, server: usize) {
        blocking(|| self.servers[server].resume()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_excludes_and_a_minority_may_be_down() {
    let three = Three::start();
    let (a, b) = (three.open().await, three.open().await);
    assert_eq!(a.servers(), 3);
    let held = a.lease(&key("x"), once(2_000)).await.unwrap().unwrap();
    let lock = a.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    assert!(b.lease(&key("x"), once(2_000)).await.unwrap().is_none());
    three.pause(0);
    // longer than both ttls: the others renew
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(held.is_held() && lock.is_held());
    assert!(b.lease(&key("x"), once(2_000)).await.unwrap().is_none());
    held.release().await.unwrap();
    lock.release().await.unwrap();
    let opts = once(2_000).wait(PATIENCE);
    let next = b.lease(&key("x"), opts).await.unwrap().expect("it was freed");
    // a handle opens without the one that is down
    let third = three.open().await;
    assert!(third.lease(&key("x"), once(2_000)).await.unwrap().is_none());
    // without a majority nothing is known: an error, and a loss
    three.pause(1);
    assert_eq!(kind_of(third.lease(&key("y"), once(2_000)).await), ErrorKind::Unavailable);
    assert_eq!(soon("the loss", next.lost().wait()).await, LossReason::Expired);
    assert_eq!(kind_of(three.try_open().await), ErrorKind::Unavailable);
    three.resume(0);
    three.resume(1);
    let opts = once(2_000).wait(PATIENCE);
    assert!(b.lease(&key("y"), opts).await.unwrap().is_some());
}

/// The highest token of one majority is known to the next one.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_from_majority_to_majority() {
    let three = Three::start();
    let quorum = three.open().await;
    let first = quorum.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    let mut last = first.token().value();
    first.release().await.unwrap();
    for round in 0..4_usize {
        // one server's token is far ahead of the others', and then it is gone
        let ahead = last + 1_000_000_000;
        for name in three.keys(round % 3, "last").await {
            three.ask(round % 3, &["SET", &name, &ahead.to_string(), "PX", "600000"]).await;
        }
        let opts = once(30_000).wait(PATIENCE);
        let with_it = loop {
            let lease = quorum.lease(&key("x"), opts).await.unwrap().unwrap();
            let token = lease.token().value();
            assert!(token > last, "{token} after {last}");
            last = token;
            lease.release().await.unwrap();
            // the majority that is heard first need not have it in
            if token > ahead {
                break token;
            }
        };
        three.pause(round % 3);
        let without = quorum.lease(&key("x"), opts).await.unwrap().unwrap();
        assert!(without.token().value() > with_it, "{} after {with_it}", without.token());
        last = without.token().value();
        without.release().await.unwrap();
        three.resume(round % 3);
        until("it answers again", || async {
            blocking(|| three.servers[round % 3].ping(Duration::from_secs(1))).is_ok()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_without_the_key_is_a_loss() {
    let three = Three::start();
    let quorum = three.open().await;
    let held = quorum.lease(&key("x"), once(1_500)).await.unwrap().unwrap();
    until("all have it", || async {
        let mut all = 0;
        for server in 0..3 {
            all += three.keys(server, "lease").await.len();
        }
        all == 3
    })
    .await;
    three.ask(0, &["FLUSHALL"]).await;
    held.renew().await.expect("two of three still have it");
    three.ask(1, &["FLUSHALL"]).await;
    assert_eq!(soon("the loss", held.lost().wait()).await, LossReason::Taken);
    assert_eq!(kind_of(held.release().await), ErrorKind::Lost);
}

/// Split votes end: everybody has its turn, one at a time, and nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn split_votes_end() {
    let three = Three::start();
    let handles = [three.open().await, three.open().await, three.open().await];
    let (inside, mut tasks) = (Arc::new(AtomicUsize::new(0)), tokio::task::JoinSet::new());
    for n in 0..24 {
        let (handle, inside) = (handles[n % 3].clone(), inside.clone());
        tasks.spawn(async move {
            let opts = once(20_000).wait(Duration::from_secs(60));
            let lease = handle.lease(&key("x"), opts).await.unwrap().expect("its turn comes");
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            lease.release().await.unwrap();
        });
    }
    let all = tokio::time::timeout(Duration::from_secs(60), tasks.join_all());
    all.await.expect("everybody has its turn");
    until("nothing is left", || async {
        let mut left = 0;
        for server in 0..3 {
            left += three.keys(server, "lease").await.len();
        }
        left == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_quorum_cannot_do_is_refused() {
    let three = Three::start();
    let two = three.servers[..2].iter().map(Server::url);
    let refused = RedisBackend::builder().connect_quorum(two).await;
    assert_eq!(kind_of(refused), ErrorKind::InvalidOptions);
    let quorum = three.open().await;
    let lease = quorum.lease(&key("x"), once(30_000)).await.unwrap().unwrap();
    let single = RedisBackend::connect(&three.servers[0].url()).await.unwrap();
    let claimed = single.claim(&Keys::none(), ClaimOptions::default()).await;
    let mut claim = claimed.unwrap().unwrap();
    let verified = lease.verify(claim.tx::<RedisTx>().unwrap()).await;
    assert_eq!(kind_of(verified), ErrorKind::Unsupported);
    let lost = lease.lost();
    soon("it closes", quorum.close()).await.unwrap();
    assert_eq!(soon("the loss", lost.wait()).await, LossReason::Closed);
    assert!(quorum.lease(&key("y"), once(1_000)).await.is_err());
    // the close has the answers of a majority, in which this one need not be
    until("the first server to be free", || async { three.keys(0, "lease").await.is_empty() })
        .await;
}

/// One of the servers tells what it knows; what is released there by force is lost as soon as that
/// is a majority. Each server is diagnosed, and one that says nothing is a fault.
#[tokio::test(flavor = "multi_thread")]
async fn its_servers_are_inspected_one_by_one() {
    let three = Three::start();
    let quorum = three.open().await;
    let lock = quorum.lock(&key("x"), LockOptions::try_once()).await.unwrap().unwrap();
    let mut holders = Vec::new();
    for server in &three.servers[..2] {
        let builder = RedisBackend::builder().namespace(&three.namespace);
        let one = builder.connect(&server.url()).await.unwrap();
        let shown = || async { one.holdings(&HoldingQuery::key(&key("x"))).await.unwrap().pop() };
        until("the majority has agreed", || async {
            let token = lock.token().await.unwrap();
            shown().await.is_some_and(|held| held.holder.is_some() && held.token == Some(token))
        })
        .await;
        assert!(lock.is_held());
        let displaced = one.force_release(Kind::Lock, &key("x")).await.unwrap().unwrap();
        holders.push(displaced.holder.unwrap());
    }
    assert_eq!(holders[0], holders[1]);
    assert_eq!(soon("the loss", lock.lost().wait()).await, LossReason::Taken);
    let refused = quorum.holdings(&HoldingQuery::default()).await;
    assert_eq!(kind_of(refused), ErrorKind::Unsupported);

    let at = format!("127.0.0.1:{}: ", three.servers[2].port());
    let of_third = |found: Vec<Finding>| {
        found.into_iter().filter(|one| one.found.starts_with(&at)).collect::<Vec<_>>()
    };
    let found = of_third(quorum.diagnose().await.unwrap());
    assert!(found.iter().any(|one| one.topic == "version" && one.severity == Severity::Fine));
    three.pause(2);
    let found = of_third(quorum.diagnose().await.unwrap());
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].topic, found[0].severity), ("connection", Severity::Fault));
    three.resume(2);
}
