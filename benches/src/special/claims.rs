//! Claims: a transaction under a lock.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Claim, ClaimOptions, Keys};
use leasehold_peers::Outcome;
use leasehold_redis::RedisTx;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use mysql_async::prelude::Queryable;
use mysql_async::{Pool, Transaction};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Postgres};

use super::{OURS, add, micros};
use crate::contenders::Opener;
use crate::record::{Against, Better, Record, Role, Unit};
use crate::scene::Scene;
use crate::turns::{Meter, at};

/// Slots that may be taken; one fewer is.
const LIMIT: i64 = 10;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let record = |title: &str| Record::new("claim", title, Unit::Micros, Better::Lower);
    let mut bare = record("claim and commit").note(
        "Packed: the fewest round trips by which it can be done by hand, two, without a pool, a \
         check or a way back.",
    );
    let mut counted = record("claim, count, take a slot, commit").note(
        "Counts the slots that are taken, and takes one as that is below the limit. Packed: the \
         fewest round trips, four, or three on Redis.",
    );
    // what was promised is next to the floor of each
    let bound = match scene.kind() {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => Some(1.10),
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => Some(1.15),
        _ => None,
    };
    if let Some(bound) = bound {
        bare = bare.target(Against::Floor, bound);
        counted = counted.target(Against::Floor, bound);
    }
    let mut sides = sides(scene).await?;
    let meter = Meter::of(&scene.server);
    meter.pin();
    let runs = scene.pick(5, 60, 150);
    for round in 0..=scene.pick(1, 9, 31) {
        for step in 0..sides.len() {
            let at_side = (round + step) % sides.len();
            let side = &mut sides[at_side];
            let (role, name) = (side.role, side.name);
            add(&mut bare, round, role, name, time(&mut side.ways, runs, false).await?);
            add(&mut counted, round, role, name, time(&mut side.ways, runs, true).await?);
        }
    }
    meter.unpin();
    for side in sides {
        side.ways.clear().await?;
    }
    Ok(vec![bare, counted])
}

/// One who takes part.
struct Side {
    role: Role,
    name: &'static str,
    ways: Box<dyn Ways>,
}

/// How it claims.
#[async_trait]
trait Ways: Send {
    async fn bare(&mut self) -> Outcome;
    async fn counted(&mut self) -> Outcome;
    /// Frees the slot that was taken; not timed.
    async fn free(&mut self) -> Outcome;
    /// Leaves nothing behind.
    async fn clear(self: Box<Self>) -> Outcome {
        Ok(())
    }
}

async fn time(ways: &mut Box<dyn Ways>, runs: usize, counted: bool) -> Outcome<f64> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let start = Instant::now();
        if counted {
            ways.counted().await?;
        } else {
            ways.bare().await?;
        }
        times.push(micros(start.elapsed()));
        if counted {
            ways.free().await?;
        }
    }
    Ok(at(times, 0.5))
}

async fn sides(scene: &Scene) -> Outcome<Vec<Side>> {
    let url = scene.server.url();
    let side = |role, name, ways: Box<dyn Ways>| Side { role, name, ways };
    Ok(match scene.kind() {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
            let options: PgConnectOptions = url.parse()?;
            let options = options.disable_statement_logging();
            let mut conn = options.connect().await?;
            sqlx::raw_sql(POSTGRES_SLOTS).execute(&mut conn).await?;
            let pool = PgPoolOptions::new().max_connections(10).connect_with(options).await?;
            let ours = Ours::open(Opener::Postgres(url)).await?;
            vec![
                side(Role::Floor, "raw sqlx, packed", Box::new(PgPacked(conn))),
                side(Role::Leasehold, OURS, Box::new(PgOurs(ours, pool.clone()))),
                side(Role::Other, "sqlx by hand", Box::new(PgByHand(pool))),
            ]
        }
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
            let pool = Pool::from_url(crate::contenders::tcp(&url))?;
            let mut conn = pool.get_conn().await?;
            conn.query_drop(MYSQL_SLOTS).await?;
            let ours = Ours::open(Opener::MySql(crate::contenders::tcp(&url))).await?;
            vec![
                side(Role::Floor, "mysql_async by hand", Box::new(MyByHand(pool.clone()))),
                side(Role::Leasehold, OURS, Box::new(MyOurs(ours, pool))),
                side(Role::Other, "raw mysql_async, packed", Box::new(MyPacked(conn))),
            ]
        }
        _ => {
            let client = Builder::from_config(Config::from_url(&url)?).build()?;
            client.init().await?;
            let members: Vec<String> = (1..LIMIT).map(|n| format!("job-{n}")).collect();
            let slots = |tag: &str| format!("{{{tag}}}:bench-slots");
            let ours = Ours::open(Opener::Redis(url.clone())).await?;
            let tag = leasehold_redis::RedisBackend::builder().namespace("bench");
            let tag = tag.connect(&url).await?.claim_tag().to_owned();
            for slots in [slots(&tag), slots("raw")] {
                let _: i64 = client.sadd(slots, members.clone()).await?;
            }
            let raw = RedisRaw { client: client.clone(), slots: slots("raw") };
            let ours = RedisOurs { ours, client, slots: slots(&tag) };
            vec![
                side(Role::Floor, "raw fred, fenced script", Box::new(raw)),
                side(Role::Leasehold, OURS, Box::new(ours)),
            ]
        }
    })
}

