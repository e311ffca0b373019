//! Leases: one row per key.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource};
use leasehold_core::{Deadline, Error, ErrorKind, FencingToken, Key, LossReason, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Transaction};

use crate::bell::Bell;
use crate::error::{BACKEND, code, is_gone, is_transient, mapped, server_code};
use crate::names::Kind;
use crate::store::{DEAD, FIRST_TOKEN, NOW, Store, Tables};
use crate::wake::Lookout;

/// Takes, renews and frees leases.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) store: Arc<Store>,
    kind: Kind,
    limits: LeaseLimits,
    acquire: String,
    release: String,
    has_renewing: AtomicBool,
    bell: Bell,
    lookout: Arc<Lookout>,
}

impl Leases {
    /// With `push`, waiters are woken by user-level locks.
    pub(crate) fn new(store: Arc<Store>, kind: Kind, limits: LeaseLimits, push: bool) -> Self {
        let Tables { lease, meta, .. } = &store.tables;
        let holder = &store.holder;
        // The last insert id carries the answer: twice the token and one if it is ours, otherwise
        // twice the microseconds until it expires. Assignments are done from left to right, and see
        // those before them: after that of the owner, it is ours if it was taken. The shared lock
        // on the floor keeps a purge from deleting the row between the read and the insert. A row
        // that somebody keeps fails the statement at once: it is not waited for on a connection.
        let (at_once, look) = if store.is_maria() {
            ("SET STATEMENT innodb_lock_wait_timeout = 0 FOR ", String::new())
        } else {
            let look = format!("SELECT 1 FROM {lease} WHERE id = ? LIMIT 1 FOR UPDATE NOWAIT");
            ("", format!("LEFT JOIN ({look}) free ON TRUE "))
        };
        let acquire = format!(
            "{at_once}INSERT INTO {lease} (id, scope, name, owner, token, ttl, expires, bell, awaited, \
                since, holder) \
             SELECT ?, ?, ?, ?, (LAST_INSERT_ID({FIRST_TOKEN} * 2 + 1) - 1) DIV 2, ?, {NOW} + ?, \
                ?, 0, {NOW}, {holder} \
             FROM {meta} {look}WHERE {meta}.id = 1 LOCK IN SHARE MODE \
             ON DUPLICATE KEY UPDATE \
             token = IF({lease}.owner = ? AND {lease}.expires > {NOW}, \
                (LAST_INSERT_ID({lease}.token * 2 + 1) - 1) DIV 2, \
                IF({lease}.expires <= {NOW}, \
                    (LAST_INSERT_ID(({lease}.token + 1) * 2 + 1) - 1) DIV 2, \
                    {lease}.token + 0 * LAST_INSERT_ID(({lease}.expires - {NOW}) * 2))), \
             owner = IF({lease}.expires <= {NOW}, ?, {lease}.owner), \
             ttl = IF({lease}.owner = ?, ?, {lease}.ttl), \
             bell = IF({lease}.owner = ?, ?, {lease}.bell), \
             awaited = IF({lease}.owner = ?, {lease}.awaited, GREATEST({lease}.awaited, ?)), \
             since = IF({lease}.owner = ?, {NOW}, {lease}.since), \
             holder = IF({lease}.owner = ?, {holder}, {lease}.holder), \
             expires = IF({lease}.owner = ?, {NOW} + ?, {lease}.expires)"
        );
        // the row keeps the token until it is purged; the last insert id tells that it was awaited
        let free = "owner = '', expires = 0, awaited = 0 * LAST_INSERT_ID(awaited)";
        let release = if store.is_maria() {
            format!("{at_once}UPDATE {lease} SET {free} WHERE id = ? AND owner = ?")
        } else {
            format!(
                "UPDATE (SELECT id FROM {lease} WHERE id = ? AND owner = ? \
                 LIMIT 1 FOR UPDATE NOWAIT) free \
                 STRAIGHT_JOIN {lease} FORCE INDEX (PRIMARY) ON {lease}.id = free.id SET {free}"
            )
        };
        let bell = if push { Bell::new(store.clone()) } else { Bell::none() };
        let lookout = Arc::new(Lookout::new(store.clone(), limits.max_poll));
        let has_renewing = AtomicBool::new(false);
        Self { store, kind, limits, acquire, release, has_renewing, bell, lookout }
    }

    /// Closes what wakes waiters.
    pub(crate) fn end(&self) {
        self.bell.end();
        self.lookout.end();
    }

