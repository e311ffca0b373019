//! leasehold on PostgreSQL next to the raw driver: ratios, medians of rounds that take turns.
//!
//! `cargo run --release -p leasehold-benches --bin postgres [-- 15|18]`

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Key, Keys, Lease, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::PostgresBackend;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Row};

const ROUNDS: usize = 9;

/// The mean time of one of so many runs.
macro_rules! each {
    ($times:expr, $run:block) => {{
        let start = Instant::now();
        for _ in 0..$times {
            $run
        }
        start.elapsed() / $times
    }};
}

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome {
    // on a worker, as a service's tasks are: the main thread is woken up anew for each answer
    tokio::spawn(run()).await?
}

async fn run() -> Outcome {
    let kind = match std::env::args().nth(1).as_deref() {
        Some("18") => Kind::Postgres18,
        _ => Kind::Postgres15,
    };
    let server = tokio::task::spawn_blocking(move || Server::shared(kind)).await??;
    let bench = Bench { url: server.url(), options: server.url().parse()? };
    bench.handle().await?.migrate().await?;
    println!("postgres {}; medians of {ROUNDS} rounds that take turns", server.version()?);
    bench.uncontended().await?;
    bench.claims().await?;
    bench.many_tasks().await?;
    bench.hand_off().await?;
    bench.many_locks().await?;
    bench.many_leases().await?;
    Ok(())
}

#[derive(Clone)]
struct Bench {
    url: String,
    options: PgConnectOptions,
}

impl Bench {
    async fn handle(&self) -> Outcome<PostgresBackend> {
        let namespace = format!("bench-{}", rand::random::<u64>());
        Ok(PostgresBackend::builder().namespace(namespace).connect(&self.url).await?)
    }

    async fn raw(&self) -> Outcome<PgConnection> {
        Ok(self.options.clone().disable_statement_logging().connect().await?)
    }

    async fn uncontended(&self) -> Outcome {
        const TIMES: u32 = 3_000;
        let handle = self.handle().await?;
        let mut conn = self.raw().await?;
        let key = Key::new("x")?;
        let mut both = Pair::default();
        for round in 0..=ROUNDS {
            let raw = each!(TIMES, {
                try_raw(&mut conn, 4_711).await?;
                release_raw(&mut conn, 4_711).await?;
            });
            let ours = each!(TIMES, {
                let guard = handle.lock(&key, LockOptions::try_once()).await?;
                guard.ok_or("it is free")?.release().await?;
            });
            both.add(round, raw, ours);
        }
        both.print("uncontended lock + unlock", "two raw statements", "<= 1.15");
        Ok(())
    }

    async fn claims(&self) -> Outcome {
        const TIMES: u32 = 1_500;
        const BEGIN: &str =
            "BEGIN; SET LOCAL lock_timeout = '10s'; SELECT pg_advisory_xact_lock(4711)";
        let handle = self.handle().await?;
        let keys = Keys::new(["x"])?;
        let pool = PgPoolOptions::new().max_connections(10);
        let pool = pool.connect_with(self.options.clone()).await?;
        let mut conn = self.raw().await?;
        let (mut bare, mut pooled, mut three) = (Pair::default(), Pair::default(), Pair::default());
        for round in 0..=ROUNDS {
            let on_connection = each!(TIMES, {
                sqlx::raw_sql(BEGIN).execute(&mut conn).await?;
                sqlx::raw_sql("COMMIT").execute(&mut conn).await?;
            });
            let on_pool = each!(TIMES, {
                let mut conn = pool.acquire().await?;
                sqlx::raw_sql(BEGIN).execute(&mut *conn).await?;
                sqlx::raw_sql("COMMIT").execute(&mut *conn).await?;
            });
            let by_hand = each!(TIMES, {
                let mut tx = pool.begin().await?;
                let lock = "SELECT set_config('lock_timeout', '10s', true), \
                    pg_advisory_xact_lock($1), nextval('leasehold.token')";
                sqlx::query(lock).bind(4_711_i64).fetch_one(&mut *tx).await?;
                tx.commit().await?;
            });
            let ours = each!(TIMES, {
                let claim = handle.claim(&keys, ClaimOptions::default()).await?;
                claim.ok_or("it is free")?.commit().await?;
            });
            bare.add(round, on_connection, ours);
            pooled.add(round, on_pool, ours);
            three.add(round, by_hand, ours);
        }
        bare.print("claim + commit", "two raw round trips, no pool", "<= 1.10");
        pooled.print("claim + commit", "the same two, from a pool", "<= 1.10");
        three.print("claim + commit", "sqlx by hand, with a token", "");
        Ok(())
    }

