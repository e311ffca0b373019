//! Dedupe: one row per key.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use leasehold_core::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Params, Transaction, Value};

use crate::error::{BACKEND, code, is_transient, mapped, server_code};
use crate::lease::{IntoValue, micros, owner_bytes};
use crate::names::{Kind, hex};
use crate::store::{FIRST_TOKEN, NOW, Store};

/// Rows that one statement admits.
const CHUNK: usize = 500;

/// Admits keys.
#[derive(Debug)]
pub(crate) struct Dedupes {
    store: Arc<Store>,
    admit: String,
}

impl Dedupes {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        let admit = admit_one(&store);
        Self { store, admit }
    }

    /// Each key's row after the insert says whose it is.
    async fn admit_many(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let table = &self.store.tables.dedupe;
        let meta = &self.store.tables.meta;
        let (scope, holder) = (self.store.scope(), &self.store.holder);
        let ids: Vec<_> = items.iter().map(|item| self.id(&item.key)).collect();
        // in one order, so that calls with common keys do not deadlock
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|i| ids[*i]);
        let mut values = Vec::with_capacity(items.len());
        for i in order {
            let (item, id) = (&items[i], hex(&ids[i]));
            let (owner, done) =
                (hex(&owner_bytes(item.owner)), u8::from(item.in_progress.is_none()));
            let keep = micros(item.in_progress.unwrap_or(item.retain));
            let name = hex(item.key.as_str().as_bytes());
            values.push(format!(
                "({id}, {scope}, {name}, {holder}, {owner}, (SELECT {FIRST_TOKEN} FROM {meta} WHERE id = 1 LOCK IN SHARE MODE), \
                 {done}, {NOW}, {NOW} + {keep})"
            ));
        }
        let list: Vec<String> = ids.iter().map(|id| hex(id)).collect();
        let text = format!(
            "INSERT INTO {table} (id, scope, name, holder, owner, token, done, since, expires) \
             VALUES {} \
             ON DUPLICATE KEY UPDATE \
             token = IF({table}.expires <= {NOW}, {table}.token + 1, {table}.token), \
             owner = IF({table}.expires <= {NOW}, VALUES(owner), {table}.owner), \
             since = IF({table}.owner = VALUES(owner), VALUES(since), since), \
             done = IF({table}.owner = VALUES(owner), VALUES(done), done), \
             expires = IF({table}.owner = VALUES(owner), VALUES(expires), {table}.expires), \
             scope = VALUES(scope), name = VALUES(name), \
             holder = IF({table}.owner = VALUES(owner), VALUES(holder), {table}.holder); \
             SELECT id, owner, token, done, since FROM {table} WHERE id IN ({})",
            values.join(","),
            list.join(",")
        );
        let rows: Vec<Row> = self.store.rows(&text).await?;
        let rows: HashMap<Vec<u8>, Row> =
            rows.into_iter().map(|row| (row.0.clone(), row)).collect();
        let mut answers = Vec::with_capacity(items.len());
        for (item, id) in items.iter().zip(&ids) {
            answers.push(match rows.get(id.as_slice()) {
                Some((_, owner, token, done, since)) => {
                    if *owner == owner_bytes(item.owner) {
                        AdmitAnswer::First(FencingToken(*token))
                    } else {
                        seen(*done, *since)
                    }
                }
                // it was purged in between
                None => self.admit_single(item).await?,
            });
        }
        Ok(answers)
    }

    async fn admit_single(&self, item: &Admit) -> Result<AdmitAnswer> {
        let params = admit_params(
            &self.id(&item.key),
            &item.key,
            item.owner,
            item.in_progress.is_none(),
            item.in_progress.unwrap_or(item.retain),
        );
        answered(self.store.exec(&self.admit, params).await?.last_id)
    }

    fn id(&self, key: &Key) -> [u8; 32] {
        self.store.row(Kind::Dedupe, key)
    }
}

type Row = (Vec<u8>, Vec<u8>, u64, bool, u64);

/// As the statement that takes a lease: the last insert id is twice the token and one if it is
/// ours; otherwise four times the microseconds since when, and two if it is done.
fn admit_one(store: &Store) -> String {
    let (table, meta) = (&store.tables.dedupe, &store.tables.meta);
    let (scope, holder) = (store.scope(), &store.holder);
    format!(
        "INSERT INTO {table} (id, scope, name, holder, owner, token, done, since, expires) \
         SELECT ?, {scope}, ?, {holder}, ?, (LAST_INSERT_ID({FIRST_TOKEN} * 2 + 1) - 1) DIV 2, ?, {NOW}, {NOW} + ? \
         FROM {meta} WHERE {meta}.id = 1 LOCK IN SHARE MODE \
         ON DUPLICATE KEY UPDATE \
         token = IF({table}.owner = ? AND {table}.expires > {NOW}, \
            (LAST_INSERT_ID({table}.token * 2 + 1) - 1) DIV 2, \
            IF({table}.expires <= {NOW}, \
                (LAST_INSERT_ID(({table}.token + 1) * 2 + 1) - 1) DIV 2, \
                {table}.token + 0 * LAST_INSERT_ID(({table}.since * 2 + {table}.done) * 2))), \
         owner = IF({table}.expires <= {NOW}, ?, {table}.owner), \
         since = IF({table}.owner = ?, {NOW}, {table}.since), \
         done = IF({table}.owner = ?, ?, {table}.done), \
         expires = IF({table}.owner = ?, {NOW} + ?, {table}.expires), \
         scope = {scope}, name = ?, holder = IF({table}.owner = ?, {holder}, {table}.holder)"
    )
}

