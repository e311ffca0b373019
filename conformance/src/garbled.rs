//! Garbled answers: whatever a store seems to say, an acquisition is an error or really held.
//!
//! [`check`] opens handles through [proxies](crate::Proxy) that garble one chunk of answers each,
//! lets them take locks of all four kinds, and looks through another handle, past the proxy,
//! whether what they believe to hold is held. By its seed a run does the same to the same chunk;
//! which request the chunk answers depends on the order in which tasks run.
//!
//! A garbled answer that is well-formed and means something else cannot be told from a true one (no
//! protocol has a checksum; TLS has): for [those](Garble::may_lie) everything is checked but that.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Admission, Backend, Claim, ClaimOptions, DedupeGuard, DedupeOptions, ErrorKind, Key, Keys,
    LeaseGuard, LeaseOptions, LockGuard, LockOptions, Result,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::fault::{Fault, Verdict, ensure};
use crate::proxy::{Garble, Proxy};

/// The wait of each acquisition.
const WAIT: Duration = Duration::from_secs(1);
/// The longest that a call takes beyond its wait, on a busy machine.
const BOUND: Duration = Duration::from_secs(30);
/// How long a lost named lock may be believed in: `keepalive + answer` of any harness, and more.
const LOSS_BOUND: Duration = Duration::from_secs(15);
const TTL: Duration = Duration::from_secs(5);
const LOCKS: [&str; 3] = ["one", "two", "three"];

/// Opens handles on the store under test.
#[async_trait]
pub trait Open: Send + Sync + 'static {
    /// Where the server listens.
    fn server(&self) -> SocketAddr;

    /// A handle, on the server or on a proxy of it. Its bounds (for an answer, for silence) are
    /// seconds, not minutes.
    async fn open(&self, namespace: &str, at: SocketAddr) -> Result<Arc<dyn Backend>>;
}

/// Garbles one of the first `chunks` answers of a handle's life (the handshake, and a few of each
/// kind of call) for each seed, several at a time. `LEASEHOLD_GARBLE_SEEDS` replaces the number
/// of seeds, and `LEASEHOLD_GARBLE_SEED` is the only one to run.
///
/// # Errors
/// What went wrong, with the seed: something was believed in and not held, a call did not end, the
/// library panicked, or something could not be had again afterwards.
///
/// # Cancel safety
/// Dropping it drops all handles.
pub async fn check(store: Arc<dyn Open>, seeds: u64, chunks: u32) -> Verdict {
    let only = number("LEASEHOLD_GARBLE_SEED")?;
    let seeds = number("LEASEHOLD_GARBLE_SEEDS")?.unwrap_or(seeds);
    silence(&*store).await?;
    let mut left = only.map_or(0..seeds, |seed| seed..seed + 1);
    let panics = Panics::watch();
    let mut runs = JoinSet::new();
    let (mut kinds, mut faults) = (BTreeMap::<String, u32>::new(), Vec::new());
    loop {
        while runs.len() < 24
            && let Some(seed) = left.next()
        {
            let store = store.clone();
            runs.spawn(async move { (seed, one(&*store, seed, chunks).await) });
        }
        let Some(run) = runs.join_next().await else { break };
        let outcome = match run? {
            (_, Ok(Some(outcome))) => outcome,
            (_, Ok(None)) => "not garbled: too few answers".to_owned(),
            (seed, Err(fault)) => {
                faults.push(format!("seed {seed}: {fault}"));
                continue;
            }
        };
        *kinds.entry(outcome).or_insert(0) += 1;
    }
    println!("garbled answers: {kinds:?}");
    for panic in panics.seen() {
        println!("a panic was contained: {panic}");
        // where a dependency of ours lies, its path is absolute
        if !panic.starts_with('/') {
            faults.push(format!("the library panicked: {panic}"));
        }
    }
    ensure!(faults.is_empty(), "expected no belief without a lock: {}", faults.join("\n"));
    ensure!(
        only.is_some() || kinds.len() > Garble::ALL.len(),
        "expected each way of garbling to be tried with success: {kinds:?}"
    );
    Ok(())
}

/// A server that accepts connections and never answers.
async fn silence(store: &dyn Open) -> Verdict {
    let silent = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let opened =
        bounded("opening a handle on a silent server", store.open("silence", silent.local_addr()?));
    let Err(error) = opened.await? else {
        return Err(Fault::new("expected no handle on a server that never answers"));
    };
    let kind = error.kind();
    ensure!(kind == ErrorKind::Unavailable, "expected a silent server to be unavailable: {error}");
    Ok(())
}

