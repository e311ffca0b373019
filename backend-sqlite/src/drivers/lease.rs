//! Leases: rows with an expiry by the clock of the machine's current life.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use serde_json::json;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{Sqlite, SqliteConnection};
use sqlx::{AssertSqlSafe, Row, Transaction};

use super::{bytes, hex, micros, wrong_answer};
use crate::clock::now;
use crate::error::{NAME, code, store_error};
use crate::schema::next_token;
use crate::store::Store;

/// A look that does not write, so that those who wait keep nobody from writing.
const LOOK: &str = "SELECT expires - ?4 FROM leasehold_lease \
    WHERE namespace = ?1 AND key = ?2 AND boot = ?3 AND expires > ?4 AND owner <> ?5";
/// A repeated request of the same owner keeps its token.
const ACQUIRE: &str = concat!(
    "INSERT INTO leasehold_lease AS l (namespace, key, boot, expires, owner, holder, since, token) \
     VALUES (?1, ?2, ?3, ?4 + ?6, ?5, ?7, ?4, ",
    next_token!("leasehold_token"),
    ") ON CONFLICT (namespace, key) DO UPDATE SET boot = excluded.boot, \
       expires = excluded.expires, owner = excluded.owner, \
       token = CASE WHEN l.owner = excluded.owner AND l.boot = ?3 AND l.expires > ?4 \
         THEN l.token ELSE excluded.token END, since = excluded.since, holder = excluded.holder \
     WHERE l.owner = excluded.owner OR l.boot <> ?3 OR l.expires <= ?4 RETURNING token"
);
/// The list is made into a table of its own first: joined as it is, it would be read anew for each
/// lease of the namespace.
const RENEW: &str = "WITH r AS MATERIALIZED \
    (SELECT value ->> 0 AS key, unhex(value ->> 1) AS owner, value ->> 2 AS ttl \
      FROM json_each(?4)) \
    UPDATE leasehold_lease AS l SET expires = ?3 + r.ttl FROM r \
    WHERE l.namespace = ?1 AND l.key = r.key AND l.owner = r.owner AND l.boot = ?2 \
      AND l.expires > ?3 RETURNING key, owner";
const RELEASE: &str = "DELETE FROM leasehold_lease \
    WHERE namespace = ?1 AND key = ?2 AND owner = ?3 RETURNING 1";
const PURGE: &str = "DELETE FROM leasehold_lease WHERE (namespace, key) IN \
    (SELECT namespace, key FROM leasehold_lease WHERE boot <> ?1 OR expires <= ?2 LIMIT ?3) \
    RETURNING 1";

/// The statements of leases.
#[derive(Debug)]
pub(crate) struct Leases {
    store: Arc<Store>,
    limits: LeaseLimits,
}

impl Leases {
    pub(crate) fn new(store: Arc<Store>, limits: LeaseLimits) -> Self {
        Self { store, limits }
    }

    /// Deletes expired leases, at most `batch`.
    pub(crate) async fn purge(&self, batch: u32) -> Result<u64> {
        let purged = self.store.leases.run(|| {
            let now = now()?;
            Ok(sqlx::query(PURGE).bind(now.boot).bind(now.micros).bind(batch))
        });
        Ok(purged.await?.len() as u64)
    }

    async fn look(&self, key: &Key, owner: Owner) -> Result<Option<Duration>> {
        let rows = self.store.leases.run(|| {
            let now = now()?;
            Ok(sqlx::query(LOOK)
                .bind(self.store.namespace.clone())
                .bind(key.as_str().to_owned())
                .bind(now.boot)
                .bind(now.micros)
                .bind(bytes(owner)))
        });
        let rows = rows.await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let left: i64 = row.try_get(0).map_err(store_error)?;
        Ok(Some(Duration::from_micros(left.unsigned_abs())))
    }
}

