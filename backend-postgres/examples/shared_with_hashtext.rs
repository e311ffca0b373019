//! Shares a lock with a program that locks `hashtext(key)`, as many do, e.g. in SQL.
//!
//! `cargo run -p leasehold-postgres --example shared_with_hashtext -- postgres://user@localhost/db`

use leasehold_core::{Backend, Key, LockOptions, NamedLock};
use leasehold_postgres::{PostgresBackend, hashtext};
use sqlx::{ConnectOptions, Row, postgres::PgConnectOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let url = std::env::args().nth(1).ok_or("say where: postgres://user@host/database")?;
    let store = PostgresBackend::builder()
        .key_hash(|_kind, key| hashtext(key.as_str()).into())
        .connect(&url)
        .await?;
    store.migrate().await?;
    let key = Key::new("nightly-import")?;
    let guard = store.lock(&key, LockOptions::default()).await?.ok_or("somebody else has it")?;

    // the other program
    let mut other = url.parse::<PgConnectOptions>()?.connect().await?;
    let lock = "SELECT pg_try_advisory_lock(hashtext('nightly-import'))";
    let granted: bool = sqlx::query(lock).fetch_one(&mut other).await?.try_get(0)?;
    println!("the other program got it while we hold it: {granted}");
    assert!(!granted);

    guard.release().await?;
    let granted: bool = sqlx::query(lock).fetch_one(&mut other).await?.try_get(0)?;
    println!("and after our release: {granted}");
    assert!(granted);
    assert!(store.lock(&key, LockOptions::try_once()).await?.is_none());
    store.close().await?;
    Ok(())
}
