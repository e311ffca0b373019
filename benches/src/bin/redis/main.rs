//! leasehold on Redis and Valkey next to raw fred, in turns: what counts are the ratios.
//!
//! `cargo run --release -p leasehold-benches --bin redis [-- redis|redis8|valkey [PART..]]`, where a
//! part is `lock`, `hand-off`, `tasks`, `dedupe` or `renewals`; or one contender alone, for a
//! profiler: `alone-ours`, `alone-raw`, `alone-ours64`, `alone-raw64`, `alone-hand-ours` or
//! `alone-hand-raw`.

mod many;
mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_benches::turns;
use leasehold_benches::turns::{Both, Meter, at};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Key, Lease, LeaseOptions};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use leasehold_redis::fred::types::Message;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use crate::raw::{Raw, client};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const TTL_MS: i64 = 30_000;
const TASKS: usize = 64;
/// Everybody waits by the time of the release.
const SETTLE: Duration = Duration::from_millis(4);

#[tokio::main]
async fn main() -> Outcome {
    // on a worker thread, as the tasks of a service
    tokio::spawn(run()).await?
}

async fn run() -> Outcome {
    let mut parts: Vec<String> = std::env::args().skip(1).collect();
    let only = if parts.is_empty() { String::new() } else { parts.remove(0) };
    for kind in [Kind::Redis7, Kind::Redis8, Kind::Valkey] {
        if only == kind.name() || only.is_empty() && kind != Kind::Redis8 {
            let server = tokio::task::block_in_place(|| Server::start(kind))?;
            println!("\n{kind} {}", server.version()?);
            Bench::new(&server, parts.clone()).await?.run().await?;
        }
    }
    Ok(())
}

/// The contenders on one server.
struct Bench {
    url: String,
    meter: Meter,
    parts: Vec<String>,
    raw: Raw,
    store: Arc<RedisBackend>,
}

impl Bench {
    async fn new(server: &Server, parts: Vec<String>) -> Outcome<Self> {
        let url = server.url();
        let raw = Raw::connect(&url).await?;
        let store = Arc::new(RedisBackend::connect(&url).await?);
        Ok(Self { url, meter: Meter::of(server), parts, raw, store })
    }

    async fn run(&self) -> Outcome {
        println!("  client and server on a core each: {}", self.meter.pin());
        if let Some(who) = self.parts.iter().find_map(|part| part.strip_prefix("alone-")) {
            return self.alone(who).await;
        }
        if self.wants("lock") {
            self.lock_and_unlock().await?;
        }
        if self.wants("hand-off") {
            self.hand_off().await?;
        }
        if self.wants("tasks") {
            self.throughput().await?;
        }
        self.meter.unpin();
        println!("  client and server on any core:");
        if self.wants("tasks") {
            self.throughput().await?;
        }
        if self.wants("dedupe") {
            many::dedupe(&self.raw, &self.store).await?;
        }
        if self.wants("renewals") {
            many::renewals(&self.raw, &self.url).await?;
        }
        Ok(())
    }

    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }

    async fn lock_and_unlock(&self) -> Outcome {
        let key = Key::new("latency")?;
        let both = turns!(self.meter, 303, 100,
            ours {
                let start = Instant::now();
                cycle(&self.store, &key).await?;
                start.elapsed()
            }
            raw {
                let start = Instant::now();
                self.raw.cycle("raw:latency").await?;
                start.elapsed()
            }
        );
        both.print("lock and unlock", "at most 1.10");
        Ok(())
    }

    /// By tasks with keys of their own, on one client.
    async fn throughput(&self) -> Outcome {
        const EACH: usize = 100;
        let both = turns!(self.meter, 63, 1,
            ours { our_crowd(&self.store, EACH).await? }
            raw { raw_crowd(&self.raw, EACH).await? }
        );
        let what = "64 tasks with keys of their own, time a lock and unlock";
        both.print_many(what, "at most 1.11, which is 0.90 of the throughput", TASKS * EACH);
        Ok(())
    }

    /// From the release being sent to the waiter holding it.
    async fn hand_off(&self) -> Outcome {
        let hands = Hands::new(self).await?;
        let both: Both = turns!(self.meter, 103, 10,
            ours { hands.ours().await? }
            raw { hands.raw().await? }
        );
        both.print("hand-off between two handles", "at most 1.50");
        let mut polled = Vec::new();
        for round in 0..50 {
            // at any moment between two looks
            let settle = Duration::from_millis(53 + round * 7 % 50);
            polled.push(hands.polled(settle).await?.as_secs_f64() * 1e6);
        }
        let polled = at(polled, 0.5);
        let times = polled / both.ours();
        println!("      by a poll of 50 ms {polled:.0} us, {times:.0} times as long (at least 20)");
        Ok(())
    }

    /// One contender alone, for a profiler.
    async fn alone(&self, who: &str) -> Outcome {
        let hands = Hands::new(self).await?;
        let end = Instant::now() + Duration::from_secs(8);
        let (key, mut cycles, start) = (Key::new("latency")?, 0_u32, Instant::now());
        let before = self.meter.read();
        while Instant::now() < end {
            match who {
                "raw" => self.raw.cycle("raw:latency").await?,
                "ours" => cycle(&self.store, &key).await?,
                "raw64" => drop(raw_crowd(&self.raw, 100).await?),
                "ours64" => drop(our_crowd(&self.store, 100).await?),
                "hand-raw" => drop(hands.raw().await?),
                "hand-ours" => drop(hands.ours().await?),
                _ => return Err("nobody of this name".into()),
            }
            cycles += if who.ends_with("64") { 6_400 } else { 1 };
        }
        let each = |nanos: f64| nanos / 1e3 / f64::from(cycles);
        let after = self.meter.read();
        println!(
            "{who}: {cycles} cycles of {:.2} us, CPU {:.2} us here and {:.2} us on the server",
            each(start.elapsed().as_nanos() as f64),
            each((after.client - before.client) as f64),
            each((after.server - before.server) as f64)
        );
        let ask = leasehold_redis::fred::cmd!("INFO");
        let stats: String = self.raw.client.custom(ask, vec!["commandstats"]).await?;
        for line in stats.lines().filter(|line| line.contains("usec_per_call")) {
            println!("  {line}");
        }
        Ok(())
    }
}

