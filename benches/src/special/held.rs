//! Many locks that are held at once, by a process that does nothing else.

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use leasehold_conformance::servers::Kind;
use leasehold_peers::{Held, Locker, Outcome};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::admin::Admin;
use super::usage;
use crate::contenders;
use crate::process::Process;
use crate::record::{Against, Better, Record, Role, Unit};
use crate::scene::{Effort, Entrant, Scene};

/// So many are asked for at once: what is under way counts as little as can be.
const BATCH: usize = 100;
/// Who can't take a batch in this time holds no more.
const LIMIT: Duration = Duration::from_secs(3);
/// How often all contenders' locks with a ttl of 30 s are renewed.
const TICK: Duration = Duration::from_secs(10);

/// Why these have no target against all peers.
const QUIET: &str =
    "rslock, redlock and the raw drivers renew nothing, so that their locks end after 30 s.";

/// What the process that holds them is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// The server's kind, by name.
    pub kind: String,
    /// Where it is.
    pub url: String,
    /// Who holds, by name.
    pub contender: String,
    /// How many.
    pub locks: usize,
}

/// What the process says when it holds them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Report {
    locks: usize,
    /// Microseconds for all.
    taken: f64,
    /// KiB for all.
    memory: f64,
}

pub(super) async fn play(scene: &Scene) -> Outcome<Vec<Record>> {
    let locks = scene.pick(200, 2_000, 10_000);
    let record = |title: &str, unit| {
        Record::new("held", format!("{locks} held: {title}"), unit, Better::Lower)
    };
    let mut records = [
        record("client memory each", Unit::KiB).target(Against::Nothing, 2.0).note(
            "What the process has grown by, its share of the allocator's slack included. Nothing \
                 is promised next to the peers: a lock that is neither renewed nor watched takes \
                 the room of its name.",
        ),
        record("connections", Unit::Count).note(
            "redlock opens one for each command, and so has none while it holds: a lock that \
                 nobody renews or watches needs none. So nothing is promised here.",
        ),
        record("server memory each", Unit::KiB).note(
            "What the server has grown by: by its own account on Redis, by its processes' memory \
             elsewhere, the holder's connections included.",
        ),
        record("time to take one", Unit::Micros)
            .target(Against::Peers, 1.0)
            .note("100 at a time, by one task."),
        record("requests while they are held, in 10 s", Unit::Count).note(format!(
            "Renewals and signs of life: transactions, statements or scripts. {QUIET}"
        )),
        record("server time while they are held, in 10 s", Unit::Millis).note(QUIET),
        record("client time while they are held, in 10 s", Unit::Millis).note(QUIET),
    ];
    let url = scene.server.url();
    for entrant in holders(scene.kind(), &url)? {
        let job = Holding {
            kind: scene.kind().name().to_owned(),
            url: url.clone(),
            contender: entrant.name().to_owned(),
            locks,
        };
        let (role, name) = (entrant.role, entrant.name());
        match watch(scene, &job).await {
            Ok(numbers) => {
                for (at, record) in records.iter_mut().enumerate() {
                    match numbers.get(at) {
                        Some(&number) => record.add(role, name, number),
                        None => record.cannot(role, name, "takes too long for a quick run"),
                    }
                }
            }
            Err(error) => {
                for record in &mut records {
                    record.cannot(role, name, &error);
                }
            }
        }
    }
    Ok(records.into())
}

/// Who can hold locks, leases of every store among them; not the raw drivers whose locks cost a
/// connection each.
fn holders(kind: Kind, url: &str) -> Outcome<Vec<Entrant>> {
    let mut all = contenders::of(kind, url)?;
    all.extend(contenders::lease_of(kind, url));
    all.retain(|entrant| entrant.role != Role::Floor || !contenders::is_sql(kind));
    Ok(all)
}

