//! leasehold on Redis or Valkey next to raw fred, interleaved in one run:
//! `cargo run --release -p leasehold-benches --bin redis [redis|redis8|valkey [PART]]`,
//! where PART is `latency`, `throughput`, `hand-over`, `dedupe` or `renewals`; or one contender
//! alone, for a profiler: `alone-ours`, `alone-raw`, `alone-ours64` or `alone-raw64`.
//!
//! Only ratios of one run mean something. The contenders take turns in short rounds, of which the
//! first warm the machine up; a ratio is the median of the rounds' ratios, with the quartiles.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Dedupe, DedupeExt, Key, Lease, LeaseOptions};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use leasehold_redis::fred::types::config::UnresponsiveConfig;
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
    let part = std::env::args().nth(2).unwrap_or_default();
    if let Some(who) = part.strip_prefix("alone-") {
        return alone(&raw, &store, who).await;
    }
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

/// A client that does not wait for ever, as the handle's own: a command has a time limit, and a
/// connection on which nothing is answered is given up.
async fn client(url: &str) -> Outcome<Client> {
    let limit = Duration::from_secs(5);
    let client = Builder::from_config(Config::from_url(url)?)
        .with_performance_config(|performance| performance.default_command_timeout = limit)
        .with_connection_config(|connection| {
            connection.unresponsive =
                UnresponsiveConfig { max_timeout: Some(limit), interval: Duration::from_secs(1) };
        })
        .build()?;
    client.init().await?;
    Ok(client)
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
        let client = client(url).await?;
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

/// What two contenders took in the rounds of one run, in which they took turns.
#[derive(Default)]
struct Race {
    ours: Vec<f64>,
    raw: Vec<f64>,
}

impl Race {
    fn add(&mut self, ours: f64, raw: f64) {
        self.ours.push(ours);
        self.raw.push(raw);
    }

    /// Medians over the rounds, and the quartiles of the rounds' ratios: what the machine did to
    /// one round it did to both sides of it.
    fn print(&self, what: &str, unit: &str, target: &str) {
        let mut ratios: Vec<f64> = self.ours.iter().zip(&self.raw).map(|(a, b)| a / b).collect();
        println!(
            "{what:<29}{:>8.0} {unit}  raw {:>8.0} {unit}  ratio {:.3} ({:.3} to {:.3} in {} \
             rounds) {target}",
            median(&self.ours, 0.5),
            median(&self.raw, 0.5),
            at(&mut ratios, 0.5),
            at(&mut ratios, 0.25),
            at(&mut ratios, 0.75),
            ratios.len()
        );
    }
}

fn at(figures: &mut [f64], share: f64) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[((figures.len() - 1) as f64 * share) as usize]
}

fn median(figures: &[f64], share: f64) -> f64 {
    at(&mut figures.to_vec(), share)
}

async fn latency(raw: &Raw, store: &RedisBackend) -> Outcome<()> {
    const ROUNDS: usize = 2_000;
    const WARM_UP: usize = 400;
    const CYCLES: usize = 7;
    let key = Key::new("latency")?;
    let (mut middle, mut ours, mut theirs) = (Race::default(), Vec::new(), Vec::new());
    for round in 0..ROUNDS + WARM_UP {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        // whoever is first may find a colder processor
        for turn in 0..2 {
            for _ in 0..CYCLES {
                let start = Instant::now();
                if (turn + round) % 2 == 0 {
                    raw.cycle("raw:latency").await?;
                    b.push(start.elapsed());
                } else {
                    cycle(store, &key).await?;
                    a.push(start.elapsed());
                }
            }
        }
        if round >= WARM_UP {
            middle.add(quantile(&mut a, 0.5), quantile(&mut b, 0.5));
            ours.append(&mut a);
            theirs.append(&mut b);
        }
    }
    middle.print("lock+unlock, one task", "µs", "at most 1.10");
    let (a, b) = (quantile(&mut ours, 0.99), quantile(&mut theirs, 0.99));
    println!("{:<29}{a:>8.0} µs  raw {b:>8.0} µs  ratio {:.3}", "  99 % within", a / b);
    Ok(())
}

const TASKS: usize = 64;

async fn raw_crowd(raw: &Raw, cycles: usize) -> Outcome<f64> {
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
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
    Ok((TASKS * cycles) as f64 / start.elapsed().as_secs_f64())
}

async fn our_crowd(store: &Arc<RedisBackend>, cycles: usize) -> Outcome<f64> {
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
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
    Ok((TASKS * cycles) as f64 / start.elapsed().as_secs_f64())
}

async fn throughput(raw: &Raw, store: &Arc<RedisBackend>) -> Outcome<()> {
    const ROUNDS: usize = 60;
    const WARM_UP: usize = 10;
    const CYCLES: usize = 100;
    let mut race = Race::default();
    for round in 0..ROUNDS + WARM_UP {
        let (ours, theirs) = if round % 2 == 0 {
            let theirs = raw_crowd(raw, CYCLES).await?;
            (our_crowd(store, CYCLES).await?, theirs)
        } else {
            (our_crowd(store, CYCLES).await?, raw_crowd(raw, CYCLES).await?)
        };
        if round >= WARM_UP {
            race.add(ours, theirs);
        }
    }
    race.print("lock+unlock, 64 tasks", "/s", "at least 0.90");
    Ok(())
}

