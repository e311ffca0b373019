//! The recipes of the crate `leasehold`: written once over the traits, they keep their promises on
//! every backend, or one of the two is wrong.

mod leader;
mod limit;
mod one_time_token;
mod periodic;
mod processes;
mod schedule;
mod semaphore;
mod single_flight;
mod takeover;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::case::Case;

pub(super) const PARTS: [&[Case]; 9] = [
    leader::CASES,
    semaphore::CASES,
    single_flight::CASES,
    periodic::CASES,
    limit::CASES,
    one_time_token::CASES,
    schedule::CASES,
    takeover::CASES,
    processes::CASES,
];

/// Counts those who are inside at a time.
#[derive(Debug, Default)]
struct Inside {
    now: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

impl Inside {
    fn enter(&self) -> Entered<'_> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.all.fetch_add(1, Ordering::SeqCst);
        Entered(self)
    }

    /// The most that were inside at a time.
    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    /// How many have been inside.
    fn all(&self) -> usize {
        self.all.load(Ordering::SeqCst)
    }
}

struct Entered<'a>(&'a Inside);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}
