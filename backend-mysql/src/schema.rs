//! The tables: created, checked, purged.

use leasehold_core::{Error, ErrorKind, Housekeeping, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, TxOpts};

use crate::error::{code, is_transient, mapped, server_code};
use crate::store::{NOW, Store, Tables, retried};
use crate::threads::Threads;

/// The statements that [`migrate`](leasehold_core::Backend::migrate) runs, with the prefix
/// `leasehold_`.
pub const SCHEMA: &str = include_str!("schema.sql");
/// What this program knows.
pub(crate) const VERSION: u32 = 3;
/// From which version on an update is needed no more, its table, and what it adds. Statements of
/// older programs that still run find a default.
const UPDATES: &[(u32, &str, &str)] = &[
    (
        2,
        "lease",
        "ADD COLUMN bell BIGINT UNSIGNED NOT NULL DEFAULT 0, \
         ADD COLUMN awaited TINYINT UNSIGNED NOT NULL DEFAULT 0",
    ),
    (
        3,
        "lease",
        "ADD COLUMN since BIGINT NOT NULL DEFAULT 0, \
         ADD COLUMN holder VARBINARY(160) NOT NULL DEFAULT ''",
    ),
    (
        3,
        "dedupe",
        "ADD COLUMN scope VARBINARY(200), ADD COLUMN name VARBINARY(1024), \
         ADD COLUMN holder VARBINARY(160) NOT NULL DEFAULT ''",
    ),
    (
        3,
        "claim",
        "ADD COLUMN connection BIGINT UNSIGNED NOT NULL DEFAULT 0, \
         ADD COLUMN since BIGINT NOT NULL DEFAULT 0, \
         ADD COLUMN mark BIGINT UNSIGNED NOT NULL DEFAULT 0, \
         ADD COLUMN scope VARBINARY(200) NOT NULL DEFAULT '', \
         ADD COLUMN holder VARBINARY(160) NOT NULL DEFAULT ''",
    ),
];
/// Rows that one statement deletes.
const BATCH: u64 = 1_000;
/// The sequence keeps its last rows, and the row of a claim lives so long; microseconds.
const KEEP_NUMBERS: u64 = 1_000;
const KEEP_CLAIM: u64 = 24 * 60 * 60 * 1_000_000;
/// A session that has just been opened may not have its marker yet.
const KEEP_SESSION: u64 = 60 * 1_000_000;
/// A connection of a pool that does not say for so long whose it is is not in use, or has a claim
/// that takes longer: that is one of the connections which can be listed, if it is our user's.
const KEEP_POOLED: u64 = 2 * crate::claim::INTRODUCED.as_micros() as u64;

/// Creates what is missing. Every statement can be run again and side by side with itself.
pub(crate) async fn migrate(store: &Store) -> Result<()> {
    let mut conn = store.connect().await?;
    // what waits for a table's open transactions keeps everybody else from it: not for long
    let limit = "SET SESSION lock_wait_timeout = 2, innodb_lock_wait_timeout = 2";
    conn.query_drop(limit).await.map_err(mapped)?;
    let text: String = SCHEMA
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .collect::<Vec<_>>()
        .join("\n")
        .replace("`leasehold_", &format!("`{}", store.tables.prefix));
    for statement in text.split(';').map(str::trim).filter(|text| !text.is_empty()) {
        retried!(conn.query_drop(statement)).map_err(mapped)?;
    }
    update(&mut conn, &store.tables).await?;
    check(&mut conn, &store.tables).await?;
    drop(conn.disconnect().await); // it has done its work
    Ok(())
}

/// Adds what an older version lacks; the rows stay. Of several that do so at once, one does.
async fn update(conn: &mut Conn, tables: &Tables) -> Result<()> {
    let Some(found) = version(conn, tables).await?.filter(|found| *found < VERSION) else {
        return Ok(());
    };
    for (_, table, columns) in UPDATES.iter().filter(|(to, ..)| *to > found) {
        let add = format!("ALTER TABLE `{}{table}` {columns}", tables.prefix);
        match retried!(conn.query_drop(&add)) {
            Err(error) if server_code(&error) == Some(code::COLUMN_EXISTS) => {}
            added => added.map_err(mapped)?,
        }
    }
    let done = format!(
        "UPDATE {} SET version = {VERSION} WHERE id = 1 AND version < {VERSION}",
        tables.meta
    );
    retried!(conn.query_drop(&done)).map_err(mapped)
}

