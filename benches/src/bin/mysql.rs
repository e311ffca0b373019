//! leasehold on MySQL and MariaDB next to the raw driver, interleaved in one run: what counts are
//! the ratios.
//!
//! `cargo run --release -p leasehold-benches --bin mysql [-- mysql|mariadb]`

use std::error::Error;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Key, Keys, Lease, LeaseOptions, LockGuard, LockOptions,
    NamedLock,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool};
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 15;
const GET: &str = "SELECT GET_LOCK(?, ?)";
const RELEASE: &str = "SELECT RELEASE_LOCK(?)";

#[tokio::main]
async fn main() -> Outcome<()> {
    let only = std::env::args().nth(1).unwrap_or_default();
    for kind in [Kind::MySql, Kind::MariaDb] {
        if only.is_empty() || only == kind.name() {
            let server = Server::start(kind)?;
            println!("\n{kind} {}", server.version()?);
            // a task, as the callers of a service are
            let url = server.url();
            tokio::spawn(async move { measure(kind, &url).await }).await??;
        }
    }
    Ok(())
}

async fn measure(kind: Kind, url: &str) -> Outcome<()> {
    let opts: Opts = OptsBuilder::from_opts(Opts::from_url(url)?).prefer_socket(false).into();
    let handle = || MySqlBackend::builder().namespace("bench").from_pool(Pool::new(opts.clone()));
    let one = Arc::new(handle().await?);
    one.migrate().await?;
    let two = Arc::new(handle().await?);
    lock_and_unlock(&one, &opts).await?;
    begin_and_commit(&one, &opts).await?;
    throughput(&one, &opts).await?;
    hand_off(&one, &two, &opts).await?;
    many_locks(&one, if kind == Kind::MySql { 10_000 } else { 2_000 }).await?;
    lease_hand_off(&one, &two).await
}

fn key(name: impl Display) -> Key {
    Key::new(name.to_string()).expect("a key")
}

async fn raw(opts: &Opts) -> Outcome<Conn> {
    Ok(Conn::new(opts.clone()).await?)
}

async fn taken(backend: &MySqlBackend, key: &Key) -> Outcome<LockGuard> {
    let guard = backend.lock(key, LockOptions::default()).await?;
    guard.ok_or_else(|| "somebody else holds it".into())
}

/// The medians of both, and the ratio of ours to the raw one.
fn report(what: &str, ours: &mut [Duration], raw: &mut [Duration], bound: &str) {
    let (ours, raw) = (median(ours), median(raw));
    let ratio = ours.as_secs_f64() / raw.as_secs_f64();
    println!("  {what:<44} {ours:>10.1?} raw {raw:>10.1?}  ratio {ratio:.2} ({bound})");
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

async fn lock_and_unlock(one: &MySqlBackend, opts: &Opts) -> Outcome<()> {
    let mut conn = raw(opts).await?;
    let (name, held) = (key("one"), "bench-one");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for _ in 0..200 {
            let start = Instant::now();
            taken(one, &name).await?.release().await?;
            ours.push(start.elapsed());
        }
        for _ in 0..200 {
            let start = Instant::now();
            conn.exec_first::<Option<u8>, _, _>(GET, (held, 0)).await?;
            conn.exec_first::<Option<u8>, _, _>(RELEASE, (held,)).await?;
            theirs.push(start.elapsed());
        }
    }
    report("lock and unlock", &mut ours, &mut theirs, "at most 1.15");
    Ok(())
}

/// What one would write by hand for the same: the lock, a token on disk, the transaction, the
/// unlock, on a pooled connection.
async fn begin_and_commit(one: &MySqlBackend, opts: &Opts) -> Outcome<()> {
    let pool = Pool::new(opts.clone());
    let names = Keys::new(["one"])?;
    let held = "bench-claim";
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for _ in 0..100 {
            let start = Instant::now();
            let claim = one.claim(&names, ClaimOptions::default()).await?;
            claim.ok_or("somebody else holds it")?.commit().await?;
            ours.push(start.elapsed());
        }
        for _ in 0..100 {
            let start = Instant::now();
            let mut conn = pool.get_conn().await?;
            conn.query_first::<Option<u8>, _>(format!("SELECT GET_LOCK('{held}', 10)")).await?;
            conn.query_drop("INSERT INTO leasehold_token VALUES ()").await?;
            conn.query_drop("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
            conn.query_drop("START TRANSACTION").await?;
            conn.query_drop("COMMIT").await?;
            conn.query_first::<Option<u8>, _>(format!("SELECT RELEASE_LOCK('{held}')")).await?;
            drop(conn);
            theirs.push(start.elapsed());
        }
    }
    report("claim: begin and commit", &mut ours, &mut theirs, "at most 1.15");
    Ok(pool.disconnect().await?)
}

