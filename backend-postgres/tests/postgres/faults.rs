//! The worst: cancellation at any moment, and a server that is killed.

use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::servers::Server;
use leasehold_core::{
    ClaimLock, ClaimOptions, Dedupe, DedupeOptions, ErrorKind, Keys, Lease, LeaseOptions,
    LockOptions, NamedLock,
};

use crate::env::{Env, PATIENCE, got, key, namespace, soon, until};

/// B03: dropped at random moments, with and without somebody else in the way.
pub(crate) async fn five_hundred_cancelled_acquires_leave_nothing(env: &Env) {
    let ns = namespace("cancel");
    let pool = env.pool(&ns, 4);
    let a = Arc::new(env.builder(&ns).build(pool.clone()).unwrap());
    let b = env.handle(&ns).await;
    let busy = got(b.lock(&key("busy"), LockOptions::try_once()).await);
    let busy_claim = got(b.claim(&Keys::from(key("busy")), ClaimOptions::try_once()).await);
    for n in 0..500_u32 {
        let name = key(if n % 3 == 0 { "busy" } else { "free" });
        let keys = Keys::from(name.clone());
        let wait = if n % 2 == 0 { Duration::ZERO } else { PATIENCE };
        let limit = Duration::from_micros(rand::random_range(0..5_000));
        match n % 4 {
            0 | 1 => {
                let lock = a.lock(&name, LockOptions::default().wait(wait));
                drop(tokio::time::timeout(limit, lock).await);
            }
            2 => {
                let claim = a.claim(&keys, ClaimOptions::default().wait(wait));
                drop(tokio::time::timeout(limit, claim).await);
            }
            _ => {
                let lease = a.lease(&name, LeaseOptions::default().wait(wait));
                drop(tokio::time::timeout(limit, lease).await);
                let admit = a.admit(&name, DedupeOptions::default());
                drop(tokio::time::timeout(limit, admit).await);
            }
        }
    }
    assert!(busy.is_held());
    busy.release().await.unwrap();
    busy_claim.rollback().await.unwrap();
    // all is free for another handle, and stays so
    for name in ["busy", "free"] {
        let name = key(name);
        let wait = LockOptions::default().wait(PATIENCE);
        got(b.lock(&name, wait).await).release().await.unwrap();
        let opts = ClaimOptions::default().wait(PATIENCE);
        got(b.claim(&Keys::from(name.clone()), opts).await).rollback().await.unwrap();
        let opts = LeaseOptions::default().wait(PATIENCE);
        got(b.lease(&name, opts).await).release().await.unwrap();
    }
    env.nothing_is_left(&ns).await;
    // no place in the pool is lost
    let all = futures_util::future::join_all((0..4).map(|_| pool.acquire()));
    let all = soon("all connections of the pool", all).await;
    assert!(all.iter().all(Result::is_ok));
}

/// `kill -9` and a restart: session locks are gone and known to be, tokens rise, and the handle
/// goes on.
pub(crate) async fn a_killed_server_loses_the_locks_and_keeps_the_tokens(env: &Env) {
    let kind = env.server.kind();
    let server = tokio::task::spawn_blocking(move || Server::start(kind)).await.unwrap().unwrap();
    let own = Env::over(server.clone());
    let ns = namespace("killed");
    let a = Arc::new(own.handle(&ns).await);
    for _ in 0..3 {
        let held = got(soon("the lock", a.lock(&key("x"), LockOptions::default())).await);
        let opts = LeaseOptions::default().ttl(Duration::from_secs(2)).wait(PATIENCE);
        let lease = got(a.lease(&key("x"), opts).await);
        let mut claim = got(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
        let day = Duration::from_secs(86_400);
        assert!(claim.first_seen(&key("x"), day).await.unwrap());
        let tokens = [held.token().await.unwrap(), lease.token(), claim.token()];
        let entry = key(&format!("{}", rand::random::<u64>()));
        a.admit(&entry, DedupeOptions::default())
            .await
            .unwrap()
            .first()
            .unwrap()
            .complete()
            .await
            .unwrap();

        let killed = server.clone();
        tokio::task::spawn_blocking(move || killed.kill()).await.unwrap().unwrap();
        soon("the loss of the lock", held.lost().wait()).await;
        assert_eq!(held.release().await.unwrap_err().kind(), ErrorKind::Lost);
        let unknown = claim.commit().await.unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::CommitUnknown, "{unknown}");
        let down = a.lock(&key("x"), LockOptions::try_once()).await.unwrap_err();
        assert_eq!(down.kind(), ErrorKind::Unavailable, "{down}");
        soon("the loss of the lease", lease.lost().wait()).await;

        let restarted = server.clone();
        tokio::task::spawn_blocking(move || restarted.restart()).await.unwrap().unwrap();
        until("a connection", || async { a.check().await.is_ok() }).await;
        let again = got(a.lock(&key("x"), LockOptions::default().wait(PATIENCE)).await);
        let lease_again = got(a.lease(&key("x"), opts).await);
        let claim_again = got(a.claim(&Keys::from(key("x")), ClaimOptions::default()).await);
        let new = [again.token().await.unwrap(), lease_again.token(), claim_again.token()];
        assert!(new.iter().min() > tokens.iter().max(), "{new:?} after {tokens:?}");
        let seen = a.admit(&entry, DedupeOptions::default()).await.unwrap();
        assert!(!seen.is_first(), "an entry that was completed is lost");
        again.release().await.unwrap();
        lease_again.release().await.unwrap();
        claim_again.rollback().await.unwrap();
    }
    own.nothing_is_left(&ns).await;
}
