//! Runs: taken under the limits, worked on in their turn, put back when their pod is gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::recipes::{PerKey, Recovery, Taken};
use leasehold::{Claim, Error, Key, LeaseGuard, Result, Store};
use serde::{Deserialize, Serialize};

use super::{Pod, RUNS};
use crate::docs::{Docs, claim};

/// A webhook's delivery is remembered for so long.
const RETAIN: Duration = Duration::from_secs(24 * 60 * 60);

/// A run, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Of which repository.
    pub repo: String,
    /// How far it is.
    pub state: State,
    /// How often it was begun.
    pub begun: u32,
    /// The fencing token of the turn in which it was written last.
    pub token: u64,
}

/// How far a [`Run`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It waits.
    Queued,
    /// A pod is at it.
    Running,
    /// It has ended.
    Done,
}

/// All runs, by id, on a claim.
///
/// # Errors
/// Those of the store.
///
/// # Cancel safety
/// That of the store's statement.
pub async fn all(docs: &dyn Docs, claim: &mut Claim) -> Result<BTreeMap<String, Run>> {
    let stored = docs.list(claim, "run/").await?;
    let run = |(name, text): (String, String)| {
        let run = serde_json::from_str(&text).map_err(crate::docs::failed)?;
        Ok((name.trim_start_matches("run/").to_owned(), run))
    };
    stored.into_iter().map(run).collect()
}

/// All runs, as a plain look.
async fn look(store: &Store, docs: &dyn Docs) -> Result<BTreeMap<String, Run>> {
    let mut claim = claim(store, &[]).await?;
    let runs = all(docs, &mut claim).await?;
    claim.rollback().await?;
    Ok(runs)
}

async fn write(pod: &Pod, claim: &mut Claim, id: &str, run: &Run) -> Result<()> {
    let text = serde_json::to_string(run).map_err(crate::docs::failed)?;
    pod.docs.write(claim, &format!("run/{id}"), &text).await
}

async fn read(pod: &Pod, claim: &mut Claim, id: &str) -> Result<Option<Run>> {
    let stored = pod.docs.read(claim, &format!("run/{id}")).await?;
    let parsed = stored.map(|text| serde_json::from_str(&text).map_err(crate::docs::failed));
    parsed.transpose()
}

/// Takes in a delivery: recorded, and queued as a run, in one transaction; false if it was known.
pub(super) async fn take_in(pod: &Pod, id: &str, repo: &str) -> Result<bool> {
    let mut claim = claim(&pod.store, &[RUNS]).await?;
    if !claim.first_seen(&Key::new(format!("delivery/{id}"))?, RETAIN).await? {
        claim.rollback().await?;
        return Ok(false);
    }
    let run = Run { repo: repo.to_owned(), state: State::Queued, begun: 0, token: 0 };
    write(pod, &mut claim, id, &run).await?;
    // told once it is true, and not at all if it does not come true
    let (journal, id) = (pod.journal.clone(), id.to_owned());
    claim.after_commit(async move { journal.tell("queued", &id, 0) });
    claim.commit().await?;
    Ok(true)
}

