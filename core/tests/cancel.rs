//! Every async method, dropped after each possible number of polls: nothing may be left.

mod common;

use common::{key, nothing_left, poll_times, secs};
use leasehold_core::memory::{MemoryBackend, MemoryStore, MemoryTx};
use leasehold_core::{
    Backend, ClaimLock, ClaimLockExt, ClaimOptions, Dedupe, DedupeExt, DedupeOptions, Error, Keys,
    Lease, LeaseExt, LeaseOptions, LockOptions, NamedLock, NamedLockExt,
};

/// A handle under test, and another one that looks afterwards.
struct Pair {
    one: MemoryBackend,
    two: MemoryBackend,
}

impl Pair {
    fn new() -> Self {
        let store = MemoryStore::new();
        let open = || MemoryBackend::builder().store(&store).namespace("test").build();
        let (one, two) = (open(), open());
        // a way with a delay has more places to be cancelled at
        one.link().delay(std::time::Duration::from_millis(2));
        Self { one, two }
    }

    /// The other handle can have everything, and nothing is left when it lets go.
    async fn check(&self) {
        let within = LockOptions::default().wait(secs(30));
        let lock = self.two.lock(&key("a"), within).await.unwrap();
        assert!(lock.is_some(), "the named lock is still held");
        let lease = self.two.lease(&key("a"), LeaseOptions::default().wait(secs(5))).await;
        assert!(lease.unwrap().is_some(), "the lease is still held");
        let claim = self.two.claim(&keys(), ClaimOptions::default()).await.unwrap();
        assert!(claim.is_some(), "a key of the claim is still held");
        drop((lock, claim));
        nothing_left_but_expiring(&self.two).await;
    }
}

async fn nothing_left_but_expiring(backend: &MemoryBackend) {
    nothing_left(backend.store()).await;
}

fn keys() -> Keys {
    Keys::new(["a", "b"]).unwrap()
}

/// Runs `$call` on a fresh `$pair` with one poll more each time, until it completes; `$prepare`
/// makes what it needs.
macro_rules! at_every_poll {
    ($name:ident, |$pair:ident| $prepare:expr, |$thing:ident| $call:expr) => {
        #[tokio::test(start_paused = true)]
        async fn $name() {
            for polls in 0.. {
                let $pair = &Pair::new();
                #[allow(unused_variables, unused_mut, clippy::let_unit_value)]
                let mut $thing = $prepare;
                let done = poll_times($call, polls).await;
                let completed = done.is_some();
                drop(done);
                $pair.check().await;
                if completed {
                    assert!(polls > 1, "completed at once: nothing was cancelled");
                    return;
                }
                assert!(polls < 1000, "never completes");
            }
        }
    };
}

async fn held_lock(pair: &Pair) -> leasehold_core::LockGuard {
    pair.one.lock(&key("a"), LockOptions::default()).await.unwrap().unwrap()
}

async fn held_lease(pair: &Pair) -> leasehold_core::LeaseGuard {
    pair.one.lease(&key("a"), LeaseOptions::default()).await.unwrap().unwrap()
}

async fn open_claim(pair: &Pair) -> leasehold_core::Claim {
    pair.one.claim(&keys(), ClaimOptions::default()).await.unwrap().unwrap()
}

async fn admitted(pair: &Pair) -> leasehold_core::DedupeGuard {
    pair.one.admit(&key("a"), DedupeOptions::default()).await.unwrap().first().unwrap()
}

at_every_poll!(lock_free, |pair| (), |_none| pair.one.lock(&key("a"), LockOptions::default()));
at_every_poll!(lock_try, |pair| (), |_none| pair.one.lock(&key("a"), LockOptions::try_once()));
at_every_poll!(
    lock_that_waits_on_the_store,
    |pair| {
        let held = pair.two.lock(&key("a"), LockOptions::default()).await.unwrap().unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(secs(1) / 50).await;
            held.release().await
        })
    },
    |_release| pair.one.lock(&key("a"), LockOptions::default())
);
at_every_poll!(
    lock_that_waits_locally,
    |pair| {
        let held = held_lock(pair).await;
        tokio::spawn(async move {
            tokio::time::sleep(secs(1) / 50).await;
            held.release().await
        })
    },
    |_release| pair.one.lock(&key("a"), LockOptions::default())
);
at_every_poll!(
    lock_token,
    |pair| held_lock(pair).await,
    |guard| async move { guard.token().await }
);
at_every_poll!(lock_release, |pair| held_lock(pair).await, |guard| guard.release());
at_every_poll!(with_lock, |pair| (), |_none| pair.one.with_lock(
    &key("a"),
    LockOptions::default(),
    async |_| tokio::task::yield_now().await
));