/// leasehold's handle and the key of its claims.
struct Ours {
    backend: Arc<dyn Backend>,
    keys: Keys,
}

impl Ours {
    async fn open(opener: Opener) -> Outcome<Self> {
        let backend = opener.open().await?;
        backend.migrate().await?;
        Ok(Self { backend, keys: Keys::new(["slots"])? })
    }

    async fn claim(&self) -> Outcome<Claim> {
        let claim = self.backend.claim(&self.keys, ClaimOptions::default()).await?;
        claim.ok_or_else(|| "it was free".into())
    }
}

fn below(taken: i64) -> Outcome {
    (taken < LIMIT).then_some(()).ok_or_else(|| "a slot is free".into())
}

// --- Postgres ------------------------------------------------------------------------------

const POSTGRES_SLOTS: &str = "DROP TABLE IF EXISTS bench_slot; \
     CREATE TABLE bench_slot (id int PRIMARY KEY, taken bool NOT NULL) WITH (fillfactor = 50); \
     INSERT INTO bench_slot SELECT n, n < 10 FROM generate_series(1, 100) AS n";
const PG_COUNT: &str = "SELECT count(*) FROM bench_slot WHERE taken";
const PG_TAKE: &str = "UPDATE bench_slot SET taken = true WHERE id = 10";
const PG_FREE: &str = "UPDATE bench_slot SET taken = false WHERE id = 10";
const PG_BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = '10s'; SELECT pg_advisory_xact_lock(4711)";

struct PgPacked(PgConnection);

#[async_trait]
impl Ways for PgPacked {
    async fn bare(&mut self) -> Outcome {
        sqlx::raw_sql(PG_BEGIN).execute(&mut self.0).await?;
        sqlx::raw_sql("COMMIT").execute(&mut self.0).await?;
        Ok(())
    }

    async fn counted(&mut self) -> Outcome {
        sqlx::raw_sql(PG_BEGIN).execute(&mut self.0).await?;
        below(sqlx::query_scalar(PG_COUNT).fetch_one(&mut self.0).await?)?;
        sqlx::query(PG_TAKE).execute(&mut self.0).await?;
        sqlx::raw_sql("COMMIT").execute(&mut self.0).await?;
        Ok(())
    }

    async fn free(&mut self) -> Outcome {
        sqlx::query(PG_FREE).execute(&mut self.0).await?;
        Ok(())
    }
}

struct PgByHand(PgPool);

impl PgByHand {
    async fn begin(&self) -> Outcome<sqlx::Transaction<'static, Postgres>> {
        let mut tx = self.0.begin().await?;
        let lock = "SELECT set_config('lock_timeout', '10s', true), \
             pg_advisory_xact_lock($1), nextval('leasehold.token')";
        sqlx::query(lock).bind(4_711_i64).fetch_one(&mut *tx).await?;
        Ok(tx)
    }
}

#[async_trait]
impl Ways for PgByHand {
    async fn bare(&mut self) -> Outcome {
        Ok(self.begin().await?.commit().await?)
    }

