//! Very many keys in one handle, and very many waiters for one key.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use leasehold::{
    Backend, ClaimOptions, Key, Keys, LeaseGuard, LeaseOptions, LockGuard, LockOptions,
};
use tokio::task::JoinSet;

use super::told;
use crate::event::Kind;
use crate::run::last;
use crate::store::{Lab, StoreKind};

/// Calls of one handle that are under way at once.
const AT_ONCE: usize = 128;
/// A waiter has its turn within this time.
const PATIENCE: Duration = Duration::from_secs(240);

/// A part of the run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scale {
    /// So many keys are held at once, for longer than this ttl.
    Held(Kind, usize, Duration),
    /// So many calls of one handle wait for one key.
    Wait(Kind, usize),
}

pub(super) fn parts(store: StoreKind, short: bool) -> Vec<Scale> {
    // MariaDB's own lists of user-level locks are what bounds it
    let locks = if store == StoreKind::Mariadb { 2_000 } else { 10_000 };
    let (locks, leases, waiters) = if short { (500, 500, 100) } else { (locks, 10_000, 1_000) };
    let ttl = Duration::from_secs(if short { 2 } else { 12 });
    let waits = [Kind::Lock, Kind::Lease, Kind::Claim].map(|kind| Scale::Wait(kind, waiters));
    [Scale::Held(Kind::Lock, locks, ttl), Scale::Held(Kind::Lease, leases, ttl)]
        .into_iter()
        .chain(waits)
        .collect()
}

impl Scale {
    /// Its name, and figures or what went wrong.
    pub(super) async fn run(self, lab: &Arc<dyn Lab>) -> (String, Result<String, String>) {
        match self {
            Self::Held(kind, keys, ttl) => {
                (format!("{keys} keys held, {kind}s"), held(lab, kind, keys, ttl).await)
            }
            Self::Wait(kind, waiters) => {
                (format!("{waiters} waiters, a {kind}"), wait(lab, kind, waiters).await)
            }
        }
    }
}

enum Guard {
    Lock(LockGuard),
    Lease(LeaseGuard),
}

impl Guard {
    async fn take(
        handle: &dyn Backend,
        kind: Kind,
        key: &Key,
        ttl: Duration,
    ) -> Result<Self, String> {
        let taken = if kind == Kind::Lock {
            let taken = handle.lock(key, LockOptions::try_once()).await;
            taken.map(|guard| guard.map(Guard::Lock))
        } else {
            let taken = handle.lease(key, LeaseOptions::try_once().ttl(ttl)).await;
            taken.map(|guard| guard.map(Guard::Lease))
        };
        taken
            .map_err(|error| wrong("cannot be taken", key, error))?
            .ok_or_else(|| format!("{key} is told to be held"))
    }

    fn is_held(&self) -> bool {
        match self {
            Self::Lock(guard) => guard.is_held(),
            Self::Lease(guard) => guard.is_held(),
        }
    }

    /// False: a row was kept from us for a moment, and the release goes on in the background. That
    /// nothing is left is seen afterwards.
    async fn release(self) -> Result<bool, String> {
        let (key, released) = match self {
            Self::Lock(guard) => (guard.key().clone(), guard.release().await),
            Self::Lease(guard) => (guard.key().clone(), guard.release().await),
        };
        match released {
            Ok(()) => Ok(true),
            Err(error) if error.is_retryable() => Ok(false),
            Err(error) => Err(wrong("cannot be released", &key, error)),
        }
    }
}

fn wrong(what: &str, key: &Key, error: impl Display) -> String {
    format!("{key} {what}: {error}")
}

