//! Events that must count once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, DedupeExt, DedupeOptions, Key};
use leasehold_peers::Outcome;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::prelude::*;
use mysql_async::prelude::Queryable;
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgConnection};

use super::{OURS, add, micros};
use crate::contenders::{Opener, tcp};
use crate::record::{Better, Record, Role, Unit};
use crate::scene::Scene;
use crate::turns::{Meter, at};

/// What they are remembered for.
const RETAIN: Duration = Duration::from_secs(3_600);
/// So many at once.
const MANY: usize = 1_000;

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let record = |title: &str| Record::new("dedupe", title, Unit::Micros, Better::Lower);
    let raw = "By hand: an insert that ignores a conflict, or SET NX PX, without a time to take \
               over, a token or a holder.";
    let mut new = record("first seen, new").note(raw);
    let mut known = record("first seen, known").note(raw);
    let mut many = record("1,000 events at once, each").note(
        "admit_many. By hand: one insert of as many rows, one pipeline on Redis, without a time to \
         take over, a token or a holder.",
    );
    let mut sides = sides(scene).await?;
    let meter = Meter::of(&scene.server);
    meter.pin();
    let runs = scene.pick(5, 100, 200);
    for round in 0..=scene.pick(1, 9, 31) {
        for step in 0..sides.len() {
            let at_side = (round + step) % sides.len();
            let (role, name, side) = &mut sides[at_side];
            let base = format!("{:016x}", rand::random::<u64>());
            let (mut fresh, mut again) = (Vec::new(), Vec::new());
            for (times, expected) in [(&mut fresh, true), (&mut again, false)] {
                for n in 0..runs {
                    let key = format!("{base}-{n}");
                    let start = Instant::now();
                    let first = side.first_seen(&key).await?;
                    times.push(micros(start.elapsed()));
                    (first == expected).then_some(()).ok_or("it counts once")?;
                }
            }
            let keys = (0..MANY).map(|n| format!("{base}-many-{n}")).collect();
            let start = Instant::now();
            let firsts = side.many(keys).await?;
            let took = micros(start.elapsed()) / MANY as f64;
            (firsts == MANY).then_some(()).ok_or("they were new")?;
            add(&mut new, round, *role, name, at(fresh, 0.5));
            add(&mut known, round, *role, name, at(again, 0.5));
            add(&mut many, round, *role, name, took);
        }
    }
    meter.unpin();
    for (_, _, side) in sides {
        side.clear().await?;
    }
    Ok(vec![new, known, many])
}

type Side = (Role, &'static str, Box<dyn Ways>);

/// How it tells new events from known ones.
#[async_trait]
trait Ways: Send {
    async fn first_seen(&mut self, key: &str) -> Outcome<bool>;
    /// How many of them are new.
    async fn many(&mut self, keys: Vec<String>) -> Outcome<usize>;
    /// Leaves nothing behind.
    async fn clear(self: Box<Self>) -> Outcome;
}

async fn sides(scene: &Scene) -> Outcome<Vec<Side>> {
    let url = scene.server.url();
    let (name, raw, opener): (_, Box<dyn Ways>, _) = match scene.kind() {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
            let options: PgConnectOptions = url.parse()?;
            let mut conn = options.disable_statement_logging().connect().await?;
            let table = "DROP TABLE IF EXISTS bench_event; \
                 CREATE TABLE bench_event (id text PRIMARY KEY, until timestamptz NOT NULL)";
            sqlx::raw_sql(table).execute(&mut conn).await?;
            ("raw sqlx", Box::new(Pg(conn)), Opener::Postgres(url))
        }
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
            let mut conn = mysql_async::Conn::from_url(tcp(&url)).await?;
            let table = "DROP TABLE IF EXISTS bench_event; \
                 CREATE TABLE bench_event (id VARBINARY(200) PRIMARY KEY, until BIGINT NOT NULL)";
            conn.query_drop(table).await?;
            ("raw mysql_async", Box::new(My(conn)), Opener::MySql(tcp(&url)))
        }
        _ => {
            let client = Builder::from_config(Config::from_url(&url)?).build()?;
            client.init().await?;
            ("raw fred", Box::new(Redis(client)), Opener::Redis(url))
        }
    };
    let ours = opener.open().await?;
    ours.migrate().await?;
    Ok(vec![(Role::Floor, name, raw), (Role::Leasehold, OURS, Box::new(Ours(ours)))])
}

