//! Pods that run tasks: webhooks in, a limited number of runs, and what else such a service needs.
//!
//! - A delivery of a webhook is recorded and becomes a run in one transaction; a second delivery of
//!   the same id is known ([`Claim::first_seen`]).
//! - So many runs at a time at most, and so many per repository ([`Limit`]): counted and taken in
//!   one transaction.
//! - A run belongs to the pod that has its turn ([`Turns`]), a lease that is taken before the run is
//!   marked; a sweep ([`Housekeeper`]) puts back the runs whose pod is gone.
//! - One refresh of the access token serves all pods ([`SingleFlight`]); an upgrade token is good once
//!   ([`OneTimeTokens`]); a schedule ticks once for the fleet ([`Schedule`]); a chat has one speaker at
//!   a time (a [`Lease`](leasehold::Lease)).
//!
//! Every write is guarded: by the claim that it is made in, and by the lease under which it is made.

mod http;
mod runs;

use std::sync::Arc;
use std::time::Duration;

use leasehold::recipes::{
    Every, Housekeeper, Limit, MissedTicks, OneTimeTokens, Schedule, SingleFlight, Turns,
};
use leasehold::{Claim, Key, LeaseGuard, LeaseOptions, Result, Store};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::docs::{Docs, claim};
use crate::journal::Journal;

pub use runs::{Run, State, all};

/// The key under which runs are counted, taken and finished.
pub(crate) const RUNS: &str = "runs";
/// The document of the access token.
const ACCESS: &str = "access token";

/// What a pod does.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// So many runs at a time, over all pods.
    pub limit: u64,
    /// So many of them for one repository.
    pub per_repo: u64,
    /// Workers of this pod.
    pub workers: usize,
    /// How long a run takes.
    pub run: Duration,
    /// After how long a dead pod's runs are put back.
    pub turn: Duration,
    /// How often the schedule ticks.
    pub tick: Duration,
}

/// One pod.
#[derive(Debug)]
pub struct Pod {
    store: Store,
    docs: Arc<dyn Docs>,
    journal: Journal,
    settings: Settings,
    limit: Limit,
    turns: Turns,
    flights: SingleFlight,
}

impl Pod {
    /// A pod on a store.
    ///
    /// # Errors
    /// None; the keys are valid.
    pub fn new(
        store: &Store,
        docs: Arc<dyn Docs>,
        settings: Settings,
        journal: Journal,
    ) -> Result<Self> {
        let limit = Limit::new(store.claims(), Key::new(RUNS)?, settings.limit);
        Ok(Self {
            limit: limit.wait(Duration::from_secs(2)),
            turns: Turns::new(store.leases(), Key::new("run")?).ttl(settings.turn),
            flights: SingleFlight::new(store.leases()).ttl(settings.turn),
            store: store.clone(),
            docs,
            journal,
            settings,
        })
    }

    /// Works until `stop` ends. Its address is told to the journal.
    ///
    /// # Errors
    /// If no port is to be had.
    ///
    /// # Cancel safety
    /// Dropped, it releases in the background.
    pub async fn run(self, stop: impl Future<Output = ()>) -> std::io::Result<()> {
        let pod = Arc::new(self);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let mut duties = JoinSet::new();
        duties.spawn(http::serve(pod.clone(), listener));
        for _ in 0..pod.settings.workers {
            duties.spawn(runs::work(pod.clone()));
        }
        duties.spawn(pod.clone().tick());
        duties.spawn(pod.clone().keep_house());
        pod.journal.tell("listening", &port.to_string(), 0);
        stop.await;
        duties.shutdown().await;
        Ok(())
    }

