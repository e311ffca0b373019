//! leasehold on Redis or Valkey next to raw fred, interleaved in one run:
//! `cargo run --release -p leasehold-benches --bin redis [redis|redis8|valkey [PART]]`,
//! where PART is `latency`, `throughput`, `hand-over`, `dedupe` or `renewals`.
//!
//! Only ratios of one run mean something.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Dedupe, DedupeExt, Key, Lease, LeaseOptions};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use leasehold_redis::fred::types::scripts::Script;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Compare and delete, as everybody writes it.
const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";
/// The same, telling a waiter.
const UNLOCK_AND_TELL: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
     redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '1') return 1 end return 0";
const TTL_MS: i64 = 30_000;

#[tokio::main]
async fn main() -> Outcome<()> {
    // on a worker thread, as the tasks of a service
    tokio::spawn(run()).await?
}

async fn run() -> Outcome<()> {
    let kind: Kind = match std::env::args().nth(1) {
        Some(name) => name.parse()?,
        None => Kind::Redis7,
    };
    let server = tokio::task::block_in_place(|| Server::start(kind))?;
    println!("{kind} {}", server.version()?);
    let raw = Raw::connect(&server.url()).await?;
    let store = Arc::new(RedisBackend::connect(&server.url()).await?);
    let wanted = |part: &str| std::env::args().nth(2).is_none_or(|only| only == part);
    if wanted("latency") {
        latency(&raw, &store).await?;
    }
    if wanted("throughput") {
        throughput(&raw, &store).await?;
    }
    if wanted("hand-over") {
        hand_over(&raw, &store, &server.url()).await?;
    }
    if wanted("dedupe") {
        dedupe(&raw, &store).await?;
    }
    if wanted("renewals") {
        renewals(&raw, &server.url()).await?;
    }
    Ok(())
}

/// What one would write without a library.
#[derive(Clone)]
struct Raw {
    client: Client,
    unlock: Script,
    tell: Script,
}

impl Raw {
    async fn connect(url: &str) -> Outcome<Self> {
        let client = Builder::from_config(Config::from_url(url)?).build()?;
        client.init().await?;
        let (unlock, tell) = (Script::from_lua(UNLOCK), Script::from_lua(UNLOCK_AND_TELL));
        unlock.load(&client).await?;
        tell.load(&client).await?;
        Ok(Self { client, unlock, tell })
    }

    async fn try_lock(&self, key: &str, owner: &str) -> Outcome<bool> {
        let expire = Some(Expiration::PX(TTL_MS));
        let set = self.client.set(key, owner, expire, Some(SetOptions::NX), false);
        let set: Option<String> = set.await?;
        Ok(set.is_some())
    }

    async fn unlock(&self, key: &str, owner: &str) -> Outcome<()> {
        let freed: i64 = self.unlock.evalsha(&self.client, key, owner).await?;
        assert_eq!(freed, 1, "it was ours");
        Ok(())
    }

    async fn cycle(&self, key: &str) -> Outcome<()> {
        let owner = format!("{:032x}", leasehold_core::backend::Owner::fresh().0);
        assert!(self.try_lock(key, &owner).await?, "it was free");
        self.unlock(key, &owner).await
    }
}

fn opts() -> LeaseOptions {
    LeaseOptions::try_once().ttl(Duration::from_millis(TTL_MS.unsigned_abs()))
}

async fn cycle(store: &RedisBackend, key: &Key) -> Outcome<()> {
    let lease = store.lease(key, opts()).await?.ok_or("it was free")?;
    Ok(lease.release().await?)
}

/// A quantile in µs.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let index = ((times.len() - 1) as f64 * share) as usize;
    times[index].as_secs_f64() * 1e6
}

async fn latency(raw: &Raw, store: &RedisBackend) -> Outcome<()> {
    let key = Key::new("latency")?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..40 {
        for _ in 0..150 {
            let start = Instant::now();
            raw.cycle("raw:latency").await?;
            if round > 0 {
                theirs.push(start.elapsed());
            }
        }
        for _ in 0..150 {
            let start = Instant::now();
            cycle(store, &key).await?;
            if round > 0 {
                ours.push(start.elapsed());
            }
        }
    }
    let (a, b) = (quantile(&mut ours, 0.5), quantile(&mut theirs, 0.5));
    println!(
        "lock+unlock, one task        {a:>8.0} µs  raw {b:>8.0} µs  ratio {:.2} (at most 1.10)",
        a / b
    );
    let (a, b) = (quantile(&mut ours, 0.99), quantile(&mut theirs, 0.99));
    println!("                         p99 {a:>8.0} µs  raw {b:>8.0} µs  ratio {:.2}", a / b);
    Ok(())
}