/// A holder and a waiter on connections of their own, for both contenders.
struct Hands<'a> {
    bench: &'a Bench,
    other: Arc<RedisBackend>,
    waiter: Raw,
    listener: Client,
    key: Key,
}

impl<'a> Hands<'a> {
    async fn new(bench: &'a Bench) -> Outcome<Self> {
        let other = Arc::new(RedisBackend::connect(&bench.url).await?);
        let waiter = Raw::connect(&bench.url).await?;
        let listener = client(&bench.url).await?;
        listener.subscribe("raw:hand").await?;
        Ok(Self { bench, other, waiter, listener, key: Key::new("hand")? })
    }

    async fn ours(&self) -> Outcome<Duration> {
        let held = self.bench.store.lease(&self.key, opts()).await?.ok_or("it was free")?;
        let takes = tokio::spawn({
            let (other, key) = (self.other.clone(), self.key.clone());
            let waiting = opts().wait(Duration::from_secs(20));
            async move {
                let lease = other.lease(&key, waiting).await?.ok_or("it waits long enough")?;
                Outcome::Ok((Instant::now(), lease))
            }
        });
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        held.release().await?;
        let (at, lease) = takes.await??;
        lease.release().await?;
        Ok(at - start)
    }

    async fn raw(&self) -> Outcome<Duration> {
        let (raw, messages) = (&self.bench.raw, self.listener.message_rx());
        assert!(raw.try_lock("raw:hand", "a").await?, "it was free");
        let takes = tokio::spawn(wait(self.waiter.clone(), messages));
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        raw.unlock_and_tell("raw:hand", "a").await?;
        let took = takes.await?? - start;
        self.waiter.unlock("raw:hand", "b").await?;
        Ok(took)
    }

    async fn polled(&self, settle: Duration) -> Outcome<Duration> {
        let raw = &self.bench.raw;
        assert!(raw.try_lock("raw:hand", "a").await?, "it was free");
        let takes = tokio::spawn({
            let waiter = self.waiter.clone();
            async move {
                while !waiter.try_lock("raw:hand", "b").await? {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Outcome::Ok(Instant::now())
            }
        });
        tokio::time::sleep(settle).await;
        let start = Instant::now();
        raw.unlock("raw:hand", "a").await?;
        let took = takes.await?? - start;
        self.waiter.unlock("raw:hand", "b").await?;
        Ok(took)
    }
}

async fn wait(waiter: Raw, mut messages: broadcast::Receiver<Message>) -> Outcome<Instant> {
    while !waiter.try_lock("raw:hand", "b").await? {
        messages.recv().await?;
    }
    Ok(Instant::now())
}

fn opts() -> LeaseOptions {
    LeaseOptions::try_once().ttl(Duration::from_millis(TTL_MS.unsigned_abs()))
}

async fn cycle(store: &RedisBackend, key: &Key) -> Outcome {
    let lease = store.lease(key, opts()).await?.ok_or("it was free")?;
    Ok(lease.release().await?)
}

/// The time for one of all cycles.
async fn raw_crowd(raw: &Raw, cycles: usize) -> Outcome<Duration> {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let raw = raw.clone();
        tasks.spawn(async move {
            let key = format!("raw:{task}");
            for _ in 0..cycles {
                raw.cycle(&key).await?;
            }
            Outcome::Ok(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    Ok(start.elapsed() / (TASKS * cycles) as u32)
}

/// The time for one of all cycles.
async fn our_crowd(store: &Arc<RedisBackend>, cycles: usize) -> Outcome<Duration> {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let store = store.clone();
        tasks.spawn(async move {
            let key = Key::new(format!("task-{task}"))?;
            for _ in 0..cycles {
                cycle(&store, &key).await?;
            }
            Outcome::Ok(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    Ok(start.elapsed() / (TASKS * cycles) as u32)
}
