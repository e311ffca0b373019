//! [`Lost`]: the news that what a guard held is held no longer.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::observe::Held;

/// Why a guard lost what it held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The store ended the session that held the lock.
    SessionEnded,
    /// The store did not answer within the stated bound: not knowing counts as lost.
    Silent,
    /// The local deadline passed without a renewal.
    Expired,
    /// The store says that it is not ours: deleted, or taken by somebody else.
    Taken,
    /// The handle was closed.
    Closed,
}

impl LossReason {
    /// The reason as a phrase for a message.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SessionEnded => "the store ended the session",
            Self::Silent => "the store did not answer in time",
            Self::Expired => "it expired without a renewal",
            Self::Taken => "the store says that it is not ours any more",
            Self::Closed => "the handle was closed",
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    deadline: Option<Instant>,
    reason: Option<LossReason>,
    settled: bool,
}

impl State {
    fn reason(&self) -> Option<LossReason> {
        match self.deadline {
            _ if self.reason.is_some() => self.reason,
            Some(deadline) if !self.settled && deadline <= Instant::now() => {
                Some(LossReason::Expired)
            }
            _ => None,
        }
    }
}

/// Tells when a guard's hold is lost. Cloneable, awaitable, independent of the guard's lifetime.
///
/// A late subscriber finds it already set; a normal release never fires it.
///
/// ```
/// # use leasehold_core::{Key, Lease, LeaseOptions, memory::MemoryBackend};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let backend = MemoryBackend::new();
/// let guard = backend.lease(&Key::new("report")?, LeaseOptions::default()).await?.unwrap();
/// let lost = guard.lost();
/// tokio::select! {
///     reason = lost.wait() => eprintln!("stop: {}", reason.as_str()),
///     () = async { /* the work */ } => guard.release().await?,
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Lost(watch::Receiver<State>);

impl Lost {
    /// Waits for the loss; for ever if there is none.
    ///
    /// # Cancel safety
    /// Safe: nothing is lost by dropping it.
    pub async fn wait(&self) -> LossReason {
        let mut state = self.0.clone();
        loop {
            let now = *state.borrow_and_update();
            if let Some(reason) = now.reason() {
                return reason;
            }
            let changed = match now.deadline {
                Some(deadline) if !now.settled => tokio::select! {
                    changed = state.changed() => changed,
                    () = sleep_until(deadline) => Ok(()),
                },
                _ => state.changed().await,
            };
            if changed.is_err() && state.borrow().reason().is_none() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Does `work` until it ends, or until the hold is lost: then `work` is dropped.
    ///
    /// # Errors
    /// The reason, if the hold was lost first; also if both are so at once.
    ///
    /// # Cancel safety
    /// As safe as `work`.
    pub async fn run_until_lost<T>(&self, work: impl Future<Output = T>) -> Result<T, LossReason> {
        tokio::select! {
            biased;
            reason = self.wait() => Err(reason),
            done = work => Ok(done),
        }
    }

    /// Whether it is lost by now. Never does any I/O.
    pub fn is_set(&self) -> bool {
        self.reason().is_some()
    }

    /// Why it is lost, if it is.
    pub fn reason(&self) -> Option<LossReason> {
        self.0.borrow().reason()
    }
}

impl IntoFuture for Lost {
    type Output = LossReason;
    type IntoFuture = Pin<Box<dyn Future<Output = LossReason> + Send>>;
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.wait().await })
    }
}

/// The writing side of [`Lost`], for engines and backends that build guards.
///
/// With a deadline it computes the loss itself: there is no state in which the task that should
/// have renewed is dead and the guard still believes to hold.
#[derive(Clone, Debug)]
pub struct LossSignal(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: watch::Sender<State>,
    /// What is told of the hold, once somebody has got the guard.
    held: OnceLock<Held>,
}

impl LossSignal {
    /// A signal for a hold that lasts until it is said to be lost.
    pub fn new() -> Self {
        Self::with(State::default())
    }

    /// A signal for a hold that is lost at `deadline` unless it is extended.
    pub fn until(deadline: Instant) -> Self {
        Self::with(State { deadline: Some(deadline), ..State::default() })
    }

