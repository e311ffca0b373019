//! A client: many operations at once on few keys, each recorded.

mod claim;
pub mod crowd;
mod dedupe;
mod hold;
pub mod leak;
mod lease;
mod lock;
pub mod steady;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Backend, Error};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::leak::Leak;
use crate::event::{Do, Log, Micros, now};
use crate::mutant::Mutant;
use crate::store::{Shop, StoreKind};

/// The keys of locks, leases and claims: few, so that everybody meets.
pub const KEYS: [&str; 3] = ["a", "b", "c"];
/// A round of slots or dedupe keys.
pub const ROUND: Duration = Duration::from_secs(3);
/// Slots of a round.
pub const SLOTS: i64 = 3;
/// Slots, what is first seen with them and what is done are remembered for longer than any run.
const RETAIN: Duration = Duration::from_secs(24 * 60 * 60);
/// Operations at once in a client.
const TASKS: u64 = 4;
/// A statement of the client's own on a transaction takes at most so long: the library does not
/// bound it.
pub(crate) const STATEMENT: Duration = Duration::from_secs(5);
/// Closing the handle takes at most so long.
const CLOSE: Duration = Duration::from_secs(10);
/// Time that a process did not run for, from which on it is recorded.
const STALL: Duration = Duration::from_millis(200);

/// What a client is there for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Role {
    /// It works until it is told to stop, whatever its faults are: see [`work`].
    Torture,
    /// It works and rests in turn, and must not grow: see [`steady`]. With a leak it does.
    Steady(Option<Leak>),
    /// One of very many, that wants so many turns of each kind: see [`crowd`].
    Crowd(u32),
}

/// What another process is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// Which store.
    pub store: StoreKind,
    /// Where, usually behind a proxy.
    pub url: String,
    /// Which client.
    pub client: u32,
    /// Which life of it.
    pub life: u32,
    /// The seed of the run.
    pub seed: u64,
    /// What is wrong with its backend.
    pub mutant: Option<Mutant>,
    /// Where it records.
    pub record: PathBuf,
    /// What it is there for.
    pub role: Role,
}

impl Order {
    /// The client's name.
    pub fn name(&self) -> String {
        format!("c{}", self.client)
    }