struct Ours(Arc<dyn Backend>);

#[async_trait]
impl Ways for Ours {
    async fn first_seen(&mut self, key: &str) -> Outcome<bool> {
        Ok(self.0.first_seen(&Key::new(key)?, RETAIN).await?)
    }

    async fn many(&mut self, keys: Vec<String>) -> Outcome<usize> {
        let keys = keys.into_iter().map(Key::new).collect::<Result<Vec<_>, _>>()?;
        let opts = DedupeOptions::default().retain(RETAIN).done_at_once();
        let admitted = self.0.admit_many(&keys, opts).await?;
        Ok(admitted.iter().filter(|admission| admission.is_first()).count())
    }

    async fn clear(self: Box<Self>) -> Outcome {
        Ok(self.0.close().await?)
    }
}

struct Pg(PgConnection);

#[async_trait]
impl Ways for Pg {
    async fn first_seen(&mut self, key: &str) -> Outcome<bool> {
        let insert = "INSERT INTO bench_event VALUES ($1, now() + interval '1 hour') \
             ON CONFLICT DO NOTHING RETURNING 1";
        let row = sqlx::query(insert).bind(key).fetch_optional(&mut self.0).await?;
        Ok(row.is_some())
    }

    async fn many(&mut self, keys: Vec<String>) -> Outcome<usize> {
        let insert = "INSERT INTO bench_event \
             SELECT id, now() + interval '1 hour' FROM unnest($1) AS id \
             ON CONFLICT DO NOTHING RETURNING id";
        Ok(sqlx::query(insert).bind(keys).fetch_all(&mut self.0).await?.len())
    }

    async fn clear(mut self: Box<Self>) -> Outcome {
        sqlx::raw_sql("DROP TABLE bench_event").execute(&mut self.0).await?;
        Ok(())
    }
}

struct My(mysql_async::Conn);

#[async_trait]
impl Ways for My {
    async fn first_seen(&mut self, key: &str) -> Outcome<bool> {
        let insert = "INSERT IGNORE INTO bench_event VALUES (?, UNIX_TIMESTAMP() + 3600)";
        self.0.exec_drop(insert, (key,)).await?;
        Ok(self.0.affected_rows() == 1)
    }

    async fn many(&mut self, keys: Vec<String>) -> Outcome<usize> {
        let rows: Vec<String> =
            keys.iter().map(|key| format!("('{key}',UNIX_TIMESTAMP()+3600)")).collect();
        self.0
            .query_drop(format!("INSERT IGNORE INTO bench_event VALUES {}", rows.join(",")))
            .await?;
        Ok(self.0.affected_rows() as usize)
    }

    async fn clear(mut self: Box<Self>) -> Outcome {
        Ok(self.0.query_drop("DROP TABLE bench_event").await?)
    }
}

struct Redis(Client);

#[async_trait]
impl Ways for Redis {
    async fn first_seen(&mut self, key: &str) -> Outcome<bool> {
        let key = format!("bench:event:{key}");
        let expire = Some(Expiration::PX(RETAIN.as_millis() as i64));
        let set: Option<String> = self.0.set(key, "1", expire, Some(SetOptions::NX), false).await?;
        Ok(set.is_some())
    }

    async fn many(&mut self, keys: Vec<String>) -> Outcome<usize> {
        let pipeline = self.0.pipeline();
        for key in keys {
            let key = format!("bench:event:{key}");
            let expire = Some(Expiration::PX(RETAIN.as_millis() as i64));
            let _: () = pipeline.set(key, "1", expire, Some(SetOptions::NX), false).await?;
        }
        let set: Vec<Option<String>> = pipeline.all().await?;
        Ok(set.into_iter().flatten().count())
    }

    async fn clear(self: Box<Self>) -> Outcome {
        // they expire by themselves
        Ok(())
    }
}
