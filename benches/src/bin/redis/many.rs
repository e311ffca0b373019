//! What is asked for in large numbers: events to admit, leases to renew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::{Dedupe, DedupeExt, Key, Lease, LeaseOptions};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::prelude::*;

use crate::Outcome;
use crate::raw::Raw;

pub(crate) async fn dedupe(raw: &Raw, store: &RedisBackend) -> Outcome {
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
pub(crate) async fn renewals(raw: &Raw, url: &str) -> Outcome {
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
    // in µs: more than a PING takes, which would fill the log
    ask(&["CONFIG", "SET", "slowlog-log-slower-than", "10"]).await?;
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

/// A quantile in µs.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let index = ((times.len() - 1) as f64 * share) as usize;
    times[index].as_secs_f64() * 1e6
}