/// Whether the tables are there, and of the version that this program knows.
///
/// # Errors
/// [`ErrorKind::Schema`] if not.
pub(crate) async fn check(conn: &mut Conn, tables: &Tables) -> Result<()> {
    match version(conn, tables).await? {
        Some(VERSION) => Ok(()),
        Some(other) => Err(another(other)),
        None => Err(Error::new(ErrorKind::Schema, "the tables are missing: run migrate")),
    }
}

/// As [`check`], but missing tables and older ones are fine: they may be migrated yet.
pub(crate) async fn check_version(conn: &mut Conn, tables: &Tables) -> Result<()> {
    match version(conn, tables).await? {
        Some(other) if other > VERSION => Err(another(other)),
        _ => Ok(()),
    }
}

fn another(version: u32) -> Error {
    let todo = if version < VERSION { "run migrate" } else { "upgrade the program" };
    let detail =
        format!("the tables are of version {version}, this program knows {VERSION}: {todo}");
    Error::new(ErrorKind::Schema, detail)
}

pub(crate) async fn version(conn: &mut Conn, tables: &Tables) -> Result<Option<u32>> {
    let text = format!("SELECT version FROM {} WHERE id = 1", tables.meta);
    match conn.query_first(text).await {
        Err(error)
            if matches!(server_code(&error), Some(code::NO_SUCH_TABLE | code::TABLE_DENIED)) =>
        {
            Ok(None)
        }
        other => other.map_err(mapped),
    }
}

/// Deletes expired rows in batches. The floor is raised above their tokens first: an insert that
/// comes after them reads it, and one that has read it before is waited for.
pub(crate) async fn housekeep(store: &Store) -> Result<Housekeeping> {
    let leases = purge(store, &store.tables.lease).await?;
    let dedupe = purge(store, &store.tables.dedupe).await?;
    purge_numbers(store).await?;
    purge_claims(store).await?;
    purge_sessions(store).await?;
    Ok(Housekeeping::new(leases, dedupe))
}

/// How often a purge tries for the floor, and the pause between.
const FLOOR_TRIES: u32 = 200;
const FLOOR_PAUSE: std::time::Duration = std::time::Duration::from_millis(5);

async fn purge(store: &Store, table: &str) -> Result<u64> {
    let meta = &store.tables.meta;
    let read = format!(
        "SELECT {NOW}, MAX(token), (SELECT floor FROM {meta} WHERE id = 1) FROM {table} \
         WHERE expires <= {NOW}"
    );
    let found: Vec<(i64, Option<u64>, Option<u64>)> = store.rows(&read).await?;
    let Some(&(now, Some(highest), floor)) = found.first() else {
        return Ok(0);
    };
    if floor.is_none_or(|floor| floor < highest) && !raise_floor(store, highest).await? {
        tracing::debug!(table, "the purge is left to the next one: the floor is in use");
        return Ok(0);
    }
    // one that was taken again since then has a later expiry or, if freed again, a higher token
    let expired = format!("expires <= {now} AND token <= {highest}");
    purge_rows(store, table, &expired).await
}

/// Raises the floor; false if that was not to be had soon.
///
/// It does not queue for the row: who takes a lease that a transaction keeps shares it for as long as
/// it waits, and everybody else who takes a lease would queue behind the one that wants it alone.
async fn raise_floor(store: &Store, highest: u64) -> Result<bool> {
    let meta = &store.tables.meta;
    let raise = format!("UPDATE {meta} SET floor = GREATEST(floor, {highest}) WHERE id = 1");
    for _ in 0..FLOOR_TRIES {
        let mut conn = store.own.get_conn().await.map_err(mapped)?;
        let raised = if store.is_maria() {
            // in one statement: those who take leases do not wait for the row there
            let at_once = format!("SET STATEMENT innodb_lock_wait_timeout = 0 FOR {raise}");
            conn.query_drop(at_once).await
        } else {
            locked_and_raised(&mut conn, meta, &raise).await
        };
        match raised {
            Ok(()) => return Ok(true),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(mapped(error)),
        }
        drop(conn); // others need it meanwhile
        tokio::time::sleep(FLOOR_PAUSE).await;
    }
    Ok(false)
}

