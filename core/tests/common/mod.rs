//! What the engine's tests share.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part of it

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::Key;
use leasehold_core::memory::{MemoryBackend, MemoryStore};
use tokio::time::Instant;

pub fn key(name: &str) -> Key {
    Key::new(name).expect("a valid key")
}

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Two processes of a service on one store.
pub fn pair() -> (MemoryBackend, MemoryBackend) {
    let store = MemoryStore::new();
    let open = || MemoryBackend::builder().store(&store).namespace("test").build();
    (open(), open())
}

/// Waits on a condition, at most a virtual or real minute.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < secs(60), "not within a minute: {what}");
        tokio::time::sleep(millis(5)).await;
    }
}

/// Waits until nothing is held or waited for in the namespace of [`pair`].
pub async fn nothing_left(store: &MemoryStore) {
    let start = Instant::now();
    while let left = store.leftovers("test")
        && !left.is_empty()
    {
        assert!(start.elapsed() < secs(60), "left behind: {left:?}");
        tokio::time::sleep(millis(5)).await;
    }
}

/// Polls a future at most `polls` times, letting the rest of the program run in between, and drops
/// it. Gives its output if it completed.
pub async fn poll_times<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..polls {
        let woken = std::future::poll_fn(|context| {
            let polled = future.as_mut().poll(context);
            Poll::Ready(polled)
        })
        .await;
        match woken {
            Poll::Ready(output) => return Some(output),
            Poll::Pending => step().await,
        }
    }
    None
}

/// Lets every other task run as far as it can, and time pass a little.
async fn step() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(millis(1)).await;
}

/// Polls once, without a waker.
pub fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}
