//! The lease engine under a paused clock, over a store with faults on the way.

mod common;

use common::{key, millis, nothing_left, pair, secs};
use leasehold_core::backend::{LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource};
use leasehold_core::engine::LeaseEngine;
use leasehold_core::memory::{MemoryBackend, MemoryDriver, MemoryStore, MemoryTx};
use leasehold_core::{
    Backend, Claim, ClaimLock, ClaimOptions, Error, ErrorKind, FencingToken, Key, Keys, Lease,
    LeaseExt, LeaseOptions, LossReason, Result,
};
use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

static KEY: LazyLock<Key> = LazyLock::new(|| key("a"));

fn ttl(ttl: Duration) -> LeaseOptions {
    LeaseOptions::try_once().ttl(ttl)
}

/// What the holder believes of a ttl: less the drift margin.
fn believed(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + millis(2))
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_for_as_long_as_it_is_held() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    let token = guard.token();
    for _ in 0..1000 {
        tokio::time::sleep(secs(7)).await;
        assert!(guard.is_held() && guard.remaining() > secs(1));
        assert!(two.lease(&KEY, ttl(secs(3))).await.unwrap().is_none());
    }
    assert_eq!(guard.token(), token, "a renewal changed the token");
    guard.release().await.unwrap();
    let next = two.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    assert!(next.token() > token);
}

#[tokio::test(start_paused = true)]
async fn a_silent_network_loses_at_the_local_deadline_before_the_store_frees() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(30))).await.unwrap().unwrap();
    let start = Instant::now();
    one.link().silence();
    let lost = guard.lost();
    let wanted = LeaseOptions::default().ttl(secs(30)).wait(secs(60));
    let ((), successor) = tokio::join!(
        async {
            assert_eq!(lost.wait().await, LossReason::Expired);
            let took = start.elapsed();
            assert!(took + millis(1) >= believed(secs(30)) && took < secs(30), "{took:?}");
        },
        two.lease(&KEY, wanted)
    );
    assert!(start.elapsed() >= secs(30), "the store freed it early");
    assert!(start.elapsed() < secs(32), "taken over after {:?}", start.elapsed());
    let successor = successor.unwrap().unwrap();
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert_eq!(guard.renew().await.unwrap_err().kind(), ErrorKind::Lost);
    one.link().heal();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    tokio::time::sleep(secs(5)).await;
    assert!(successor.is_held(), "a stale renewal or release hit the successor");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_is_tried_again_before_the_deadline() {
    let (one, _) = pair();
    let guard = one.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    for _ in 0..20 {
        one.link().lose_next_answer();
        tokio::time::sleep(secs(2)).await;
    }
    one.link().lose_next_answer();
    guard.renew().await.unwrap();
    // one that hangs is cut short
    one.link().silence();
    tokio::time::sleep(millis(1500)).await;
    one.link().heal();
    tokio::time::sleep(secs(60)).await;
    assert!(guard.is_held());
    one.link().lose_next_answer();
    guard.release().await.expect("the release that was repeated found it freed");
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_does_not_resurrect() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    one.link().delay(secs(2)); // the store renews, the answers come past their limit
    assert_eq!(guard.lost().wait().await, LossReason::Expired);
    tokio::time::sleep(secs(10)).await;
    assert!(!guard.is_held());
    one.link().heal();
    let next = two.lease(&KEY, LeaseOptions::default().wait(secs(10))).await.unwrap();
    assert!(next.is_some(), "what a late renewal left on the store was not freed");
}