fn number(variable: &str) -> Result<Option<u64>, Fault> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    let fault = |error| Fault::new(format!("{variable} is not a number: {error}"));
    text.parse().map(Some).map_err(fault)
}

/// What the handle behind the garbled answers was given.
#[derive(Default)]
struct Given {
    locks: Vec<(Key, LockGuard)>,
    lease: Option<LeaseGuard>,
    claim: Option<Claim>,
    entry: Option<DedupeGuard>,
    errors: u32,
}

/// Says how the answer was garbled and what came of it.
async fn one(store: &dyn Open, seed: u64, chunks: u32) -> Result<Option<String>, Fault> {
    let mut rng = StdRng::seed_from_u64(seed);
    let kind = Garble::ALL[rng.random_range(0..Garble::ALL.len())];
    let after = rng.random_range(0..chunks);
    let namespace = format!("garbled-{:08x}", rand::random::<u32>());
    let proxy = Proxy::start(store.server()).await?;
    proxy.garble(kind, after, seed);
    let checked = run(store, &proxy, &namespace, kind).await;
    let garbled = proxy.garbled();
    let told = |fault: Fault| match garbled {
        Some(garbled) => fault.during(format!("{garbled}, chunk {after}")),
        None => fault,
    };
    let errors = checked.map_err(told)?;
    let outcome = if errors > 0 { "errors" } else { "no error" };
    Ok(garbled.map(|garbled| format!("{:?}, {outcome}", garbled.kind)))
}

async fn run(store: &dyn Open, proxy: &Proxy, namespace: &str, kind: Garble) -> Result<u32, Fault> {
    let direct = store.open(namespace, store.server()).await?;
    let opened = bounded("opening a handle", store.open(namespace, proxy.addr())).await?;
    let mut errors = 1;
    if let Ok(handle) = opened {
        let given = acquire(&handle).await?;
        errors = given.errors;
        let held = match kind.may_lie() {
            true => Ok(()),
            false => {
                verify(&*direct, &given.locks, given.lease.as_ref(), given.entry.as_ref()).await
            }
        };
        let taken = match &given.claim {
            Some(_) => direct.claim(&claimed(), ClaimOptions::try_once()).await?,
            None => None,
        };
        errors += give_back(given, taken.is_some() && !kind.may_lie()).await?;
        held?;
        drop(taken);
        drop(handle);
    }
    all_is_free(&*direct).await?;
    bounded("the close", direct.close()).await??;
    Ok(errors)
}

async fn bounded<T>(what: &str, call: impl Future<Output = T>) -> Result<T, Fault> {
    let fault = |_| Fault::new(format!("expected {what} to end within {BOUND:?}"));
    timeout(WAIT + BOUND, call).await.map_err(fault)
}

fn key(name: &str) -> Key {
    Key::new(name).expect("a valid key")
}

fn claimed() -> Keys {
    Keys::new(["four", "five"]).expect("valid keys")
}

async fn acquire(handle: &Arc<dyn Backend>) -> Result<Given, Fault> {
    let mut given = Given::default();
    let mut count = |failed: bool| given.errors += u32::from(failed);
    let mut locks = JoinSet::new();
    for name in LOCKS {
        let handle = handle.clone();
        locks.spawn(async move {
            let opts = LockOptions::default().wait(WAIT);
            let locked = bounded("a lock", handle.lock(&key(name), opts)).await;
            if let Ok(Ok(Some(guard))) = &locked {
                drop(bounded("a token", guard.token()).await?);
            }
            locked
        });
    }
    let opts = LeaseOptions::default().wait(WAIT).ttl(TTL);
    let lease = bounded("a lease", handle.lease(&key("lease"), opts)).await?;
    count(lease.is_err());
    let opts = ClaimOptions::default().wait(WAIT);
    let claim = bounded("a claim", handle.claim(&claimed(), opts)).await?;
    count(claim.is_err());
    let opts = DedupeOptions::default().in_progress(TTL);
    let entry = bounded("an admission", handle.admit(&key("entry"), opts)).await?;
    count(entry.is_err());
    while let Some(locked) = locks.join_next().await {
        let locked = locked??;
        count(locked.is_err());
        let held = locked.ok().flatten();
        given.locks.extend(held.map(|guard| (guard.key().clone(), guard)));
    }
    given.lease = lease.ok().flatten();
    given.claim = claim.ok().flatten();
    given.entry = entry.ok().and_then(Admission::first);
    Ok(given)
}

