//! A session that the server ends: when does its holder know?

use std::time::{Duration, Instant};

use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Key, Lease, LeaseOptions, LockOptions, NamedLock};
use leasehold_mysql::MySqlBackend;
use leasehold_peers::Outcome;
use leasehold_postgres::{LockKind, PostgresBackend};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::prelude::*;
use tokio::time::timeout;

use super::OURS;
use super::admin::Admin;
use crate::record::{Better, Record, Role, Unit};
use crate::scene::Scene;

/// Longer than every stated bound.
const LIMIT: Duration = Duration::from_secs(30);
/// Of a lease whose key is deleted.
const TTL: Duration = Duration::from_secs(3);

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let mut admin = Admin::connect(&scene.server).await?;
    let is_redis = matches!(admin, Admin::Redis(_));
    let note = if is_redis {
        "From the deletion of the lease's key on the server to `lost()`: it is noticed by the \
         renewal, at a third of the ttl, here 3 s."
    } else {
        "From the server's ending the session (pg_terminate_backend, KILL) to `lost()`. The peers \
         tell nobody."
    };
    let mut record = Record::new("loss", "loss noticed", Unit::Millis, Better::Lower).note(note);
    for _ in 0..if is_redis { scene.pick(1, 3, 10) } else { scene.pick(1, 10, 30) } {
        let took = lose(scene, &mut admin).await?.as_secs_f64() * 1e3;
        record.add(Role::Leasehold, OURS, took);
    }
    Ok(vec![record])
}

async fn lose(scene: &Scene, admin: &mut Admin) -> Outcome<Duration> {
    let url = scene.server.url();
    let key = Key::new(format!("lost-{:08x}", rand::random::<u32>()))?;
    let opts = LockOptions::try_once();
    match scene.kind() {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
            let backend = PostgresBackend::builder().namespace("bench").connect(&url).await?;
            backend.migrate().await?;
            let guard = backend.lock(&key, opts).await?.ok_or("it is free")?;
            let id = backend.lock_id(LockKind::Session, &key);
            let start = Instant::now();
            let kill = "SELECT pg_terminate_backend(pid) FROM pg_locks \
                 WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ExclusiveLock' \
                 AND ((classid::int8 << 32) | objid::int8) =";
            admin.run(format!("{kill} {id}")).await?;
            timeout(LIMIT, guard.lost().wait()).await?;
            Ok(start.elapsed())
        }
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
            let backend = MySqlBackend::builder().namespace("bench").connect(&url).await?;
            backend.migrate().await?;
            let guard = backend.lock(&key, opts).await?.ok_or("it is free")?;
            let name = backend.lock_name(&key).replace('\'', "''");
            let Admin::MySql(conn) = admin else { return Err("it is no MySQL".into()) };
            let id: Option<u64> = mysql_async::prelude::Queryable::query_first(
                conn,
                format!("SELECT IS_USED_LOCK('{name}')"),
            )
            .await?;
            let id = id.ok_or("the lock is held")?;
            let start = Instant::now();
            admin.run(format!("KILL {id}")).await?;
            timeout(LIMIT, guard.lost().wait()).await?;
            Ok(start.elapsed())
        }
        _ => {
            let backend = RedisBackend::builder().namespace("bench").connect(&url).await?;
            let opts = LeaseOptions::try_once().ttl(TTL);
            let guard = backend.lease(&key, opts).await?.ok_or("it is free")?;
            let Admin::Redis(client) = admin else { return Err("it is no Redis".into()) };
            let keys: Vec<String> = client
                .custom(leasehold_redis::fred::cmd!("KEYS"), vec![format!("*{}", key.as_str())])
                .await?;
            let start = Instant::now();
            let _: i64 = client.del(keys).await?;
            timeout(LIMIT, guard.lost().wait()).await?;
            Ok(start.elapsed())
        }
    }
}
