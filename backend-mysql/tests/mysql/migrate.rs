//! Tables of an older version.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeExt, DedupeOptions, ErrorKind, HoldingQuery,
    Inspect, Kind, Lease, LeaseOptions,
};
use mysql_async::prelude::Queryable;

use crate::support::MySqlHarness;
use crate::{Verdict, ensure, key, keys, locked, namespace};

crate::tests!("migrate":
    older_tables_are_told_and_brought_up_to_date,
);

const DAY: Duration = Duration::from_hours(24);

/// What each version added, taken away again, the newest first.
const BACK: [&str; 2] = [
    "ALTER TABLE {}lease DROP COLUMN since, DROP COLUMN holder; \
     ALTER TABLE {}dedupe DROP COLUMN scope, DROP COLUMN name, DROP COLUMN holder; \
     ALTER TABLE {}claim DROP COLUMN connection, DROP COLUMN since, DROP COLUMN mark, \
       DROP COLUMN scope, DROP COLUMN holder; \
     DROP TABLE {}session; UPDATE {}meta SET version = 2",
    "ALTER TABLE {}lease DROP COLUMN bell, DROP COLUMN awaited; UPDATE {}meta SET version = 1",
];

/// Everything says so, `migrate` from many at once adds what is missing, and no row, owner or token
/// is lost; programs of the older version that still run go on.
async fn older_tables_are_told_and_brought_up_to_date(harness: Arc<MySqlHarness>) -> Verdict {
    for versions in [1, 2] {
        let prefix = format!("old{versions}_{:08x}_", rand::random::<u32>());
        let builder = harness.builder(&namespace()).table_prefix(&prefix);
        let first = builder.clone().connect(harness.url()).await?;
        first.migrate().await?;
        let opts = LeaseOptions::default().ttl(DAY);
        let lease = first.lease(&key("held"), opts).await?.ok_or("not free")?;
        let gone = first.lease(&key("gone"), opts).await?.ok_or("not free")?;
        let last = gone.token();
        gone.release().await?;
        ensure!(first.first_seen(&key("seen"), DAY).await?, "not the first");
        let mut conn = harness.conn().await?;
        for back in &BACK[..versions] {
            conn.query_drop(back.replace("{}", &prefix)).await?;
        }

        let backend = builder.clone().connect(harness.url()).await?;
        let errors = [
            backend.check_schema().await.err(),
            backend.lease(&key("x"), LeaseOptions::try_once()).await.err(),
            backend.first_seen(&key("x"), DAY).await.err(),
            backend.claim(&keys(&["x"]), ClaimOptions::try_once()).await.err(),
            locked(&backend, "x")
                .await
                .err()
                .map(|error| *error.downcast().expect("an error of ours")),
        ];
        for (i, error) in errors.into_iter().enumerate() {
            let error = error.ok_or_else(|| format!("question {i} worked on old tables"))?;
            ensure!(error.kind() == ErrorKind::Schema, "it said {error}");
            ensure!(error.to_string().contains("run migrate"), "it said {error}");
        }
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let another = builder.clone().connect(harness.url()).await?;
            tasks.spawn(async move { another.migrate().await });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        backend.check_schema().await?;

        let busy = backend.lease(&key("held"), LeaseOptions::try_once()).await?;
        ensure!(busy.is_none(), "a lease was lost");
        lease.renew().await?;
        let held = backend.holdings(&HoldingQuery::key(&key("held"))).await?;
        ensure!(held.len() == 1 && held[0].token == Some(lease.token()), "it shows {held:?}");
        ensure!(held[0].holder.is_none() && held[0].held_for.is_none(), "it shows {held:?}");
        let next = backend.lease(&key("gone"), LeaseOptions::try_once()).await?;
        let next = next.ok_or("not free")?;
        ensure!(next.token() > last, "{} after {last}", next.token());
        ensure!(!backend.first_seen(&key("seen"), DAY).await?, "an entry was lost");
        let query = HoldingQuery::key(&key("seen")).kinds([Kind::Dedupe]).done(true);
        ensure!(backend.holdings(&query).await?.len() == 1, "an entry is not shown");
        let entry = backend.admit(&key("new"), DedupeOptions::default()).await?;
        ensure!(entry.is_first(), "not the first");
        let query = HoldingQuery::default().kinds([Kind::Lease, Kind::Dedupe]);
        let listed = backend.holdings(&query).await?;
        ensure!(listed.len() == 3, "it lists {listed:?}");
        // as the version before writes
        let old = format!(
            "INSERT INTO {prefix}dedupe (id, owner, token, done, since, expires) \
             VALUES (REPEAT('x', 32), REPEAT('x', 16), 1, 1, 1, 1); \
             INSERT IGNORE INTO {prefix}claim (id, used) VALUES (REPEAT('x', 32), 1); \
             INSERT INTO {prefix}lease (id, scope, name, owner, token, ttl, expires, bell, awaited) \
             VALUES (REPEAT('x', 32), '', 'x', '', 1, 1, 1, 0, 0)"
        );
        conn.query_drop(old).await?;
        backend.housekeep().await?;
        lease.release().await?;
        backend.close().await?;
    }
    Ok(())
}
