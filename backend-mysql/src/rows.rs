//! Claims by row locks, where user-level locks are absent or local to a node (Galera, group
//! replication, ProxySQL, Vitess): one row per key, locked until the transaction ends.

use std::time::Duration;

use leasehold_core::{Deadline, Error, ErrorKind, FencingToken, Result};
use mysql_async::Transaction;
use mysql_async::prelude::Queryable;

use crate::claim::{ANSWER, no_answer};
use crate::error::{code, mapped, server_code};
use crate::store::{NOW, Store, retried};

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
    // it ends the first statement's transaction in any case
    let text = if missing.is_empty() {
        "COMMIT AND CHAIN".to_owned()
    } else {
        format!(
            "INSERT IGNORE INTO {table} (id, used) VALUES {}; COMMIT AND CHAIN",
            missing.join(",")
        )
    };
    retried!(tx.query_drop(&text)).map_err(mapped)
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
    let rows = format!(
        "SELECT id FROM {} WHERE id IN ({}) ORDER BY id FOR UPDATE",
        store.tables.claim,
        ids.join(",")
    );
    loop {
        // the server counts whole seconds: the rest of a wait is spent with tries
        let seconds = deadline.remaining().as_secs().min(SLICE);
        let text = if seconds == 0 {
            format!("{rows} NOWAIT")
        } else {
            // the session's own value is put back before the caller gets the transaction
            format!(
                "SET @leasehold_wait = @@innodb_lock_wait_timeout, \
                 SESSION innodb_lock_wait_timeout = {seconds}; {rows}"
            )
        };
        let limit = Duration::from_secs(seconds) + ANSWER;
        let outcome = tokio::time::timeout(limit, locked(tx, text)).await;
        let outcome = outcome.map_err(|_| no_answer())?;
        if seconds > 0 {
            let restore = "SET SESSION innodb_lock_wait_timeout = @leasehold_wait";
            tx.query_drop(restore).await.map_err(mapped)?;
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

/// The next number of the sequence. It is not reused when the transaction is rolled back; only a
/// server that crashes within about a second of that may give it again.
pub(crate) async fn token(store: &Store, tx: &mut Transaction<'static>) -> Result<FencingToken> {
    let text = format!("INSERT INTO {} VALUES ()", store.tables.token);
    tx.query_drop(text).await.map_err(mapped)?;
    tx.last_insert_id()
        .map(FencingToken)
        .ok_or_else(|| Error::new(ErrorKind::Backend, "the server gave no number of the sequence"))
}