async fn locked_and_raised(conn: &mut Conn, meta: &str, raise: &str) -> mysql_async::Result<()> {
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let lock = format!("SELECT floor FROM {meta} WHERE id = 1 FOR UPDATE NOWAIT");
    if let Err(error) = tx.query_drop(lock).await {
        tx.rollback().await?;
        return Err(error);
    }
    tx.query_drop(raise).await?;
    tx.commit().await
}

/// In the order of the primary key, as everybody locks rows, so that there is no deadlock; and past
/// those that are locked, which are in use. What is in the way all the same is left to the next run.
async fn purge_rows(store: &Store, table: &str, condition: &str) -> Result<u64> {
    let mut total = 0;
    let find = format!("SELECT LOWER(HEX(id)) FROM {table} WHERE {condition} LIMIT {BATCH}");
    let mut conn = store.own.get_conn().await.map_err(mapped)?;
    loop {
        let mut ids: Vec<String> = conn.query(&find).await.map_err(mapped)?;
        ids.sort_unstable();
        let deleted = match delete_free(&mut conn, table, condition, &ids).await {
            Err(error) if is_transient(&error) => {
                tracing::debug!(%error, table, "the rest of the purge is left to the next one");
                0
            }
            outcome => outcome.map_err(mapped)?,
        };
        total += deleted;
        if deleted == 0 || (ids.len() as u64) < BATCH {
            return Ok(total);
        }
    }
}

async fn delete_free(
    conn: &mut Conn,
    table: &str,
    condition: &str,
    ids: &[String],
) -> mysql_async::Result<u64> {
    if ids.is_empty() {
        return Ok(0);
    }
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let lock = format!(
        "SELECT LOWER(HEX(id)) FROM {table} FORCE INDEX (PRIMARY) \
         WHERE id IN (x'{}') AND {condition} \
         FOR UPDATE SKIP LOCKED",
        ids.join("',x'")
    );
    let locked: Vec<String> = tx.query(lock).await?;
    if !locked.is_empty() {
        // DELETE takes no index hint; a row each, so that it is no scan
        let delete = |id: &String| format!("DELETE FROM {table} WHERE id = x'{id}'");
        tx.query_drop(locked.iter().map(delete).collect::<Vec<_>>().join("; ")).await?;
    }
    tx.commit().await?;
    Ok(locked.len() as u64)
}

async fn purge_numbers(store: &Store) -> Result<()> {
    let table = &store.tables.token;
    let read = format!("SELECT MAX(id) FROM {table}");
    let last: Vec<Option<u64>> = store.rows(&read).await?;
    let last = last.first().copied().flatten();
    let Some(keep) = last.map(|last| last.saturating_sub(KEEP_NUMBERS)) else {
        return Ok(());
    };
    let delete = format!("DELETE FROM {table} WHERE id < {keep} ORDER BY id LIMIT {BATCH}");
    while store.text(&delete).await?.changed == BATCH {}
    Ok(())
}

async fn purge_claims(store: &Store) -> Result<()> {
    let old = format!("used < {NOW} - {KEEP_CLAIM}");
    purge_rows(store, &store.tables.claim, &old).await.map(|_| ())
}

/// Those that have ended, and those of a pool that have not been used for long. A pool opens
/// connections all the time where claims are given up on, so that their rows must not stay.
async fn purge_sessions(store: &Store) -> Result<()> {
    let table = &store.tables.session;
    let shown: Vec<String> = Threads::read(store).await?.ids().map(|id| id.to_string()).collect();
    let shown = shown.join(","); // ours is there in any case
    let find = format!(
        "SELECT connection, LOWER(HEX(scope)), since FROM {table} \
         WHERE since < {NOW} - IF(marker = '', {KEEP_POOLED}, {KEEP_SESSION}) \
           AND IF(marker = '', since < {NOW} - {KEEP_CLAIM} OR connection NOT IN ({shown}), \
             IS_USED_LOCK(marker) IS NULL) \
         LIMIT {BATCH}"
    );
    loop {
        let ended: Vec<(u64, String, i64)> = store.rows(&find).await?;
        for (connection, scope, since) in &ended {
            let delete = format!(
                "DELETE FROM {table} WHERE connection = {connection} AND scope = x'{scope}' \
                 AND since = {since}"
            );
            store.text(&delete).await?;
        }
        if (ended.len() as u64) < BATCH {
            return Ok(());
        }
    }
}
