//! Claims by row locks, where user-level locks are absent or local to a node (Galera, group
//! replication, `ProxySQL`, Vitess): one row per key, locked until the transaction ends.

use std::fmt::Write;
use std::time::Duration;

use leasehold_core::{Deadline, Error, ErrorKind, FencingToken, Result};
use mysql_async::Transaction;
use mysql_async::prelude::Queryable;

use crate::claim::{ANSWER, no_answer};
use crate::error::{code, mapped, server_code};
use crate::store::{NOW, Store, Tables};

/// The longest single wait on the server, in seconds.
const SLICE: u64 = 10;

/// Creates the rows that are missing, and commits that.
pub(crate) async fn create(
    store: &Store,
    tx: &mut Transaction<'static>,
    ids: &[String],
) -> Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let table = &store.tables.claim;
    let found = format!("SELECT LOWER(HEX(id)) FROM {table} WHERE id IN ({})", ids.join(","));
    let found: Vec<String> = tx.query(found).await.map_err(mapped)?;
    let missing: Vec<String> = ids
        .iter()
        .filter(|id| !found.iter().any(|found| id.contains(found.as_str())))
        .map(|id| format!("({id}, {NOW})"))
        .collect();
    if missing.is_empty() {
        return tx.query_drop("COMMIT AND CHAIN").await.map_err(mapped);
    }
    // Somebody else may create and lock one meanwhile, for which the insert would wait: as short
    // as the server can.
    let shortest = u8::from(!store.is_maria());
    let text = format!(
        "{}; INSERT IGNORE INTO {table} (id, used) VALUES {}",
        set_wait(shortest.into()),
        missing.join(",")
    );
    let inserted = retried_deadlock(tx, &text).await;
    let restore = format!("{RESTORE_WAIT}; COMMIT AND CHAIN");
    match inserted {
        // a row that is waited for is there
        Err(error) if server_code(&error) != Some(code::LOCK_WAIT_TIMEOUT) => Err(mapped(error)),
        _ => tx.query_drop(restore).await.map_err(mapped),
    }
}

async fn retried_deadlock(tx: &mut Transaction<'static>, text: &str) -> mysql_async::Result<()> {
    for tries in 1.. {
        match tx.query_drop(text).await {
            Err(error) if server_code(&error) == Some(code::DEADLOCK) && tries < 10 => {
                // the server has ended the transaction, which had done nothing else
                crate::store::pause(tries, &error).await;
                let anew = format!(
                    "{RESTORE_WAIT}; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                     START TRANSACTION"
                );
                tx.query_drop(anew).await?;
            }
            outcome => return outcome,
        }
    }
    Ok(())
}

/// The session's own value is put back before the caller gets the transaction.
const RESTORE_WAIT: &str = "SET SESSION innodb_lock_wait_timeout = @leasehold_wait";

/// Remembers the session's own value once, and sets another one.
fn set_wait(seconds: u64) -> String {
    format!(
        "SET @leasehold_wait = @@innodb_lock_wait_timeout, \
         SESSION innodb_lock_wait_timeout = {seconds}"
    )
}

/// Locks the rows in order; false if the deadline passes, and the transaction must be rolled back.
pub(crate) async fn lock(
    store: &Store,
    tx: &mut Transaction<'static>,
    ids: &[String],
    deadline: Deadline,
) -> Result<bool> {
    if ids.is_empty() {
        return Ok(true);
    }
    // a statement per row, in order: a list of ids might be looked up by a scan, which would lock
    // the rows of others
    let table = &store.tables.claim;
    let rows = |how: &str| -> String {
        let lock = |id: &String| format!("SELECT id FROM {table} WHERE id = {id} FOR UPDATE{how}");
        ids.iter().map(lock).collect::<Vec<_>>().join("; ")
    };
    loop {
        // the server counts whole seconds: the rest of a wait is spent with tries
        let seconds = deadline.remaining().as_secs().min(SLICE);
        let text = if seconds == 0 {
            rows(" NOWAIT")
        } else {
            format!("{}; {}", set_wait(seconds), rows(""))
        };
        let limit = Duration::from_secs(seconds) + ANSWER;
        let outcome = tokio::time::timeout(limit, locked(tx, text)).await;
        let outcome = outcome.map_err(|_| no_answer())?;
        if seconds > 0 {
            tx.query_drop(RESTORE_WAIT).await.map_err(mapped)?;
        }
        match outcome {
            Ok(count) if count == ids.len() => return Ok(true),
            // a purge took one
            Ok(_) => create(store, tx, ids).await?,
            Err(error)
                if matches!(
                    server_code(&error),
                    Some(code::LOCK_NOWAIT | code::LOCK_WAIT_TIMEOUT)
                ) =>
            {
                if deadline.has_passed() {
                    return Ok(false);
                }
                if seconds == 0 {
                    let pause = Duration::from_millis(rand::random_range(5..25));
                    tokio::time::sleep(pause.min(deadline.remaining())).await;
                }
            }
            Err(error) => return Err(mapped(error)),
        }
    }
}

/// How many rows were locked.
async fn locked(tx: &mut Transaction<'static>, text: String) -> mysql_async::Result<usize> {
    let mut result = tx.query_iter(text).await?;
    let mut count = 0;
    while !result.is_empty() {
        count += result.collect::<mysql_async::Row>().await?.len();
    }
    result.drop_result().await?;
    Ok(count)
}

/// Writes into the locked rows whose they are, which others can read before it is committed, and
/// gives the next number of the sequence. It is not reused when the transaction is rolled back; only a
/// server that crashes within about a second of that may give it again.
pub(crate) async fn token(
    store: &Store,
    tx: &mut Transaction<'static>,
    ids: &[String],
) -> Result<FencingToken> {
    let Tables { claim, token, .. } = &store.tables;
    let set = format!(
        "connection = CONNECTION_ID(), since = {NOW}, mark = {}, scope = {}, holder = {}",
        rand::random::<u64>(),
        store.scope(),
        store.holder
    );
    // a statement per row, as for the locks
    let mut text = String::new();
    for id in ids {
        // writing to a string cannot fail
        let _ = write!(text, "UPDATE {claim} SET {set} WHERE id = {id}; ");
    }
    let _ = write!(text, "INSERT INTO {token} VALUES ()");
    tx.query_drop(text).await.map_err(mapped)?;
    tx.last_insert_id()
        .map(FencingToken)
        .ok_or_else(|| Error::new(ErrorKind::Backend, "the server gave no number of the sequence"))
}
