//! Coordination between copies of a service: traits, guards, engine and the memory backend.
//!
//! # The model in five minutes
//!
//! A service runs as several copies and needs some decisions to be made once. It asks a store that
//! all copies share, through four small traits:
//!
//! | trait | verb | held until | guard |
//! |---|---|---|---|
//! | [`NamedLock`] | [`lock`](NamedLock::lock) | released, or the session with the store ends | [`LockGuard`] |
//! | [`Lease`] | [`lease`](Lease::lease) | released, or the ttl passes without a renewal | [`LeaseGuard`] |
//! | [`ClaimLock`] | [`claim`](ClaimLock::claim) | the transaction ends | [`Claim`] |
//! | [`Dedupe`] | [`admit`](Dedupe::admit) | completed, abandoned or taken over | [`DedupeGuard`] |
//!
//! - **Contention is a value, failure is an error.** `Ok(None)`: somebody else held it for the
//!   whole wait. `Err`: we do not know or cannot. `wait` means the same everywhere: zero tries
//!   once, [`Duration::MAX`](std::time::Duration::MAX) waits for ever, and it bounds everything.
//! - **Loss is told.** Every guard has [`lost()`](LockGuard::lost), which can be awaited, and
//!   `is_held()`, which does no I/O. Not knowing counts as lost.
//! - **A lock is not a fence.** Every guard has a [`FencingToken`] that grows with each
//!   acquisition; a guarded write checks it, or calls [`LeaseGuard::verify`] in its transaction.
//! - **Any future here may be dropped at any moment** and leaves nothing behind.
//! - **Nothing is re-entrant**, also within one process.
//!
//! ```
//! use leasehold_core::{ClaimLockExt, Claim, ClaimOptions, Key, Keys, LeaseExt, LeaseOptions};
//! use leasehold_core::memory::{MemoryBackend, MemoryTx};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> leasehold_core::Result<()> {
//! let store = MemoryBackend::new();
//!
//! // One copy at a time sends the report; the others get `None`.
//! let sent = store
//!     .with_lease(&Key::new("daily-report")?, LeaseOptions::try_once(), async |lease| {
//!         format!("sent by the holder with token {}", lease.token())
//!     })
//!     .await?;
//! assert!(sent.is_some());
//!
//! // Count and write under a claim, in its own transaction.
//! let slots = Keys::new(["slots"])?;
//! let taken = store
//!     .with_claim(&slots, ClaimOptions::default(), async |claim: &mut Claim| {
//!         let tx = claim.tx::<MemoryTx>()?;
//!         let used: u64 = tx.read("used").map_or(0, |used| used.parse().unwrap_or(0));
//!         tx.write("used", (used + 1).to_string());
//!         leasehold_core::Result::Ok(used + 1)
//!     })
//!     .await?;
//! assert_eq!(taken, Some(1));
//! # Ok(())
//! # }
//! ```
//!
//! # For operators
//!
//! [`observe`] lists the spans, events and metrics.
//!
//! # For authors of backends
//!
//! [`backend`] has the driver traits to implement, [`engine`] turns drivers into the four traits,
//! [`memory`] is the smallest complete example and the executable specification.

pub mod backend;
pub mod engine;
pub mod memory;
pub mod observe;

mod claim;
mod dedupe;
mod error;
mod holder;
mod inspect;
mod key;
mod lease;
mod lost;
#[cfg(test)]
mod model;
mod named;
mod options;
mod registry;
mod steer;
mod token;

pub use backend::{Backend, Capabilities, Housekeeping, Reach};
pub use claim::{COMMIT_LIMIT, Claim, ClaimLock, ClaimLockExt, ClaimTx};
pub use dedupe::{Admission, Dedupe, DedupeExt, DedupeGuard, DedupeHold, Seen};
pub use error::{Error, ErrorKind, Result};
pub use holder::Holder;
pub use inspect::{Finding, HeldName, Holding, HoldingQuery, Inspect, Kind, NameQuery, Severity};
pub use key::{Key, Keys};
pub use lease::{Lease, LeaseExt, LeaseGuard, LeaseHold};
pub use lost::{LossReason, LossSignal, Lost};
pub use named::{LockGuard, LockHold, NamedLock, NamedLockExt};
pub use options::{
    ClaimOptions, DEFAULT_WAIT, Deadline, DedupeOptions, LeaseOptions, LockOptions, MAX_RETAIN,
    MAX_TTL, MIN_TTL,
};
pub use registry::{HeldSnapshot, LockRegistry};
pub use token::FencingToken;
