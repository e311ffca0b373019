//! Dedupe: rows beside the service's own, so that a key seen in a transaction goes with it.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use leasehold_core::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use serde_json::json;
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Row};

use super::{bytes, hex, micros, wrong_answer};
use crate::error::{NAME, store_error};
use crate::file::commit;
use crate::schema::{next_token, wall_clock};
use crate::store::Store;

/// A question waits for the claims that are open: the file has one writer.
const ANSWER: Duration = Duration::from_secs(30);
/// How often an answer is asked for that a concurrent change kept from us.
const LOOKS: usize = 10;

/// What is known of keys, and since when; without writing.
const LOOK: &str = concat!(
    "SELECT key, done, since, owner FROM {p}_dedupe WHERE namespace = ?1 \
     AND key IN (SELECT value FROM json_each(?2)) AND expires_at > ",
    wall_clock!()
);
const TOKENS: &str =
    concat!("UPDATE {p}_token SET value = ?1 - 1 + ", next_token!("{p}_token"), " RETURNING value");
const ADMIT: &str = concat!(
    "INSERT INTO {p}_dedupe AS d (namespace, key, owner, done, since, expires_at, holder) \
     SELECT ?1, value ->> 0, unhex(value ->> 1), value ->> 2, ",
    wall_clock!(),
    ", ",
    wall_clock!(),
    " + (value ->> 3), ?3 FROM json_each(?2) WHERE true \
     ON CONFLICT (namespace, key) DO UPDATE SET owner = excluded.owner, done = excluded.done, \
       since = excluded.since, expires_at = excluded.expires_at, holder = excluded.holder \
     WHERE d.owner = excluded.owner OR d.expires_at <= ",
    wall_clock!(),
    " RETURNING key"
);
const COMPLETE: &str = concat!(
    "UPDATE {p}_dedupe SET since = CASE WHEN done THEN since ELSE ",
    wall_clock!(),
    " END, done = 1, expires_at = ?4 + ",
    wall_clock!(),
    " WHERE namespace = ?1 AND key = ?2 AND owner = ?3 RETURNING 1"
);
const ABANDON: &str = "DELETE FROM {p}_dedupe \
    WHERE namespace = ?1 AND key = ?2 AND owner = ?3 AND NOT done RETURNING 1";
const PURGE: &str = concat!(
    "DELETE FROM {p}_dedupe WHERE (namespace, key) IN (SELECT namespace, key FROM {p}_dedupe \
     WHERE expires_at <= ",
    wall_clock!(),
    " LIMIT ?1) RETURNING 1"
);

/// The statements of dedupe.
#[derive(Debug)]
pub(crate) struct Deduper {
    store: Arc<Store>,
    sql: Statements,
}

/// The statements, with the prefix of the tables.
#[derive(Clone)]
pub(crate) struct Statements {
    look: String,
    tokens: String,
    admit: String,
    complete: String,
    abandon: String,
    purge: String,
}

impl Statements {
    pub(crate) fn new(prefix: &str) -> Self {
        let sql = |text: &str| text.replace("{p}", prefix);
        Self {
            look: sql(LOOK),
            tokens: sql(TOKENS),
            admit: sql(ADMIT),
            complete: sql(COMPLETE),
            abandon: sql(ABANDON),
            purge: sql(PURGE),
        }
    }

    /// Whether a key is known, in the transaction of `conn`.
    pub(crate) async fn is_known(
        &self,
        conn: &mut SqliteConnection,
        namespace: &str,
        key: &Key,
    ) -> sqlx::Result<bool> {
        let known = sqlx::query(AssertSqlSafe(self.look.clone()))
            .bind(namespace.to_owned())
            .bind(json!([key.as_str()]).to_string());
        Ok(!known.fetch_all(conn).await?.is_empty())
    }

    /// Whether a key is the first, which it is then no longer, in the transaction of `conn`.
    pub(crate) async fn first_seen(
        &self,
        conn: &mut SqliteConnection,
        store: &Store,
        key: &Key,
        retain: Duration,
    ) -> sqlx::Result<bool> {
        let item = json!([[key.as_str(), hex(Owner::fresh()), 1, micros(retain)]]);
        let admitted = sqlx::query(AssertSqlSafe(self.admit.clone()))
            .bind(store.namespace.clone())
            .bind(item.to_string())
            .bind(store.holder.clone());
        Ok(!admitted.fetch_all(conn).await?.is_empty())
    }
}

impl Debug for Statements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Statements").finish_non_exhaustive()
    }
}