    /// Fires the ticks of the schedule that this pod is the first to record.
    async fn tick(self: Arc<Self>) {
        let scheduled = async {
            let every = Every::new(self.settings.tick)?;
            let schedule = Schedule::new(self.store.deduper(), Key::new("schedule")?, every);
            let schedule = schedule.missed(MissedTicks::All).catch_up(Duration::from_secs(10));
            schedule
                .run(async |tick| {
                    let due = tick.due.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                    let name = format!("tick/{}", due.as_millis());
                    match self.count(&name, None).await {
                        Ok(()) => self.journal.tell("ticked", &name, 0),
                        Err(error) => self.journal.tell("tick failed", &error.to_string(), 0),
                    }
                })
                .await
        };
        if let Err(error) = scheduled.await {
            tracing::error!(%error, "the schedule has ended");
        }
    }

    /// Puts back the runs of dead pods, under a lease of the fleet.
    async fn keep_house(self: Arc<Self>) {
        let kept = async {
            let keeper = Housekeeper::new(self.store.backend(), Key::new("housekeeping")?)
                .interval(Duration::from_millis(500));
            let pod = self.clone();
            keeper.register_sweep("orphaned runs", move || runs::put_back(pod.clone()));
            keeper.run().await
        };
        // it ends by an error only
        let Err(error) = kept.await;
        tracing::error!(%error, "the housekeeping has ended");
    }

    /// An access token newer than `generation`: refreshed once, whoever asks.
    async fn access_token(&self, generation: u64) -> Result<Option<u64>> {
        let newer = async || {
            let mut claim = claim(&self.store, &[]).await?;
            let stored = self.docs.read(&mut claim, ACCESS).await?;
            claim.rollback().await?;
            let stored = stored.and_then(|text| text.parse().ok());
            Ok(stored.filter(|stored| *stored > generation))
        };
        let refresh = async |lease: &LeaseGuard| {
            tokio::time::sleep(Duration::from_millis(50)).await; // asks whoever gives tokens
            let next = generation + 1;
            let mut claim = claim(&self.store, &[ACCESS]).await?;
            self.docs.verify(&mut claim, lease).await?;
            self.docs.write(&mut claim, ACCESS, &next.to_string()).await?;
            self.count_in(&mut claim, &format!("refreshed/{next}")).await?;
            claim.commit().await?;
            self.journal.tell("refreshed", &next.to_string(), lease.token().value());
            Ok(next)
        };
        self.flights.run(&Key::new(ACCESS)?, newer, refresh).await
    }

    /// Says something in a chat where one speaks at a time; false if somebody else does.
    async fn chat(&self, user: &str) -> Result<bool> {
        let opts = LeaseOptions::try_once().ttl(Duration::from_secs(30));
        let Some(lease) = self.store.lease(&Key::new(format!("chat/{user}"))?, opts).await? else {
            return Ok(false);
        };
        self.journal.tell("chat begins", user, lease.token().value());
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.count(&format!("chat/{user}/{}", lease.token()), Some(&lease)).await?;
        self.journal.tell("chat ends", user, lease.token().value());
        // the answer does not wait for a slow store: the lease expires then
        let freed = tokio::time::timeout(Duration::from_secs(2), lease.release()).await;
        if let Ok(Err(error)) = freed {
            tracing::warn!(%error, "the chat was not released");
        }
        Ok(true)
    }

    /// Upgrade tokens of a user.
    fn upgrades(&self, user: &str) -> Result<OneTimeTokens> {
        Ok(OneTimeTokens::new(self.store.deduper(), Key::new(format!("upgrade/{user}"))?))
    }

    /// Counts that something was done, under its own claim and perhaps a lease.
    async fn count(&self, name: &str, lease: Option<&LeaseGuard>) -> Result<()> {
        let mut claim = claim(&self.store, &[name]).await?;
        if let Some(lease) = lease {
            self.docs.verify(&mut claim, lease).await?;
        }
        self.count_in(&mut claim, name).await?;
        claim.commit().await
    }

    async fn count_in(&self, claim: &mut Claim, name: &str) -> Result<()> {
        let name = format!("count/{name}");
        let times = self.docs.read(claim, &name).await?;
        let times = times.and_then(|times| times.parse().ok()).unwrap_or(0_u64) + 1;
        self.docs.write(claim, &name, &times.to_string()).await
    }
}
