//! All four traits on a PostgreSQL.
//!
//! `cargo run -p leasehold-postgres --example postgres -- postgres://user@localhost/database`

use std::time::Duration;

use leasehold_core::{
    Admission, Backend, Claim, ClaimLockExt, ClaimOptions, Dedupe, DedupeOptions, Key, Keys,
    LeaseExt, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_postgres::PostgresBackend;
use sqlx::Transaction;
use sqlx::postgres::Postgres;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome {
    let url = std::env::args().nth(1).ok_or("say where: postgres://user@host/database")?;
    let store = PostgresBackend::builder()
        .namespace("example")
        .application_name("leasehold example")
        .connect(&url)
        .await?;
    store.migrate().await?;
    store.check().await?;

    // One copy of the service leads, until it releases the lock or its process is gone.
    let leader = Key::new("pipeline-7")?;
    match store.lock(&leader, LockOptions::try_once()).await? {
        Some(guard) => {
            println!("leading with fencing token {}", guard.token().await?);
            guard.release().await?;
        }
        None => println!("somebody else leads"),
    }

    // A lease is renewed while the work goes on, and the work is stopped when it is lost.
    let report = Key::new("daily-report")?;
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(10));
    let sent = store.with_lease(&report, opts, async |lease| lease.token()).await?;
    println!("report sent: {sent:?}");

    // A claim's work happens in its own transaction: count and write without a race.
    let slots = Keys::new(["slots"])?;
    let used: Option<i64> = store
        .with_claim(&slots, ClaimOptions::default(), async |claim: &mut Claim| {
            claim.after_commit(async { println!("announced after the commit") });
            let tx = claim.tx::<Transaction<'static, Postgres>>()?;
            let count = sqlx::query_scalar("SELECT count(*) FROM pg_class");
            Outcome::Ok(count.fetch_one(&mut **tx).await?)
        })
        .await?;
    println!("counted under the claim: {used:?}");

    // The first delivery counts; a redelivery does not.
    let delivery = Key::new("delivery-4711")?;
    for _ in 0..2 {
        match store.admit(&delivery, DedupeOptions::default()).await? {
            Admission::First(guard) => {
                println!("handled once");
                guard.complete().await?;
            }
            Admission::InProgress { since } => println!("somebody is at it since {since:?}"),
            Admission::Done { at } => println!("done already, at {at:?}"),
        }
    }

    println!("deleted: {:?}", store.housekeep().await?);
    store.close().await?;
    Ok(())
}
