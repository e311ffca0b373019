//! Locks with a ttl on the server: what leases, named locks and claims are made of.

use fred::types::Value;
use leasehold_core::backend::{Freed, LeaseTry, Owner};
use leasehold_core::{FencingToken, Result};
use std::sync::Arc;
use std::time::Duration;

use crate::batch::{self, Queue, Request};
use crate::conn::{Conn, Words};
use crate::error::strange;
use crate::keys::{KEEP_LAST, KEEP_MARK, Kind, Place, millis};
use crate::script::{ACQUIRE, CLAIM, RELEASE, RENEW, TOKEN};

/// A busy lock without a ttl is somebody else's doing: looked at again after this time.
const UNKNOWN_TTL: Duration = Duration::from_secs(1);
/// Locks that one script renews. It takes the server less than a millisecond, in which it serves
/// nobody else.
const RENEW_CHUNK: usize = 200;

impl Conn {
    /// Takes a lock; what is asked for at the same time goes out together.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        place: Place,
        owner: Owner,
        ttl: Duration,
    ) -> Result<LeaseTry> {
        batch::ask(self, Wanted { place, owner, ttl }).await
    }

    /// Takes locks that one script may touch.
    async fn acquire_all(&self, wanted: &[Wanted]) -> Result<Vec<LeaseTry>> {
        let Some(first) = wanted.first() else {
            return Ok(Vec::new());
        };
        let words = || {
            let mut keys = Vec::with_capacity(1 + wanted.len());
            let mut args = Vec::with_capacity(1 + 2 * wanted.len());
            keys.push(self.keys.last_lease(&first.place.tag));
            args.push(millis(KEEP_LAST));
            for Wanted { place, owner, ttl } in wanted {
                keys.push(Value::from(place.name.as_str()));
                args.push(self.keys.owner(*owner).into());
                args.push(millis(*ttl));
            }
            Words { keys, args }
        };
        let answer = self.call(&ACQUIRE, first.place.wake, words).await?;
        let parts = array(&answer)?;
        if parts.len() != wanted.len() {
            return Err(strange(&answer));
        }
        let taken: Result<Vec<LeaseTry>> =
            parts.iter().map(|part| taken(part).ok_or_else(|| strange(&answer))).collect();
        let taken = taken?;
        if taken.iter().any(|taken| matches!(taken, LeaseTry::Acquired(_))) {
            self.replicated(&first.place).await?;
        }
        Ok(taken)
    }

    /// Takes all of `places`, which share a slot, or none.
    pub(crate) async fn claim(
        &self,
        tag: &str,
        places: &[Place],
        owner: Owner,
        ttl: Duration,
    ) -> Result<LeaseTry> {
        let words = || {
            let mut keys = Vec::with_capacity(2 + places.len());
            keys.push(self.keys.last(Kind::Claim, tag));
            keys.push(self.keys.mark(tag, owner));
            keys.extend(places.iter().map(|place| Value::from(place.name.as_str())));
            let args = vec![self.keys.owner(owner).into(), millis(ttl), millis(KEEP_LAST)];
            Words { keys, args }
        };
        let answer = self.call(&CLAIM, first_wake(places), words).await?;
        let [code, value] = array(&answer)? else {
            return Err(strange(&answer));
        };
        let taken = read(code, value).ok_or_else(|| strange(&answer))?;
        if let (LeaseTry::Acquired(_), Some(place)) = (taken, places.first()) {
            self.replicated(place).await?;
        }
        Ok(taken)
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
            let words = || Words {
                keys: chosen().map(|(place, ..)| Value::from(place.name.as_str())).collect(),
                args: chosen()
                    .flat_map(|(_, owner, ttl)| [self.keys.owner(*owner).into(), millis(*ttl)])
                    .collect(),
            };
            let wake = chosen().next().map_or(0, |(place, ..)| place.wake);
            self.run(&RENEW, wake, limit, words).await
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

    /// Makes a new token for a lock that `owner` has; none if it has not.
    pub(crate) async fn token(&self, place: &Place, owner: Owner) -> Result<Option<FencingToken>> {
        let words = || Words {
            keys: vec![self.keys.last_lease(&place.tag), place.name.as_str().into()],
            args: vec![self.keys.owner(owner).into(), millis(KEEP_LAST)],
        };
        let answer = self.call(&TOKEN, place.wake, words).await?;
        if answer.as_i64() == Some(0) {
            return Ok(None);
        }
        let token = number(Some(&answer)).ok_or_else(|| strange(&answer))?;
        self.replicated(place).await?;
        Ok(Some(FencingToken(token)))
    }

    /// Frees a lock if `owner` has it. What is freed at the same time goes out together.
    pub(crate) async fn release(self: &Arc<Self>, place: Place, owner: Owner) -> Result<Freed> {
        batch::ask(self, Held { place, owner }).await
    }

    /// Frees a lock if `owner` has it, without refusing what it asks for later.
    pub(crate) async fn give_back(&self, place: Place, owner: Owner) -> Result<bool> {
        let held = [Held { place, owner }];
        let freed = self.release_marked(&held, None).await?;
        Ok(freed.first().is_some_and(|freed| freed.ours))
    }

    /// Frees locks that one script may touch.
    pub(crate) async fn release_all(&self, held: &[Held]) -> Result<Vec<Freed>> {
        self.release_marked(held, Some(KEEP_MARK)).await
    }

    async fn release_marked(&self, held: &[Held], mark: Option<Duration>) -> Result<Vec<Freed>> {
        let Some(Held { place: first, .. }) = held.first() else {
            return Ok(Vec::new());
        };
        let words = || {
            let mut keys = Vec::with_capacity(1 + held.len());
            let mut args = Vec::with_capacity(3 + 2 * held.len());
            keys.push(self.keys.last_lease(&first.tag));
            args.push(mark.map_or(Value::Integer(0), millis));
            args.push(self.keys.publish());
            args.push(self.keys.channel_word(&first.tag));
            for Held { place, owner } in held {
                keys.push(Value::from(place.name.as_str()));
                args.push(self.keys.owner(*owner).into());
                args.push(place.wake.to_string().into());
            }
            Words { keys, args }
        };
        let answer = self.call(&RELEASE, first.wake, words).await?;
        let parts = array(&answer)?;
        if parts.len() != held.len() {
            return Err(strange(&answer));
        }
        Ok(parts.iter().map(freed).collect())
    }
}