fn admit_params(id: &[u8; 32], key: &Key, owner: Owner, done: bool, keep: Duration) -> Params {
    let name: Value = key.as_str().as_bytes().into_value();
    let owner: Value = owner_bytes(owner).into_value();
    let keep = micros(keep);
    Params::Positional(vec![
        id.into_value(),
        name.clone(),
        owner.clone(),
        done.into(),
        keep.into(),
        owner.clone(),
        owner.clone(),
        owner.clone(),
        owner.clone(),
        done.into(),
        owner.clone(),
        keep.into(),
        name,
        owner,
    ])
}

fn answered(answer: Option<u64>) -> Result<AdmitAnswer> {
    match answer {
        Some(answer) if answer % 2 == 1 => Ok(AdmitAnswer::First(FencingToken(answer / 2))),
        Some(answer) => Ok(seen(answer / 2 % 2 == 1, answer / 4)),
        None => Err(Error::new(ErrorKind::Schema, "the row of the floor is missing: run migrate")),
    }
}

fn seen(done: bool, since: u64) -> AdmitAnswer {
    let time = SystemTime::UNIX_EPOCH + Duration::from_micros(since);
    if done { AdmitAnswer::Done { at: time } } else { AdmitAnswer::InProgress { since: time } }
}

/// Inside of the caller's transaction, which a duplicate does not end.
///
/// A key that is known is only read, so that its owner can complete it meanwhile. Inserts of one
/// key by several transactions deadlock when the first is rolled back, which would end the caller's
/// transaction: so an empty row is committed before, and the transaction only updates it.
pub(crate) async fn first_seen(
    store: &Store,
    tx: &mut Transaction<'static>,
    key: &Key,
    retain: Duration,
) -> Result<bool> {
    let (table, id) = (&store.tables.dedupe, store.row(Kind::Dedupe, key));
    let read = format!("SELECT expires > {NOW} FROM {table} WHERE id = ?");
    // By the primary key, as everybody locks rows. MariaDB may find a row of a small table by its
    // expiry rather, and would lock it in the other order: that of a deadlock.
    let take = format!(
        "UPDATE {table} FORCE INDEX (PRIMARY) SET token = token + 1, owner = ?, done = 1, since = {NOW}, \
         expires = {NOW} + ?, holder = {} WHERE id = ? AND expires <= {NOW}",
        store.holder
    );
    let owner = owner_bytes(Owner::fresh());
    loop {
        let params = (id.as_slice(),);
        match tx.exec_first(&*read, params).await.map_err(mapped)? {
            Some(true) => return Ok(false),
            Some(false) => {}
            None => make_room(store, &id, key).await?,
        }
        // it waits for another transaction that is at the same key
        let params = (owner.as_slice(), micros(retain), id.as_slice());
        tx.exec_drop(&*take, params).await.map_err(mapped)?;
        if tx.affected_rows() > 0 {
            return Ok(true);
        }
        // that one has committed, or a purge took the row: look again
    }
}

/// Commits a row that says nothing yet.
async fn make_room(store: &Store, id: &[u8; 32], key: &Key) -> Result<()> {
    let (table, meta) = (&store.tables.dedupe, &store.tables.meta);
    let insert = format!(
        "INSERT IGNORE INTO {table} (id, scope, name, owner, token, done, since, expires) \
         SELECT {}, {}, {}, '', {FIRST_TOKEN}, 0, 0, 0 FROM {meta} WHERE id = 1 LOCK IN SHARE MODE",
        hex(id),
        store.scope(),
        hex(key.as_str().as_bytes())
    );
    let mut conn = store.own.get_conn().await.map_err(mapped)?;
    loop {
        match conn.query_drop(&insert).await {
            Ok(()) => return Ok(()),
            // somebody else's row is there, and is being taken
            Err(error) if server_code(&error) == Some(code::LOCK_WAIT_TIMEOUT) => return Ok(()),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(mapped(error)),
        }
    }
}

#[async_trait]
impl DedupeDriver for Dedupes {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        if let [item] = items {
            return Ok(vec![self.admit_single(item).await?]);
        }
        let mut answers = Vec::with_capacity(items.len());
        for chunk in items.chunks(CHUNK) {
            answers.extend(self.admit_many(chunk).await?);
        }
        Ok(answers)
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        let table = &self.store.tables.dedupe;
        let complete = format!(
            "UPDATE {table} SET since = IF(done, since, {NOW}), expires = {NOW} + ?, done = 1 \
             WHERE id = ? AND owner = ?"
        );
        let (id, owner) = (self.id(key).to_vec(), owner_bytes(owner).to_vec());
        let params = (micros(retain), id.clone(), owner.clone());
        if self.store.exec(&complete, params.into()).await?.changed > 0 {
            return Ok(true);
        }
        // a row that did not change is not counted
        let still =
            format!("SELECT 1 FROM {table} WHERE id = {} AND owner = {}", hex(&id), hex(&owner));
        Ok(!self.store.rows::<u8>(&still).await?.is_empty())
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        let table = &self.store.tables.dedupe;
        // the row keeps the token until it is purged
        let forget = format!(
            "UPDATE {table} SET owner = '', expires = 0 WHERE id = ? AND owner = ? AND NOT done"
        );
        let pair = (self.id(key).to_vec(), owner_bytes(owner).to_vec());
        Ok(self.store.exec(&forget, pair.into()).await?.changed > 0)
    }
}