#[async_trait]
impl LeaseDriver for Leases {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        loop {
            if let Some(expires_in) = self.look(key, owner).await? {
                return Ok(LeaseTry::Busy { expires_in });
            }
            let rows = self.store.leases.run(|| {
                let now = now()?;
                Ok(sqlx::query(ACQUIRE)
                    .bind(self.store.namespace.clone())
                    .bind(key.as_str().to_owned())
                    .bind(now.boot)
                    .bind(now.micros)
                    .bind(bytes(owner))
                    .bind(micros(ttl))
                    .bind(self.store.holder.clone()))
            });
            if let Some(row) = rows.await?.first() {
                let token: i64 = row.try_get(0).map_err(store_error)?;
                return Ok(LeaseTry::Acquired(FencingToken(token.cast_unsigned())));
            }
            // somebody took it between the two: look for how long
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let list: Vec<_> = renewals
            .iter()
            .map(|renewal| json!([renewal.key.as_str(), hex(renewal.owner), micros(renewal.ttl)]))
            .collect();
        let list = json!(list).to_string();
        let rows = self.store.leases.run(|| {
            let now = now()?;
            Ok(sqlx::query(RENEW)
                .bind(self.store.namespace.clone())
                .bind(now.boot)
                .bind(now.micros)
                .bind(list.clone()))
        });
        let mut renewed = std::collections::HashSet::new();
        for row in rows.await? {
            let key: String = row.try_get(0).map_err(store_error)?;
            let owner: Vec<u8> = row.try_get(1).map_err(store_error)?;
            renewed.insert((key, owner));
        }
        let is_renewed = |renewal: &Renewal| {
            renewed.contains(&(renewal.key.as_str().to_owned(), bytes(renewal.owner)))
        };
        Ok(renewals.iter().map(is_renewed).collect())
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let rows = self.store.leases.run(|| {
            Ok(sqlx::query(RELEASE)
                .bind(self.store.namespace.clone())
                .bind(key.as_str().to_owned())
                .bind(bytes(owner)))
        });
        Ok(!rows.await?.is_empty())
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        let conn = connection(tx)?;
        // First the writer's place of the main file, in the order in which claims take them; then
        // that of the leases, which keeps the lease from being taken until the transaction ends.
        let main = format!("DELETE FROM main.{}_token WHERE one = 2", self.store.files.prefix);
        let leases = "DELETE FROM leasehold_leases.leasehold_token WHERE one = 2";
        for sql in [main.as_str(), leases] {
            let taken = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *conn).await;
            taken.map_err(|error| match code(&error) {
                Some(1) => {
                    let detail = "the transaction's connection does not see the leases: \
                        use a claim, or a transaction of the handle's pool()";
                    Error::new(ErrorKind::Unsupported, detail).with_source(error)
                }
                _ => store_error(error),
            })?;
        }
        let now = now()?;
        let sql = "SELECT count(*) FROM leasehold_leases.leasehold_lease \
            WHERE namespace = ?1 AND key = ?2 AND owner = ?3 AND boot = ?4 AND expires > ?5";
        let held = sqlx::query(sql)
            .bind(self.store.namespace.clone())
            .bind(key.as_str().to_owned())
            .bind(bytes(owner))
            .bind(now.boot)
            .bind(now.micros)
            .fetch_one(conn)
            .await
            .map_err(store_error)?;
        match held.try_get::<i64, _>(0).map_err(store_error)? {
            1 => Ok(()),
            0 => Err(Error::new(ErrorKind::Lost, "the lease is held no longer: roll back")),
            _ => Err(wrong_answer()),
        }
    }

    fn wake_id(&self, key: &Key) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        hasher.finish()
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        Ok(None)
    }

    fn limits(&self) -> LeaseLimits {
        self.limits
    }
}

/// The connection of a transaction, or one that is in a transaction.
fn connection(tx: &mut (dyn Any + Send)) -> Result<&mut SqliteConnection> {
    if tx.is::<Transaction<'static, Sqlite>>() {
        let tx = tx.downcast_mut::<Transaction<'static, Sqlite>>();
        return tx.map(|tx| &mut **tx).ok_or_else(wrong_type);
    }
    if tx.is::<PoolConnection<Sqlite>>() {
        let conn = tx.downcast_mut::<PoolConnection<Sqlite>>();
        return conn.map(|conn| &mut **conn).ok_or_else(wrong_type);
    }
    tx.downcast_mut::<SqliteConnection>().ok_or_else(wrong_type)
}

fn wrong_type() -> Error {
    let detail = "the transaction is not a sqlx::Transaction<'static, Sqlite>";
    Error::new(ErrorKind::WrongBackend, detail)
}