    async fn many_tasks(&self) -> Outcome {
        const TASKS: usize = 64;
        let time = Duration::from_millis(700);
        let handle = Arc::new(self.handle().await?);
        let mut conns = Vec::new();
        for _ in 0..TASKS {
            conns.push(self.raw().await?);
        }
        let mut both = Pair::default();
        for round in 0..=ROUNDS {
            let start = Instant::now();
            let raw: Vec<_> = conns
                .drain(..)
                .zip(5_000_i64..)
                .map(|(mut conn, id)| {
                    tokio::spawn(async move {
                        let mut done = 0_u32;
                        while start.elapsed() < time {
                            try_raw(&mut conn, id).await?;
                            release_raw(&mut conn, id).await?;
                            done += 1;
                        }
                        Outcome::Ok((done, conn))
                    })
                })
                .collect();
            let mut raw_done = 0;
            for task in raw {
                let (done, conn) = task.await??;
                raw_done += done;
                conns.push(conn);
            }
            let raw_time = start.elapsed() / raw_done;
            let start = Instant::now();
            let ours: Vec<_> = (0..TASKS)
                .map(|task| {
                    let handle = handle.clone();
                    tokio::spawn(async move {
                        let key = Key::new(format!("k{task}"))?;
                        let mut done = 0_u32;
                        while start.elapsed() < time {
                            let guard = handle.lock(&key, LockOptions::try_once()).await?;
                            guard.ok_or("it is free")?.release().await?;
                            done += 1;
                        }
                        Outcome::Ok(done)
                    })
                })
                .collect();
            let mut ours_done = 0;
            for task in ours {
                ours_done += task.await??;
            }
            both.add(round, raw_time, start.elapsed() / ours_done);
        }
        let (raw, ours) = both.medians();
        println!(
            "64 tasks, distinct keys: {:.0}/s on one connection, {:.0}/s on 64 raw ones: {:.2} x (>= 3)",
            1.0 / ours,
            1.0 / raw,
            raw / ours
        );
        Ok(())
    }

    async fn hand_off(&self) -> Outcome {
        const TIMES: u32 = 150;
        let namespace = format!("bench-{}", rand::random::<u64>());
        let builder = || PostgresBackend::builder().namespace(namespace.clone());
        let (a, b) = (builder().connect(&self.url).await?, builder().connect(&self.url).await?);
        let (mut one, two) = (self.raw().await?, self.raw().await?);
        let mut two = Some(two);
        let mut admin = self.raw().await?;
        let b = Arc::new(b);
        let key = Key::new("x")?;
        let mut both = Pair::default();
        for round in 0..=ROUNDS {
            let mut raw = Vec::new();
            for _ in 0..TIMES {
                try_raw(&mut one, 4_712).await?;
                let mut conn = two.take().ok_or("it came back")?;
                let waiter = tokio::spawn(async move {
                    let query = sqlx::query("SELECT pg_advisory_lock($1)").bind(4_712_i64);
                    query.execute(&mut conn).await?;
                    Outcome::Ok((Instant::now(), conn))
                });
                somebody_waits(&mut admin).await?;
                let sent = Instant::now();
                release_raw(&mut one, 4_712).await?;
                let (got, mut conn) = waiter.await??;
                raw.push(got - sent);
                release_raw(&mut conn, 4_712).await?;
                two = Some(conn);
            }
            let mut ours = Vec::new();
            for _ in 0..TIMES {
                let guard = a.lock(&key, LockOptions::default()).await?.ok_or("it is free")?;
                let (waits, name) = (b.clone(), key.clone());
                let waiter = tokio::spawn(async move {
                    let guard = waits.lock(&name, LockOptions::default()).await?;
                    Outcome::Ok((Instant::now(), guard.ok_or("it came free")?))
                });
                somebody_waits(&mut admin).await?;
                let sent = Instant::now();
                guard.release().await?;
                let (got, guard) = waiter.await??;
                ours.push(got - sent);
                guard.release().await?;
            }
            both.add(round, median(&mut raw), median(&mut ours));
        }
        both.print("hand-off to a waiter elsewhere", "pg_advisory_lock", "<= 1.3");
        Ok(())
    }

