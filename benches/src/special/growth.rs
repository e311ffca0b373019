//! What a lease and an event cost next to many others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, DedupeExt, Key, LeaseOptions};
use leasehold_mysql::MySqlBackend;
use leasehold_peers::Outcome;
use leasehold_postgres::PostgresBackend;
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use mysql_async::prelude::Queryable;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection};

use super::OURS;
use crate::record::{Better, Record, Role, Unit};
use crate::scene::Scene;
use crate::turns::at;

/// Tables, or keys, of its own.
const PREFIX: &str = "bench_growth";
/// In µs; nothing expires meanwhile.
const LATER: i64 = 24 * 60 * 60 * 1_000_000;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let sizes = scene.pick(&[100, 1_000][..], &[100, 10_000, 100_000], &[100, 10_000, 1_000_000]);
    let (rounds, runs) = scene.pick((1, 20), (5, 200), (15, 400));
    let mut filler = Filler::new(scene).await?;
    let backend = filler.handle(&scene.server.url()).await?;
    let mut records = Vec::new();
    let mut rows = 0;
    for size in sizes {
        filler.add(rows, *size).await?;
        rows = *size;
        let record = |what: &str| {
            let title = format!("{what}, next to {rows} others");
            Record::new("growth", title, Unit::Micros, Better::Lower)
        };
        let (mut lease, mut event) = (record("lease and release"), record("first seen, new"));
        for _ in 0..rounds {
            lease.add(Role::Leasehold, OURS, leases(&backend, runs).await?);
            event.add(Role::Leasehold, OURS, events(&backend, runs).await?);
        }
        records.extend([lease, event]);
    }
    backend.close().await?;
    filler.clear().await?;
    Ok(records)
}

async fn leases(backend: &Arc<dyn Backend>, runs: usize) -> Outcome<f64> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let key = Key::new(format!("lease-{:016x}", rand::random::<u64>()))?;
        let start = Instant::now();
        let lease = backend.lease(&key, LeaseOptions::try_once()).await?;
        lease.ok_or("it was free")?.release().await?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(at(times, 0.5))
}

async fn events(backend: &Arc<dyn Backend>, runs: usize) -> Outcome<f64> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let key = Key::new(format!("event-{:016x}", rand::random::<u64>()))?;
        let start = Instant::now();
        let new = backend.first_seen(&key, Duration::from_secs(3_600)).await?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        new.then_some(()).ok_or("it was new")?;
    }
    Ok(at(times, 0.5))
}

/// Puts rows where leasehold's are, by the server itself.
enum Filler {
    Postgres(PgConnection),
    MySql(mysql_async::Conn),
    Redis(Client, usize),
}

