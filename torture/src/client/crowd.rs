//! One of very many clients on few keys, each of which wants its turn.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{ClaimOptions, Error, Key, Keys, LeaseOptions, LockOptions};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::sync::watch;

use super::{CLOSE, Ctx, KEYS, Order, RETAIN, micros, open, told, watch_for_stalls};
use crate::event::{Do, Kind, Part};
use crate::store::{Shop, failed};

/// Everybody has had a turn within this time.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// The ttl of a lease: that of a process which gets little time of the machine.
const TTL: Duration = Duration::from_secs(20);
/// How often a turn that failed is tried for again.
const TRIES: u32 = 20;

/// Takes so many turns of a lock, a lease and a claim, and ends.
///
/// # Errors
/// If it does not get one.
pub async fn crowd(order: &Order, shop: Arc<dyn Shop>, turns: u32) -> Result<(), Error> {
    let log = order.log().map_err(failed)?;
    log.put(0, Do::Hello);
    let stalls = watch_for_stalls(log.clone());
    let (_stop, mut stopped) = watch::channel(false);
    let backend = open(order, &*shop, &mut stopped).await?;
    let backend = backend.ok_or_else(|| failed("nobody stops it"))?;
    let idle = Duration::ZERO;
    let ctx = Ctx { shop, backend: backend.clone(), log, retain: RETAIN, fresh: 0.0, idle };
    let mut rng = order.rng(0);
    for _ in 0..turns {
        for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
            let mut tries = 0;
            while let Err(error) = ctx.turn(kind, &mut rng).await {
                tries += 1;
                if tries == TRIES {
                    return Err(error);
                }
                tokio::time::sleep(Duration::from_millis(rng.random_range(50..500))).await;
            }
        }
    }
    // it is answered, or ends with the process
    drop(tokio::time::timeout(CLOSE, backend.close()).await);
    stalls.abort();
    ctx.log.put(0, Do::Bye);
    Ok(())
}

impl Ctx {
    async fn turn(&self, kind: Kind, rng: &mut StdRng) -> Result<(), Error> {
        let name = KEYS[rng.random_range(0..KEYS.len())];
        let key = Key::new(name).expect("a short name is a key");
        let op = self.log.op();
        let ttl = (kind == Kind::Lease).then(|| micros(TTL));
        let (keys, wait) = (vec![name.to_owned()], micros(PATIENCE));
        self.log.put(op, Do::Begin { kind, keys, wait, ttl });
        let done = match kind {
            Kind::Lock => self.turn_of_lock(op, &key, rng).await,
            Kind::Lease => self.turn_of_lease(op, &key, rng).await,
            _ => self.turn_of_claim(op, key).await,
        };
        match done {
            Ok(Some(())) => Ok(()),
            Ok(None) => {
                self.log.put(op, Do::Busy { done: false });
                Err(failed(format!("no turn within {PATIENCE:?}")))
            }
            Err(error) => Err(error),
        }
    }

    /// Records what came of the call.
    fn got<G>(
        &self,
        op: u64,
        called: Result<Option<G>, Error>,
        token: impl Fn(&G) -> Option<u64>,
    ) -> Result<Option<G>, Error> {
        match &called {
            Ok(Some(guard)) => self.log.put(op, Do::Got { token: token(guard) }),
            Ok(None) => {}
            Err(error) => self.log.put(op, Do::Failed(told(error))),
        }
        called
    }

    async fn turn_of_lock(
        &self,
        op: u64,
        key: &Key,
        rng: &mut StdRng,
    ) -> Result<Option<()>, Error> {
        let called = self.backend.lock(key, LockOptions::default().wait(PATIENCE)).await;
        let Some(guard) = self.got(op, called, |_| None)? else { return Ok(None) };
        let token = guard.token().await?;
        self.log.put(op, Do::Token(token.value()));
        let lost = guard.lost();
        self.hold(op, moment(rng), &lost, || guard.is_held()).await;
        self.ended(op, Part::Release, guard.release()).await.map(Some)
    }

    async fn turn_of_lease(
        &self,
        op: u64,
        key: &Key,
        rng: &mut StdRng,
    ) -> Result<Option<()>, Error> {
        let opts = LeaseOptions::default().ttl(TTL).wait(PATIENCE);
        let called = self.backend.lease(key, opts).await;
        let token = |guard: &leasehold::LeaseGuard| Some(guard.token().value());
        let Some(guard) = self.got(op, called, token)? else { return Ok(None) };
        let lost = guard.lost();
        self.hold(op, moment(rng), &lost, || guard.is_held()).await;
        self.ended(op, Part::Release, guard.release()).await.map(Some)
    }

    /// With a write that shows its place in the order.
    async fn turn_of_claim(&self, op: u64, key: Key) -> Result<Option<()>, Error> {
        let name = format!("claim:{key}");
        let opts = ClaimOptions::default().wait(PATIENCE);
        let called = self.backend.claim(&Keys::from(key), opts).await;
        let token = |claim: &leasehold::Claim| Some(claim.token().value());
        let Some(mut claim) = self.got(op, called, token)? else { return Ok(None) };
        let token = claim.token().value();
        let (seq, before) = self.append(&mut claim, &name, token, Duration::ZERO).await?;
        let seq = seq.unwrap_or(0);
        self.log.put(op, Do::Note { name, seq, before });
        self.ended(op, Part::Commit, claim.commit()).await.map(Some)
    }
}

/// So long a lock or a lease is held.
fn moment(rng: &mut StdRng) -> Duration {
    Duration::from_millis(rng.random_range(0..3))
}
