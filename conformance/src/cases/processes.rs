//! Other processes: killed, stopped, with another clock. They are this executable, started again.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, all, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::history::History;
use crate::holder::Kind;

cases!(Backend in "processes" {
    killed_holder_frees_its_locks = "the locks of a process that is killed are free at once, without a ttl (B86, B109)" [Processes, SessionLocks];
    killed_holder_frees_its_leases = "the leases of a process that is killed are free after their ttl (B86)" [Processes];
    exit_frees_everything = "a process that ends in the ordinary way leaves nothing behind for long (B85)" [Processes];
    stopped_writer_is_rejected = "a process that was stopped past its ttl goes on as a loser: its guarded write fails (B81)" [Processes];
    fuzz_of_locks = "locks taken at random by several processes never overlap, and tokens rise" [Processes];
    fuzz_of_leases = "leases taken at random by several processes never overlap, and tokens rise" [Processes];
    counter_of_processes = "several processes count on the store without a lost update" [Processes];
    client_time_zone_does_not_matter = "clients in other time zones agree on what has expired (B80)" [Processes];
    client_clock_does_not_matter = "clients whose clocks are an hour off agree on what has expired (B79)" [Processes];
});

async fn killed_holder_frees_its_locks(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut process = ctx.process(&[]).await?;
    let token = process.takes(Kind::Lock, "x", LONG).await?;
    ensure!(b.try_lock("x").await?.is_none(), "expected the process to exclude this one");
    process.dies().await?;
    let next = b.locked("x").await?;
    ensure!(next.token().await?.value() > token, "expected tokens to rise across processes");
    Ok(next.release().await?)
}

async fn killed_holder_frees_its_leases(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut process = ctx.process(&[]).await?;
    let ttl = Duration::from_secs(2);
    let token = process.takes(Kind::Lease, "x", ttl).await?;
    process.dies().await?;
    let next = b.leased("x", LONG).await?;
    ensure!(next.token().value() > token, "expected tokens to rise across processes");
    Ok(next.release().await?)
}

async fn exit_frees_everything(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut process = ctx.process(&[]).await?;
    process.takes(Kind::Lock, "x", LONG).await?;
    process.takes(Kind::Lease, "x", Duration::from_secs(2)).await?;
    process.exits().await?;
    b.locked("x").await?.release().await?;
    Ok(b.leased("x", LONG).await?.release().await?)
}

async fn stopped_writer_is_rejected(ctx: Ctx) -> Verdict {
    let b = ctx.open().await?;
    let mut process = ctx.process(&[]).await?;
    process.takes(Kind::Lease, "x", Duration::from_secs(2)).await?;
    let number = ctx.number("n");
    ensure!(process.writes("x", &number, 1).await?, "expected the holder's write to pass");
    process.stops()?;
    let next = b.leased("x", LONG).await;
    process.goes_on()?; // whatever came of it
    let next = next?;
    ensure!(!process.writes("x", &number, 2).await?, "expected the late write to be rejected");
    let believes = process.believes_to_hold(Kind::Lease, "x").await?;
    ensure!(!believes, "expected the stopped process to know of its loss");
    ctx.guarded_write(&b, &next, "n", 3).await?;
    ensure!(ctx.committed("n").await? == 3, "expected the successor's write to stay");
    next.release().await?;
    process.exits().await
}

async fn fuzz(ctx: &Ctx, kind: Kind) -> Verdict {
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let mut process = ctx.process(&[]).await?;
        tasks.spawn(async move {
            let intervals = process.fuzzes(kind, &["left", "right"], 40).await?;
            process.exits().await?;
            Ok::<_, Fault>(intervals)
        });
    }
    let history = History::new();
    while let Some(intervals) = tasks.join_next().await {
        history.extend(intervals??);
    }
    history.check_at_least(10)
}

async fn fuzz_of_locks(ctx: Ctx) -> Verdict {
    fuzz(&ctx, Kind::Lock).await
}

