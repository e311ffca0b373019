//! Creating, checking and cleaning the tables.

use leasehold_core::{Error, ErrorKind, Housekeeping, Result};
use sqlx::{AssertSqlSafe, Row};

use crate::error::{code, store_error};
use crate::store::Store;

/// The version of the tables that this code works with.
pub(crate) const VERSION: i32 = 2;
const SCHEMA: &str = include_str!("schema.sql");
/// The schema's name in the file.
const WRITTEN_AS: &str = "leasehold";
/// Rows that one statement of the housekeeping deletes.
const BATCH: u64 = 1_000;
/// All that migrate, of whatever schema, do it one after the other: "leasehold" in ASCII, cut.
const MIGRATION_LOCK: i64 = 0x6c65_6173_6568_6f6c;

/// Whether the tables are there.
pub(crate) async fn check(store: &Store) -> Result<()> {
    match version(store).await? {
        Some(VERSION) => Ok(()),
        found => Err(unfit(found)),
    }
}

fn unfit(found: Option<i32>) -> Error {
    let detail = match found {
        None => "the tables are missing: run migrate".to_owned(),
        Some(found) if found > VERSION => {
            format!("the tables are of version {found}, and this program of version {VERSION}")
        }
        Some(found) => format!("the tables are of version {found}: run migrate"),
    };
    Error::new(ErrorKind::Schema, detail)
}

pub(crate) async fn version(store: &Store) -> Result<Option<i32>> {
    let sql = format!("SELECT max(version) FROM {}.version", store.names.schema());
    let mut conn = store.connection().await?;
    let asked = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(&mut **conn).await;
    match asked {
        Ok(row) => {
            drop(conn.into_inner());
            row.try_get(0).map_err(store_error)
        }
        Err(error) if matches!(code(&error).as_deref(), Some("42P01" | "3F000")) => {
            drop(conn.into_inner());
            Ok(None)
        }
        Err(error) => Err(store_error(error)),
    }
}

/// Creates what is missing. One who finds all there needs no privilege to create.
pub(crate) async fn migrate(store: &Store) -> Result<()> {
    match version(store).await? {
        Some(VERSION) => return Ok(()),
        Some(newer) if newer > VERSION => return Err(unfit(Some(newer))),
        _ => {}
    }
    let mut conn = store.connection().await?;
    let schema = store.names.schema();
    let statements = SCHEMA
        .replace(&format!("{WRITTEN_AS}."), &format!("{schema}."))
        .replace(&format!("EXISTS {WRITTEN_AS};"), &format!("EXISTS {schema};"));
    // One message is one transaction: after the lock, each statement sees what the one before
    // this one in the queue has created.
    let text = format!(
        "BEGIN; SET LOCAL lock_timeout = 0; SET LOCAL client_min_messages = warning; \
         SELECT pg_advisory_xact_lock({MIGRATION_LOCK}); {statements} COMMIT"
    );
    let outcome = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut **conn).await;
    if outcome.is_ok() {
        drop(conn.into_inner());
    }
    // one that failed is closed with its open transaction
    outcome.map(drop).map_err(store_error)
}

/// Deletes what has expired, in batches; a row that is in use by somebody is left alone.
pub(crate) async fn housekeep(store: &Store) -> Result<Housekeeping> {
    let leases = purge(store, "lease").await?;
    let dedupe = purge(store, "dedupe").await?;
    Ok(Housekeeping::new(leases, dedupe))
}

async fn purge(store: &Store, table: &str) -> Result<u64> {
    let table = format!("{}.{table}", store.names.schema());
    let sql = format!(
        "WITH dead AS MATERIALIZED (SELECT id FROM {table} WHERE expires_at <= clock_timestamp() \
           LIMIT {BATCH} FOR UPDATE SKIP LOCKED) \
         DELETE FROM {table} t USING dead WHERE t.id = dead.id"
    );
    let mut purged = 0;
    loop {
        let mut conn = store.connection().await?;
        let statement = sqlx::raw_sql(AssertSqlSafe(sql.clone()));
        let deleted = statement.execute(&mut **conn).await.map_err(store_error)?.rows_affected();
        drop(conn.into_inner());
        purged += deleted;
        if deleted < BATCH {
            return Ok(purged);
        }
    }
}