/// Has a process hold them and looks at it: the numbers of all records, or of those only that need
/// no watching for a time.
async fn watch(scene: &Scene, job: &Holding) -> Outcome<Vec<f64>> {
    let mut admin = Admin::connect(&scene.server).await?;
    let connections = settled(&mut admin).await?;
    let memory = admin.memory(&scene.server).await?;
    let mut holder = Process::start("hold", job)?;
    let report: Report = serde_json::from_str(&holder.line().await?)?;
    if report.locks < job.locks {
        holder.end().await?;
        let seconds = LIMIT.as_secs();
        let why = format!("after {} it takes no {BATCH} more within {seconds} s", report.locks);
        return Err(why.into());
    }
    let each = |all: f64| all / report.locks as f64;
    let grown = admin.memory(&scene.server).await? - memory;
    let connections = admin.connections().await? - connections;
    let mut numbers = vec![each(report.memory), connections, each(grown), each(report.taken)];
    if scene.effort == Effort::Quick {
        holder.end().await?;
        return Ok(numbers);
    }
    let (server, client) = (scene.server.pids(), [holder.id()?]);
    // Postgres tells of statements a second after them
    tokio::time::sleep(scene.pick(Duration::ZERO, TICK / 5, TICK / 5)).await;
    let before = (admin.statements().await?, usage::on_cpu(&server), usage::on_cpu(&client));
    let time = scene.pick(TICK / 20, TICK, TICK * 2);
    tokio::time::sleep(time).await;
    let after = (admin.statements().await?, usage::on_cpu(&server), usage::on_cpu(&client));
    holder.end().await?;
    let ticks = time.as_secs_f64() / TICK.as_secs_f64();
    numbers.extend([
        (after.0 - before.0) / ticks,
        (after.1 - before.1) / ticks,
        (after.2 - before.2) / ticks,
    ]);
    Ok(numbers)
}

/// How many connections there are when those of the process before are gone.
async fn settled(admin: &mut Admin) -> Outcome<f64> {
    let ends = Instant::now() + LIMIT;
    let mut before = admin.connections().await?;
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = admin.connections().await?;
        if (now - before).abs() < 0.5 || Instant::now() > ends {
            return Ok(now);
        }
        before = now;
    }
}

/// What the process does: takes the locks, says so, and keeps them until its input ends.
///
/// # Errors
/// Those of the contender, which it says as well.
pub async fn hold(job: Holding) -> Outcome {
    let held = take(&job).await;
    let mut out = std::io::stdout();
    let (report, held) = match held {
        Ok(held) => held,
        Err(error) => {
            writeln!(out, "failed: {error}")?;
            return Err(error);
        }
    };
    writeln!(out, "{}", serde_json::to_string(&report)?)?;
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await?;
    for chunk in chunks(held) {
        try_join_all(chunk.into_iter().map(Held::release)).await?;
    }
    Ok(())
}

async fn take(job: &Holding) -> Outcome<(Report, Vec<Box<dyn Held>>)> {
    let kind: Kind = job.kind.parse()?;
    let entrants = holders(kind, &job.url)?;
    let entrant = entrants.into_iter().find(|entrant| entrant.name() == job.contender);
    let handle = entrant.ok_or("nobody of this name")?.contender.open().await?;
    let salt: u32 = rand::random();
    // what a first lock sets up is not what one costs
    one(&handle, format!("warm-{salt:08x}")).await?.ok_or("it was free")?.release().await?;
    let mut held: Vec<Box<dyn Held>> = Vec::with_capacity(job.locks);
    let before = usage::own_memory();
    let start = Instant::now();
    for first in (0..job.locks).step_by(BATCH) {
        let names = first..job.locks.min(first + BATCH);
        let locks = names.map(|n| one(&handle, format!("held-{salt:08x}-{n}")));
        let Ok(locks) = timeout(LIMIT, try_join_all(locks)).await else { break };
        held.extend(locks?.into_iter().flatten());
    }
    let taken = start.elapsed().as_secs_f64() * 1e6;
    let report = Report { locks: held.len(), taken, memory: usage::own_memory() - before };
    Ok((report, held))
}

async fn one(handle: &Arc<dyn Locker>, name: String) -> Outcome<Option<Box<dyn Held>>> {
    handle.lock(&name, Duration::ZERO).await
}

fn chunks(mut held: Vec<Box<dyn Held>>) -> Vec<Vec<Box<dyn Held>>> {
    let mut chunks = Vec::new();
    while !held.is_empty() {
        chunks.push(held.split_off(held.len().saturating_sub(BATCH)));
    }
    chunks
}