/// A lock that somebody wants.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    place: Place,
    owner: Owner,
    ttl: Duration,
}

/// A lock that somebody has, or may have.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) place: Place,
    pub(crate) owner: Owner,
}

impl Request for Wanted {
    type Answer = LeaseTry;

    fn queue(conn: &Conn) -> &Queue<Self> {
        &conn.acquisitions
    }

    fn lane(&self, conn: &Conn) -> String {
        lane(conn, &self.place)
    }

    async fn exchange(conn: &Conn, requests: &[Self]) -> Result<Vec<LeaseTry>> {
        conn.acquire_all(requests).await
    }
}

impl Request for Held {
    type Answer = Freed;

    fn queue(conn: &Conn) -> &Queue<Self> {
        &conn.releases
    }

    fn lane(&self, conn: &Conn) -> String {
        lane(conn, &self.place)
    }

    async fn exchange(conn: &Conn, requests: &[Self]) -> Result<Vec<Freed>> {
        conn.release_all(requests).await
    }
}

/// What the script says of a lock; none if that is not understood.
fn taken(answer: &Value) -> Option<LeaseTry> {
    match answer {
        Value::Integer(left) => Some(busy(*left)),
        token => Some(LeaseTry::Acquired(FencingToken(number(Some(token))?))),
    }
}

/// What the script says of a lock that is to be freed.
fn freed(answer: &Value) -> Freed {
    let code = answer.as_i64();
    Freed { ours: matches!(code, Some(1 | 2)), awaited: code == Some(2) }
}

/// What a script says of the locks of a claim.
fn read(code: &Value, value: &Value) -> Option<LeaseTry> {
    match code.as_i64()? {
        1 => Some(LeaseTry::Acquired(FencingToken(number(Some(value))?))),
        0 => Some(busy(value.as_i64()?)),
        // a request that was given up and arrived late: nobody waits for this answer
        -1 => Some(busy(-1)),
        _ => None,
    }
}

fn busy(left: i64) -> LeaseTry {
    let expires_in = u64::try_from(left).map_or(UNKNOWN_TTL, Duration::from_millis);
    LeaseTry::Busy { expires_in }
}

/// A script may touch one slot of a cluster, and any key elsewhere.
fn lane(conn: &Conn, place: &Place) -> String {
    if conn.keys.clustered() { place.tag.clone() } else { String::new() }
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
