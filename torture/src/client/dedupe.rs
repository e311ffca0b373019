//! Dedupe entries: of each round a few.

use std::time::Duration;

use leasehold::{Admission, DedupeOptions, Key};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{Ctx, micros, perhaps_cancelled, round, told};
use crate::event::{Do, Kind, Part};

/// After this time one that is not done can be taken over.
pub(crate) const IN_PROGRESS: Duration = Duration::from_millis(1200);

impl Ctx {
    pub(super) async fn dedupe(&self, rng: &mut StdRng) {
        let at_once = rng.random_bool(0.2);
        let name = format!("{}-{}", round(), rng.random_range(0..3));
        let name = if at_once { format!("once-{name}") } else { name };
        let name = self.fresh(rng).unwrap_or(name);
        let key = Key::new(&name).expect("a short name is a key");
        let op = self.log.op();
        let opts = DedupeOptions::default().retain(self.retain);
        let (opts, ttl) = match at_once {
            true => (opts.done_at_once(), None),
            false => (opts.in_progress(IN_PROGRESS), Some(micros(IN_PROGRESS))),
        };
        self.log.put(op, Do::Begin { kind: Kind::Dedupe, keys: vec![name], wait: 0, ttl });
        let guard = match perhaps_cancelled(rng, self.backend.admit(&key, opts)).await {
            None => return self.log.put(op, Do::Cancelled),
            Some(Err(error)) => return self.log.put(op, Do::Failed(told(&error))),
            Some(Ok(Admission::Done { .. })) => return self.log.put(op, Do::Busy { done: true }),
            Some(Ok(Admission::InProgress { .. })) => {
                return self.log.put(op, Do::Busy { done: false });
            }
            Some(Ok(Admission::First(guard))) => guard,
        };
        self.log.put(op, Do::Got { token: Some(guard.token().value()) });
        if at_once {
            return drop(guard);
        }
        let lost = guard.lost();
        let time = match rng.random_range(0..8) {
            0 => IN_PROGRESS + Duration::from_millis(300), // too long: it is taken over
            1 => IN_PROGRESS / 2,
            _ => Duration::from_millis(rng.random_range(0..60)),
        };
        self.hold(op, time, &lost, || guard.is_held()).await;
        let how = match rng.random_range(0..10) {
            0 => Part::Drop,
            1 => Part::Abandon,
            _ => Part::Complete,
        };
        self.log.put(op, Do::Part(how));
        let parted = match how {
            Part::Complete => guard.complete().await,
            Part::Abandon => guard.abandon().await,
            _ => return drop(guard),
        };
        self.log.put(op, Do::Parted(parted.into()));
    }
}