/// Takes all keys, holds them for longer than a ttl, and releases them.
async fn held(
    lab: &Arc<dyn Lab>,
    kind: Kind,
    keys: usize,
    ttl: Duration,
) -> Result<String, String> {
    let handle = lab.shop().open("scale").await.map_err(told)?;
    let memory = resident()?;
    let start = Instant::now();
    let names = stream::iter(0..keys).map(|number| {
        let handle = handle.clone();
        async move {
            let key = Key::new(format!("held-{number}")).map_err(told)?;
            Guard::take(&*handle, kind, &key, ttl).await
        }
    });
    let guards: Vec<Guard> = names.buffer_unordered(AT_ONCE).try_collect().await?;
    let took = start.elapsed();
    let hold = ttl + ttl / 3;
    tokio::time::sleep(hold).await;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    if lost > 0 {
        return Err(format!("{lost} of {keys} were lost within {hold:?}"));
    }
    let census = lab.census().await.map_err(told)?;
    let more = resident()?.saturating_sub(memory);
    let start = Instant::now();
    let releases = stream::iter(guards).map(Guard::release);
    let released: Vec<bool> = releases.buffer_unordered(AT_ONCE).try_collect().await?;
    let later = released.iter().filter(|released| !**released).count();
    let freed = start.elapsed();
    close(&*handle).await?;
    let connections = census
        .connections
        .map_or_else(String::new, |connections| format!(", {connections} connections"));
    Ok(format!(
        "taken in {:.1} s, {more} KiB{connections}, released in {:.1} s, \
         {later} of them in the background",
        took.as_secs_f64(),
        freed.as_secs_f64()
    ))
}

/// The resident memory of this process, in KiB.
fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(told)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok())
        .ok_or_else(|| "this process has no VmRSS".to_owned())
}

/// Has all calls wait behind one holder, and lets them have their turns.
async fn wait(lab: &Arc<dyn Lab>, kind: Kind, waiters: usize) -> Result<String, String> {
    let handle = lab.shop().open("scale").await.map_err(told)?;
    let (inside, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut calls = JoinSet::new();
    let start = Instant::now();
    for _ in 0..waiters {
        let (handle, inside, turns) = (handle.clone(), inside.clone(), turns.clone());
        calls.spawn(async move {
            turn(&*handle, kind, &inside).await?;
            turns.fetch_add(1, Ordering::Relaxed);
            Ok::<_, String>(())
        });
    }
    while let Some(done) = calls.join_next().await {
        done.map_err(told)??;
    }
    let took = start.elapsed();
    close(&*handle).await?;
    let turns = turns.load(Ordering::Relaxed);
    if turns != waiters as u64 {
        return Err(format!("only {turns} of {waiters} had their turn"));
    }
    Ok(format!("all had their turn within {:.1} s", took.as_secs_f64()))
}

async fn turn(handle: &dyn Backend, kind: Kind, inside: &AtomicBool) -> Result<(), String> {
    let key = Key::new("waited for").map_err(told)?;
    let late = || format!("no turn within {PATIENCE:?}");
    let alone = async || {
        let alone = !inside.swap(true, Ordering::SeqCst);
        tokio::task::yield_now().await;
        inside.store(false, Ordering::SeqCst);
        if alone { Ok(()) } else { Err("two have it at once".to_owned()) }
    };
    match kind {
        Kind::Lock => {
            let opts = LockOptions::default().wait(PATIENCE);
            let guard = handle.lock(&key, opts).await.map_err(told)?.ok_or_else(late)?;
            alone().await?;
            guard.release().await.map_err(told)
        }
        Kind::Lease => {
            let opts = LeaseOptions::default().wait(PATIENCE);
            let guard = handle.lease(&key, opts).await.map_err(told)?.ok_or_else(late)?;
            alone().await?;
            guard.release().await.map_err(told)
        }
        _ => {
            let opts = ClaimOptions::default().wait(PATIENCE);
            let claim = handle.claim(&Keys::from(key), opts).await.map_err(told)?;
            let claim = claim.ok_or_else(late)?;
            alone().await?;
            claim.commit().await.map_err(told)
        }
    }
}

async fn close(handle: &dyn Backend) -> Result<(), String> {
    match tokio::time::timeout(last::BOUND, handle.close()).await {
        Ok(closed) => closed.map_err(told),
        Err(_) => Err(format!("the handle does not close within {:?}", last::BOUND)),
    }
}