    pub(crate) fn row(&self, key: &Key) -> [u8; 32] {
        self.store.row(self.kind, key)
    }

    /// One for a try; with the first, one for renewals is opened as well, lest a short ttl passes while
    /// the first renewal waits for it.
    async fn connection(&self) -> Result<Conn> {
        let Store { own, renewing, .. } = &*self.store;
        if self.has_renewing.swap(true, Ordering::Relaxed) {
            return own.get_conn().await.map_err(mapped);
        }
        // if that one fails, the renewal will tell
        let (conn, _) = tokio::join!(own.get_conn(), renewing.get_conn());
        conn.map_err(mapped)
    }

    /// Marks it as awaited if it `waits` and somebody else holds it.
    async fn take(&self, key: &Key, owner: Owner, ttl: Duration, waits: bool) -> Result<LeaseTry> {
        let id = self.row(key);
        let bytes = owner_bytes(owner);
        let ttl = micros(ttl);
        let bell = self.bell.number();
        let mut params = vec![
            id.into_value(),
            self.store.namespace.as_bytes().into_value(),
            key.as_str().as_bytes().into_value(),
            bytes.into_value(),
            ttl.into(),
            ttl.into(),
            bell.into(),
            bytes.into_value(),
            bytes.into_value(),
            bytes.into_value(),
            ttl.into(),
            bytes.into_value(),
            bell.into(),
            bytes.into_value(),
            u8::from(waits).into(),
            bytes.into_value(),
            bytes.into_value(),
            bytes.into_value(),
            ttl.into(),
        ];
        if !self.store.is_maria() {
            params.insert(LOOKED_AT, id.into_value());
        }
        let params = mysql_async::Params::Positional(params);
        let (mut pauses, patience) = (PAUSES.into_iter(), Deadline::after(PATIENCE));
        let (mut tries, mut dead) = (0, 0);
        let answer = loop {
            let mut conn = self.connection().await?;
            match conn.exec_drop(self.acquire.as_str(), params.clone()).await {
                Ok(()) => break conn.last_insert_id(),
                // if it was taken all the same, the owner is known again
                Err(error) if is_gone(&error) && dead < DEAD => dead += 1,
                Err(error) if server_code(&error) == Some(code::DEADLOCK) && tries < 10 => {
                    tries += 1;
                }
                Err(error) if is_kept(&error) => {
                    drop(conn); // others need it meanwhile
                    let Some(pause) = pauses.next().filter(|_| !patience.has_passed()) else {
                        self.floor_is_free().await?;
                        // somebody's `verify` keeps the row
                        return Ok(LeaseTry::Busy { expires_in: KEPT });
                    };
                    tokio::time::sleep(jittered(pause)).await;
                }
                Err(error) => return Err(mapped(error)),
            }
        };
        match answer {
            Some(answer) if answer % 2 == 1 => {
                self.bell.hang();
                Ok(LeaseTry::Acquired(FencingToken(answer / 2)))
            }
            Some(answer) => {
                if waits {
                    self.lookout.look_for(id, self.wake_id(key));
                }
                let expires_in = Duration::from_micros(answer / 2);
                Ok(LeaseTry::Busy { expires_in })
            }
            None => {
                Err(Error::new(ErrorKind::Schema, "the row of the floor is missing: run migrate"))
            }
        }
    }

    /// Fails if the floor's row is kept, by a purge on a stalled server, say: then what is in the way of
    /// a try is no holder.
    async fn floor_is_free(&self) -> Result<()> {
        let meta = &self.store.tables.meta;
        let how = if self.store.is_maria() { "LOCK IN SHARE MODE" } else { "FOR SHARE" };
        let look = format!("SELECT 1 FROM {meta} WHERE id = 1 {how} NOWAIT");
        let mut conn = self.store.own.get_conn().await.map_err(mapped)?;
        match conn.query_drop(look).await {
            Err(error) if is_kept(&error) => {
                let detail = "a purge keeps the row of the floor: the server is slow, or a \
                    transaction that changed it is open";
                Err(Error::new(ErrorKind::Unavailable, detail).with_source(error))
            }
            looked => looked.map_err(mapped),
        }
    }
}

/// The place of the parameter by which MySQL looks whether somebody keeps the row.
const LOOKED_AT: usize = 7;

