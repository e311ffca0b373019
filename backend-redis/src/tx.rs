//! [`RedisTx`]: the transaction of a claim.

use std::sync::Arc;
use std::time::Duration;

use fred::types::{ClusterHash, FromValue, Key as RedisKey, Value};
use leasehold_core::backend::Owner;
use leasehold_core::{Error, ErrorKind, Result};

use crate::conn::{Conn, Words};
use crate::error::{is_answer, mapped, strange, was_not_sent};
use crate::keys::{Place, millis};
use crate::locks::{array, number};
use crate::script::COMMIT;
use crate::writes::{Write, bytes, is_write};

/// The transaction of a claim on Redis or Valkey: a *fenced batch*.
///
/// Reads go straight to the server. Writes are queued, and [`commit`](leasehold_core::Claim::commit)
/// applies them *and* frees the claim's keys in one atomic step, only if every key is still held
/// by this claim (and every lease given to [`LeaseGuard::verify`](leasehold_core::LeaseGuard::verify)
/// by its holder); otherwise it fails with [`ErrorKind::Lost`] and nothing is written.
///
/// A read does not see the queued writes: [`get`](Self::get) knows a plain SET or DEL of its key,
/// any other read of a key with queued writes is refused rather than answered wrongly. So read
/// first, then queue.
///
/// What cannot run is found before anything is written where that is possible: unknown commands
/// and too few arguments when they are queued; at the commit a key of the wrong type, a value
/// that is not an integer, a missing permission, a server without memory, a replica. **Not
/// found** in advance are other bad arguments (a syntax error in an option, a score that is no
/// number, an index out of range, an overflow): if such a write is not the first of the batch,
/// those before it stay written; the commit fails with [`ErrorKind::Backend`] and says so. Redis
/// has no rollback.
///
/// In a cluster every key must be in the slot of the claim's keys: name it
/// `{tag}…` with [`tag`](Self::tag).
#[derive(Debug)]
pub struct RedisTx {
    conn: Arc<Conn>,
    tag: String,
    wake: u64,
    writes: Vec<Write>,
    leases: Vec<(Place, Owner)>,
}

impl RedisTx {
    pub(crate) fn new(conn: Arc<Conn>, wake: u64) -> Self {
        let tag = conn.keys.claim_tag().to_owned();
        Self { conn, tag, wake, writes: Vec::new(), leases: Vec::new() }
    }

