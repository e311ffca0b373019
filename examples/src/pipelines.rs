//! Pipelines, each driven by one server at a time.
//!
//! Every server runs the same loop. A tick takes what locks it can get, one per pipeline, and keeps
//! them ([`LockRegistry`]): a pipeline stays with its server until it is finished or the server
//! goes away, and then the next tick of another takes it over. What is finished is swept: first the
//! held locks are noted, then the active pipelines are queried, then the difference is released.
//!
//! The lock is not a fence: a server that was cut off believes in it until it looks. So each step is
//! written by compare-and-set, in a claim on the pipeline, and only if no greater fencing token has
//! written before.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Key, LockGuard, LockOptions, LockRegistry, Result, Store};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::docs::{Docs, claim};
use crate::journal::Journal;

/// The lock of the server that looks for new pipelines.
const SCAN: &str = "scan";

/// What there is to do.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// So many pipelines are found, one after another.
    pub pipelines: u32,
    /// The steps of each.
    pub steps: u32,
    /// The time that a step takes.
    pub step: Duration,
    /// A server looks around so often.
    pub tick: Duration,
    /// A server drives so many at once at most.
    pub share: usize,
}

/// A pipeline as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipeline {
    /// Steps that are done.
    pub done: u32,
    /// Of so many.
    pub steps: u32,
    /// The fencing token of the last write: lower ones write no more.
    pub token: u64,
}

/// How a step ended.
enum Step {
    Done(u32),
    Finished,
    /// A later holder of the lock has written already.
    Stale,
}

/// One server.
#[derive(Debug)]
pub struct Server {
    store: Store,
    docs: Arc<dyn Docs>,
    locks: LockRegistry,
    settings: Settings,
    journal: Journal,
}

impl Server {
    /// A server on a store.
    pub fn new(store: &Store, docs: Arc<dyn Docs>, settings: Settings, journal: Journal) -> Self {
        let locks = LockRegistry::new(store.locks());
        Self { store: store.clone(), docs, locks, settings, journal }
    }