/// In milliseconds, before each further try for a row that somebody keeps: others only for a moment,
/// an open transaction for longer. (It may also be the floor's, which a purge raises.)
const PAUSES: [u64; 20] =
    [5, 5, 5, 5, 10, 10, 10, 10, 20, 20, 50, 50, 50, 50, 100, 100, 100, 100, 100, 100];
/// No further try after so long, where each takes long itself.
const PATIENCE: Duration = Duration::from_millis(800);
/// Who waits for a lease whose row is kept tries again after so long.
const KEPT: Duration = Duration::from_millis(200);

/// Whether somebody else keeps a row that was not waited for.
fn is_kept(error: &mysql_async::Error) -> bool {
    matches!(server_code(error), Some(code::LOCK_WAIT_TIMEOUT | code::LOCK_NOWAIT))
}

/// Those who try for one row should not do so at the same time again.
fn jittered(pause: u64) -> Duration {
    Duration::from_millis(pause).mul_f64(rand::random_range(0.5..=1.0))
}

/// For a column of 16 bytes.
pub(crate) fn owner_bytes(owner: Owner) -> [u8; 16] {
    owner.0.to_be_bytes()
}

pub(crate) fn micros(time: Duration) -> i64 {
    // options bound it to ten years
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 4)
}

#[async_trait]
impl LeaseDriver for Leases {
    fn backend(&self) -> &'static str {
        BACKEND
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.take(key, owner, ttl, false).await
    }

    async fn acquire_waiting(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.take(key, owner, ttl, true).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        self.renew_each(renewals).await?.into_iter().collect()
    }

    async fn renew_each(&self, renewals: &[Renewal]) -> Result<Vec<Result<bool>>> {
        self.renew_batch(renewals).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let params = (self.row(key).to_vec(), owner_bytes(owner).to_vec());
        let (mut pauses, patience) = (PAUSES.into_iter(), Deadline::after(PATIENCE));
        let (mut dead, mut unknown) = (0, None);
        loop {
            let mut conn = self.store.own.get_conn().await.map_err(mapped)?;
            match conn.exec_drop(self.release.as_str(), params.clone()).await {
                Ok(()) if conn.affected_rows() > 0 => {
                    if conn.last_insert_id().is_some() {
                        self.bell.ring();
                    }
                    return Ok(true);
                }
                Ok(()) => {
                    let Some(error) = unknown else {
                        return Ok(false);
                    };
                    // the one whose answer is lost may have freed it
                    self.bell.ring();
                    return Err(mapped(error));
                }
                Err(error) if is_gone(&error) && dead < DEAD => {
                    dead += 1;
                    unknown = Some(error);
                }
                Err(error) if is_transient(&error) => {
                    drop(conn); // others need it meanwhile
                    let Some(pause) = pauses.next().filter(|_| !patience.has_passed()) else {
                        return Err(mapped(error));
                    };
                    tokio::time::sleep(jittered(pause)).await;
                }
                Err(error) => return Err(mapped(error)),
            }
        }
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        let tx = tx.downcast_mut::<Transaction<'static>>().ok_or_else(|| {
            let detail = "the transaction is not a mysql_async::Transaction<'static>";
            Error::new(ErrorKind::WrongBackend, detail)
        })?;
        let lease = &self.store.tables.lease;
        let check = format!(
            "SELECT expires > {NOW} FROM {lease} WHERE id = ? AND owner = ? LOCK IN SHARE MODE"
        );
        let params = (self.row(key).to_vec(), owner_bytes(owner).to_vec());
        let live: Option<bool> = tx.exec_first(check, params).await.map_err(mapped)?;
        match live {
            Some(true) => Ok(()),
            other => {
                let reason = match other {
                    Some(_) => LossReason::Expired,
                    None => LossReason::Taken,
                };
                Err(Error::new(ErrorKind::Lost, format!("cannot verify: {}", reason.as_str())))
            }
        }
    }

    fn wake_id(&self, key: &Key) -> u64 {
        let id = self.row(key);
        id.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        Ok(Some(Box::new(self.lookout.clone().listen())))
    }

    fn limits(&self) -> LeaseLimits {
        self.limits
    }
}

/// Bytes as a parameter.
pub(crate) trait IntoValue {
    fn into_value(self) -> mysql_async::Value;
}

impl<T: AsRef<[u8]>> IntoValue for T {
    fn into_value(self) -> mysql_async::Value {
        mysql_async::Value::Bytes(self.as_ref().to_vec())
    }
}
