//! Dedupe: rows that say that a key is in progress or done.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use leasehold_core::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};

use super::lease::{CONFIG, micros, millis};
use crate::error::{NAME, store_error};
use crate::keys::Use;
use crate::sql::{Arg, Mode, Names, Statement};
use crate::store::Store;

/// A row that an open transaction has inserted is waited for so long; less than the engine waits.
const ROW_WAIT: Duration = Duration::from_millis(4_500);
/// How often an answer is asked for that a concurrent change kept from us.
const LOOKS: usize = 10;

#[derive(Debug)]
pub(crate) struct Deduper {
    store: Arc<Store>,
    admit: Statement,
    /// As `admit`, for one key. Its arguments are no arrays, whose lengths the server plans for anew
    /// each time, which takes it longer than all the rest.
    admit_one: Statement,
    complete: Statement,
    abandon: Statement,
}

impl Deduper {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        let names: &Names = &store.names;
        // Rows are inserted in one order, so that two calls do not deadlock. One that is seen to
        // be another's is not locked.
        let admit = |want: &str| {
            format!(
                "WITH {CONFIG}, want AS MATERIALIZED ({want}), \
             taken AS (INSERT INTO {{dedupe}} AS d \
               (id, namespace, key, owner, done, since, expires_at, holder) \
               SELECT w.id, $3, w.key, w.owner, w.done = 1, now.at, \
                 now.at + w.keep * interval '1 microsecond', $8 \
               FROM want w, (SELECT clock_timestamp() AS at) now \
               WHERE NOT EXISTS (SELECT 1 FROM {{dedupe}} h WHERE h.id = w.id \
                 AND h.owner <> w.owner AND h.expires_at > clock_timestamp()) ORDER BY w.id \
               ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, done = excluded.done, \
                 since = clock_timestamp(), holder = excluded.holder, \
                 expires_at = clock_timestamp() + interval '1 second' \
                   * extract(epoch FROM excluded.expires_at - excluded.since) \
               WHERE d.expires_at <= clock_timestamp() OR d.owner = excluded.owner \
               RETURNING d.id, {{next_token}} AS token) \
             SELECT w.place, t.token, d.done, (extract(epoch FROM d.since) * 1000000)::int8 \
             FROM want w LEFT JOIN taken t ON t.id = w.id \
             LEFT JOIN {{dedupe}} d ON d.id = w.id AND t.id IS NULL"
            )
        };
        let many = "SELECT w.* \
             FROM unnest($2::bytea[], $4::bytea[], $5::bytea[], $6::int8[], $7::int8[]) \
               WITH ORDINALITY AS w (id, key, owner, done, keep, place), config ORDER BY id";
        let one = "SELECT $2::bytea AS id, $4::bytea AS key, $5::bytea AS owner, \
             $6::int8 AS done, $7::int8 AS keep, 1::int8 AS place FROM config";
        let complete = format!(
            "WITH {CONFIG} UPDATE {{dedupe}} d SET done = true, \
               since = CASE WHEN d.done THEN d.since ELSE clock_timestamp() END, \
               expires_at = clock_timestamp() + $4 * interval '1 microsecond' \
             FROM config WHERE d.id = $2 AND d.owner = $3 RETURNING 1"
        );
        let abandon = format!(
            "WITH {CONFIG} DELETE FROM {{dedupe}} d USING config \
             WHERE d.id = $2 AND d.owner = $3 AND NOT d.done RETURNING 1"
        );
        Self {
            admit: names.statement(&admit(many)),
            admit_one: names.statement(&admit(one)),
            complete: names.statement(&complete),
            abandon: names.statement(&abandon),
            store,
        }
    }

    /// Asks for some of the items; none for one whose row came or went meanwhile.
    async fn ask(&self, items: &[&Admit]) -> Result<Vec<Option<AdmitAnswer>>> {
        let row = |item: &Admit| self.store.keys.row(Use::Dedupe, &item.key);
        let done = |item: &Admit| i64::from(item.in_progress.is_none());
        let keep = |item: &Admit| micros(item.in_progress.unwrap_or(item.retain));
        let namespace = Arg::Bytes(self.store.keys.namespace().as_bytes());
        let holder = Arg::Bytes(self.store.holder_bytes());
        let rows = if let [item] = items {
            let (id, owner) = (row(item), bytes(item.owner));
            let key = item.key.as_str().as_bytes();
            let args = vec![
                millis(ROW_WAIT),
                Arg::Bytes(&id),
                namespace,
                Arg::Bytes(key),
                Arg::Bytes(&owner),
                Arg::Int(done(item)),
                Arg::Int(keep(item)),
                holder,
            ];
            self.store.run(&self.admit_one, args).await?
        } else {
            let key = |item: &Admit| item.key.as_str().as_bytes().to_vec();
            let args = vec![
                millis(ROW_WAIT),
                Arg::ByteLists(items.iter().map(|item| row(item)).collect()),
                namespace,
                Arg::ByteLists(items.iter().map(|item| key(item)).collect()),
                Arg::ByteLists(items.iter().map(|item| bytes(item.owner).to_vec()).collect()),
                Arg::Ints(items.iter().map(|item| done(item)).collect()),
                Arg::Ints(items.iter().map(|item| keep(item)).collect()),
                holder,
            ];
            self.store.run(&self.admit, args).await?
        };
        let mut answers = vec![None; items.len()];
        for row in rows {
            let (place, answer) = read(&row).map_err(store_error)?;
            if let Some(place) = answers.get_mut(place) {
                *place = answer;
            }
        }
        Ok(answers)
    }

    async fn run(
        &self,
        statement: &Statement,
        key: &Key,
        owner: Owner,
        more: Option<Arg<'_>>,
    ) -> Result<bool> {
        let id = self.store.keys.row(Use::Dedupe, key);
        let owner = bytes(owner);
        let mut args = vec![millis(ROW_WAIT), Arg::Bytes(&id), Arg::Bytes(&owner)];
        args.extend(more);
        let rows = self.store.run(statement, args).await?;
        Ok(!rows.is_empty())
    }
}

