//! Locks with a ttl on the server: what leases, named locks and claims are made of.

use fred::types::Value;
use leasehold_core::backend::{LeaseTry, Owner};
use leasehold_core::{Error, ErrorKind, FencingToken, Result};
use std::time::Duration;

use crate::conn::Conn;
use crate::error::strange;
use crate::keys::{KEEP_LAST, KEEP_MARK, Kind, Place, hex, millis};
use crate::script::{ACQUIRE, RELEASE, RENEW};

/// A busy lock without a ttl is somebody else's doing: looked at again after this time.
const UNKNOWN_TTL: Duration = Duration::from_secs(1);
/// Locks that one script renews. It takes the server less than a millisecond, in which it serves
/// nobody else.
const RENEW_CHUNK: usize = 200;

impl Conn {
    /// Takes all of `places`, which share a slot, or none.
    pub(crate) async fn acquire(
        &self,
        kind: Kind,
        tag: &str,
        places: &[Place],
        owner: Owner,
        ttl: Duration,
    ) -> Result<LeaseTry> {
        let mut keys = Vec::with_capacity(2 + places.len());
        keys.push(self.keys.last(kind, tag));
        keys.push(self.keys.mark(tag, owner));
        keys.extend(places.iter().map(|place| Value::from(place.name.as_str())));
        let args = vec![hex(owner).into(), millis(ttl), millis(KEEP_LAST)];
        let answer = self.call(&ACQUIRE, first_wake(places), keys, args).await?;
        let parts = array(&answer)?;
        match parts.first().and_then(Value::as_i64) {
            Some(1) => {
                let token = FencingToken(number(parts.get(1)).ok_or_else(|| strange(&answer))?);
                if let Some(place) = places.first() {
                    self.replicated(place).await?;
                }
                Ok(LeaseTry::Acquired(token))
            }
            Some(0) => {
                let left = parts.get(1).and_then(Value::as_i64);
                let expires_in = left
                    .and_then(|left| u64::try_from(left).ok())
                    .map_or(UNKNOWN_TTL, Duration::from_millis);
                Ok(LeaseTry::Busy { expires_in })
            }
            Some(-1) => {
                let detail = "the request arrived after it had been given up";
                Err(Error::new(ErrorKind::Unavailable, detail))
            }
            _ => Err(strange(&answer)),
        }
    }

    /// Renews locks (or reserved entries) by their names; says of each whether it was.
    pub(crate) async fn renew(
        &self,
        renewals: &[(&Place, Owner, Duration)],
        limit: Duration,
    ) -> Result<Vec<bool>> {
        // those that one script may touch: in a cluster only those of one slot
        let mut chunks: Vec<Vec<usize>> = Vec::new();
        if self.keys.clustered() {
            let mut by_tag: std::collections::HashMap<&str, Vec<usize>> =
                std::collections::HashMap::new();
            for (index, (place, ..)) in renewals.iter().enumerate() {
                by_tag.entry(&place.tag).or_default().push(index);
            }
            for group in by_tag.values() {
                chunks.extend(group.chunks(RENEW_CHUNK).map(<[usize]>::to_vec));
            }
        } else {
            let all: Vec<usize> = (0..renewals.len()).collect();
            chunks.extend(all.chunks(RENEW_CHUNK).map(<[usize]>::to_vec));
        }
        let calls = chunks.iter().map(|chunk| async move {
            let chosen = || chunk.iter().map(|index| &renewals[*index]);
            let keys = chosen().map(|(place, ..)| Value::from(place.name.as_str())).collect();
            let args =
                chosen().flat_map(|(_, owner, ttl)| [hex(*owner).into(), millis(*ttl)]).collect();
            let wake = chosen().next().map_or(0, |(place, ..)| place.wake);
            self.run(&RENEW, wake, keys, args, limit).await
        });
        let answers = futures_util::future::join_all(calls).await;
        let mut renewed = vec![false; renewals.len()];
        for (chunk, answer) in chunks.iter().zip(answers) {
            let answer = answer.map_err(crate::error::mapped)?;
            let parts = array(&answer)?;
            if parts.len() != chunk.len() {
                return Err(strange(&answer));
            }
            for (index, part) in chunk.iter().zip(parts) {
                renewed[*index] = part.as_i64() == Some(1);
            }
        }
        Ok(renewed)
    }

    /// Frees those of `places`, which share a slot, that `owner` has; says whether it had all.
    pub(crate) async fn release(&self, tag: &str, places: &[Place], owner: Owner) -> Result<bool> {
        let mut keys = Vec::with_capacity(1 + places.len());
        keys.push(self.keys.mark(tag, owner));
        keys.extend(places.iter().map(|place| Value::from(place.name.as_str())));
        let mut args = Vec::with_capacity(4 + places.len());
        args.push(hex(owner).into());
        args.push(millis(KEEP_MARK));
        args.push(self.keys.publish());
        args.push(self.keys.channel(tag).into());
        args.extend(places.iter().map(|place| place.wake.to_string().into()));
        let answer = self.call(&RELEASE, first_wake(places), keys, args).await?;
        let freed = answer.as_i64().ok_or_else(|| strange(&answer))?;
        Ok(usize::try_from(freed) == Ok(places.len()))
    }
}

/// By which the client is chosen.
pub(crate) fn first_wake(places: &[Place]) -> u64 {
    places.first().map_or(0, |place| place.wake)
}

pub(crate) fn array(answer: &Value) -> Result<&[Value]> {
    match answer {
        Value::Array(parts) => Ok(parts),
        _ => Err(strange(answer)),
    }
}

pub(crate) fn number(value: Option<&Value>) -> Option<u64> {
    match value? {
        Value::Integer(number) => u64::try_from(*number).ok(),
        value => value.as_str()?.parse().ok(),
    }
}