    /// The hash tag of the claim's keys, without braces. In a cluster, `{tag}anything` is a key
    /// that this transaction can read and write.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Runs a reading command, e.g. `read("LRANGE", ["list", "0", "-1"])`. Its first argument is
    /// taken for its key.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a command that writes and for a key with queued writes,
    /// [`ErrorKind::Backend`] if the server refuses, [`ErrorKind::Unavailable`] if it did not
    /// answer.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn read<R: FromValue>(
        &self,
        command: &str,
        args: impl IntoIterator<Item = impl Into<Value>>,
    ) -> Result<R> {
        let args: Vec<Value> = args.into_iter().map(Into::into).collect();
        if is_write(command) {
            let detail = format!("{command} writes: queue it");
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        if let Some(key) = args.first() {
            let key = bytes(key);
            self.check_slot(&key)?;
            if self.writes.iter().any(|write| write.touches(&key)) {
                return Err(written(&key));
            }
        }
        self.through(command, args).await
    }

    /// The string at a key. Sees a queued plain SET or DEL.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn get<R: FromValue>(&self, key: impl Into<RedisKey>) -> Result<R> {
        let key: RedisKey = key.into();
        self.check_slot(key.as_bytes())?;
        let mut touching = self.writes.iter().rev();
        let last = touching.find(|write| write.touches(key.as_bytes()));
        match last.map(|write| (write.spec.kind, write.words.as_slice())) {
            None => self.through("GET", vec![key.into()]).await,
            Some(("replaced", [_, _, value])) => value.clone().convert().map_err(mapped),
            Some(("none", _)) => Value::Null.convert().map_err(mapped),
            Some(_) => Err(written(key.as_bytes())),
        }
    }

    /// The value of a field of a hash.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn hget<R: FromValue>(
        &self,
        key: impl Into<RedisKey>,
        field: impl Into<RedisKey>,
    ) -> Result<R> {
        self.read("HGET", [key.into(), field.into()]).await
    }

    /// How many fields a hash has.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn hlen(&self, key: impl Into<RedisKey>) -> Result<u64> {
        self.read("HLEN", [key.into()]).await
    }

    /// How many members a set has.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn scard(&self, key: impl Into<RedisKey>) -> Result<u64> {
        self.read("SCARD", [key.into()]).await
    }

    /// Whether a set has a member.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn sismember(
        &self,
        key: impl Into<RedisKey>,
        member: impl Into<RedisKey>,
    ) -> Result<bool> {
        self.read("SISMEMBER", [key.into(), member.into()]).await
    }

    /// How many members a sorted set has.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn zcard(&self, key: impl Into<RedisKey>) -> Result<u64> {
        self.read("ZCARD", [key.into()]).await
    }

    /// Whether a key exists.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn exists(&self, key: impl Into<RedisKey>) -> Result<bool> {
        self.read("EXISTS", [key.into()]).await
    }

    /// Queues a writing command, to be applied at the commit, in order. Its answer is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a command that cannot be queued (one that blocks, reads or
    /// concerns the connection) and, in a cluster, for a key in another slot;
    /// [`ErrorKind::InvalidOptions`] for too few or too many arguments.
    pub fn queue(
        &mut self,
        command: &str,
        args: impl IntoIterator<Item = impl Into<Value>>,
    ) -> Result<&mut Self> {
        let write = Write::new(command, args.into_iter().map(Into::into).collect())?;
        for key in write.keys() {
            self.check_slot(&bytes(key))?;
        }
        self.writes.push(write);
        Ok(self)
    }

    /// Queues a SET.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn set(&mut self, key: impl Into<RedisKey>, value: impl Into<Value>) -> Result<&mut Self> {
        let words: [Value; 2] = [key.into().into(), value.into()];
        self.queue("SET", words)
    }

    /// Queues an INCRBY.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn incr_by(&mut self, key: impl Into<RedisKey>, by: i64) -> Result<&mut Self> {
        self.queue("INCRBY", [key.into().into(), Value::Integer(by)])
    }

    /// Queues a DEL.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn del(&mut self, key: impl Into<RedisKey>) -> Result<&mut Self> {
        self.queue("DEL", [key.into()])
    }

    /// Queues an HSET of one field.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn hset(
        &mut self,
        key: impl Into<RedisKey>,
        field: impl Into<RedisKey>,
        value: impl Into<Value>,
    ) -> Result<&mut Self> {
        let words: [Value; 3] = [key.into().into(), field.into().into(), value.into()];
        self.queue("HSET", words)
    }

    /// Queues an SADD of one member.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn sadd(
        &mut self,
        key: impl Into<RedisKey>,
        member: impl Into<RedisKey>,
    ) -> Result<&mut Self> {
        self.queue("SADD", [key.into(), member.into()])
    }

    /// Queues an SREM of one member.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn srem(
        &mut self,
        key: impl Into<RedisKey>,
        member: impl Into<RedisKey>,
    ) -> Result<&mut Self> {
        self.queue("SREM", [key.into(), member.into()])
    }

    /// Queues a ZADD of one member.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn zadd(
        &mut self,
        key: impl Into<RedisKey>,
        score: f64,
        member: impl Into<RedisKey>,
    ) -> Result<&mut Self> {
        let (key, member): (RedisKey, RedisKey) = (key.into(), member.into());
        let words: [Value; 3] = [key.into(), score.to_string().into(), member.into()];
        self.queue("ZADD", words)
    }

    /// Queues a PEXPIRE: the key goes away so long after the commit.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn expire(&mut self, key: impl Into<RedisKey>, after: Duration) -> Result<&mut Self> {
        self.queue("PEXPIRE", [key.into().into(), millis(after)])
    }

    /// Adds a lease to what must still be held at the commit, and looks whether it is.
    pub(crate) async fn verify(&mut self, place: Place, owner: Owner) -> Result<()> {
        if self.conn.keys.clustered() && place.tag != self.tag {
            let detail = "in a cluster, leases and claims share a slot only with a cluster tag";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        let held: Option<String> =
            self.through("GET", vec![Value::from(place.name.as_str())]).await?;
        if !held.is_some_and(|held| held.starts_with(&self.conn.keys.owner(owner))) {
            let detail = "the lease is held no longer, by the server's word";
            return Err(Error::new(ErrorKind::Lost, detail));
        }
        self.leases.push((place, owner));
        Ok(())
    }

    /// Applies everything and frees the locks; true for `freed` in an error means that the locks
    /// have been freed all the same.
    pub(crate) async fn commit(
        &mut self,
        owner: Owner,
        places: &[Place],
        entries: &[(Place, Duration)],
    ) -> std::result::Result<(), (Error, Freed)> {
        let lost = |index: usize| {
            let name = places
                .iter()
                .chain(self.leases.iter().map(|(place, _)| place))
                .chain(entries.iter().map(|(place, _)| place))
                .nth(index)
                .map_or("a key", |place| place.name.as_str());
            let detail = format!("{name} is held no longer, nothing was written");
            (Error::new(ErrorKind::Lost, detail), Freed::No)
        };
        if places.is_empty()
            && entries.is_empty()
            && self.leases.is_empty()
            && self.writes.is_empty()
        {
            return Ok(());
        }
        let limit = self.conn.settings.command_limit;
        let words = || self.request(owner, places, entries);
        let answer = self.conn.run(&COMMIT, self.wake, limit, words).await;
        let answer = answer.map_err(|error| {
            if is_answer(&error) || was_not_sent(&error) {
                return (mapped(error), Freed::No);
            }
            let detail = "the answer to the commit was lost";
            let error = Error::new(ErrorKind::CommitUnknown, detail).with_source(error);
            (error, Freed::No)
        })?;
        let parts = array(&answer).map_err(|error| (error, Freed::No))?;
        let index = number(parts.get(1)).unwrap_or_default() as usize;
        let why = parts.get(2).and_then(Value::as_string).unwrap_or_default();
        let command = index.checked_sub(1).and_then(|index| self.writes.get(index));
        let command = command.map_or_else(String::new, |write| bytes_text(&write.words[0]));
        match parts.first().and_then(Value::as_i64) {
            Some(1) => Ok(()),
            Some(0) => Err(lost(index.saturating_sub(1))),
            Some(-1) => {
                let detail =
                    format!("write {index} ({command}) cannot run, nothing was written: {why}");
                Err((Error::new(ErrorKind::Backend, detail), Freed::Yes))
            }
            Some(-2) => {
                let detail =
                    format!("write {index} ({command}) failed, those before it are written: {why}");
                Err((Error::new(ErrorKind::Backend, detail), Freed::Yes))
            }
            _ => Err((strange(&answer), Freed::No)),
        }
    }

    fn request(&self, owner: Owner, places: &[Place], entries: &[(Place, Duration)]) -> Words {
        let count = |count: usize| Value::Integer(i64::try_from(count).unwrap_or(i64::MAX));
        let names = places
            .iter()
            .chain(self.leases.iter().map(|(place, _)| place))
            .chain(entries.iter().map(|(place, _)| place));
        let mut keys: Vec<Value> = names.map(|place| place.name.as_str().into()).collect();
        let mut args = vec![
            self.conn.keys.owner(owner).into(),
            count(places.len()),
            count(self.leases.len()),
            count(entries.len()),
            self.conn.keys.publish(),
            self.conn.keys.channel(&self.tag).into(),
        ];
        args.extend(places.iter().map(|place| place.wake.to_string().into()));
        args.extend(self.leases.iter().map(|(_, owner)| self.conn.keys.owner(*owner).into()));
        args.extend(entries.iter().map(|(_, retain)| millis(*retain)));
        for write in &self.writes {
            keys.extend(write.keys().cloned());
            args.push(Value::from_static_str(write.spec.kind));
            args.push(count(write.words.len()));
            args.push(Value::Integer(write.first_key()));
            args.extend(write.words.iter().cloned());
        }
        Words { keys, args }
    }

    async fn through<R: FromValue>(&self, command: &str, args: Vec<Value>) -> Result<R> {
        let hash = ClusterHash::FirstValue;
        let answer = self.conn.command(self.wake, command, hash, args).await?;
        answer.convert().map_err(mapped)
    }

    fn check_slot(&self, key: &[u8]) -> Result<()> {
        if !self.conn.keys.clustered() {
            return Ok(());
        }
        let (found, wanted) = (
            fred::util::redis_keyslot(key),
            fred::util::redis_keyslot(format!("{{{}}}", self.tag).as_bytes()),
        );
        if found == wanted {
            return Ok(());
        }
        let (key, tag) = (String::from_utf8_lossy(key), &self.tag);
        let detail =
            format!("{key:?} is in slot {found} and the claim in {wanted}: name it {{{tag}}}{key}");
        Err(Error::new(ErrorKind::Unsupported, detail))
    }
}

/// Whether a commit that failed has freed the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Yes,
    No,
}

fn written(key: &[u8]) -> Error {
    let key = String::from_utf8_lossy(key);
    let detail = format!("{key:?} has queued writes, which a read does not see: read it before");
    Error::new(ErrorKind::Unsupported, detail)
}

fn bytes_text(word: &Value) -> String {
    String::from_utf8_lossy(&bytes(word)).into_owned()
}