impl Deduper {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        let sql = Statements::new(&store.files.prefix);
        Self { store, sql }
    }

    pub(crate) fn statements(&self) -> &Statements {
        &self.sql
    }

    /// Deletes expired entries, at most `batch`.
    pub(crate) async fn purge(&self, batch: u32) -> Result<u64> {
        let purge = || Ok(sqlx::query(AssertSqlSafe(self.sql.purge.clone())).bind(batch));
        Ok(self.store.main.run(purge).await?.len() as u64)
    }

    /// What others have at the keys.
    async fn look(&self, items: &[&Admit]) -> Result<HashMap<String, AdmitAnswer>> {
        let owners: HashMap<&str, Vec<u8>> =
            items.iter().map(|item| (item.key.as_str(), bytes(item.owner))).collect();
        let keys = json!(owners.keys().collect::<Vec<_>>()).to_string();
        let rows = self.store.main.run(|| {
            Ok(sqlx::query(AssertSqlSafe(self.sql.look.clone()))
                .bind(self.store.namespace.clone())
                .bind(keys.clone()))
        });
        let mut answers = HashMap::new();
        for row in rows.await? {
            let key: String = row.try_get(0).map_err(store_error)?;
            let done: bool = row.try_get(1).map_err(store_error)?;
            let since: i64 = row.try_get(2).map_err(store_error)?;
            let owner: Vec<u8> = row.try_get(3).map_err(store_error)?;
            let at = SystemTime::UNIX_EPOCH + Duration::from_micros(since.unsigned_abs());
            if owners.get(key.as_str()) != Some(&owner) {
                let answer = match done {
                    true => AdmitAnswer::Done { at },
                    false => AdmitAnswer::InProgress { since: at },
                };
                answers.insert(key, answer);
            }
        }
        Ok(answers)
    }

    /// Admits what is free; the tokens of those that it admitted.
    async fn take(&self, items: &[&Admit]) -> Result<HashMap<String, AdmitAnswer>> {
        let list: Vec<_> = items
            .iter()
            .map(|item| {
                let done = i64::from(item.in_progress.is_none());
                let keep = micros(item.in_progress.unwrap_or(item.retain));
                json!([item.key.as_str(), hex(item.owner), done, keep])
            })
            .collect();
        let mut lent = self.store.main.begin().await?;
        let last: i64 = sqlx::query_scalar(AssertSqlSafe(self.sql.tokens.clone()))
            .bind(i64::try_from(items.len()).unwrap_or(i64::MAX))
            .fetch_one(&mut *lent)
            .await
            .map_err(store_error)?;
        let admitted = sqlx::query(AssertSqlSafe(self.sql.admit.clone()))
            .bind(self.store.namespace.clone())
            .bind(json!(list).to_string())
            .bind(self.store.holder.clone())
            .fetch_all(&mut *lent)
            .await
            .map_err(store_error)?;
        commit(&mut lent).await?;
        lent.give_back();
        let mut answers = HashMap::new();
        for (row, token) in admitted.iter().zip((0..=last).rev()) {
            let key: String = row.try_get(0).map_err(store_error)?;
            answers.insert(key, AdmitAnswer::First(FencingToken(token.cast_unsigned())));
        }
        Ok(answers)
    }

    async fn change(&self, sql: &str, key: &Key, owner: Owner, keep: Option<i64>) -> Result<bool> {
        let rows = self.store.main.run(|| {
            let query = sqlx::query(AssertSqlSafe(sql.to_owned()))
                .bind(self.store.namespace.clone())
                .bind(key.as_str().to_owned())
                .bind(bytes(owner));
            Ok(match keep {
                Some(keep) => query.bind(keep),
                None => query,
            })
        });
        Ok(!rows.await?.is_empty())
    }
}

#[async_trait]
impl DedupeDriver for Deduper {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let mut answers = HashMap::new();
        for _ in 0..LOOKS {
            let open = |answers: &HashMap<String, AdmitAnswer>| -> Vec<&Admit> {
                items.iter().filter(|item| !answers.contains_key(item.key.as_str())).collect()
            };
            answers.extend(self.look(&open(&answers)).await?);
            let free = open(&answers);
            if !free.is_empty() {
                answers.extend(self.take(&free).await?);
            }
            if open(&answers).is_empty() {
                let answer = |item: &Admit| answers.get(item.key.as_str()).copied();
                return items.iter().map(|item| answer(item).ok_or_else(wrong_answer)).collect();
            }
        }
        let detail = "the key comes and goes too fast for an answer";
        Err(Error::new(ErrorKind::Unavailable, detail))
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        self.change(&self.sql.complete, key, owner, Some(micros(retain))).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        self.change(&self.sql.abandon, key, owner, None).await
    }

    fn answer_limit(&self) -> Duration {
        ANSWER
    }
}
