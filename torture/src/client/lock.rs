//! Named locks.

use leasehold::{Key, LockOptions};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{Ctx, KEYS, hold_time, micros, perhaps_cancelled, told, wait};
use crate::event::{Do, Kind, Part};

impl Ctx {
    pub(super) async fn lock(&self, rng: &mut StdRng) {
        let name = self.name(rng);
        let key = Key::new(&name).expect("a short name is a key");
        let guards = KEYS.contains(&name.as_str());
        let (op, wait) = (self.log.op(), wait(rng));
        let keys = vec![name];
        self.log.put(op, Do::Begin { kind: Kind::Lock, keys, wait: micros(wait), ttl: None });
        let call = self.backend.lock(&key, LockOptions::default().wait(wait));
        let guard = match perhaps_cancelled(rng, call).await {
            None => return self.log.put(op, Do::Cancelled),
            Some(Err(error)) => return self.log.put(op, Do::Failed(told(&error))),
            Some(Ok(None)) => return self.log.put(op, Do::Busy { done: false }),
            Some(Ok(Some(guard))) => guard,
        };
        self.log.put(op, Do::Got { token: None });
        let lost = guard.lost();
        let mut held = self.hold(op, hold_time(rng), &lost, || guard.is_held()).await;
        if rng.random_bool(0.6) {
            // also one that is lost may ask, and must not get one
            if let Ok(token) = guard.token().await {
                self.log.put(op, Do::Token(token.value()));
                if guards && rng.random_bool(0.7) {
                    self.fenced_write(op, &key, token.value(), rng).await;
                }
            }
            held = self.hold(op, hold_time(rng) / 2, &lost, || guard.is_held()).await;
        }
        if held && rng.random_bool(0.25) {
            self.log.put(op, Do::Part(Part::Drop));
            return drop(guard);
        }
        drop(self.ended(op, Part::Release, guard.release()).await); // it is in the record
    }
}
