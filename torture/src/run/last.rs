//! After the last client is gone: everything can be had again, and nothing is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{
    Admission, Backend, ClaimOptions, DedupeOptions, Key, Keys, LeaseOptions, LockOptions,
};

use crate::client::KEYS;
use crate::store::{Lab, Shop};

/// Everything can be acquired within this time: the longest ttl, what a session may take to be
/// seen as gone, and time for a busy machine.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// Takes everything once. Gives what went wrong.
pub(super) async fn acquire_all(lab: &Arc<dyn Lab>) -> Vec<String> {
    let handle = match lab.shop().open("controller").await {
        Ok(handle) => handle,
        Err(error) => return vec![format!("no handle could be opened at the end: {error}")],
    };
    let mut wrong = Vec::new();
    for name in KEYS {
        let key = Key::new(name).expect("a short name is a key");
        let locked = handle.lock(&key, LockOptions::default().wait(BOUND)).await;
        had(&mut wrong, &format!("lock {name}"), locked);
        let leased = handle.lease(&key, LeaseOptions::default().wait(BOUND)).await;
        had(&mut wrong, &format!("lease {name}"), leased);
        let claimed = handle.claim(&Keys::from(key), ClaimOptions::default().wait(BOUND)).await;
        had(&mut wrong, &format!("claim {name}"), claimed);
    }
    for name in ["slots", "fence-a", "fence-b", "fence-c"] {
        let keys = Keys::new([name]).expect("a short name is a key");
        had(&mut wrong, name, handle.claim(&keys, ClaimOptions::default().wait(BOUND)).await);
    }
    let key = Key::new("last").expect("a short name is a key");
    match handle.admit(&key, DedupeOptions::default()).await {
        Ok(Admission::First(guard)) => match guard.complete().await {
            Ok(()) => {}
            Err(error) => wrong.push(format!("a dedupe entry cannot be completed: {error}")),
        },
        other => wrong.push(format!("a fresh dedupe key is not admitted: {other:?}")),
    }
    close(&mut wrong, &*handle).await;
    wrong
}

fn had<T>(wrong: &mut Vec<String>, what: &str, taken: leasehold::Result<Option<T>>) {
    match taken {
        Ok(Some(_)) => {} // its drop gives it back
        Ok(None) => wrong.push(format!("{what} cannot be had within {BOUND:?} after the end")),
        Err(error) => wrong.push(format!("{what} cannot be had after the end: {error}")),
    }
}

async fn close(wrong: &mut Vec<String>, handle: &dyn Backend) {
    match tokio::time::timeout(BOUND, handle.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => wrong.push(format!("the last handle cannot be closed: {error}")),
        Err(_) => wrong.push(format!("the last handle does not close within {BOUND:?}")),
    }
}

/// Waits until nothing is left on the store. Gives what is after the bound.
pub(crate) async fn leftovers(lab: &Arc<dyn Lab>) -> Vec<String> {
    let start = Instant::now();
    loop {
        let left = match lab.leftovers().await {
            Ok(left) if left.is_empty() => return Vec::new(),
            Ok(left) => left,
            Err(error) => vec![format!("the store does not say what is left: {error}")],
        };
        if start.elapsed() > BOUND {
            return left.iter().map(|left| format!("left on the store: {left}")).collect();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The committed value of a number.
pub(super) async fn committed(
    shop: &dyn Shop,
    handle: &dyn Backend,
    name: &str,
) -> leasehold::Result<i64> {
    let claim = handle.claim(&Keys::none(), ClaimOptions::default()).await?;
    let mut claim =
        claim.ok_or_else(|| crate::store::failed("nobody can be in the way of no keys"))?;
    let value = shop.read(&mut claim, name).await?;
    claim.rollback().await?;
    Ok(value)
}