async fn throughput(raw: &Raw, store: &Arc<RedisBackend>) -> Outcome<()> {
    const TASKS: usize = 64;
    const CYCLES: usize = 300;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let raw = raw.clone();
            tasks.spawn(async move {
                for _ in 0..CYCLES {
                    raw.cycle(&format!("raw:{task}")).await?;
                }
                Outcome::Ok(())
            });
        }
        for done in tasks.join_all().await {
            done?;
        }
        theirs.push(start.elapsed());
        let start = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let store = store.clone();
            tasks.spawn(async move {
                let key = Key::new(format!("task-{task}"))?;
                for _ in 0..CYCLES {
                    cycle(&store, &key).await?;
                }
                Outcome::Ok(())
            });
        }
        for done in tasks.join_all().await {
            done?;
        }
        ours.push(start.elapsed());
    }
    let per_second = |times: &mut [Duration]| (TASKS * CYCLES) as f64 * 1e6 / quantile(times, 0.5);
    let (a, b) = (per_second(&mut ours), per_second(&mut theirs));
    println!(
        "lock+unlock, 64 tasks        {a:>8.0} /s  raw {b:>8.0} /s  ratio {:.2} (at least 0.90)",
        a / b
    );
    Ok(())
}

/// From the release to the waiter's hold.
async fn hand_over(raw: &Raw, store: &Arc<RedisBackend>, url: &str) -> Outcome<()> {
    let other = Arc::new(RedisBackend::connect(url).await?);
    let waiter = Raw::connect(url).await?;
    let listener = Builder::from_config(Config::from_url(url)?).build()?;
    listener.init().await?;
    listener.subscribe("raw:hand").await?;
    let (mut ours, mut theirs, mut polled) = (Vec::new(), Vec::new(), Vec::new());
    let key = Key::new("hand")?;
    let waiting = opts().wait(Duration::from_secs(20));
    for round in 0..300 {
        // everybody waits by the time of the release
        let settle = Duration::from_millis(5);
        assert!(raw.try_lock("raw:hand", "a").await?);
        let mut messages = listener.message_rx();
        let takes = tokio::spawn({
            let waiter = waiter.clone();
            async move {
                while !waiter.try_lock("raw:hand", "b").await? {
                    messages.recv().await?;
                }
                Outcome::Ok(Instant::now())
            }
        });
        tokio::time::sleep(settle).await;
        let start = Instant::now();
        let _: i64 = raw.tell.evalsha(&raw.client, "raw:hand", "a").await?;
        theirs.push(takes.await?? - start);
        waiter.unlock("raw:hand", "b").await?;

        let held = store.lease(&key, opts()).await?.ok_or("it was free")?;
        let takes = tokio::spawn({
            let (other, key) = (other.clone(), key.clone());
            async move {
                let lease = other.lease(&key, waiting).await?.ok_or("it waits long enough")?;
                Outcome::Ok((Instant::now(), lease))
            }
        });
        tokio::time::sleep(settle).await;
        let start = Instant::now();
        held.release().await?;
        let (at, lease) = takes.await??;
        ours.push(at - start);
        lease.release().await?;

        if round < 40 {
            assert!(raw.try_lock("raw:hand", "a").await?);
            let takes = tokio::spawn({
                let waiter = waiter.clone();
                async move {
                    while !waiter.try_lock("raw:hand", "b").await? {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    Outcome::Ok(Instant::now())
                }
            });
            // at any moment between two looks
            tokio::time::sleep(Duration::from_millis(53 + round * 7 % 50)).await;
            let start = Instant::now();
            raw.unlock("raw:hand", "a").await?;
            polled.push(takes.await?? - start);
            waiter.unlock("raw:hand", "b").await?;
        }
    }
    let (a, b) = (quantile(&mut ours, 0.5), quantile(&mut theirs, 0.5));
    println!(
        "hand-over to a waiter        {a:>8.0} µs  raw {b:>8.0} µs  ratio {:.2} (at most 1.50)",
        a / b
    );
    let b = quantile(&mut polled, 0.5);
    println!(
        "                       a poll of 50 ms {b:>12.0} µs  {:.0} times (at least 20)",
        b / a
    );
    let (a, b) = (quantile(&mut ours, 0.99), quantile(&mut theirs, 0.99));
    println!("                         p99 {a:>8.0} µs  raw {b:>8.0} µs  ratio {:.2}", a / b);
    Ok(())
}

async fn dedupe(raw: &Raw, store: &RedisBackend) -> Outcome<()> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let retain = Duration::from_secs(60);
    for n in 0..4_000 {
        let name = format!("raw:dedupe:{n}");
        let start = Instant::now();
        assert!(raw.try_lock(&name, "1").await?);
        theirs.push(start.elapsed());
        let key = Key::new(format!("event-{n}"))?;
        let start = Instant::now();
        assert!(store.first_seen(&key, retain).await?);
        ours.push(start.elapsed());
    }
    let (a, b) = (quantile(&mut ours, 0.5), quantile(&mut theirs, 0.5));
    println!("first seen, fresh            {a:>8.0} µs  raw {b:>8.0} µs  ratio {:.2}", a / b);
    let keys: Result<Vec<Key>, _> = (0..1_000).map(|n| Key::new(format!("many-{n}"))).collect();
    let keys = keys?;
    let start = Instant::now();
    let admitted = store.admit_many(&keys, leasehold_core::DedupeOptions::default()).await?;
    println!("admit_many of 1,000          {:>8.0} µs", start.elapsed().as_secs_f64() * 1e6);
    for admission in admitted {
        admission.first().ok_or("it was fresh")?.complete().await?;
    }
    Ok(())
}