/// A worker: looks for runs for ever.
pub(super) async fn work(pod: Arc<Pod>) {
    loop {
        match begin_one(&pod).await {
            Ok(true) => {}
            Ok(false) => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => {
                tracing::warn!(%error, "the worker is held up");
                pod.journal.tell("worker failed", &error.to_string(), 0);
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// Begins a queued run for which there is room, and works on it; false if there is none.
async fn begin_one(pod: &Pod) -> Result<bool> {
    let runs = look(&pod.store, &*pod.docs).await?;
    let queued = runs.into_iter().filter(|(_, run)| run.state == State::Queued);
    for (id, run) in queued {
        // the turn comes first: whoever finds the run marked and its turn free knows it to be dead
        let mut began = false;
        let worked = pod.turns.run(&id, async |turn| {
            began = mark(pod, &id, &run.repo, turn).await?;
            if began { finish(pod, &id, turn).await } else { Ok(()) }
        });
        match worked.await {
            Err(error) if began => pod.journal.tell("run lost", &format!("{id}: {error}"), 0),
            other => drop(other?),
        }
        if began {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Marks it as running, if the limits allow it.
async fn mark(pod: &Pod, id: &str, repo: &str, turn: &LeaseGuard) -> Result<bool> {
    let token = turn.token().value();
    let count = async |claim: &mut Claim| {
        let runs = all(&*pod.docs, claim).await?;
        let running = runs.values().filter(|run| run.state == State::Running);
        let (mut total, mut of_repo) = (0, 0);
        for run in running {
            total += 1;
            of_repo += u64::from(run.repo == repo);
        }
        if total > pod.settings.limit || of_repo > pod.settings.per_repo {
            pod.journal.tell("limit exceeded", &format!("{total} runs, {of_repo} of {repo}"), 0);
        }
        Ok(vec![total, of_repo])
    };
    let take = async |claim: &mut Claim| {
        let Some(run) = read(pod, claim, id).await? else { return Ok(false) };
        if run.state != State::Queued {
            return Ok(false);
        }
        pod.docs.verify(claim, turn).await?;
        let run = Run { state: State::Running, begun: run.begun + 1, token, ..run };
        write(pod, claim, id, &run).await?;
        Ok::<_, Error>(true)
    };
    let per_repo = [PerKey::new(repo, pod.settings.per_repo)];
    let taken = pod.limit.take(&per_repo, count, take).await?;
    Ok(matches!(taken, Taken::Taken(true)))
}

/// Does the work, and writes that it is done: if the turn is still ours.
async fn finish(pod: &Pod, id: &str, turn: &LeaseGuard) -> Result<()> {
    let token = turn.token().value();
    pod.journal.tell("run begins", id, token);
    tokio::time::sleep(pod.settings.run).await;
    let mut claim = claim(&pod.store, &[RUNS]).await?;
    let run = read(pod, &mut claim, id).await?;
    let verified = pod.docs.verify(&mut claim, turn).await;
    let ours = run.filter(|run| run.token == token && run.state == State::Running);
    let (Ok(()), Some(run)) = (verified, ours) else {
        pod.journal.tell("rejected", id, token);
        return claim.rollback().await;
    };
    write(pod, &mut claim, id, &Run { state: State::Done, ..run }).await?;
    pod.count_in(&mut claim, &format!("done/{id}")).await?;
    claim.commit().await?;
    pod.journal.tell("run ends", id, token);
    Ok(())
}

/// Puts back the runs whose pod is gone: marked as running, and nobody has their turn.
pub(super) async fn put_back(pod: Arc<Pod>) -> Result<u64> {
    let runs = look(&pod.store, &*pod.docs).await?;
    let mut swept = 0;
    for (id, _) in runs.into_iter().filter(|(_, run)| run.state == State::Running) {
        // it may have ended meanwhile
        let is_running = async |_: &LeaseGuard| {
            let runs = look(&pod.store, &*pod.docs).await?;
            Ok(runs.get(&id).is_some_and(|run| run.state == State::Running))
        };
        let queue = async |turn: &LeaseGuard| {
            let mut claim = claim(&pod.store, &[RUNS]).await?;
            let run = read(&pod, &mut claim, &id).await?;
            pod.docs.verify(&mut claim, turn).await?;
            if let Some(run) = run.filter(|run| run.state == State::Running) {
                let token = turn.token().value();
                write(&pod, &mut claim, &id, &Run { state: State::Queued, token, ..run }).await?;
                claim.commit().await?;
                pod.journal.tell("put back", &id, token);
            }
            Ok::<_, Error>(())
        };
        if let Recovery::Settled(()) = pod.turns.recover(&id, is_running, queue).await? {
            swept += 1;
        }
    }
    Ok(swept)
}