/// Lock and unlock by 64 tasks with keys of their own: one handle, or 64 connections.
async fn throughput(one: &Arc<MySqlBackend>, opts: &Opts) -> Outcome<()> {
    const TASKS: usize = 64;
    const EACH: usize = 150;
    let mut conns = Vec::new();
    for _ in 0..TASKS {
        conns.push(raw(opts).await?);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let one = one.clone();
            tasks.spawn(async move {
                let name = key(format!("task-{task}"));
                for _ in 0..EACH {
                    taken(&one, &name).await?.release().await?;
                }
                Outcome::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        ours.push(start.elapsed());
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for (task, mut conn) in conns.drain(..).enumerate() {
            tasks.spawn(async move {
                let name = format!("bench-task-{task}");
                for _ in 0..EACH {
                    conn.exec_first::<Option<u8>, _, _>(GET, (&name, 0)).await?;
                    conn.exec_first::<Option<u8>, _, _>(RELEASE, (&name,)).await?;
                }
                Outcome::Ok(conn)
            });
        }
        while let Some(done) = tasks.join_next().await {
            conns.push(done??);
        }
        theirs.push(start.elapsed());
    }
    let rate = |time: Duration| (TASKS * EACH) as f64 / time.as_secs_f64();
    let (ours, theirs) = (rate(median(&mut ours)), rate(median(&mut theirs)));
    let ratio = ours / theirs;
    println!(
        "  {:<44} {ours:>8.0}/s raw {theirs:>8.0}/s  ratio {ratio:.2} (at least 2)",
        "64 tasks with keys of their own"
    );
    Ok(())
}

/// From the release being sent to the waiter holding it.
async fn hand_off(one: &Arc<MySqlBackend>, two: &MySqlBackend, opts: &Opts) -> Outcome<()> {
    let name = key("handed");
    let held = "bench-handed";
    let (mut holder, mut waiter) = (raw(opts).await?, raw(opts).await?);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS * 10 {
        let first = taken(two, &name).await?;
        let waits = tokio::spawn({
            let (one, name) = (one.clone(), name.clone());
            async move { (taken(&one, &name).await, Instant::now()) }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let start = Instant::now();
        first.release().await?;
        let (next, at) = waits.await?;
        ours.push(at.duration_since(start));
        next?.release().await?;

        holder.exec_first::<Option<u8>, _, _>(GET, (held, 0)).await?;
        let waits = tokio::spawn(async move {
            let got = waiter.exec_first::<Option<u8>, _, _>(GET, (held, 10)).await;
            (got, Instant::now(), waiter)
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let start = Instant::now();
        holder.exec_first::<Option<u8>, _, _>(RELEASE, (held,)).await?;
        let (got, at, back) = waits.await?;
        got?;
        theirs.push(at.duration_since(start));
        waiter = back;
        waiter.exec_first::<Option<u8>, _, _>(RELEASE, (held,)).await?;
    }
    report("hand-off between two handles", &mut ours, &mut theirs, "at most 1.3");
    Ok(())
}

/// The cost of a lock, with few held and with many.
async fn many_locks(one: &Arc<MySqlBackend>, count: usize) -> Outcome<()> {
    let mut guards = Vec::with_capacity(count);
    let mut quarters = Vec::new();
    for quarter in 0..4 {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for n in 0..count / 4 {
            let one = one.clone();
            tasks.spawn(async move { taken(&one, &key(format!("many-{quarter}-{n}"))).await });
        }
        while let Some(done) = tasks.join_next().await {
            guards.push(done??);
        }
        quarters.push(start.elapsed() / (count / 4) as u32);
    }
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for guard in guards {
        tasks.spawn(guard.release());
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let released = start.elapsed() / count as u32;
    println!(
        "  {count} locks on one handle: {quarters:.1?} a lock by quarter, {released:.1?} a release"
    );
    Ok(())
}

/// Neither server has a push for leases: what the bell costs that stands in for it.
async fn lease_hand_off(one: &Arc<MySqlBackend>, two: &MySqlBackend) -> Outcome<()> {
    let name = key("leased");
    let mut ours = Vec::new();
    for round in 0..ROUNDS * 4 {
        let first = two.lease(&name, LeaseOptions::try_once()).await?;
        let first = first.ok_or("somebody else has it")?;
        let waits = tokio::spawn({
            let (one, name) = (one.clone(), name.clone());
            async move { (one.lease(&name, LeaseOptions::default()).await, Instant::now()) }
        });
        tokio::time::sleep(Duration::from_millis(100 + (round as u64 * 7) % 50)).await;
        let start = Instant::now();
        first.release().await?;
        let (next, at) = waits.await?;
        ours.push(at.duration_since(start));
        next?.ok_or("it was not to be had")?.release().await?;
    }
    ours.sort_unstable();
    let (half, most) = (ours[ours.len() / 2], ours[ours.len() * 9 / 10]);
    println!("  hand-off of a lease between two handles: p50 {half:.1?}, p90 {most:.1?}");
    Ok(())
}