    /// Works until `stop` ends, then releases what it holds.
    ///
    /// # Errors
    /// Those of the releases.
    ///
    /// # Cancel safety
    /// Dropped, it releases in the background.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<()> {
        let server = Arc::new(self);
        let mut driven = HashMap::new();
        let mut ticks = tokio::time::interval(server.settings.tick);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                _ = ticks.tick() => {}
            }
            if let Err(error) = server.tick(&mut driven).await {
                // fail closed: what is not known to be held is not driven
                tracing::warn!(%error, "the tick failed");
                server.journal.tell("tick failed", &error.to_string(), 0);
            }
        }
        for drive in driven.values_mut() {
            drive.0.abort();
            drop((&mut drive.0).await); // aborted, or done
        }
        server.locks.snapshot().release_all_except(&HashSet::new()).await?;
        Ok(())
    }

    async fn tick(self: &Arc<Self>, driven: &mut HashMap<Key, Drive>) -> Result<()> {
        // before the query: what is taken in between is never swept
        let held = self.locks.snapshot();
        let scan = Key::new(SCAN)?;
        let active = self.active().await?;
        let wanted: HashSet<Key> = active.iter().chain([&scan]).cloned().collect();
        for swept in held.release_all_except(&wanted).await? {
            self.journal.tell("swept", swept.as_str(), 0);
        }
        if self.locks.hold(&scan, LockOptions::try_once()).await? {
            self.scan().await?;
        }
        driven.retain(|_, drive| !drive.0.is_finished());
        for key in active {
            if driven.len() >= self.settings.share {
                break;
            }
            if !driven.contains_key(&key) && self.locks.hold(&key, LockOptions::try_once()).await? {
                let Some(guard) = self.locks.guard(&key) else { continue };
                let drive = self.clone().drive(guard);
                driven.insert(key, Drive(tokio::spawn(drive)));
            }
        }
        Ok(())
    }

    /// The pipelines that are not finished.
    async fn active(&self) -> Result<Vec<Key>> {
        let all = pipelines(&self.store, &*self.docs).await?;
        let active = all.into_iter().filter(|(_, pipeline)| pipeline.done < pipeline.steps);
        active.map(|(name, _)| Key::new(name)).collect()
    }

    /// Finds new pipelines: one server does, and stays at it.
    async fn scan(&self) -> Result<()> {
        let Some(guard) = self.locks.guard(&Key::new(SCAN)?) else { return Ok(()) };
        let token = guard.token().await?.value();
        let mut claim = claim(&self.store, &[SCAN]).await?;
        let found = self.docs.read(&mut claim, SCAN).await?;
        let (last, found) = found.map_or(Ok((0, 0)), |text| parse::<(u64, u32)>(&text))?;
        if last > token {
            self.journal.tell("rejected", SCAN, token);
            return claim.rollback().await;
        }
        let upto = (found + 2).min(self.settings.pipelines);
        for number in found..upto {
            let new = Pipeline { done: 0, steps: self.settings.steps, token: 0 };
            self.docs.write(&mut claim, &format!("pipeline/{number:03}"), &text(&new)).await?;
        }
        if upto == found {
            return claim.rollback().await;
        }
        self.docs.write(&mut claim, SCAN, &text(&(token, upto))).await?;
        claim.commit().await
    }

    /// Drives a pipeline for as long as its lock is held.
    async fn drive(self: Arc<Self>, guard: Arc<LockGuard>) {
        let name = guard.key().as_str();
        let token = match guard.token().await {
            Ok(token) => token.value(),
            Err(error) => return self.journal.tell("lost", &format!("{name}: {error}"), 0),
        };
        self.journal.tell("driving", name, token);
        let lost = guard.lost();
        loop {
            tokio::select! {
                biased;
                _ = lost.wait() => return self.journal.tell("lost", name, token),
                () = tokio::time::sleep(self.settings.step) => {}
            }
            match self.step(name, token).await {
                Ok(Step::Done(done)) => self.journal.tell("step", &format!("{name}/{done}"), token),
                Ok(Step::Finished) => return self.journal.tell("finished", name, token),
                Ok(Step::Stale) => return self.journal.tell("rejected", name, token),
                // the next round reads what became of it
                Err(error) => self.journal.tell("step failed", &format!("{name}: {error}"), token),
            }
        }
    }

    /// Does the next step: in one transaction, if no greater token has written.
    async fn step(&self, name: &str, token: u64) -> Result<Step> {
        let mut claim = claim(&self.store, &[name]).await?;
        let stored = self.docs.read(&mut claim, name).await?;
        let Some(mut pipeline) = stored.map(|text| parse::<Pipeline>(&text)).transpose()? else {
            return Ok(Step::Stale); // nobody deletes pipelines; there is nothing to drive
        };
        if pipeline.token > token {
            return Ok(Step::Stale);
        }
        if pipeline.done == pipeline.steps {
            return Ok(Step::Finished); // the answer to its last commit was lost
        }
        (pipeline.done, pipeline.token) = (pipeline.done + 1, token);
        // how often this step was done: the tests want it to be once
        let count = format!("done/{name}/{}", pipeline.done);
        let times = self.docs.read(&mut claim, &count).await?;
        let times = times.map_or(Ok(0), |text| parse::<u32>(&text))? + 1;
        self.docs.write(&mut claim, name, &text(&pipeline)).await?;
        self.docs.write(&mut claim, &count, &text(&times)).await?;
        claim.commit().await?;
        let finished = pipeline.done == pipeline.steps;
        Ok(if finished { Step::Finished } else { Step::Done(pipeline.done) })
    }
}

/// A pipeline that is driven; not any longer when this is dropped.
struct Drive(JoinHandle<()>);

impl Drop for Drive {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// All pipelines, as they are stored.
///
/// # Errors
/// Those of the store.
///
/// # Cancel safety
/// Safe.
pub async fn pipelines(store: &Store, docs: &dyn Docs) -> Result<Vec<(String, Pipeline)>> {
    let mut claim = claim(store, &[]).await?;
    let stored = docs.list(&mut claim, "pipeline/").await?;
    claim.rollback().await?;
    stored.into_iter().map(|(name, text)| Ok((name, parse(&text)?))).collect()
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn parse<T: for<'a> Deserialize<'a>>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(crate::docs::failed)
}