fn bytes(owner: Owner) -> [u8; 16] {
    owner.0.to_be_bytes()
}

fn read(row: &PgRow) -> sqlx::Result<(usize, Option<AdmitAnswer>)> {
    let place: i64 = row.try_get(0)?;
    let place = place.unsigned_abs() as usize - 1;
    if let Some(token) = row.try_get::<Option<i64>, _>(1)? {
        return Ok((place, Some(AdmitAnswer::First(FencingToken(token.cast_unsigned())))));
    }
    let (done, since): (Option<bool>, Option<i64>) = (row.try_get(2)?, row.try_get(3)?);
    let answer = done.zip(since).map(|(done, since)| {
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(since.unsigned_abs());
        if done { AdmitAnswer::Done { at } } else { AdmitAnswer::InProgress { since: at } }
    });
    Ok((place, answer))
}

#[async_trait]
impl DedupeDriver for Deduper {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let mut answers: Vec<Option<AdmitAnswer>> = vec![None; items.len()];
        for _ in 0..LOOKS {
            let open: Vec<usize> = (0..items.len()).filter(|i| answers[*i].is_none()).collect();
            let asked: Vec<&Admit> = open.iter().map(|i| &items[*i]).collect();
            for (i, answer) in open.iter().zip(self.ask(&asked).await?) {
                answers[*i] = answer;
            }
            if answers.iter().all(Option::is_some) {
                return Ok(answers.into_iter().flatten().collect());
            }
        }
        let detail = "the key comes and goes too fast for an answer";
        Err(Error::new(ErrorKind::Unavailable, detail))
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        self.run(&self.complete, key, owner, Some(Arg::Int(micros(retain)))).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        self.run(&self.abandon, key, owner, None).await
    }
}

/// Dedupe in a transaction of the caller's: it sets nothing, and a conflict is no error.
pub(crate) fn first_seen_statement(names: &Names) -> Statement {
    names.statement(
        "INSERT INTO {dedupe} AS d (id, namespace, key, owner, done, since, expires_at, holder) \
         SELECT $1, $2, $3, $4, true, clock_timestamp(), \
           clock_timestamp() + $5 * interval '1 microsecond', $6 \
         WHERE NOT EXISTS (SELECT 1 FROM {dedupe} h WHERE h.id = $1 \
           AND h.expires_at > clock_timestamp()) \
         ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, done = true, \
           since = clock_timestamp(), holder = excluded.holder, \
           expires_at = clock_timestamp() + $5 * interval '1 microsecond' \
         WHERE d.expires_at <= clock_timestamp() RETURNING 1",
    )
}

pub(super) async fn first_seen(
    tx: &mut PgConnection,
    statement: &Statement,
    mode: Mode,
    store: &Store,
    key: &Key,
    retain: Duration,
) -> Result<bool> {
    let id = store.keys.row(Use::Dedupe, key);
    let owner = bytes(Owner::fresh());
    let args = vec![
        Arg::Bytes(&id),
        Arg::Bytes(store.keys.namespace().as_bytes()),
        Arg::Bytes(key.as_str().as_bytes()),
        Arg::Bytes(&owner),
        Arg::Int(micros(retain)),
        Arg::Bytes(store.holder_bytes()),
    ];
    let rows = statement.run(tx, mode, args).await.map_err(store_error)?;
    Ok(!rows.is_empty())
}