/// One contender alone, for a profiler: `ours` or `raw`, one task or 64.
async fn alone(raw: &Raw, store: &Arc<RedisBackend>, who: &str) -> Outcome<()> {
    let end = Instant::now() + Duration::from_secs(8);
    let (key, mut cycles, start) = (Key::new("latency")?, 0_u32, Instant::now());
    while Instant::now() < end {
        match who {
            "raw" => raw.cycle("raw:latency").await?,
            "ours" => cycle(store, &key).await?,
            "raw64" => drop(raw_crowd(raw, 100).await?),
            _ => drop(our_crowd(store, 100).await?),
        }
        cycles += if who.ends_with("64") { 6_400 } else { 1 };
    }
    println!("{who}: {:.2} µs a cycle", start.elapsed().as_secs_f64() * 1e6 / f64::from(cycles));
    let stats: String = raw
        .client
        .custom::<String, &str>(leasehold_redis::fred::cmd!("INFO"), vec!["commandstats", "cpu"])
        .await?;
    for line in
        stats.lines().filter(|line| line.contains("usec_per_call") || line.contains("used_cpu_"))
    {
        println!("  {line}");
    }
    Ok(())
}

/// From the release to the waiter's hold.
async fn hand_over(raw: &Raw, store: &Arc<RedisBackend>, url: &str) -> Outcome<()> {
    const ROUNDS: usize = 60;
    const WARM_UP: usize = 5;
    const TURNS: usize = 20;
    let other = Arc::new(RedisBackend::connect(url).await?);
    let waiter = Raw::connect(url).await?;
    let listener = client(url).await?;
    listener.subscribe("raw:hand").await?;
    let (mut race, mut ours, mut theirs) = (Race::default(), Vec::new(), Vec::new());
    let key = Key::new("hand")?;
    for round in 0..ROUNDS + WARM_UP {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            b.push(raw_hand_over(raw, &waiter, listener.message_rx()).await?);
            a.push(our_hand_over(store, &other, &key).await?);
        }
        if round >= WARM_UP {
            race.add(quantile(&mut a, 0.5), quantile(&mut b, 0.5));
            ours.append(&mut a);
            theirs.append(&mut b);
        }
    }
    race.print("hand-over to a waiter", "µs", "at most 1.50");
    let (a, b) = (quantile(&mut ours, 0.99), quantile(&mut theirs, 0.99));
    println!("{:<29}{a:>8.0} µs  raw {b:>8.0} µs  ratio {:.3}", "  99 % within", a / b);
    let mut polled = Vec::new();
    for round in 0..50 {
        // at any moment between two looks
        let settle = Duration::from_millis(53 + round * 7 % 50);
        polled.push(polled_hand_over(raw, &waiter, settle).await?);
    }
    let (a, b) = (quantile(&mut ours, 0.5), quantile(&mut polled, 0.5));
    println!("{:<29}{b:>8.0} µs, {:.0} times as long, at least 20", "  by a poll of 50 ms", b / a);
    Ok(())
}

/// Everybody waits by the time of the release.
const SETTLE: Duration = Duration::from_millis(4);

async fn raw_hand_over(
    raw: &Raw,
    waiter: &Raw,
    mut messages: tokio::sync::broadcast::Receiver<leasehold_redis::fred::types::Message>,
) -> Outcome<Duration> {
    assert!(raw.try_lock("raw:hand", "a").await?, "it was free");
    let takes = tokio::spawn({
        let waiter = waiter.clone();
        async move {
            while !waiter.try_lock("raw:hand", "b").await? {
                messages.recv().await?;
            }
            Outcome::Ok(Instant::now())
        }
    });
    tokio::time::sleep(SETTLE).await;
    let start = Instant::now();
    let _: i64 = raw.tell.evalsha(&raw.client, "raw:hand", "a").await?;
    let took = takes.await?? - start;
    waiter.unlock("raw:hand", "b").await?;
    Ok(took)
}

async fn our_hand_over(
    store: &RedisBackend,
    other: &Arc<RedisBackend>,
    key: &Key,
) -> Outcome<Duration> {
    let held = store.lease(key, opts()).await?.ok_or("it was free")?;
    let takes = tokio::spawn({
        let (other, key) = (other.clone(), key.clone());
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

async fn polled_hand_over(raw: &Raw, waiter: &Raw, settle: Duration) -> Outcome<Duration> {
    assert!(raw.try_lock("raw:hand", "a").await?, "it was free");
    let takes = tokio::spawn({
        let waiter = waiter.clone();
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
    waiter.unlock("raw:hand", "b").await?;
    Ok(took)
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
