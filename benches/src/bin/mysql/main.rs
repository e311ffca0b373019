//! leasehold on MySQL and MariaDB next to the raw driver, in turns: what counts are the ratios.
//!
//! `cargo run --release -p leasehold-benches --bin mysql [-- mysql|mariadb [PART..]]`, where a part
//! is a word of its line. Both sides use TCP and the same options; a lock and an unlock are a
//! prepared statement each on both.

use std::error::Error;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_benches::turns;
use leasehold_benches::turns::{Meter, quartiles};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Key, Keys, Lease, LeaseOptions, LockGuard, LockOptions,
    NamedLock,
};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool};
use tokio::task::JoinSet;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

const GET: &str = "SELECT GET_LOCK(?, ?)";
const RELEASE: &str = "SELECT RELEASE_LOCK(?)";
/// How long a waiter gets to arrive.
const ARRIVE: Duration = Duration::from_millis(10);

#[tokio::main]
async fn main() -> Outcome {
    let mut args = std::env::args().skip(1);
    let only = args.next().unwrap_or_default();
    let parts: Vec<String> = args.collect();
    for kind in [Kind::MySql, Kind::MariaDb] {
        if only.is_empty() || only == kind.name() {
            let server = Server::start(kind)?;
            println!("\n{kind} {}", server.version()?);
            let bench = Bench::new(kind, &server, parts.clone())?;
            // a task, as the callers of a service are
            tokio::spawn(async move { bench.run().await }).await??;
        }
    }
    Ok(())
}

struct Bench {
    kind: Kind,
    opts: Opts,
    meter: Meter,
    parts: Vec<String>,
}

impl Bench {
    fn new(kind: Kind, server: &Server, parts: Vec<String>) -> Outcome<Self> {
        let opts = OptsBuilder::from_opts(Opts::from_url(&server.url())?).prefer_socket(false);
        Ok(Self { kind, opts: opts.into(), meter: Meter::of(server), parts })
    }