    /// Its record.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn log(&self) -> std::io::Result<Log> {
        let file = self.record.join(format!("client-{}-{}.jsonl", self.client, self.life));
        Log::open(&file, Some(self.client), self.life)
    }

    fn rng(&self, task: u64) -> StdRng {
        let salt = u64::from(self.client) << 32 | u64::from(self.life) << 8 | task;
        StdRng::seed_from_u64(self.seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// What an operation works with.
#[derive(Clone)]
struct Ctx {
    shop: Arc<dyn Shop>,
    backend: Arc<dyn Backend>,
    log: Log,
    /// What is done or first seen is remembered for so long.
    retain: Duration,
    /// The share of operations on keys that nobody ever uses again.
    fresh: f64,
    /// The longest pause between two operations.
    idle: Duration,
}

/// Does what it is there for.
///
/// # Errors
/// As [`work`] and [`crowd::crowd`]. A client that works and rests needs to be told so: see
/// [`steady::steady`].
pub async fn be(
    order: &Order,
    shop: Arc<dyn Shop>,
    stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    match order.role {
        Role::Torture => work(order, shop, stop).await,
        Role::Crowd(turns) => crowd::crowd(order, shop, turns).await,
        Role::Steady(_) => Err(crate::store::failed("nobody tells it to rest")),
    }
}

/// Works until it is told to stop, then closes its handle.
///
/// # Errors
/// If it could not open its handle within a generous time.
pub async fn work(
    order: &Order,
    shop: Arc<dyn Shop>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let log = order.log().map_err(crate::store::failed)?;
    log.put(0, Do::Hello);
    drop(watch_for_stalls(log.clone())); // it goes on
    let Some(backend) = open(order, &*shop, &mut stop).await? else {
        log.put(0, Do::Bye);
        return Ok(());
    };
    let backend = match order.mutant {
        Some(mutant) => mutant.of(backend),
        None => backend,
    };
    let (retain, idle) = (RETAIN, Duration::from_millis(30));
    let ctx = Ctx { shop, backend: backend.clone(), log: log.clone(), retain, fresh: 0.0, idle };
    operate(ctx, order, TASKS, stop, None).await?;
    // whether it answers or not: what it held must be free in any case
    drop(tokio::time::timeout(CLOSE, backend.close()).await);
    log.put(0, Do::Bye);
    Ok(())
}

/// Operates with so many tasks until told to stop. Gives the number of operations.
async fn operate(
    ctx: Ctx,
    order: &Order,
    tasks: u64,
    stop: watch::Receiver<bool>,
    leak: Option<Leak>,
) -> Result<u64, Error> {
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let (ctx, stop, mut rng) = (ctx.clone(), stop.clone(), order.rng(task));
        running.spawn(async move {
            let mut operations = 0;
            while !*stop.borrow() {
                ctx.operate(&mut rng).await;
                operations += 1;
                if let Some(leak) = leak {
                    leak.happen(&ctx, operations).await;
                }
                tokio::time::sleep(ctx.idle.mul_f64(rng.random())).await;
            }
            operations
        });
    }
    drop(ctx);
    let mut operations = 0;
    while let Some(done) = running.join_next().await {
        operations += done.map_err(crate::store::failed)?; // a panic must not go unseen
    }
    Ok(operations)
}

/// Opens the handle; none if it was told to stop before that could be done.
async fn open(
    order: &Order,
    shop: &dyn Shop,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<Arc<dyn Backend>>, Error> {
    let tries = async {
        loop {
            // a fault may be on from before
            match tokio::time::timeout(CLOSE, shop.open(&order.name())).await {
                Ok(Ok(backend)) => return backend,
                Ok(Err(error)) => tracing::debug!(%error, "could not open a handle"),
                Err(_) => tracing::debug!("no answer while opening a handle"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::select! {
        backend = tokio::time::timeout(Duration::from_secs(120), tries) => {
            backend.map(Some).map_err(|_| crate::store::failed("the store never answered"))
        }
        _ = stop.wait_for(|stop| *stop) => Ok(None),
    }
}

/// Records when the process did not run: a bound on its answers cannot hold then.
fn watch_for_stalls(log: Log) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let tick = Duration::from_millis(20);
        loop {
            let from = now();
            tokio::time::sleep(tick).await;
            let to = now();
            if Duration::from_micros(to - from) > STALL + tick {
                log.put(0, Do::Stall { from, to });
            }
        }
    })
}

impl Ctx {
    /// The key of a lock, lease or claim.
    fn name(&self, rng: &mut StdRng) -> String {
        self.fresh(rng).unwrap_or_else(|| KEYS[rng.random_range(0..KEYS.len())].to_owned())
    }

    /// One that nobody ever uses again, if it is to be one.
    fn fresh(&self, rng: &mut StdRng) -> Option<String> {
        rng.random_bool(self.fresh).then(|| format!("fresh-{:032x}", rng.random::<u128>()))
    }

    async fn operate(&self, rng: &mut StdRng) {
        match rng.random_range(0..100) {
            0..28 => self.lock(rng).await,
            28..60 => self.lease(rng).await,
            60..78 => self.claim(rng).await,
            78..86 => self.slot(rng).await,
            _ => self.dedupe(rng).await,
        }
    }
}

/// A random wait.
fn wait(rng: &mut StdRng) -> Duration {
    let millis = [0, 0, 20, 200, 1000, 3000];
    Duration::from_millis(millis[rng.random_range(0..millis.len())])
}

/// How long something is held: mostly not for long.
fn hold_time(rng: &mut StdRng) -> Duration {
    Duration::from_millis(match rng.random_range(0..20) {
        0 => rng.random_range(500..4000),
        1..4 => rng.random_range(50..500),
        _ => rng.random_range(0..30),
    })
}

/// Runs an acquisition, now and then only for a random moment; none if it was dropped.
async fn perhaps_cancelled<T>(rng: &mut StdRng, call: impl Future<Output = T>) -> Option<T> {
    if rng.random_bool(0.85) {
        return Some(call.await);
    }
    let moment = Duration::from_micros(match rng.random_range(0..4) {
        0 => 0,
        1 => rng.random_range(0..2_000),
        2 => rng.random_range(0..20_000),
        _ => rng.random_range(0..300_000),
    });
    tokio::time::timeout(moment, call).await.ok()
}

fn micros(time: Duration) -> Micros {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// An error as it is recorded.
fn told(error: &Error) -> String {
    format!("{:?}: {error}", error.kind())
}

/// The current round.
fn round() -> u64 {
    now() / micros(ROUND)
}