    fn with(state: State) -> Self {
        Self(Arc::new(Shared { state: watch::Sender::new(state), held: OnceLock::new() }))
    }

    /// A reader.
    pub fn subscribe(&self) -> Lost {
        Lost(self.0.state.subscribe())
    }

    /// Says that the hold is lost. The first reason stays; after [`settle`](Self::settle) it is
    /// ignored. Returns whether this call made it so.
    pub fn lose(&self, reason: LossReason) -> bool {
        let mut lost = None;
        self.0.state.send_if_modified(|state| {
            let first = state.reason.is_none() && !state.settled;
            if first {
                state.reason = Some(state.reason().unwrap_or(reason));
                lost = state.reason;
            }
            first
        });
        if let (Some(reason), Some(held)) = (lost, self.held()) {
            held.lost(reason.into());
        }
        lost.is_some()
    }

    /// Says that the hold ended as its owner wanted. Returns whether it was still held.
    pub fn settle(&self) -> bool {
        let mut held = false;
        self.0.state.send_if_modified(|state| {
            held = state.reason().is_none() && !state.settled;
            if state.reason.is_none() {
                state.reason = state.reason();
            }
            let changed = !state.settled;
            state.settled = true;
            // one who subscribes from here on sees it; telling nobody costs as much as telling all
            changed && self.0.state.receiver_count() > 0
        });
        held
    }

    /// Moves the deadline, never backwards, and only while the hold is not lost: an expired lease
    /// is not resurrected by a late answer. Returns whether it is held now.
    pub fn extend(&self, deadline: Instant) -> bool {
        let mut held = false;
        self.0.state.send_if_modified(|state| {
            held = state.reason().is_none() && !state.settled;
            let later = held && state.deadline.is_some_and(|old| old < deadline);
            if later {
                state.deadline = Some(deadline);
            }
            later
        });
        held
    }

    /// The local deadline, if there is one.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.state.borrow().deadline
    }

    /// Why it is lost, if it is.
    pub fn reason(&self) -> Option<LossReason> {
        self.0.state.borrow().reason()
    }

    /// Whether it is neither lost nor settled.
    pub fn is_held(&self) -> bool {
        let state = self.0.state.borrow();
        !state.settled && state.reason().is_none()
    }

    /// Has the end of the hold told; false if that is so already.
    pub(crate) fn observe(&self, held: Held) -> bool {
        if self.0.held.set(held).is_err() {
            return false;
        }
        // a loss that came before did not see it; one that comes now does
        if let (Some(reason), Some(held)) = (self.reason(), self.held()) {
            held.lost(reason.into());
        }
        true
    }

    pub(crate) fn held(&self) -> Option<&Held> {
        self.0.held.get()
    }
}

impl Default for LossSignal {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::{advance, timeout};

    #[tokio::test(start_paused = true)]
    async fn the_deadline_fires_without_anybody_doing_anything() {
        let start = Instant::now();
        let signal = LossSignal::until(start + Duration::from_secs(3));
        let lost = signal.subscribe();
        assert!(signal.extend(start + Duration::from_secs(5)));
        assert_eq!(lost.wait().await, LossReason::Expired);
        assert_eq!(start.elapsed(), Duration::from_secs(5));
        assert!(!signal.extend(start + Duration::from_secs(9)), "a late answer resurrected it");
        assert_eq!(lost.wait().await, LossReason::Expired);
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_never_fires_and_the_first_reason_stays() {
        let signal = LossSignal::until(Instant::now() + Duration::from_secs(1));
        let lost = signal.subscribe();
        assert!(signal.settle());
        advance(Duration::from_secs(5)).await;
        assert!(!lost.is_set() && !signal.lose(LossReason::Taken));
        drop(signal);
        assert!(timeout(Duration::from_secs(60), lost.wait()).await.is_err());

        let signal = LossSignal::new();
        assert!(signal.lose(LossReason::SessionEnded));
        assert!(!signal.lose(LossReason::Taken));
        assert!(!signal.settle(), "a lost hold was reported as released");
        let late = signal.subscribe();
        drop(signal);
        assert_eq!(late.await, LossReason::SessionEnded);
    }
}