    async fn counted(&mut self) -> Outcome {
        let mut tx = self.begin().await?;
        below(sqlx::query_scalar(PG_COUNT).fetch_one(&mut *tx).await?)?;
        sqlx::query(PG_TAKE).execute(&mut *tx).await?;
        Ok(tx.commit().await?)
    }

    async fn free(&mut self) -> Outcome {
        sqlx::query(PG_FREE).execute(&self.0).await?;
        Ok(())
    }
}

struct PgOurs(Ours, PgPool);

#[async_trait]
impl Ways for PgOurs {
    async fn bare(&mut self) -> Outcome {
        Ok(self.0.claim().await?.commit().await?)
    }

    async fn counted(&mut self) -> Outcome {
        let mut claim = self.0.claim().await?;
        let tx = claim.tx::<sqlx::Transaction<'static, Postgres>>()?;
        below(sqlx::query_scalar(PG_COUNT).fetch_one(&mut **tx).await?)?;
        sqlx::query(PG_TAKE).execute(&mut **tx).await?;
        Ok(claim.commit().await?)
    }

    async fn free(&mut self) -> Outcome {
        sqlx::query(PG_FREE).execute(&self.1).await?;
        Ok(())
    }

    async fn clear(self: Box<Self>) -> Outcome {
        sqlx::query("DROP TABLE bench_slot").execute(&self.1).await?;
        Ok(self.0.backend.close().await?)
    }
}

// --- MySQL and MariaDB ---------------------------------------------------------------------

const MYSQL_SLOTS: &str = "DROP TABLE IF EXISTS bench_slot; \
     CREATE TABLE bench_slot (id INT PRIMARY KEY, taken BOOL NOT NULL); \
     INSERT INTO bench_slot VALUES (1,1),(2,1),(3,1),(4,1),(5,1),(6,1),(7,1),(8,1),(9,1),(10,0)";
const MY_COUNT: &str = "SELECT COUNT(*) FROM bench_slot WHERE taken";
const MY_TAKE: &str = "UPDATE bench_slot SET taken = 1 WHERE id = 10";
const MY_FREE: &str = "UPDATE bench_slot SET taken = 0 WHERE id = 10";
const MY_LOCK: &str = "SELECT GET_LOCK('bench-claim', 10)";
const MY_UNLOCK: &str = "SELECT RELEASE_LOCK('bench-claim')";
const MY_TOKEN: &str = "INSERT INTO leasehold_token VALUES ()";
const MY_LEVEL: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED";

struct MyPacked(mysql_async::Conn);

impl MyPacked {
    async fn begin(&mut self) -> Outcome {
        let text = format!("{MY_LOCK}; {MY_TOKEN}; {MY_LEVEL}; START TRANSACTION");
        Ok(self.0.query_drop(text).await?)
    }

    async fn commit(&mut self) -> Outcome {
        Ok(self.0.query_drop(format!("COMMIT; {MY_UNLOCK}")).await?)
    }
}

#[async_trait]
impl Ways for MyPacked {
    async fn bare(&mut self) -> Outcome {
        self.begin().await?;
        self.commit().await
    }

    async fn counted(&mut self) -> Outcome {
        self.begin().await?;
        below(self.0.query_first(MY_COUNT).await?.ok_or("a count is a row")?)?;
        self.0.query_drop(MY_TAKE).await?;
        self.commit().await
    }

    async fn free(&mut self) -> Outcome {
        Ok(self.0.query_drop(MY_FREE).await?)
    }
}

struct MyByHand(Pool);

impl MyByHand {
    async fn begin(&self) -> Outcome<mysql_async::Conn> {
        let mut conn = self.0.get_conn().await?;
        for text in [MY_LOCK, MY_TOKEN, MY_LEVEL, "START TRANSACTION"] {
            conn.query_drop(text).await?;
        }
        Ok(conn)
    }

    async fn commit(mut conn: mysql_async::Conn) -> Outcome {
        conn.query_drop("COMMIT").await?;
        Ok(conn.query_drop(MY_UNLOCK).await?)
    }
}

#[async_trait]
impl Ways for MyByHand {
    async fn bare(&mut self) -> Outcome {
        Self::commit(self.begin().await?).await
    }