impl Filler {
    async fn new(scene: &Scene) -> Outcome<Self> {
        let url = scene.server.url();
        let mut filler = match scene.kind() {
            Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
                Self::Postgres(PgConnection::connect(&url).await?)
            }
            Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
                Self::MySql(mysql_async::Conn::from_url(&url).await?)
            }
            _ => {
                let client = Builder::from_config(Config::from_url(&url)?).build()?;
                client.init().await?;
                Self::Redis(client, 0)
            }
        };
        filler.clear().await?; // of a run that was broken off
        Ok(filler)
    }

    async fn handle(&self, url: &str) -> Outcome<Arc<dyn Backend>> {
        let backend: Arc<dyn Backend> = match self {
            Self::Postgres(_) => {
                Arc::new(PostgresBackend::builder().schema(PREFIX).connect(url).await?)
            }
            Self::MySql(_) => {
                let builder = MySqlBackend::builder().table_prefix(format!("{PREFIX}_"));
                Arc::new(builder.connect(url).await?)
            }
            Self::Redis(..) => {
                Arc::new(RedisBackend::builder().namespace(PREFIX).connect(url).await?)
            }
        };
        backend.migrate().await?;
        Ok(backend)
    }

    /// Up to so many, from those that are there.
    async fn add(&mut self, from: usize, to: usize) -> Outcome {
        match self {
            Self::Postgres(conn) => {
                let series = format!("generate_series({from} + 1, {to}) AS n");
                let fill = format!(
                    "INSERT INTO {PREFIX}.lease (id, namespace, key, owner, expires_at, since, token) \
                     SELECT sha256(n::text::bytea), 'fill', n::text::bytea, \
                       decode(md5(n::text), 'hex'), now() + interval '1 day', now(), n FROM {series}; \
                     INSERT INTO {PREFIX}.dedupe (id, namespace, key, owner, done, since, expires_at) \
                     SELECT sha256(n::text::bytea), 'fill', n::text::bytea, \
                       decode(md5(n::text), 'hex'), true, now(), now() + interval '1 day' \
                     FROM {series}"
                );
                sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut *conn).await?;
                // not in the same message: it must not be in a transaction
                let vacuum = format!("VACUUM (ANALYZE) {PREFIX}.lease, {PREFIX}.dedupe");
                sqlx::raw_sql(AssertSqlSafe(vacuum)).execute(conn).await?;
            }
            Self::MySql(conn) => {
                let digits = "(SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION \
                     SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION \
                     SELECT 9)";
                let series = format!(
                    "(SELECT 1 + a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d + \
                       100000 * g.d AS n FROM {digits} a, {digits} b, {digits} c, {digits} e, \
                       {digits} f, {digits} g) AS s WHERE n > {from} AND n <= {to}"
                );
                let now = "CAST(1000000 * UNIX_TIMESTAMP(NOW(6)) AS SIGNED)";
                conn.query_drop(format!(
                    "INSERT INTO {PREFIX}_lease (id, scope, name, owner, token, ttl, expires, \
                       bell, awaited, since) \
                     SELECT UNHEX(SHA2(n, 256)), 'fill', n, UNHEX(LEFT(SHA2(n, 256), 32)), n, {LATER}, \
                       {now} + {LATER}, 0, 0, {now} FROM {series}"
                ))
                .await?;
                conn.query_drop(format!(
                    "INSERT INTO {PREFIX}_dedupe (id, owner, token, done, since, expires, scope, \
                       name) \
                     SELECT UNHEX(SHA2(n, 256)), UNHEX(LEFT(SHA2(n, 256), 32)), n, 1, {now}, {now} + {LATER}, \
                       'fill', n FROM {series}"
                ))
                .await?;
            }
            Self::Redis(client, filled) => {
                script(client, "redis.call('SET', KEYS[1] .. n, '1', 'PX', 86400000)", from, to)
                    .await?;
                *filled = to;
            }
        }
        Ok(())
    }

    async fn clear(&mut self) -> Outcome {
        match self {
            Self::Postgres(conn) => {
                let drop = format!("DROP SCHEMA IF EXISTS {PREFIX} CASCADE");
                sqlx::raw_sql(AssertSqlSafe(drop)).execute(conn).await?;
            }
            Self::MySql(conn) => {
                let tables = ["meta", "lease", "dedupe", "token", "claim", "session"];
                let tables = tables.map(|table| format!("{PREFIX}_{table}")).join(", ");
                conn.query_drop(format!("DROP TABLE IF EXISTS {tables}")).await?;
            }
            Self::Redis(client, filled) => {
                script(client, "redis.call('UNLINK', KEYS[1] .. n)", 0, *filled).await?;
            }
        }
        Ok(())
    }
}

/// Does something for each number, a bounded time at once.
async fn script(client: &Client, each: &str, from: usize, to: usize) -> Outcome {
    let text = format!("for n = ARGV[1] + 1, ARGV[2] do {each} end");
    for first in (from..to).step_by(10_000) {
        let last = to.min(first + 10_000);
        let keys = vec![format!("leasehold:{PREFIX}:fill:")];
        let _: Value = client.eval(&text, keys, vec![first.to_string(), last.to_string()]).await?;
    }
    Ok(())
}
