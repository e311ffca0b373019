//! Leases: rows with an owner and an expiry by the server's clock.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, Postgres};
use sqlx::{Row, Transaction};

use super::listen::{PgWakes, channel};
use crate::error::{NAME, code, store_error};
use crate::keys::Use;
use crate::sql::{Arg, Names, Statement};
use crate::store::Store;

/// A row that another transaction has locked is waited for so long.
const ROW_WAIT: Duration = Duration::from_millis(500);
/// How often an answer is asked for that a concurrent change kept from us.
const LOOKS: usize = 5;

#[derive(Debug)]
pub(crate) struct Leases {
    store: Arc<Store>,
    limits: LeaseLimits,
    acquire: Statement,
    renew: Statement,
    release: Statement,
    verify: Statement,
    channel: String,
}

/// What a statement sets for itself: it waits for rows at most `$1` ms, and what it promised is
/// on disk when it is answered.
pub(crate) const CONFIG: &str = "config AS MATERIALIZED (\
      SELECT set_config('lock_timeout', $1, true), set_config('synchronous_commit', \
      CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
      ELSE current_setting('synchronous_commit') END, true))";

impl Leases {
    pub(crate) fn new(store: Arc<Store>, limits: LeaseLimits) -> Self {
        let names: &Names = &store.names;
        // What an update sets is evaluated after the wait for the row. What is inserted is not:
        // somebody could take the lease and release it between our drawing a token and the
        // insertion. So who finds it free first takes the key's gate, to the end of the statement,
        // and then draws. A lease that is seen to be held is not locked.
        let acquire = format!(
            "WITH {CONFIG}, gate AS MATERIALIZED (SELECT pg_advisory_xact_lock($7) FROM config \
               WHERE NOT EXISTS (SELECT 1 FROM {{lease}} h WHERE h.id = $2 \
                 AND h.owner <> $5 AND h.expires_at > clock_timestamp())), \
             taken AS (INSERT INTO {{lease}} AS l \
               (id, namespace, key, owner, expires_at, holder, since, token) \
               SELECT $2, $3, $4, $5, clock_timestamp() + $6 * interval '1 microsecond', \
                 $8, clock_timestamp(), {{next_token}} FROM gate \
               ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, \
                 expires_at = clock_timestamp() + $6 * interval '1 microsecond', \
                 holder = excluded.holder, since = clock_timestamp(), token = excluded.token \
               WHERE l.expires_at <= clock_timestamp() OR l.owner = excluded.owner \
               RETURNING l.token) \
             SELECT token, 0::int8 AS left_micros FROM taken UNION ALL \
             SELECT NULL, greatest(0, extract(epoch FROM expires_at - clock_timestamp()) \
               * 1000000)::int8 FROM {{lease}} WHERE id = $2 AND NOT EXISTS (SELECT 1 FROM taken)"
        );
        // Rows are locked in one order, so that two handles' renewals do not deadlock.
        let renew = format!(
            "WITH {CONFIG}, held AS MATERIALIZED (SELECT l.id, w.owner, w.ttl, w.place \
               FROM unnest($2::bytea[], $3::bytea[], $4::int8[]) WITH ORDINALITY \
                 AS w (id, owner, ttl, place) \
               JOIN {{lease}} l ON l.id = w.id AND l.owner = w.owner, config \
               WHERE l.expires_at > clock_timestamp() ORDER BY l.id FOR NO KEY UPDATE OF l) \
             UPDATE {{lease}} l SET expires_at = clock_timestamp() + h.ttl * interval '1 microsecond' \
             FROM held h WHERE l.id = h.id AND l.owner = h.owner \
               AND l.expires_at > clock_timestamp() RETURNING h.place"
        );
        let release = format!(
            "WITH {CONFIG}, freed AS (DELETE FROM {{lease}} l USING config \
               WHERE l.id = $2 AND l.owner = $3 RETURNING 1) \
             SELECT pg_notify($4, $5) FROM freed"
        );
        let verify = "SELECT 1 FROM {lease} WHERE id = $1 AND owner = $2 \
             AND expires_at > clock_timestamp() FOR KEY SHARE";
        Self {
            limits,
            acquire: names.statement(&acquire),
            renew: names.statement(&renew),
            release: names.statement(&release),
            verify: names.statement(verify),
            channel: channel(&store),
            store,
        }
    }

    fn id(&self, key: &Key) -> Vec<u8> {
        self.store.keys.row(Use::Lease, key)
    }
}

fn bytes(owner: Owner) -> [u8; 16] {
    owner.0.to_be_bytes()
}

pub(super) fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

