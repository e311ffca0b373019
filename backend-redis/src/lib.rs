//! leasehold on Redis (7.0 and later) and Valkey: the fast backend.
//!
//! ```no_run
//! use leasehold_core::{Key, LeaseExt, LeaseOptions};
//! use leasehold_redis::RedisBackend;
//!
//! # async fn example() -> leasehold_core::Result<()> {
//! let store = RedisBackend::builder()
//!     .namespace("billing")
//!     .connect("redis://127.0.0.1:6379")
//!     .await?;
//! let key = Key::new("daily-report")?;
//! store.with_lease(&key, LeaseOptions::try_once(), async |lease| {
//!     println!("sent by the holder with token {}", lease.token());
//! }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # How it works
//!
//! - Everything is a key with a ttl, and every step is a Lua script that compares the owner, 32 bits
//!   of the handle and 96 random ones, fresh for each acquisition. A repeated request finds its own lock; a stale one
//!   finds somebody else's and does nothing. A request that was given up is marked, so that it is
//!   refused if it arrives after its own release.
//! - Keys are named `leasehold:<namespace>:{<tag>}:<kind>:<key>`. The tag decides the slot in a
//!   cluster, whatever braces the key has in it. See [`Builder::cluster_tag`].
//! - A **named lock** is a lease of [`Builder::lock_ttl`] that the handle renews: Redis has no
//!   sessions that hold locks. The locks of a dead process are free when that has passed. Within a
//!   process a lock goes to the next caller that waits for it without a trip to the server, up to 16
//!   times in a row and for at most 100 ms; then it is released, and others who wait have their turn.
//! - One heartbeat renews all locks and leases of the handle, in scripts of 200 keys that are
//!   pipelined, so that the server serves others in between.
//! - Requests for locks and leases that arrive while others are under way go out together in the
//!   next script, as in group commit; one that comes alone goes at once. (In a cluster, those of
//!   one slot.)
//! - A waiter first queues locally; one per process and key contends. It is woken by a message
//!   that the release publishes (only if somebody has asked for the lock meanwhile), over one
//!   subscription for all waiters of the handle, by sharded publish in a cluster. Messages may
//!   get lost: it looks again by itself when the holder's ttl has passed, and at least every
//!   second.
//! - **Claims** have a *fenced batch* for a transaction, [`RedisTx`]: reads go through, writes are
//!   queued, and the commit applies them and frees the keys in one step, only if all keys are
//!   still held. The claim is renewed while it is open ([`Builder::claim_ttl`]).
//! - **Dedupe** entries are kept for their `retain`. An unfinished one is kept so much longer than
//!   its `in_progress`, during which it can be taken over, or completed by its late owner.
//! - [`RedisQuorum`] is something else: locks and leases by a majority of independent servers.
//!
//! # Fencing tokens
//!
//! A token is the larger of the last one plus one and the server's clock in µs. The last one is
//! remembered for each kind and slot (256 of them, whatever the number of names; outside of a
//! cluster one for all leases and named locks), until the clock has caught up with it and a day
//! longer. So tokens rise
//! - always, while the data is there, also if the server's clock is set back (by up to a day if
//!   nothing was acquired in the slot for a day);
//! - across `FLUSHALL`, a restart without persistence and a failover to a replica that lags,
//!   provided that the clock of the server that goes on is not behind that of the one before by
//!   more than the time that passed between the two acquisitions. Keep the clocks of primaries
//!   and replicas in step (NTP), and do not step them back while data is lost.
//!
//! A lease and a claim have it at once, and so has a named lock that the server was asked for. One
//! that was handed on within the process gets it when it is first asked for, by a script that gives
//! none to who has lost the lock.
//!
//! # What it does not promise
//!
//! - A lock is not a fence. Write through a claim, or compare the token.
//! - Replication is asynchronous: a **failover may lose a lock** that was acknowledged, and a
//!   commit. [`Builder::wait_replicas`] makes that unlikely, not impossible. The old holder is
//!   told at its next renewal, and its claims commit nothing then.
//! - Redis has no rollback: see [`RedisTx`] for what may stay written of a batch with a bad write.
//! - Expiry is by the server's wall clock: a step forward frees locks early (the holder learns it
//!   at its next renewal), a step back keeps those of the dead longer.
//! - A lock that somebody deletes by hand is lost at the next renewal, at a third of the ttl; at
//!   once with [`Builder::keyspace_events`].
//! - Waiting claims have no order across processes, and one of many keys may be overtaken by
//!   claims of a few.
//! - `first_seen` in a claim holds back other claims that ask for the same key until the claim
//!   ends, at most 10 s; [`Dedupe`](leasehold_core::Dedupe) calls see it in progress.
//!
//! # Who holds what
//!
//! An owner's first 32 bits are the handle's instance, and a key of the handle's own,
//! `…:holder:<instance>`, has its [`Holder`](leasehold_core::Holder), so that
//! [`Inspect`](leasehold_core::Inspect) can tell it and acquisitions write nothing for it. It is
//! written anew every minute and kept for 15 minutes longer than the longest ttl that the handle has
//! asked for; afterwards the instance alone is shown. Lists come by `SCAN`. A forced release deletes
//! the key and publishes that: a holder that listens is told at once, others with the next renewal;
//! a claim then commits nothing.
//!
//! # The server
//!
//! A handle refuses a server that may evict keys (any `maxmemory-policy` but `noeviction`, unless
//! [allowed](Builder::allow_eviction)), that is a replica, older than 7.0, or has a clock that was
//! never set. Without free memory new locks fail as
//! [`Exhausted`](leasehold_core::ErrorKind::Exhausted); what is held can still be renewed and freed.
//! Commands fail after [`Builder::command_limit`] and are not repeated by the client.
//!
//! # The user
//!
//! [`LEAST_COMMANDS`] is all that a user needs, on the keys and channels `leasehold:<namespace>:*`,
//! besides what the application reads and writes in claims:
//!
//! ```text
//! ACL SETUSER locks on >password ~leasehold:billing:* &leasehold:billing:*
//!   +evalsha +eval +mget +get +set +del +pexpire +pttl +time +type +publish
//!   +subscribe +ping +info +client|id
//! ```
//!
//! `+spublish +ssubscribe +cluster|slots +cluster|info` in place of `+publish +subscribe` in a
//! cluster, `+wait` with [`Builder::wait_replicas`], `+psubscribe` with
//! [`Builder::keyspace_events`]. [`INSPECT_COMMANDS`] are for operators. Without `info` the server goes unchecked; without `subscribe` and
//! `ping` waiters poll.

mod backend;
mod batch;
mod builder;
mod check;
mod claim;
mod conn;
mod dedupe;
mod error;
mod holder;
mod inspect;
mod keys;
mod lease;
mod locks;
mod quorum;
mod script;
mod tx;
mod wake;
mod writes;

pub use backend::RedisBackend;
pub use builder::Builder;
pub use fred;
pub use quorum::RedisQuorum;
pub use tx::RedisTx;

/// The commands that make inspection complete, in the form of `ACL SETUSER … +command`: for lists
/// of holdings, for the settings that `diagnose` looks at, and for the names of connections.
pub const INSPECT_COMMANDS: &[&str] = &["scan", "config|get", "client|setname"];

/// The commands that the server's user needs, in the form of `ACL SETUSER … +command`.
pub const LEAST_COMMANDS: &[&str] = &[
    "evalsha",
    "eval",
    "mget",
    "get",
    "set",
    "del",
    "pexpire",
    "pttl",
    "time",
    "type",
    "publish",
    "subscribe",
    "ping",
    "info",
    "client|id",
];
