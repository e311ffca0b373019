//! Growing, capped, jittered delays.

use std::time::Duration;

use crate::steer::random_part;

/// Full-range jitter over a delay that doubles up to a cap (Brooker, *Exponential Backoff And
/// Jitter*, 2015; the "equal jitter" form, so that a delay never comes near zero).
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    first: Duration,
    cap: Duration,
    tries: u32,
}

impl Backoff {
    pub(super) fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, tries: 0 }
    }

    /// How many delays it has given.
    pub(super) fn tries(&self) -> u32 {
        self.tries
    }

    pub(super) fn next(&mut self) -> Duration {
        let delay = self.first.saturating_mul(1 << self.tries.min(16)).min(self.cap);
        self.tries += 1;
        jittered(delay)
    }
}

/// Between half of `delay` and the whole of it.
pub(super) fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(random_part())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_cap_and_stay_above_half_of_it() {
        let (first, cap) = (Duration::from_millis(10), Duration::from_millis(100));
        let mut backoff = Backoff::new(first, cap);
        assert!(backoff.next() <= first);
        let delays: Vec<_> = (0..100).map(|_| backoff.next()).collect();
        assert!(delays.iter().all(|delay| *delay <= cap));
        assert!(delays[50..].iter().all(|delay| *delay >= cap / 2));
    }
}