    async fn run(&self) -> Outcome {
        self.handle().await?.migrate().await?;
        println!("  client and server on a core each: {}", self.meter.pin());
        if self.wants("lock") {
            self.lock_and_unlock().await?;
        }
        if self.wants("claim") {
            self.begin_and_commit().await?;
        }
        if self.wants("hand-off") {
            self.hand_off().await?;
        }
        self.meter.unpin();
        println!("  client and server on any core:");
        if self.wants("tasks") {
            self.throughput().await?;
        }
        if self.wants("many") {
            self.many_locks().await?;
        }
        if self.wants("lease") {
            self.lease_hand_off().await?;
        }
        Ok(())
    }

    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }

    async fn handle(&self) -> Outcome<Arc<MySqlBackend>> {
        let builder = MySqlBackend::builder().namespace("bench");
        Ok(Arc::new(builder.from_pool(Pool::new(self.opts.clone())).await?))
    }

    async fn raw(&self) -> Outcome<Conn> {
        Ok(Conn::new(self.opts.clone()).await?)
    }

    async fn lock_and_unlock(&self) -> Outcome {
        let (one, mut conn) = (self.handle().await?, self.raw().await?);
        let name = key("one");
        let both = turns!(self.meter, 60, 100,
            ours {
                let start = Instant::now();
                taken(&one, &name).await?.release().await?;
                start.elapsed()
            }
            raw {
                let start = Instant::now();
                raw_lock(&mut conn, "bench-one", 0).await?;
                raw_unlock(&mut conn, "bench-one").await?;
                start.elapsed()
            }
        );
        both.print("lock and unlock", "at most 1.15");
        Ok(one.close().await?)
    }

    /// What one would write by hand for the same: the lock, a token on disk, the transaction, the
    /// unlock, on a pooled connection; and the same packed into as few round trips as can be.
    async fn begin_and_commit(&self) -> Outcome {
        let (one, pool) = (self.handle().await?, Pool::new(self.opts.clone()));
        let names = Keys::new(["one"])?;
        let both = turns!(self.meter, 40, 50,
            ours {
                let start = Instant::now();
                let claim = one.claim(&names, ClaimOptions::default()).await?;
                claim.ok_or("somebody else holds it")?.commit().await?;
                start.elapsed()
            }
            raw {
                let start = Instant::now();
                let mut conn = pool.get_conn().await?;
                raw_one(&mut conn, "SELECT GET_LOCK('bench-claim', 10)").await?;
                conn.query_drop("INSERT INTO leasehold_token VALUES ()").await?;
                conn.query_drop("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
                conn.query_drop("START TRANSACTION").await?;
                conn.query_drop("COMMIT").await?;
                raw_one(&mut conn, "SELECT RELEASE_LOCK('bench-claim')").await?;
                drop(conn);
                start.elapsed()
            }
        );
        both.print("claim: begin and commit, next to six statements", "at most 1.15");
        let both = turns!(self.meter, 40, 50,
            ours {
                let start = Instant::now();
                let claim = one.claim(&names, ClaimOptions::default()).await?;
                claim.ok_or("somebody else holds it")?.commit().await?;
                start.elapsed()
            }
            raw {
                let start = Instant::now();
                let mut conn = pool.get_conn().await?;
                conn.query_drop(
                    "SELECT GET_LOCK('bench-claim', 10); INSERT INTO leasehold_token VALUES (); \
                     SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION",
                ).await?;
                conn.query_drop("COMMIT; SELECT RELEASE_LOCK('bench-claim')").await?;
                drop(conn);
                start.elapsed()
            }
        );
        both.print("claim: begin and commit, next to two packed round trips", "no bound");
        one.close().await?;
        Ok(pool.disconnect().await?)
    }

    /// From the release being sent to the waiter holding it.
    async fn hand_off(&self) -> Outcome {
        let (one, two) = (self.handle().await?, self.handle().await?);
        let (mut holder, mut waiter) = (self.raw().await?, self.raw().await?);
        let name = key("handed");
        let held = "bench-handed";
        let both = turns!(self.meter, 33, 5,
            ours {
                let first = taken(&two, &name).await?;
                let waits = tokio::spawn({
                    let (one, name) = (one.clone(), name.clone());
                    async move { (taken(&one, &name).await, Instant::now()) }
                });
                tokio::time::sleep(ARRIVE).await;
                let start = Instant::now();
                first.release().await?;
                let (next, at) = waits.await?;
                next?.release().await?;
                at.duration_since(start)
            }
            raw {
                raw_lock(&mut holder, held, 0).await?;
                let waits = tokio::spawn(async move {
                    (raw_lock(&mut waiter, held, 10).await, Instant::now(), waiter)
                });
                tokio::time::sleep(ARRIVE).await;
                let start = Instant::now();
                raw_unlock(&mut holder, held).await?;
                let (got, at, back) = waits.await?;
                got?;
                waiter = back;
                raw_unlock(&mut waiter, held).await?;
                at.duration_since(start)
            }
        );
        both.print("hand-off between two handles", "at most 1.3");
        one.close().await?;
        Ok(two.close().await?)
    }

    /// Lock and unlock by 64 tasks with keys of their own: one handle, or 64 connections.
    async fn throughput(&self) -> Outcome {
        const TASKS: usize = 64;
        const EACH: usize = 50;
        let one = self.handle().await?;
        let mut conns = Vec::new();
        for _ in 0..TASKS {
            conns.push(self.raw().await?);
        }
        let both = turns!(self.meter, 23, 1,
            ours {
                let start = Instant::now();
                let mut tasks = JoinSet::new();
                for task in 0..TASKS {
                    let (one, name) = (one.clone(), key(format!("task-{task}")));
                    tasks.spawn(async move {
                        for _ in 0..EACH {
                            taken(&one, &name).await?.release().await?;
                        }
                        Outcome::Ok(())
                    });
                }
                while let Some(done) = tasks.join_next().await {
                    done??;
                }
                start.elapsed() / (TASKS * EACH) as u32
            }
            raw {
                let start = Instant::now();
                let mut tasks = JoinSet::new();
                for (task, mut conn) in conns.drain(..).enumerate() {
                    tasks.spawn(async move {
                        let name = format!("bench-task-{task}");
                        for _ in 0..EACH {
                            raw_lock(&mut conn, &name, 0).await?;
                            raw_unlock(&mut conn, &name).await?;
                        }
                        Outcome::Ok(conn)
                    });
                }
                while let Some(done) = tasks.join_next().await {
                    conns.push(done??);
                }
                start.elapsed() / (TASKS * EACH) as u32
            }
        );
        let what = "64 tasks with keys of their own, time a lock and unlock";
        both.print_many(what, "at most 0.5", TASKS * EACH);
        Ok(one.close().await?)
    }

    /// The cost of a lock, with few held and with many: on a new handle, which opens its session, or
    /// one for each 500 on MariaDB, on one whose sessions are open, and raw on one connection.
    async fn many_locks(&self) -> Outcome {
        const ROUNDS: usize = 9;
        let count = if self.kind == Kind::MySql { 10_000 } else { 2_000 };
        let mut sides = [const { Quarters::new() }; 3];
        for _ in 0..ROUNDS {
            let one = self.handle().await?;
            for side in &mut sides[..2] {
                let mut guards = Vec::with_capacity(count);
                for (quarter, times) in side.locks.iter_mut().enumerate() {
                    let start = Instant::now();
                    let mut tasks = JoinSet::new();
                    for n in 0..count / 4 {
                        let (one, name) = (one.clone(), key(format!("many-{quarter}-{n}")));
                        tasks.spawn(async move { taken(&one, &name).await });
                    }
                    while let Some(done) = tasks.join_next().await {
                        guards.push(done??);
                    }
                    times.push(start.elapsed().as_secs_f64() * 1e6 / (count / 4) as f64);
                }
                let start = Instant::now();
                let mut tasks = JoinSet::new();
                for guard in guards {
                    tasks.spawn(guard.release());
                }
                while let Some(done) = tasks.join_next().await {
                    done??;
                }
                side.releases.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
            }
            one.close().await?;
            self.many_raw(&mut sides[2], count).await?;
        }
        println!("  {count} locks at once on one handle, a lock by quarter (flat):");
        let names = ["a new handle", "its sessions open", "raw, one connection, 500 a statement"];
        for (name, side) in names.into_iter().zip(sides) {
            let [first, second, third, last] = side.locks.map(|times| quartiles(times)[1]);
            let release = quartiles(side.releases)[1];
            println!(
                "      {name}: {first:.1} {second:.1} {third:.1} {last:.1} us, last to first {:.2}; \
                 a release {release:.1} us",
                last / first
            );
        }
        Ok(())
    }

    async fn many_raw(&self, side: &mut Quarters, count: usize) -> Outcome {
        let mut conn = self.raw().await?;
        let each = async |conn: &mut Conn, quarter: usize, what: &str| -> Outcome {
            let names: Vec<usize> = (0..count / 4).collect();
            for names in names.chunks(500) {
                let call = |n| what.replace('?', &format!("'raw-{quarter}-{n}'"));
                let calls: Vec<String> = names.iter().map(call).collect();
                conn.query_drop(format!("DO {}", calls.join(","))).await?;
            }
            Ok(())
        };
        for (quarter, times) in side.locks.iter_mut().enumerate() {
            let start = Instant::now();
            each(&mut conn, quarter, "GET_LOCK(?,0)").await?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / (count / 4) as f64);
        }
        let start = Instant::now();
        for quarter in 0..4 {
            each(&mut conn, quarter, "RELEASE_LOCK(?)").await?;
        }
        side.releases.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
        Ok(conn.disconnect().await?)
    }

    /// Neither server has a push for leases: what the bell costs that stands in for it.
    async fn lease_hand_off(&self) -> Outcome {
        let (one, two) = (self.handle().await?, self.handle().await?);
        let name = key("leased");
        let mut ours = Vec::new();
        for round in 0..60 {
            let first = two.lease(&name, LeaseOptions::try_once()).await?;
            let first = first.ok_or("somebody else has it")?;
            let waits = tokio::spawn({
                let (one, name) = (one.clone(), name.clone());
                async move { (one.lease(&name, LeaseOptions::default()).await, Instant::now()) }
            });
            tokio::time::sleep(Duration::from_millis(100 + (round * 7) % 50)).await;
            let start = Instant::now();
            first.release().await?;
            let (next, at) = waits.await?;
            ours.push(at.duration_since(start).as_secs_f64() * 1e3);
            next?.ok_or("it was not to be had")?.release().await?;
        }
        let [low, half, high] = quartiles(ours);
        println!("  lease: hand-off between two handles {half:.1} ms [{low:.1} .. {high:.1}]");
        one.close().await?;
        Ok(two.close().await?)
    }
}

