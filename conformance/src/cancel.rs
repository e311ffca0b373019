//! Cancellation: a future is polled a few times and then dropped, for every number of polls.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::fault::{Fault, Verdict};

/// No future of ours is polled more often than this before it completes or waits for good.
const MAX_POLLS: usize = 200;

/// A future that has not asked to be polled again for so long waits for something that does not
/// come: it is dropped in that state, and that was the last number of polls to try.
const STUCK: Duration = Duration::from_millis(150);

/// Drops the future that `make` gives after 0, 1, 2, … polls, until it completes or waits for
/// good; after each runs `after`, which looks whether anything was left behind.
///
/// # Errors
/// What `after` finds, with the number of polls in front.
pub(crate) async fn cancel_at_every_poll<M, F, A>(
    mut make: impl FnMut() -> M,
    mut after: impl FnMut() -> A,
) -> Verdict
where
    M: Future<Output = Result<F, Fault>>,
    F: Future,
    A: Future<Output = Verdict>,
{
    for polls in 0..MAX_POLLS {
        let end = poll_and_drop(make().await?, polls).await;
        let fault = |fault: Fault| fault.during(format!("after a drop at poll {polls}"));
        after().await.map_err(fault)?;
        if end != End::Cut {
            return Ok(());
        }
    }
    Err(Fault::new(format!("expected the future to complete within {MAX_POLLS} polls")))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Completed,
    /// It was polled often enough.
    Cut,
    Stuck,
}

async fn poll_and_drop<F: Future>(future: F, polls: usize) -> End {
    let mut future = pin!(future);
    let mut left = polls;
    let polled = std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(End::Cut);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(_) => Poll::Ready(End::Completed),
            // the last poll: dropped while it is pending
            Poll::Pending if left == 0 => Poll::Ready(End::Cut),
            Poll::Pending => Poll::Pending,
        }
    });
    tokio::time::timeout(STUCK, polled).await.unwrap_or(End::Stuck)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    async fn three_polls(seen: &Cell<usize>) {
        for _ in 0..2 {
            seen.set(seen.get() + 1);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn every_number_of_polls_is_tried() {
        let (seen, runs) = (Cell::new(0), Cell::new(0));
        let after = || {
            runs.set(runs.get() + 1);
            std::future::ready(Ok(()))
        };
        cancel_at_every_poll(|| std::future::ready(Ok(three_polls(&seen))), after).await.unwrap();
        // 0 polls: nothing; 1: the first step; 2 and 3: both
        assert_eq!((seen.get(), runs.get()), (5, 4));
    }

    #[tokio::test]
    async fn a_future_that_never_ends_is_dropped_in_the_end() {
        let runs = Cell::new(0);
        let after = || {
            runs.set(runs.get() + 1);
            std::future::ready(Ok(()))
        };
        let make = || std::future::ready(Ok(std::future::pending::<()>()));
        cancel_at_every_poll(make, after).await.unwrap();
        // the clock polls once more before it ends the wait
        assert_eq!(runs.get(), 4);
    }

    #[tokio::test]
    async fn what_is_left_behind_is_told() {
        let make = || std::future::ready(Ok(std::future::ready(())));
        let after = || std::future::ready(Err(Fault::new("a lock is left")));
        let fault = cancel_at_every_poll(make, after).await.unwrap_err();
        assert_eq!(fault.message(), "after a drop at poll 0: a lock is left");
    }
}