async fn fuzz_of_leases(ctx: Ctx) -> Verdict {
    fuzz(&ctx, Kind::Lease).await
}

async fn counter_of_processes(ctx: Ctx) -> Verdict {
    let number = ctx.number("count");
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let (mut process, number) = (ctx.process(&[]).await?, number.clone());
        tasks.spawn(async move {
            process.counts("counter", &number, 15).await?;
            process.exits().await
        });
    }
    all(tasks).await?;
    let count = ctx.committed("count").await?;
    ensure!(count == 45, "expected 45 increments by three processes, {} were lost", 45 - count);
    Ok(())
}

/// Two processes with different environments agree on what is held and what has expired.
async fn agree(ctx: &Ctx, envs: [&[(&str, &str)]; 2]) -> Verdict {
    let (mut one, mut two) = (ctx.process(envs[0]).await?, ctx.process(envs[1]).await?);
    for round in 0..2 {
        let key = format!("x{round}");
        let holding = one.takes(Kind::Lease, &key, Duration::from_secs(5)).await?;
        let taken = two.tries(Kind::Lease, &key, LONG, Duration::from_millis(500)).await?;
        ensure!(taken.is_none(), "expected a live lease to look alive to the other process");
        let held = one.believes_to_hold(Kind::Lease, &key).await?;
        ensure!(held, "expected a renewed lease to look alive to its holder");
        one.stops()?; // no renewal
        let start = Instant::now();
        let next =
            soon("an expired lease to be had", two.tries(Kind::Lease, &key, LONG, PATIENCE * 2));
        let next = next.await;
        one.goes_on()?; // whatever came of it
        let Some(next) = next?? else {
            return Err(Fault::new(
                "expected an expired lease to look expired to the other process",
            ));
        };
        ensure!(next > holding, "expected tokens to rise, {holding} and then {next}");
        let after = start.elapsed();
        ensure!(
            after > Duration::from_secs(2),
            "expected the ttl to be kept, it was over after {after:?}"
        );
        two.releases(Kind::Lease, &key).await?;
        std::mem::swap(&mut one, &mut two);
    }
    one.exits().await?;
    two.exits().await
}

async fn client_time_zone_does_not_matter(ctx: Ctx) -> Verdict {
    agree(&ctx, [&[("TZ", "UTC+11")], &[("TZ", "UTC-12")]]).await
}

/// The library that changes what a process sees of the clock.
const LIBFAKETIME: &str = "LEASEHOLD_TEST_LIBFAKETIME";

/// Where it is; the case is ignored if it is not installed.
pub(super) fn libfaketime() -> Result<String, Fault> {
    if let Ok(library) = std::env::var(LIBFAKETIME) {
        return Ok(library);
    }
    let places = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ];
    let mut libraries = places.iter().map(|place| format!("{place}/faketime/libfaketimeMT.so.1"));
    libraries.find(|library| Path::new(library).exists()).ok_or_else(|| {
        Fault::ignored(format!(
            "libfaketime is not installed (Debian: apt-get install libfaketime, or set {LIBFAKETIME})"
        ))
    })
}

/// The environment of a process whose wall clock is wrong by so much.
pub(super) fn skewed<'a>(library: &'a str, skew: &'a str) -> [(&'a str, &'a str); 3] {
    [("LD_PRELOAD", library), ("FAKETIME", skew), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")]
}

async fn client_clock_does_not_matter(ctx: Ctx) -> Verdict {
    let library = libfaketime()?;
    let (early, late) = (skewed(&library, "-1h"), skewed(&library, "+1h"));
    let (mut one, mut two) = (ctx.process(&early).await?, ctx.process(&late).await?);
    let apart = two.wall_clock().await?.saturating_sub(one.wall_clock().await?);
    ensure!(
        apart > Duration::from_secs(90 * 60),
        "expected the clocks of the two to be two hours apart, they are {apart:?}"
    );
    one.exits().await?;
    two.exits().await?;
    agree(&ctx, [&early, &late]).await
}
