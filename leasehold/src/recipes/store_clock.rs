//! [`StoreClock`]: what the store's clock shows, by the times that it gives to dedupe entries.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::part;
use crate::{Admission, Dedupe, DedupeOptions, Error, ErrorKind, Key, Result};

/// How long a reading is good: a local clock drifts by less than 10 ms in it.
pub(super) const GOOD_FOR: Duration = Duration::from_secs(60);
/// How long the entry of a reading is kept, so that its time can be asked for.
const READING: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct StoreClock {
    dedupe: Arc<dyn Dedupe>,
    key: Key,
    reading: Option<(SystemTime, Instant)>,
}

impl StoreClock {
    pub(super) fn new(dedupe: Arc<dyn Dedupe>, key: &Key) -> Result<Self> {
        Ok(Self { dedupe, key: part(key, "clock")?, reading: None })
    }

    /// What the store's clock shows; never ahead of it, and behind by at most a round trip.
    pub(super) async fn now(&mut self) -> Result<SystemTime> {
        let reading = self.reading.filter(|(_, read)| read.elapsed() < GOOD_FOR);
        let (time, read) = if let Some(reading) = reading {
            reading
        } else {
            // an entry of its own: somebody else's would be older
            let key = part(&self.key, format_args!("{:016x}", rand::random::<u64>()))?;
            *self.reading.insert(first_seen_at(&*self.dedupe, &key, READING).await?)
        };
        Ok(time + read.elapsed())
    }
}

/// When the store first saw `key`, and a local time after that.
pub(super) async fn first_seen_at(
    dedupe: &dyn Dedupe,
    key: &Key,
    retain: Duration,
) -> Result<(SystemTime, Instant)> {
    let opts = DedupeOptions::default().retain(retain).done_at_once();
    let mut read = None;
    // first ours, then the time of it
    for _ in 0..3 {
        let admission = dedupe.admit(key, opts).await?;
        let now = Instant::now();
        match admission {
            Admission::First(_) => read = Some(now),
            Admission::InProgress { since: at } | Admission::Done { at } => {
                return Ok((at, read.unwrap_or(now)));
            }
        }
    }
    let detail = format!("it does not answer within the {retain:?} that an entry is kept");
    Err(Error::new(ErrorKind::Unavailable, detail).on(key))
}