/// Whoever believes to hold keeps others out, or is told within the bound.
async fn verify(
    direct: &dyn Backend,
    locks: &[(Key, LockGuard)],
    lease: Option<&LeaseGuard>,
    entry: Option<&DedupeGuard>,
) -> Verdict {
    for (key, guard) in locks {
        let other = direct.lock(key, LockOptions::try_once()).await?;
        if guard.is_held() && other.is_some() {
            let told = timeout(LOSS_BOUND, guard.lost().wait()).await;
            ensure!(
                told.is_ok() || !guard.is_held(),
                "expected {guard:?} to be held on the store, others were given it"
            );
        }
    }
    if let Some(guard) = lease {
        let other = direct.lease(guard.key(), LeaseOptions::try_once().ttl(TTL)).await?;
        ensure!(
            !(guard.is_held() && other.is_some()),
            "expected {guard:?} to be held on the store, others were given it"
        );
    }
    if let Some(guard) = entry {
        let opts = DedupeOptions::default().in_progress(TTL);
        let other = direct.admit(guard.key(), opts).await?;
        ensure!(
            !(guard.is_held() && other.is_first()),
            "expected {guard:?} to be in progress on the store, others were first"
        );
    }
    Ok(())
}

/// Releases what was given, and says how often that failed. A claim whose keys others were given
/// cannot be committed.
async fn give_back(given: Given, claim_is_taken: bool) -> Result<u32, Fault> {
    let mut errors = 0;
    let mut count = |failed: bool| errors += u32::from(failed);
    for (_, guard) in given.locks {
        count(bounded("a release", guard.release()).await?.is_err());
    }
    if let Some(guard) = given.lease {
        count(bounded("a renewal", guard.renew()).await?.is_err());
        count(bounded("a release", guard.release()).await?.is_err());
    }
    if let Some(claim) = given.claim {
        let ended = bounded("a commit", claim.commit()).await?;
        count(ended.is_err());
        ensure!(
            !(claim_is_taken && ended.is_ok()),
            "expected the claim to be held on the store, others were given it and it was committed"
        );
    }
    if let Some(guard) = given.entry {
        count(bounded("an abandon", guard.abandon()).await?.is_err());
    }
    Ok(errors)
}

async fn all_is_free(direct: &dyn Backend) -> Verdict {
    for name in LOCKS {
        let opts = LockOptions::default().wait(BOUND);
        let guard = direct.lock(&key(name), opts).await?;
        let guard = guard.ok_or_else(|| Fault::new(format!("the lock {name} is not free")))?;
        guard.release().await?;
    }
    let opts = LeaseOptions::default().wait(BOUND).ttl(TTL);
    let lease = direct.lease(&key("lease"), opts).await?;
    lease.ok_or_else(|| Fault::new("the lease is not free"))?.release().await?;
    let claim = direct.claim(&claimed(), ClaimOptions::default().wait(BOUND)).await?;
    claim.ok_or_else(|| Fault::new("the claim is not free"))?.rollback().await?;
    let start = Instant::now();
    loop {
        let opts = DedupeOptions::default().in_progress(TTL);
        match direct.admit(&key("entry"), opts).await? {
            Admission::First(guard) => return Ok(guard.abandon().await?),
            Admission::Done { .. } => return Err(Fault::new("what nobody did is done")),
            Admission::InProgress { .. } => {
                ensure!(start.elapsed() < BOUND, "expected the entry to be free in time");
                tokio::time::sleep(TTL / 10).await;
            }
        }
    }
}

type Hook = Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Send + Sync>;

/// The panics of the process from now on.
struct Panics(Arc<Mutex<Vec<String>>>);

impl Panics {
    fn watch() -> Self {
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let (told, before): (_, Hook) = (seen.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            let place = info.location().map(ToString::to_string).unwrap_or_default();
            let message = info.payload_as_str().unwrap_or_default();
            told.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{place}: {message}"));
            before(info);
        }));
        Self(seen)
    }

    fn seen(&self) -> Vec<String> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        seen.sort_unstable();
        seen.dedup();
        seen
    }
}
