//! leasehold on MySQL 8.0+ and MariaDB 10.6+: locks, leases, claims and dedupe on the server
//! that a service already runs, over [`mysql_async`].
//!
//! ```no_run
//! # async fn example() -> leasehold_core::Result<()> {
//! use leasehold_core::{Backend, Key, LockOptions, NamedLock};
//! use leasehold_mysql::MySqlBackend;
//!
//! let backend = MySqlBackend::connect("mysql://app:secret@db:3306/app").await?;
//! backend.migrate().await?;
//! if let Some(guard) = backend.lock(&Key::new("poller")?, LockOptions::try_once()).await? {
//!     // this server polls until the guard is dropped or lost
//!     guard.lost().wait().await;
//! }
//! # Ok(()) }
//! ```
//!
//! # How it works
//!
//! | trait | mechanism | freed when the holder dies |
//! |---|---|---|
//! | [`NamedLock`](leasehold_core::NamedLock) | `GET_LOCK` on one connection per handle (a few for many locks), outside of any pool | at once |
//! | [`ClaimLock`](leasehold_core::ClaimLock) | `GET_LOCK` and a READ COMMITTED transaction on one connection of the pool | at once |
//! | [`Lease`](leasehold_core::Lease) | a row per key, renewed for all keys in one statement | when the ttl has passed |
//! | [`Dedupe`](leasehold_core::Dedupe) | a row per key | when `in_progress` has passed |
//!
//! **Named locks.** Requests that arrive while a statement is under way go out together in the next
//! one. A key that another process holds is waited for in the server's own queue, on one of a few
//! further connections. Tokens are numbers of an `AUTO_INCREMENT` table, fetched on the very session
//! that holds the lock when they are first asked for.
//!
//! *Loss.* A second connection per session that holds a lock waits on the server for a lock that the
//! session has had since its start: it is granted the moment the server ends the session (a `KILL`,
//! a restart), and every guard is told at once. A silent network is noticed by the keepalive, within
//! [`keepalive`](MySqlBuilder::keepalive) plus [`answer`](MySqlBuilder::answer) (10 s by default).
//! The session's `wait_timeout` makes the *server* end the session of a vanished host within three
//! times `keepalive` plus `answer` (20 s by default). So a handle that holds named locks has two
//! connections, and two more for each of at most [`max_waiters`](MySqlBuilder::max_waiters) sessions
//! that wait or hold what they waited for, and for each further session that holds what the first
//! has no room for ([`max_per_session`](MySqlBuilder::max_per_session)). A loss is that of one
//! session: the guards of the others stay good.
//!
//! **Claims.** `START TRANSACTION` (which reads nothing yet), `GET_LOCK` of all keys in one order,
//! the token, then the caller's statements, each of which reads what is committed by then; `COMMIT`,
//! then `RELEASE_LOCK`, in one round trip. A connection goes back to the pool only after the server
//! has confirmed both; otherwise it is closed. The token is on disk before the claim begins (one
//! more write), so that it rises across a crash. A claim's keys and user-level locks taken by the
//! caller, or rows and keys, can form a cycle that the server does not see: waits are bounded.
//! A deadlock between rows ends the whole transaction; [`commit`](leasehold_core::Claim::commit)
//! then fails instead of passing later statements, which the server commits one by one, for a whole.
//!
//! **Leases and dedupe** go over a few connections of their own, and renewals over others, so that
//! a renewal never waits for one of the caller's, nor for one on which another call waits. Every statement goes by the server's clock in UTC, whatever the session's
//! time zone. [`verify`](leasehold_core::LeaseGuard::verify) keeps the lease's row locked until the
//! transaction ends; it is not renewed meanwhile, so keep guarded transactions well below the ttl.
//! That costs no other lease: statements on leases find their rows by the primary key, and none waits
//! on a connection for a row that is kept. Do likewise in statements of your own on these tables: one that scans, such as
//! `DELETE .. WHERE name = ..`, locks what it passes, waits for the kept row, and holds up everybody;
//! [`force_release`](leasehold_core::Inspect::force_release) does not.
//!
//! *Waiting for a lease.* Neither server has a push, so user-level locks stand in for it. A handle
//! that has had a lease keeps a *bell*, a lock on a connection of its own, which its leases' rows
//! name. Who waits marks the row as awaited, in the statement that found it busy, and waits on the
//! server for the bell. The statement that releases an awaited lease says so, and the holder lets
//! go of its bell for a moment: every handle that waits gets it, passes it on, looks at the leases
//! that it waits for in one statement and tries those that are free. A handle waits for the bells
//! of at most four others at once. For those of more, after a lost bell, and without user-level
//! locks it looks at pauses of 5 ms growing to 100 ms; otherwise at such of up to
//! [`max_poll`](MySqlBuilder::max_poll), lest a ring was lost. There is no load while nobody waits.
//! The lease of a dead holder is tried for the moment it expires.
//!
//! # Names and namespaces
//!
//! User-level locks are one space per *server*, whatever the database, with names of 64 characters
//! whose case is folded. A key whose namespace and text are lower-case, printable and short is
//! `lh:l:NAMESPACE:KEY`, as seen in `performance_schema.metadata_locks`; any other gets a hash (see
//! [`MySqlBackend::lock_name`]). Claims have names of their own. Rows have the whole SHA-256.
//!
//! # Where it does not work
//!
//! `GET_LOCK` is refused or local to a node on Galera and group replication with several primaries,
//! and tied to one backend session behind `ProxySQL`, Vitess and other multiplexers. Where that is
//! recognised, a handle is refused unless it is built
//! [`without_user_locks`](MySqlBuilder::without_user_locks): then claims lock rows and named locks
//! are leases. Compatible servers and poolers may give a lock to two sessions, or keep it after its
//! session has ended: a handle tries that when it is made (on one more connection, for a moment), and
//! is refused where it is so.
//!
//! Locks die with the primary: after a failover everybody starts anew, and an asynchronous replica
//! may lack the last tokens.
//!
//! # Cost
//!
//! A lock and its release are one round trip each; 64 tasks with keys of their own share round
//! trips. 10,000 named locks on one handle are the default limit on MySQL, 2,000 on MariaDB. There a
//! session's cost of a lock grows with the locks that it holds (the server looks through the list of
//! them), so from 500 on they go on further sessions, which keeps the cost of a lock flat.

mod backend;
mod bell;
mod builder;
mod claim;
mod dedupe;
mod error;
mod flavour;
mod inspect;
mod lease;
mod listen;
mod names;
mod probe;
mod renew;
mod rows;
mod schema;
mod session;
mod store;
mod threads;
mod wake;
mod watch;

pub use backend::MySqlBackend;
pub use builder::MySqlBuilder;
pub use flavour::{Flavour, ServerInfo};
pub use schema::SCHEMA;