/// 10,000 leases of one handle: how long the server is busy at a time, and what others notice.
async fn renewals(raw: &Raw, url: &str) -> Outcome<()> {
    const LEASES: usize = 10_000;
    let store = Arc::new(RedisBackend::connect(url).await?);
    let ttl = LeaseOptions::try_once().ttl(Duration::from_secs(15));
    let mut leases = Vec::with_capacity(LEASES);
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..LEASES {
        let (store, key) = (store.clone(), Key::new(format!("renewed-{n}"))?);
        tasks.spawn(async move { store.lease(&key, ttl).await });
    }
    for lease in tasks.join_all().await {
        leases.push(lease?.ok_or("it was free")?);
    }
    let ask = |words: &'static [&'static str]| {
        let command = leasehold_redis::fred::cmd!(words[0]);
        raw.client.custom::<Value, &str>(command, words[1..].to_vec())
    };
    ask(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]).await?;
    ask(&["CONFIG", "SET", "slowlog-max-len", "100000"]).await?;
    ask(&["SLOWLOG", "RESET"]).await?;
    let (mut pings, end) = (Vec::new(), Instant::now() + Duration::from_secs(11));
    while Instant::now() < end {
        let start = Instant::now();
        let _: Value = raw.client.ping(None).await?;
        pings.push(start.elapsed());
    }
    let log: Vec<Vec<Value>> = ask(&["SLOWLOG", "GET", "-1"]).await?.convert()?;
    let mut scripts: Vec<u64> = Vec::new();
    for entry in &log {
        let (Some(micros), Some(Value::Array(words))) = (entry.get(2), entry.get(3)) else {
            continue;
        };
        let word = words.first().and_then(Value::as_string).unwrap_or_default();
        if word.eq_ignore_ascii_case("evalsha") {
            scripts.extend(micros.as_u64());
        }
    }
    scripts.sort_unstable();
    let held = leases.iter().filter(|lease| lease.is_held()).count();
    let (median, longest) = (scripts.get(scripts.len() / 2), scripts.last());
    println!(
        "{LEASES} leases renewed          {} scripts in 11 s, the server busy for {median:?} µs \
         (p50) to {longest:?} µs at a time; {held} still held",
        scripts.len()
    );
    println!(
        "  PING of somebody else      p50 {:.0} µs, p99 {:.0} µs, longest {:.0} µs",
        quantile(&mut pings, 0.5),
        quantile(&mut pings, 0.99),
        quantile(&mut pings, 1.0)
    );
    Ok(())
}