    async fn counted(&mut self) -> Outcome {
        let mut conn = self.begin().await?;
        below(conn.query_first(MY_COUNT).await?.ok_or("a count is a row")?)?;
        conn.query_drop(MY_TAKE).await?;
        Self::commit(conn).await
    }

    async fn free(&mut self) -> Outcome {
        Ok(self.0.get_conn().await?.query_drop(MY_FREE).await?)
    }
}

struct MyOurs(Ours, Pool);

#[async_trait]
impl Ways for MyOurs {
    async fn bare(&mut self) -> Outcome {
        Ok(self.0.claim().await?.commit().await?)
    }

    async fn counted(&mut self) -> Outcome {
        let mut claim = self.0.claim().await?;
        let tx = claim.tx::<Transaction<'static>>()?;
        below(tx.query_first(MY_COUNT).await?.ok_or("a count is a row")?)?;
        tx.query_drop(MY_TAKE).await?;
        Ok(claim.commit().await?)
    }

    async fn free(&mut self) -> Outcome {
        Ok(self.1.get_conn().await?.query_drop(MY_FREE).await?)
    }

    async fn clear(self: Box<Self>) -> Outcome {
        self.1.get_conn().await?.query_drop("DROP TABLE bench_slot").await?;
        Ok(self.0.backend.close().await?)
    }
}

// --- Redis and Valkey ----------------------------------------------------------------------

/// Frees the lock if it is ours, and else does nothing.
const COMMIT: &str =
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end return redis.call('DEL', KEYS[1])";
/// The same, taking a slot in the same step.
const TAKE: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end \
     redis.call('SADD', KEYS[2], ARGV[2]) return redis.call('DEL', KEYS[1])";

struct RedisRaw {
    client: Client,
    slots: String,
}

impl RedisRaw {
    const LOCK: &'static str = "{raw}:bench-claim";

    async fn lock(&self) -> Outcome<String> {
        let owner = format!("{:032x}", rand::random::<u128>());
        let expire = Some(Expiration::PX(30_000));
        let set: Option<String> =
            self.client.set(Self::LOCK, &owner, expire, Some(SetOptions::NX), false).await?;
        set.ok_or("it was free")?;
        Ok(owner)
    }

    /// Loaded by its first call, and then by its hash.
    async fn script(&self, text: &str, keys: Vec<&str>, args: Vec<String>) -> Outcome {
        let script = leasehold_redis::fred::types::scripts::Script::from_lua(text);
        let freed: i64 = script.evalsha_with_reload(&self.client, keys, args).await?;
        (freed == 1).then_some(()).ok_or_else(|| "it was held".into())
    }
}

#[async_trait]
impl Ways for RedisRaw {
    async fn bare(&mut self) -> Outcome {
        let owner = self.lock().await?;
        self.script(COMMIT, vec![Self::LOCK], vec![owner]).await
    }

    async fn counted(&mut self) -> Outcome {
        let owner = self.lock().await?;
        below(self.client.scard(&self.slots).await?)?;
        let args = vec![owner, "job-10".to_owned()];
        self.script(TAKE, vec![Self::LOCK, &self.slots], args).await
    }

    async fn free(&mut self) -> Outcome {
        Ok(self.client.srem(&self.slots, "job-10").await?)
    }

    async fn clear(self: Box<Self>) -> Outcome {
        Ok(self.client.del(&self.slots).await?)
    }
}

struct RedisOurs {
    ours: Ours,
    client: Client,
    slots: String,
}

#[async_trait]
impl Ways for RedisOurs {
    async fn bare(&mut self) -> Outcome {
        Ok(self.ours.claim().await?.commit().await?)
    }

    async fn counted(&mut self) -> Outcome {
        let mut claim = self.ours.claim().await?;
        let tx = claim.tx::<RedisTx>()?;
        below(tx.scard(self.slots.as_str()).await?.cast_signed())?;
        tx.sadd(self.slots.as_str(), "job-10")?;
        Ok(claim.commit().await?)
    }

    async fn free(&mut self) -> Outcome {
        Ok(self.client.srem(&self.slots, "job-10").await?)
    }

    async fn clear(self: Box<Self>) -> Outcome {
        let _: i64 = self.client.del(&self.slots).await?;
        Ok(self.ours.backend.close().await?)
    }
}