at_every_poll!(lease_free, |pair| (), |_none| pair.one.lease(&key("a"), LeaseOptions::default()));
at_every_poll!(
    lease_that_waits,
    |pair| {
        let held = pair.two.lease(&key("a"), LeaseOptions::default()).await.unwrap().unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(secs(1) / 50).await;
            held.release().await
        })
    },
    |_release| pair.one.lease(&key("a"), LeaseOptions::default())
);
at_every_poll!(
    lease_renew,
    |pair| held_lease(pair).await,
    |guard| async move { guard.renew().await }
);
at_every_poll!(lease_release, |pair| held_lease(pair).await, |guard| guard.release());
at_every_poll!(with_lease, |pair| (), |_none| pair.one.with_lease(
    &key("a"),
    LeaseOptions::default(),
    async |_| tokio::task::yield_now().await
));

at_every_poll!(claim_free, |pair| (), |_none| pair.one.claim(&keys(), ClaimOptions::default()));
at_every_poll!(
    claim_that_waits,
    |pair| {
        let held = pair.two.claim(&keys(), ClaimOptions::default()).await.unwrap().unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(secs(1) / 50).await;
            held.rollback().await
        })
    },
    |_release| pair.one.claim(&keys(), ClaimOptions::default())
);
at_every_poll!(claim_commit, |pair| open_claim(pair).await, |claim| claim.commit());
at_every_poll!(claim_rollback, |pair| open_claim(pair).await, |claim| claim.rollback());
at_every_poll!(
    claim_first_seen_that_waits,
    |pair| {
        let mut other =
            pair.two.claim(&Keys::none(), ClaimOptions::default()).await.unwrap().unwrap();
        assert!(other.first_seen(&key("event"), secs(60)).await.unwrap());
        tokio::spawn(async move {
            tokio::time::sleep(secs(1) / 50).await;
            other.rollback().await
        });
        open_claim(pair).await
    },
    |claim| async move { claim.first_seen(&key("event"), secs(60)).await }
);
at_every_poll!(with_claim, |pair| (), |_none| pair.one.with_claim(
    &keys(),
    ClaimOptions::default(),
    async |claim: &mut leasehold_core::Claim| {
        claim.tx::<MemoryTx>()?.write("x", "1");
        tokio::task::yield_now().await;
        Ok::<_, Error>(())
    }
));

at_every_poll!(dedupe_admit, |pair| (), |_none| pair
    .one
    .admit(&key("a"), DedupeOptions::default()));
at_every_poll!(dedupe_admit_many, |pair| [key("a"), key("b"), key("a")], |wanted| async {
    pair.one.admit_many(&wanted, DedupeOptions::default()).await
});
at_every_poll!(dedupe_complete, |pair| admitted(pair).await, |guard| guard.complete());
at_every_poll!(dedupe_abandon, |pair| admitted(pair).await, |guard| guard.abandon());
at_every_poll!(dedupe_first_seen, |pair| (), |_none| pair.one.first_seen(&key("a"), secs(60)));

at_every_poll!(housekeep, |pair| (), |_none| pair.one.housekeep());
at_every_poll!(
    close,
    |pair| (held_lock(pair).await, held_lease(pair).await),
    |guards| async move {
        let closed = pair.one.close().await;
        drop(guards);
        closed
    }
);

#[tokio::test(start_paused = true)]
async fn a_dropped_admission_is_first_again() {
    for polls in 0..40 {
        let pair = Pair::new();
        let done = poll_times(pair.one.admit(&key("a"), DedupeOptions::default()), polls).await;
        drop(done);
        common::until("first again", || true).await;
        let start = tokio::time::Instant::now();
        while !pair.two.admit(&key("a"), DedupeOptions::default()).await.unwrap().is_first() {
            assert!(start.elapsed() < secs(30), "burned after {polls} polls");
            tokio::time::sleep(secs(1) / 100).await;
        }
    }
}
