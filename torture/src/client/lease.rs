//! Leases.

use std::time::Duration;

use leasehold::{Key, LeaseOptions};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{Ctx, KEYS, hold_time, micros, perhaps_cancelled, told, wait};
use crate::event::{Do, Kind, Part};

/// The longest ttl of a lease here.
pub(crate) const LONGEST: Duration = Duration::from_millis(2500);

impl Ctx {
    pub(super) async fn lease(&self, rng: &mut StdRng) {
        let name = self.name(rng);
        let key = Key::new(&name).expect("a short name is a key");
        let guards = KEYS.contains(&name.as_str());
        let (op, wait) = (self.log.op(), wait(rng));
        let ttls = [Duration::from_millis(400), Duration::from_secs(1), LONGEST];
        let ttl = ttls[rng.random_range(0..ttls.len())];
        let by_hand = rng.random_bool(0.3);
        let keys = vec![name];
        let (wait_us, ttl_us) = (micros(wait), Some(micros(ttl)));
        self.log.put(op, Do::Begin { kind: Kind::Lease, keys, wait: wait_us, ttl: ttl_us });
        let mut opts = LeaseOptions::default().ttl(ttl).wait(wait);
        if by_hand {
            opts = opts.manual_renewal();
        }
        let call = self.backend.lease(&key, opts);
        let guard = match perhaps_cancelled(rng, call).await {
            None => return self.log.put(op, Do::Cancelled),
            Some(Err(error)) => return self.log.put(op, Do::Failed(told(&error))),
            Some(Ok(None)) => return self.log.put(op, Do::Busy { done: false }),
            Some(Ok(Some(guard))) => guard,
        };
        self.log.put(op, Do::Got { token: Some(guard.token().value()) });
        let lost = guard.lost();
        let mut held = self.hold(op, hold_time(rng), &lost, || guard.is_held()).await;
        if by_hand && rng.random_bool(0.5) {
            // a failed renewal shows in what is believed
            drop(guard.renew().await);
        }
        if guards && rng.random_bool(0.6) {
            self.verified_write(op, &guard, rng).await;
            held = self.hold(op, hold_time(rng) / 2, &lost, || guard.is_held()).await;
        }
        if held && rng.random_bool(0.25) {
            self.log.put(op, Do::Part(Part::Drop));
            return drop(guard);
        }
        if !held && rng.random_bool(0.5) {
            // late: somebody else may have it by now, and must keep it
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..400))).await;
        }
        drop(self.ended(op, Part::Release, guard.release()).await); // it is in the record
    }
}
