//! Claims: a sequence per key, and slots of which only so many may be taken in a round.

use std::time::Duration;

use leasehold::{Claim, ClaimOptions, Error, Key, Keys};
use rand::RngExt;
use rand::rngs::StdRng;

use super::hold::limited;
use super::{Ctx, KEYS, SLOTS, micros, perhaps_cancelled, round, told, wait};
use crate::event::{Do, Kind, Part};

impl Ctx {
    pub(super) async fn claim(&self, rng: &mut StdRng) {
        let mut names = vec![self.name(rng)];
        let first = KEYS.iter().position(|key| *key == names[0]);
        if let Some(first) = first
            && rng.random_bool(0.4)
        {
            // in either order
            names.push(KEYS[(first + rng.random_range(1..KEYS.len())) % KEYS.len()].to_owned());
        }
        let op = self.log.op();
        let Some(mut claim) = self.claimed(op, rng, names.clone()).await else { return };
        let pause = Duration::from_millis(match rng.random_range(0..20) {
            0 => rng.random_range(500..5000),
            _ => rng.random_range(0..10),
        });
        let token = claim.token().value();
        let noted = async {
            for name in names.into_iter().filter(|_| first.is_some()) {
                let name = format!("claim:{name}");
                let (seq, before) = self.append(&mut claim, &name, token, pause).await?;
                let seq = seq.unwrap_or(0);
                self.log.put(op, Do::Note { name, seq, before });
            }
            Ok(())
        };
        let noted = noted.await;
        self.part(op, rng, claim, noted).await;
    }

    /// Takes a slot of the round, if one is left.
    pub(super) async fn slot(&self, rng: &mut StdRng) {
        let op = self.log.op();
        let Some(mut claim) = self.claimed(op, rng, vec!["slots".to_owned()]).await else { return };
        let name = format!("slots:{}", round());
        let seen =
            rng.random_bool(0.5).then(|| format!("seen-{}-{}", round(), rng.random_range(0..3)));
        let pause = Duration::from_millis(rng.random_range(0..20));
        let taken = async {
            if let Some(key) = seen {
                let name = Key::new(&key)?;
                let first = limited(claim.first_seen(&name, self.retain)).await?;
                self.log.put(op, Do::Seen { key, first });
            }
            let used = limited(self.shop.read(&mut claim, &name)).await?;
            tokio::time::sleep(pause).await;
            if used >= SLOTS {
                return Ok(());
            }
            limited(self.shop.write(&mut claim, &name, used + 1)).await?;
            self.log.put(op, Do::Slot { name, used });
            Ok(())
        };
        let taken = taken.await;
        self.part(op, rng, claim, taken).await;
    }

    async fn claimed(&self, op: u64, rng: &mut StdRng, names: Vec<String>) -> Option<Claim> {
        let keys = Keys::new(&names).expect("short names are keys");
        let wait = wait(rng);
        let begin = Do::Begin { kind: Kind::Claim, keys: names, wait: micros(wait), ttl: None };
        self.log.put(op, begin);
        let call = self.backend.claim(&keys, ClaimOptions::default().wait(wait));
        match perhaps_cancelled(rng, call).await {
            None => self.log.put(op, Do::Cancelled),
            Some(Err(error)) => self.log.put(op, Do::Failed(told(&error))),
            Some(Ok(None)) => self.log.put(op, Do::Busy { done: false }),
            Some(Ok(Some(claim))) => {
                self.log.put(op, Do::Got { token: Some(claim.token().value()) });
                return Some(claim);
            }
        }
        None
    }

    /// Mostly commits, unless a statement failed.
    async fn part(&self, op: u64, rng: &mut StdRng, claim: Claim, done: Result<(), Error>) {
        if let Err(error) = &done {
            tracing::debug!(%error, "a statement failed");
        }
        let how = match rng.random_range(0..10) {
            _ if done.is_err() => Part::Drop,
            0 => Part::Rollback,
            1 => Part::Drop,
            _ => Part::Commit,
        };
        self.log.put(op, Do::Part(how));
        let parted = match how {
            Part::Commit => claim.commit().await,
            Part::Rollback => claim.rollback().await,
            _ => return drop(claim),
        };
        self.log.put(op, Do::Parted(parted.into()));
    }
}
