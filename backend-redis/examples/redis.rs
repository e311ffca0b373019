//! The four traits on a Redis or Valkey: `cargo run -p leasehold-redis --example redis [URL]`.
//!
//! Without a URL it uses `redis://127.0.0.1:6379`.

use std::time::Duration;

use leasehold_core::{
    Admission, Backend, Claim, ClaimLockExt, ClaimOptions, Dedupe, DedupeOptions, Error, Key, Keys,
    LeaseExt, LeaseOptions, LockOptions, NamedLock,
};
use leasehold_redis::{RedisBackend, RedisTx};

/// At most so many jobs at once.
const SLOTS: u64 = 2;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let store = RedisBackend::builder().namespace("example").connect(&url).await?;

    // One copy at a time sends the report; the lease is renewed while it works.
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(30));
    let sent = store
        .with_lease(&Key::new("daily-report")?, opts, async |lease| {
            println!("sending the report under token {}", lease.token());
        })
        .await?;
    println!("{}", sent.map_or("another copy sends it", |()| "the report is sent"));

    // One server drives the pipeline until it goes away.
    if let Some(lock) = store.lock(&Key::new("pipeline/7")?, LockOptions::try_once()).await? {
        println!("driving pipeline 7 under token {}", lock.token().await?);
        lock.release().await?;
    }

    // Count and claim a slot: the write happens only if the claim is still ours by then.
    let slots = format!("{{{}}}:slots", store.claim_tag());
    let taken = store
        .with_claim(&Keys::new(["slots"])?, ClaimOptions::default(), async |claim: &mut Claim| {
            claim.after_commit(async { println!("announced after the commit") });
            let tx = claim.tx::<RedisTx>()?;
            if tx.scard(slots.as_str()).await? >= SLOTS {
                return Ok::<_, Error>(false);
            }
            tx.sadd(slots.as_str(), "job-1")?.expire(slots.as_str(), Duration::from_secs(60))?;
            Ok(true)
        })
        .await?;
    println!("slot taken: {taken:?}");

    // A delivery counts once; if the handler fails, the guard is dropped and it is first again.
    match store.admit(&Key::new("delivery/8c1f")?, DedupeOptions::default()).await? {
        Admission::First(first) => {
            println!("handling the delivery");
            first.complete().await?;
        }
        Admission::InProgress { .. } => println!("another copy is at it"),
        Admission::Done { .. } => println!("it was handled before"),
    }

    store.close().await
}