/// Microseconds a lock, by how many are held, and a release.
struct Quarters {
    locks: [Vec<f64>; 4],
    releases: Vec<f64>,
}

impl Quarters {
    const fn new() -> Self {
        Self { locks: [const { Vec::new() }; 4], releases: Vec::new() }
    }
}

fn key(name: impl Display) -> Key {
    Key::new(name.to_string()).expect("a key")
}

async fn taken(backend: &MySqlBackend, key: &Key) -> Outcome<LockGuard> {
    let guard = backend.lock(key, LockOptions::default()).await?;
    guard.ok_or_else(|| "somebody else holds it".into())
}

fn is_one(answer: Option<u8>) -> Outcome {
    (answer == Some(1)).then_some(()).ok_or_else(|| "the server did not do it".into())
}

async fn raw_one(conn: &mut Conn, text: &str) -> Outcome {
    is_one(conn.query_first::<Option<u8>, _>(text).await?.flatten())
}

async fn raw_lock(conn: &mut Conn, name: &str, seconds: u32) -> Outcome {
    is_one(conn.exec_first::<Option<u8>, _, _>(GET, (name, seconds)).await?.flatten())
}

async fn raw_unlock(conn: &mut Conn, name: &str) -> Outcome {
    is_one(conn.exec_first::<Option<u8>, _, _>(RELEASE, (name,)).await?.flatten())
}