#[tokio::test(start_paused = true)]
async fn a_lease_deleted_by_an_outsider_is_lost_promptly() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(3600))).await.unwrap().unwrap();
    let start = Instant::now();
    one.store().delete_lease("test", &KEY);
    assert_eq!(guard.lost().wait().await, LossReason::Taken);
    assert!(start.elapsed() < secs(1), "told after {:?}", start.elapsed());
    let next = two.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_held());
    assert!(one.lease(&KEY, ttl(secs(3))).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_release_wakes_the_waiter_and_a_lost_message_only_delays_it() {
    let (one, two) = pair();
    let long = LeaseOptions::default().ttl(secs(600)).wait(Duration::MAX);
    let mut guard = one.lease(&KEY, long).await.unwrap().unwrap();
    for round in 0..6 {
        let (from, to) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let (next, released) = tokio::join!(to.lease(&KEY, long), async {
            tokio::time::sleep(secs(5)).await;
            if round >= 4 {
                to.link().silence(); // the message comes now, and is lost
            }
            let released = Instant::now();
            guard.release().await.unwrap();
            if round >= 4 {
                to.link().heal();
            }
            released
        });
        guard = next.unwrap().unwrap();
        let took = released.elapsed();
        let bound = if round >= 4 { LeaseLimits::default().max_poll } else { millis(5) };
        assert!(took <= bound, "round {round}: woken after {took:?}");
        assert!(from.lease(&KEY, ttl(secs(1))).await.unwrap().is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn an_expiry_wakes_the_waiter() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(5)).manual_renewal()).await.unwrap().unwrap();
    let start = Instant::now();
    let next = two.lease(&KEY, LeaseOptions::default().wait(secs(60))).await.unwrap();
    let took = start.elapsed();
    assert!(next.is_some() && took >= believed(secs(5)) && took < millis(5100), "{took:?}");
    assert_eq!(guard.lost().reason(), Some(LossReason::Expired));
}

#[tokio::test(start_paused = true)]
async fn manual_renewal_and_the_longest_hold() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(5)).manual_renewal()).await.unwrap().unwrap();
    for _ in 0..10 {
        tokio::time::sleep(secs(4)).await;
        guard.renew().await.unwrap();
    }
    let start = Instant::now();
    guard.lost().wait().await;
    let took = start.elapsed();
    assert!(took + millis(1) >= believed(secs(5)) && took <= secs(5), "{took:?}");
    drop(guard);

    let start = Instant::now();
    let opts = LeaseOptions::default().ttl(secs(3)).max_hold(secs(60));
    let guard = two.lease(&KEY, opts).await.unwrap().unwrap();
    assert_eq!(guard.lost().wait().await, LossReason::Expired);
    let took = start.elapsed();
    assert!(took >= secs(60) && took <= secs(63), "a stuck holder held for {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_local_waiter_goes_on_when_the_local_holder_has_lost() {
    let (one, two) = pair();
    let guard = one.lease(&KEY, ttl(secs(3))).await.unwrap().unwrap();
    let wanted = LeaseOptions::default().ttl(secs(3)).wait(secs(60));
    let (next, ()) = tokio::join!(one.lease(&KEY, wanted), async {
        tokio::time::sleep(secs(1)).await;
        one.store().delete_lease("test", &KEY);
    });
    let next = next.unwrap().expect("blocked by a guard that is lost and still there");
    assert!(!guard.is_held());
    drop(guard);
    tokio::time::sleep(secs(1)).await;
    assert!(two.lease(&KEY, ttl(secs(3))).await.unwrap().is_none(), "the drop freed the successor");
    assert!(next.is_held());
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_refused_before_any_io() {
    let (one, _) = pair();
    one.link().silence();
    for bad in [Duration::ZERO, millis(99), Duration::MAX] {
        let error = one.lease(&KEY, ttl(bad)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOptions);
        assert!(error.to_string().starts_with("memory: lease \"a\" failed: invalid options: ttl"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_fails_a_try_within_the_answer_limit_and_leaves_nothing() {
    let (one, two) = pair();
    one.link().silence();
    let start = Instant::now();
    let error = one.lease(&KEY, ttl(secs(30))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(start.elapsed() <= LeaseLimits::default().answer);
    one.link().heal(); // now the request arrives; what it took is given back
    tokio::time::sleep(secs(5)).await;
    assert!(two.lease(&KEY, ttl(secs(3))).await.unwrap().is_some(), "an orphan");
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_recognised_as_our_own() {
    let (one, two) = pair();
    one.link().lose_next_answer();
    let wanted = ttl(secs(30));
    let start = Instant::now();
    let guard = one.lease(&KEY, wanted).await.unwrap();
    let guard = guard.expect("our own lease was called foreign");
    assert!(start.elapsed() < secs(1), "after {:?}", start.elapsed());
    tokio::time::sleep(secs(60)).await;
    assert!(guard.is_held(), "what we got by asking again was taken back");
    assert!(two.lease(&KEY, ttl(secs(3))).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn thousands_of_leases_share_a_few_renewals() {
    let (one, two) = pair();
    let mut guards = Vec::new();
    for i in 0..10_000 {
        guards.push(one.lease(&key(&i.to_string()), ttl(secs(30))).await.unwrap().unwrap());
    }
    tokio::time::sleep(secs(120)).await;
    assert!(guards.iter().all(leasehold_core::LeaseGuard::is_held));
    // with a way of 1 s, renewals one by one would not come round in time
    one.link().delay(millis(500));
    tokio::time::sleep(secs(120)).await;
    assert!(guards.iter().all(leasehold_core::LeaseGuard::is_held));
    one.link().heal();
    one.close().await.unwrap();
    assert!(guards.iter().all(|guard| guard.lost().reason() == Some(LossReason::Closed)));
    nothing_left(two.store()).await;
    assert_eq!(one.lease(&KEY, ttl(secs(1))).await.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn verify_guards_a_write_until_its_transaction_ends() {
    let (one, two) = pair();
    let begin = async |backend: &MemoryBackend| {
        backend.claim(&Keys::none(), ClaimOptions::default()).await.unwrap().unwrap()
    };
    let guard = one.lease(&KEY, ttl(secs(3)).manual_renewal()).await.unwrap().unwrap();
    let mut claim: Claim = begin(&one).await;
    guard.verify(claim.tx::<MemoryTx>().unwrap()).await.unwrap();
    claim.tx::<MemoryTx>().unwrap().write("verified", "yes");
    tokio::time::sleep(secs(10)).await;
    assert!(two.lease(&KEY, ttl(secs(3))).await.unwrap().is_none(), "taken over under a write");
    claim.commit().await.unwrap();
    assert_eq!(one.store().read("verified").as_deref(), Some("yes"));
    let successor = two.lease(&KEY, ttl(secs(3))).await.unwrap().expect("expired");
    let mut claim = begin(&one).await;
    let error = guard.verify(claim.tx::<MemoryTx>().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(claim.tx::<String>().unwrap_err().kind(), ErrorKind::WrongBackend);
    let error = successor.verify(&mut String::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongBackend);
}

#[tokio::test(start_paused = true)]
async fn with_lease_stops_the_work_on_loss() {
    let (one, _) = pair();
    let done = one.with_lease(&KEY, ttl(secs(3)), async |guard| guard.token()).await;
    assert!(done.unwrap().is_some());
    let outcome = one.with_lease(&KEY, ttl(secs(3)), async |_| {
        one.link().silence();
        tokio::time::sleep(secs(600)).await;
    });
    assert_eq!(outcome.await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn every_key_is_free_once_its_users_are_gone() {
    let (one, two) = pair();
    let backends = [Arc::new(one), Arc::new(two)];
    let mut tasks = JoinSet::new();
    for i in 0..200_u64 {
        let backend = backends[(i % 2) as usize].clone();
        tasks.spawn(async move {
            let wanted = key(&format!("k{}", i % 5));
            let opts = LeaseOptions::default().ttl(secs(600)).wait(millis(i));
            let work = async {
                if let Ok(Some(guard)) = backend.lease(&wanted, opts).await {
                    tokio::time::sleep(millis(i % 3)).await;
                    drop(guard);
                }
            };
            let _ = timeout(millis(i * 7 % 50), work).await;
        });
    }
    tasks.join_all().await;
    nothing_left(backends[0].store()).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_without_push_is_polled() {
    // a store that nobody tells anything: the link is silent when the subscription is opened
    let store = MemoryStore::new();
    let open = || MemoryBackend::builder().store(&store).namespace("test").build();
    let (one, two) = (open(), open());
    let guard = one.lease(&KEY, ttl(secs(600))).await.unwrap().unwrap();
    let wanted = LeaseOptions::default().wait(secs(60));
    let (next, released) = tokio::join!(two.lease(&KEY, wanted), async {
        tokio::time::sleep(secs(3)).await;
        store.restart(); // ends every subscription
        guard.release().await.unwrap();
        Instant::now()
    });
    assert!(next.unwrap().is_some());
    assert!(released.elapsed() <= LeaseLimits::default().max_poll);
}

/// Grants every key but one, cannot renew another, and gives a third to who waits.
#[derive(Debug)]
struct OneStuck;

#[async_trait::async_trait]
impl LeaseDriver for OneStuck {
    fn backend(&self) -> &'static str {
        "stub"
    }

    async fn acquire(&self, key: &Key, _: Owner, _: Duration) -> Result<LeaseTry> {
        match key.as_str() {
            "unreachable" => Err(Error::new(ErrorKind::Unavailable, "the pool is closed")),
            "awaited" => Ok(LeaseTry::Busy { expires_in: secs(60) }),
            _ => Ok(LeaseTry::Acquired(FencingToken(1))),
        }
    }

    async fn acquire_waiting(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        match key.as_str() {
            "awaited" => Ok(LeaseTry::Acquired(FencingToken(2))),
            _ => self.acquire(key, owner, ttl).await,
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        self.renew_each(renewals).await?.into_iter().collect()
    }

    async fn renew_each(&self, renewals: &[Renewal]) -> Result<Vec<Result<bool>>> {
        let renewed = |renewal: &Renewal| match renewal.key.as_str() {
            "stuck" => Err(Error::new(ErrorKind::Unavailable, "its row is kept")),
            _ => Ok(true),
        };
        Ok(renewals.iter().map(renewed).collect())
    }

    async fn release(&self, _: &Key, _: Owner) -> Result<bool> {
        Ok(true)
    }

    async fn verify(&self, _: &Key, _: Owner, _: &mut (dyn Any + Send)) -> Result<()> {
        Ok(())
    }

    fn wake_id(&self, _: &Key) -> u64 {
        0
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        Ok(None)
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_cannot_be_renewed_is_lost_alone() {
    let engine = LeaseEngine::new(OneStuck);
    let stuck = engine.lease(&key("stuck"), ttl(secs(3))).await.unwrap().unwrap();
    let other = engine.lease(&key("other"), ttl(secs(3))).await.unwrap().unwrap();
    assert_eq!(stuck.lost().wait().await, LossReason::Expired);
    tokio::time::sleep(secs(30)).await;
    assert!(other.is_held(), "it was lost with another one");
}

#[tokio::test(start_paused = true)]
async fn the_store_learns_of_those_who_wait_and_of_no_others() {
    let engine = LeaseEngine::new(OneStuck);
    let once = engine.lease(&key("awaited"), LeaseOptions::try_once()).await.unwrap();
    assert!(once.is_none(), "a mere try was said to wait");
    let waited = engine.lease(&key("awaited"), LeaseOptions::default().wait(secs(1))).await;
    assert_eq!(waited.unwrap().unwrap().token(), FencingToken(2));
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_when_the_handle_is_closed_though_the_store_only_fails() {
    let engine = Arc::new(LeaseEngine::new(OneStuck));
    let waiter = engine.clone();
    let wait = tokio::spawn(async move {
        let opts = LeaseOptions::default().wait(Duration::MAX);
        waiter.lease(&key("unreachable"), opts).await
    });
    tokio::time::sleep(secs(3)).await;
    assert!(!wait.is_finished());
    engine.close().await.unwrap();
    let ended = timeout(secs(10), wait).await.expect("it waits on").unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn closing_ends_the_waits() {
    let (one, two) = pair();
    let opts = LeaseOptions::default().ttl(secs(300)).wait(Duration::MAX);
    let held = two.lease(&key("x"), opts).await.unwrap().unwrap();
    let one = Arc::new(one);
    let waiter = {
        let one = one.clone();
        tokio::spawn(async move { one.lease(&key("x"), opts).await })
    };
    tokio::time::sleep(millis(100)).await;
    let start = Instant::now();
    one.close().await.unwrap();
    let ended = tokio::time::timeout(secs(60), waiter).await.expect("the wait goes on");
    assert_eq!(ended.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(start.elapsed() < secs(1), "it waited for {:?}", start.elapsed());
    held.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn closing_ends_the_waits_in_the_queue() {
    let (one, two) = pair();
    let one = Arc::new(one);
    let held = one.lease(&key("x"), ttl(secs(300))).await.unwrap().unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let one = one.clone();
            let opts = LeaseOptions::default().ttl(secs(300)).wait(Duration::MAX);
            tokio::spawn(async move { one.lease(&key("x"), opts).await })
        })
        .collect();
    tokio::time::sleep(millis(100)).await;
    one.close().await.unwrap();
    assert_eq!(held.lost().reason(), Some(LossReason::Closed));
    for waiter in waiters {
        let ended = timeout(secs(60), waiter).await.expect("the wait goes on").unwrap();
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::Unavailable);
    }
    assert!(two.lease(&key("x"), LeaseOptions::try_once()).await.unwrap().is_some());
}

/// Counts the requests for a lease.
#[derive(Debug)]
struct Counting(MemoryDriver, Arc<AtomicU32>);

#[async_trait::async_trait]
impl LeaseDriver for Counting {
    fn backend(&self) -> &'static str {
        "counting"
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.acquire(key, owner, ttl).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        self.0.renew(renewals).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        LeaseDriver::release(&self.0, key, owner).await
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        self.0.verify(key, owner, tx).await
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.0.wake_id(key)
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        self.0.listen().await
    }
}

/// B77: one waiter of a process contends, with pauses that differ, and a wake-up is one try.
#[tokio::test(start_paused = true)]
async fn hundreds_of_waiters_are_no_herd() {
    let store = MemoryStore::new();
    let builder = MemoryBackend::builder().store(&store).namespace("test");
    let holder = builder.clone().build();
    let asked = Arc::new(AtomicU32::new(0));
    let engine = Arc::new(LeaseEngine::new(Counting(builder.driver(), asked.clone())));
    let held = holder.lease(&KEY, ttl(secs(600))).await.unwrap().unwrap();
    let mut waiters = JoinSet::new();
    for _ in 0..200 {
        let engine = engine.clone();
        waiters.spawn(async move {
            let opts = LeaseOptions::default().ttl(secs(600)).wait(secs(3600));
            let guard = engine.lease(&KEY, opts).await.unwrap().unwrap();
            tokio::time::sleep(millis(50)).await;
            guard.release().await.unwrap();
        });
    }
    tokio::time::sleep(secs(20)).await;
    // two at once, then one in half of `max_poll` at the most
    let polls = asked.swap(0, Ordering::SeqCst);
    assert!(polls <= 2 + 40, "{polls} requests in 20 s");
    held.release().await.unwrap();
    waiters.join_all().await;
    let asked = asked.load(Ordering::SeqCst);
    assert!(asked <= 200 + 1, "{asked} requests for 200 turns");
}