    async fn many_locks(&self) -> Outcome {
        const LOCKS: usize = 2_000;
        let namespace = format!("bench-{}", rand::random::<u64>());
        let builder =
            PostgresBackend::builder().namespace(namespace).application_name("bench-2000");
        let handle = builder.connect(&self.url).await?;
        let keys: Vec<_> =
            (0..LOCKS).map(|n| Key::new(format!("k{n}"))).collect::<Result<_, _>>()?;
        let start = Instant::now();
        let opts = LockOptions::default();
        let held = keys.iter().map(|key| handle.lock(key, opts));
        let held = futures_util::future::try_join_all(held).await?;
        let taken = start.elapsed();
        let sql = "SELECT count(*), count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity a \
            USING (pid) WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' \
            AND a.application_name = 'bench-2000'";
        let row = sqlx::query(sql).fetch_one(&mut self.raw().await?).await?;
        let (locks, sessions): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let start = Instant::now();
        let releases = held.into_iter().flatten().map(leasehold_core::LockGuard::release);
        futures_util::future::try_join_all(releases).await?;
        println!(
            "{locks} locks held on {sessions} connection: taken in {taken:.1?}, freed in {:.1?}",
            start.elapsed()
        );
        Ok(())
    }

    async fn many_leases(&self) -> Outcome {
        const LEASES: usize = 10_000;
        let ttl = Duration::from_secs(6);
        let schema = format!("bench_{}", rand::random::<u32>());
        let handle = PostgresBackend::builder().schema(&schema).connect(&self.url).await?;
        handle.migrate().await?;
        let mut admin = self.raw().await?;
        let counter = format!(
            "CREATE SEQUENCE {schema}.updates; \
             CREATE FUNCTION {schema}.count() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM nextval('{schema}.updates'); RETURN NULL; END $$; \
             CREATE TRIGGER count AFTER UPDATE ON {schema}.lease FOR EACH STATEMENT \
             EXECUTE FUNCTION {schema}.count()"
        );
        sqlx::raw_sql(AssertSqlSafe(counter)).execute(&mut admin).await?;
        let mut held = Vec::new();
        for batch in 0..LEASES / 100 {
            let keys: Vec<_> =
                (0..100).map(|n| Key::new(format!("k{batch}-{n}"))).collect::<Result<_, _>>()?;
            let opts = LeaseOptions::default().ttl(ttl);
            let leases = keys.iter().map(|key| handle.lease(key, opts));
            held.extend(futures_util::future::try_join_all(leases).await?.into_iter().flatten());
        }
        // renewals get into step within a ttl
        tokio::time::sleep(ttl).await;
        let count = format!("SELECT last_value FROM {schema}.updates");
        let count = async |admin: &mut PgConnection| {
            let query = sqlx::query_scalar::<_, i64>(AssertSqlSafe(count.clone()));
            query.fetch_one(admin).await
        };
        let before = count(&mut admin).await?;
        tokio::time::sleep(ttl * 2).await;
        let statements = count(&mut admin).await? - before;
        let alive = held.iter().filter(|lease| lease.is_held()).count();
        println!(
            "{alive} of {LEASES} leases held by {:.1} statements a tick (<= 5)",
            statements as f64 / 6.0
        );
        drop(held);
        handle.close().await?;
        let drop = format!("DROP SCHEMA {schema} CASCADE");
        sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut admin).await?;
        Ok(())
    }
}

async fn try_raw(conn: &mut PgConnection, id: i64) -> Outcome {
    let query = sqlx::query("SELECT pg_try_advisory_lock($1)").bind(id);
    let granted: bool = query.fetch_one(conn).await?.try_get(0)?;
    granted.then_some(()).ok_or_else(|| "it is free".into())
}

async fn release_raw(conn: &mut PgConnection, id: i64) -> Outcome {
    let query = sqlx::query("SELECT pg_advisory_unlock($1)").bind(id);
    let released: bool = query.fetch_one(conn).await?.try_get(0)?;
    released.then_some(()).ok_or_else(|| "it was held".into())
}

async fn somebody_waits(admin: &mut PgConnection) -> Outcome {
    let sql = "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)";
    while !sqlx::query_scalar::<_, bool>(sql).fetch_one(&mut *admin).await? {
        tokio::task::yield_now().await;
    }
    Ok(())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Times of the two sides, a round each.
#[derive(Default)]
struct Pair {
    raw: Vec<Duration>,
    ours: Vec<Duration>,
}

impl Pair {
    /// The first round warms up.
    fn add(&mut self, round: usize, raw: Duration, ours: Duration) {
        if round > 0 {
            self.raw.push(raw);
            self.ours.push(ours);
        }
    }

    fn medians(&mut self) -> (f64, f64) {
        (median(&mut self.raw).as_secs_f64(), median(&mut self.ours).as_secs_f64())
    }

    fn print(&mut self, what: &str, peer: &str, goal: &str) {
        let (raw, ours) = self.medians();
        println!(
            "{what}: {:.1} us, {peer}: {:.1} us: {:.2} x {}",
            ours * 1e6,
            raw * 1e6,
            ours / raw,
            if goal.is_empty() { String::new() } else { format!("({goal})") }
        );
    }
}
