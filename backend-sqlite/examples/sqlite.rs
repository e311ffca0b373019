//! Two copies of a program share a file: run this twice at once, kill one, and see.
//!
//! `cargo run -p leasehold-sqlite --example sqlite [URL]`; without a URL it is the default file.

use std::time::Duration;

use leasehold_core::{
    Backend, Claim, ClaimLockExt, ClaimOptions, DedupeExt, Key, Keys, LockOptions, NamedLock,
};
use leasehold_sqlite::SqliteBackend;
use sqlx::{Sqlite, Transaction};

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "sqlite:".to_owned());
    let store = SqliteBackend::builder().namespace("example").connect(&url).await?;
    println!("the file is {}", store.path().display());

    // one leads: until it releases, or dies in whatever way
    let leader = Key::new("leader")?;
    let Some(lead) = store.lock(&leader, LockOptions::default().wait(Duration::MAX)).await? else {
        return Ok(());
    };
    println!("leading with token {}", lead.token().await?);

    // count under a claim, in its own transaction
    let counted: Option<i64> = store
        .with_claim(&Keys::new(["runs"])?, ClaimOptions::default(), async |claim: &mut Claim| {
            let tx = claim.tx::<Transaction<'static, Sqlite>>()?;
            sqlx::query("CREATE TABLE IF NOT EXISTS example_run (n INTEGER)")
                .execute(&mut **tx)
                .await?;
            sqlx::query("INSERT INTO example_run VALUES (1)").execute(&mut **tx).await?;
            let runs = sqlx::query_scalar("SELECT count(*) FROM example_run");
            Result::<_, Failure>::Ok(runs.fetch_one(&mut **tx).await?)
        })
        .await?;
    println!("run number {}", counted.unwrap_or_default());

    // a delivery counts once within a day
    let first = store.first_seen(&Key::new("delivery 42")?, Duration::from_secs(86_400)).await?;
    println!("delivery 42 is {}", if first { "new" } else { "known" });

    tokio::time::sleep(Duration::from_secs(10)).await;
    lead.release().await?;
    store.close().await?;
    Ok(())
}
