//! Holding: what is believed, and writes that are fenced.

use std::time::Duration;

use leasehold::{Claim, ClaimOptions, Error, ErrorKind, Key, Keys, LeaseGuard, Lost};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::Instant;

use super::{Ctx, STATEMENT};
use crate::event::{Do, Outcome, Part, now};

/// Belief is recorded so often.
const NOTED: Duration = Duration::from_millis(100);

impl Ctx {
    /// Holds for a time, as long as it is believed in; says whether it still is.
    pub(super) async fn hold(
        &self,
        op: u64,
        time: Duration,
        lost: &Lost,
        is_held: impl Fn() -> bool,
    ) -> bool {
        let end = Instant::now() + time;
        let mut noted: Option<Instant> = None;
        loop {
            // the time is taken before: what is believed later was believed then
            let at = now();
            if !is_held() {
                let reason = lost.reason().map_or("unknown", |reason| reason.as_str());
                self.log.put(op, Do::Lost(reason.to_owned()));
                return false;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || noted.is_none_or(|noted| noted.elapsed() > NOTED) {
                noted = Some(Instant::now());
                self.log.put(op, Do::Held(at));
            }
            if left.is_zero() {
                return true;
            }
            tokio::time::sleep(left.min(Duration::from_millis(20))).await;
        }
    }

    /// Ends a hold, and records what came of it.
    pub(super) async fn ended(
        &self,
        op: u64,
        part: Part,
        ending: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Error> {
        self.log.put(op, Do::Part(part));
        let ended = ending.await;
        self.log.put(op, Do::Parted(ended.clone().into()));
        ended
    }

    /// A write in a transaction that verifies the lease first.
    pub(super) async fn verified_write(&self, op: u64, lease: &LeaseGuard, rng: &mut StdRng) {
        let name = format!("lease:{}", lease.key());
        let pause = self.pause(rng);
        let mut at = (None, 0);
        self.log.put(op, Do::Write);
        let written = async {
            let mut claim = self.transaction(&Keys::none()).await?;
            limited(self.verify(lease, &mut claim)).await?;
            at = self.append(&mut claim, &name, lease.token().value(), pause).await?;
            claim.commit().await
        };
        let outcome = written.await.into();
        self.log.put(op, Do::Wrote { outcome, seq: at.0, before: at.1 });
    }

    /// A write that the store's fence accepts or rejects by the token, as a resource would.
    pub(super) async fn fenced_write(&self, op: u64, key: &Key, token: u64, rng: &mut StdRng) {
        let name = format!("lock:{key}");
        let pause = self.pause(rng);
        let mut at = (None, 0);
        self.log.put(op, Do::Write);
        let written = async {
            // of an ordinary resource: whose rows are locked while it compares
            let fence = Keys::new([format!("fence-{key}")])?;
            let mut claim = self.transaction(&fence).await?;
            let highest = limited(self.shop.read(&mut claim, &format!("{name}:token"))).await?;
            if highest > token.cast_signed() {
                claim.rollback().await?;
                return Err(Error::new(ErrorKind::Lost, "the fence rejects a smaller token"));
            }
            at = self.append(&mut claim, &name, token, pause).await?;
            claim.commit().await
        };
        let outcome: Outcome = written.await.into();
        self.log.put(op, Do::Wrote { outcome, seq: at.0, before: at.1 });
    }

    /// Appends to a sequence on the claim's transaction: gives the place and the token before.
    pub(super) async fn append(
        &self,
        claim: &mut Claim,
        name: &str,
        token: u64,
        pause: Duration,
    ) -> Result<(Option<i64>, i64), Error> {
        let (count, last) = (format!("{name}:seq"), format!("{name}:token"));
        let seq = limited(self.shop.read(claim, &count)).await? + 1;
        let before = limited(self.shop.read(claim, &last)).await?;
        tokio::time::sleep(pause).await;
        limited(self.shop.write(claim, &count, seq)).await?;
        limited(self.shop.write(claim, &last, token.cast_signed())).await?;
        Ok((Some(seq), before))
    }

    /// Mostly none.
    fn pause(&self, rng: &mut StdRng) -> Duration {
        Duration::from_millis(match self.dawdles(rng, 0.1) {
            true => rng.random_range(0..1500),
            false => rng.random_range(0..5),
        })
    }

    async fn transaction(&self, keys: &Keys) -> Result<Claim, Error> {
        let opts = ClaimOptions::default().wait(Duration::from_secs(3));
        let claim = self.backend.claim(keys, opts).await?;
        claim.ok_or_else(|| Error::new(ErrorKind::Exhausted, "others were in the way"))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<(), Error> {
        self.shop.verify(lease, claim).await
    }
}

/// A statement of the client's own; one that takes too long counts as failed.
pub(super) async fn limited<T>(
    statement: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let silent = || Error::new(ErrorKind::Unavailable, "no answer to a statement");
    tokio::time::timeout(STATEMENT, statement).await.unwrap_or_else(|_| Err(silent()))
}