pub(crate) fn millis(time: Duration) -> Arg<'static> {
    Arg::Text(time.as_millis().max(1).to_string())
}

#[async_trait]
impl LeaseDriver for Leases {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        let (id, owner) = (self.id(key), bytes(owner));
        let namespace = self.store.keys.namespace().as_bytes();
        let mode = self.store.server().await?.mode();
        for _ in 0..LOOKS {
            let args = vec![
                millis(ROW_WAIT),
                Arg::Bytes(&id),
                Arg::Bytes(namespace),
                Arg::Bytes(key.as_str().as_bytes()),
                Arg::Bytes(&owner),
                Arg::Int(micros(ttl)),
                Arg::Int(self.store.keys.gate(key)),
                Arg::Bytes(self.store.holder_bytes()),
            ];
            let rows = match self.store.run_as(mode, &self.acquire, args).await {
                // somebody writes under it: it was held a moment ago
                Err(error) if code(&error).as_deref() == Some("55P03") => break,
                rows => rows.map_err(store_error)?,
            };
            // no row: who holds it came or went after our snapshot was taken
            let Some(row) = rows.first() else { continue };
            if let Some(token) = row.try_get::<Option<i64>, _>(0).map_err(store_error)? {
                return Ok(LeaseTry::Acquired(FencingToken(token.cast_unsigned())));
            }
            let left: i64 = row.try_get(1).map_err(store_error)?;
            let expires_in = Duration::from_micros(left.unsigned_abs());
            return Ok(LeaseTry::Busy { expires_in });
        }
        Ok(LeaseTry::Busy { expires_in: Duration::from_millis(20) })
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let shortest = renewals.iter().map(|renewal| renewal.ttl).min().unwrap_or_default();
        let args = vec![
            millis((shortest / 4).min(self.limits.answer)),
            Arg::ByteLists(renewals.iter().map(|renewal| self.id(&renewal.key)).collect()),
            Arg::ByteLists(renewals.iter().map(|renewal| bytes(renewal.owner).into()).collect()),
            Arg::Ints(renewals.iter().map(|renewal| micros(renewal.ttl)).collect()),
        ];
        let rows = self.store.run(&self.renew, args).await?;
        let mut ours = vec![false; renewals.len()];
        for row in rows {
            let place: i64 = row.try_get(0).map_err(store_error)?;
            if let Some(ours) = ours.get_mut(place.unsigned_abs() as usize - 1) {
                *ours = true;
            }
        }
        Ok(ours)
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let (id, owner) = (self.id(key), bytes(owner));
        let args = vec![
            millis(self.limits.answer),
            Arg::Bytes(&id),
            Arg::Bytes(&owner),
            Arg::Text(self.channel.clone()),
            Arg::Text(self.wake_id(key).to_string()),
        ];
        let rows = self.store.run(&self.release, args).await?;
        Ok(!rows.is_empty())
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        let mode = self.store.server().await?.mode();
        let (id, owner) = (self.id(key), bytes(owner));
        let args = vec![Arg::Bytes(&id), Arg::Bytes(&owner)];
        let rows = self.verify.run(connection(tx)?, mode, args).await.map_err(store_error)?;
        if rows.is_empty() {
            let detail = "the lease is held no longer: roll back";
            return Err(Error::new(ErrorKind::Lost, detail));
        }
        Ok(())
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.store.keys.wake_id(key)
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        let server = self.store.session_server().await;
        match server {
            // behind a pooler nobody can listen: waiters look by themselves
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(None),
            server => drop(server?),
        }
        let wakes = PgWakes::open(&self.store, &self.channel).await?;
        Ok(wakes.map(|wakes| Box::new(wakes) as Box<dyn WakeSource>))
    }

    fn limits(&self) -> LeaseLimits {
        self.limits
    }
}

/// The connection of a transaction, or one that is in a transaction.
fn connection(tx: &mut (dyn Any + Send)) -> Result<&mut PgConnection> {
    if tx.is::<Transaction<'static, Postgres>>() {
        let tx = tx.downcast_mut::<Transaction<'static, Postgres>>();
        return tx.map(|tx| &mut **tx).ok_or_else(wrong_type);
    }
    if tx.is::<PoolConnection<Postgres>>() {
        let conn = tx.downcast_mut::<PoolConnection<Postgres>>();
        return conn.map(|conn| &mut **conn).ok_or_else(wrong_type);
    }
    tx.downcast_mut::<PgConnection>().ok_or_else(wrong_type)
}

fn wrong_type() -> Error {
    let detail = "the transaction is not a sqlx::Transaction<'static, Postgres>";
    Error::new(ErrorKind::WrongBackend, detail)
}
