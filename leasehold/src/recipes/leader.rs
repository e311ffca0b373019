//! [`Leader`]: one process leads until it goes away.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::exclusion::{Exclusion, Hold};
use crate::{Error, FencingToken, Key, Lease, LossReason, Lost, NamedLock, Result};

/// A candidate's wait for the lock is renewed so often, so that its health is known.
const ROUND: Duration = Duration::from_secs(10);
/// The pause after a failed try.
const RETRY: Duration = Duration::from_secs(1);
/// The terms of all candidates of this process, counted.
static TERMS: AtomicU64 = AtomicU64::new(0);

/// A candidate to be made: over which trait, and how it campaigns.
#[derive(Clone, Debug)]
pub struct Campaign {
    exclusion: Exclusion,
    key: Key,
    max_term: Option<Duration>,
    retry: Duration,
}

impl Campaign {
    /// Gives the leadership up after so long, so that it goes round; default: sticky, a leader
    /// leads until it goes away. Where nobody else campaigns, it is elected again.
    #[must_use]
    pub fn max_term(self, max_term: Duration) -> Self {
        Self { max_term: Some(max_term), ..self }
    }

    /// The pause after a failed try; default 1 s.
    #[must_use]
    pub fn retry(self, retry: Duration) -> Self {
        Self { retry, ..self }
    }

    /// Starts to campaign, in a task of its own. Must be called within a tokio runtime.
    pub fn start(self) -> Leader {
        let (orders, ordered) = watch::channel(Orders { campaigns: true, resignations: 0 });
        let (tell, terms) = watch::channel(None);
        let (report, health) = watch::channel(News::default());
        let key = self.key.clone();
        let terms_told = Told(tell);
        let candidate = Candidate { campaign: self, ordered, seen: 0, terms: terms_told, report };
        let task = tokio::spawn(candidate.run());
        Leader { key, orders, terms, health, task }
    }
}

/// Leader election: of all processes that campaign for a key, at most one leads at a time.
///
/// It campaigns in the background until it is dropped: waits for the lock, leads while it is held,
/// and campaigns again after a loss. Over named locks ([`Leader::over_locks`]) a killed leader is
/// followed at once, and there is no clock; over leases ([`Leader::over_leases`]) after the ttl.
///
/// **Guaranteed:** one leader at a time as far as the lock excludes; a [`Term`] ends for its holder
/// before the next begins (for a lease by its own monotonic deadline; a session lock that the
/// store dropped may go to another before the news arrives, see [`NamedLock`]). Work under
/// [`lead`](Leader::lead) is dropped on a loss, and a resignation frees the lock only after it.
///
/// **Not guaranteed:** that a leader that is paused knows of its loss at once. Check what it writes
/// with [`Term::token`].
///
/// ```
/// use std::sync::Arc;
/// use leasehold::memory::MemoryBackend;
/// use leasehold::recipes::Leader;
/// use leasehold::Key;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let store = Arc::new(MemoryBackend::new());
/// let leader = Leader::over_locks(store, Key::new("scheduler")?).start();
///
/// // runs when elected, again after each loss, until it returns
/// let token = leader.lead(async |term| term.token()).await;
/// assert!(leader.is_leader());
///
/// leader.resign().await;
/// assert!(!leader.is_leader());
/// # assert!(token.value() > 0);
/// # Ok(())
/// # }
/// ```
pub struct Leader {
    key: Key,
    orders: watch::Sender<Orders>,
    terms: watch::Receiver<Option<Term>>,
    health: watch::Receiver<News>,
    task: JoinHandle<()>,
}

impl fmt::Debug for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leader")
            .field("key", &self.key)
            .field("standing", &self.standing())
            .finish_non_exhaustive()
    }
}

/// What a candidate is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// It leads.
    Leading,
    /// It campaigns and somebody else may lead.
    Campaigning,
    /// It resigned and does not campaign.
    Resigned,
}

/// How a candidate does, for a health check.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeaderHealth {
    /// What it is.
    pub standing: Standing,
    /// How long ago the store last answered it; none if it never did. A wait that goes on is
    /// answered every 10 s.
    pub answered: Option<Duration>,
    /// The latest failure, unless the store answered since.
    pub error: Option<Error>,
}

impl LeaderHealth {
    /// Whether nothing is known to be wrong: it leads, or the store answered its latest request,
    /// or it does not want to lead.
    pub fn is_ok(&self) -> bool {
        self.standing != Standing::Campaigning || self.error.is_none()
    }
}

/// One uninterrupted leadership.
#[derive(Clone, Debug)]
pub struct Term {
    /// Tells it from every other term that this process sees.
    id: u64,
    token: FencingToken,
    lost: Lost,
    /// Held by those who work in this term; a resignation waits for them.
    work: mpsc::WeakSender<()>,
}

impl Term {
    /// The fencing token, greater than that of every earlier leader.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Tells when the leadership is lost; not when it is resigned.
    pub fn lost(&self) -> Lost {
        self.lost.clone()
    }
}

/// Equal if they are the same term of the same candidate.
impl PartialEq for Term {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Leader {
    /// A candidate over named locks: a leader leads until it resigns or its session ends.
    pub fn over_locks(locks: Arc<dyn NamedLock>, key: Key) -> Campaign {
        Campaign { exclusion: Exclusion::Locks(locks), key, max_term: None, retry: RETRY }
    }

    /// A candidate over leases, renewed while it leads; a dead leader is followed after `ttl`.
    pub fn over_leases(leases: Arc<dyn Lease>, key: Key, ttl: Duration) -> Campaign {
        Campaign { exclusion: Exclusion::Leases(leases, ttl), key, max_term: None, retry: RETRY }
    }

    /// The key that is campaigned for.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Whether it leads. No I/O; false as soon as the leadership is lost.
    pub fn is_leader(&self) -> bool {
        self.term().is_some()
    }

    /// The current term, if it leads. No I/O.
    pub fn term(&self) -> Option<Term> {
        self.terms.borrow().clone().filter(|term| !term.lost.is_set())
    }

    /// The news of gain (`Some`) and loss (`None`). It also ends with `None` when the leader is
    /// dropped.
    pub fn watch(&self) -> watch::Receiver<Option<Term>> {
        self.terms.clone()
    }

    /// How it does, without I/O.
    pub fn health(&self) -> LeaderHealth {
        let News { answered, error, .. } = self.health.borrow().clone();
        let answered = answered.map(|at| at.elapsed());
        LeaderHealth { standing: self.standing(), answered, error }
    }

    fn standing(&self) -> Standing {
        match (self.is_leader(), self.orders.borrow().campaigns) {
            (true, _) => Standing::Leading,
            (false, true) => Standing::Campaigning,
            (false, false) => Standing::Resigned,
        }
    }

    /// Waits until it leads.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn elected(&self) -> Term {
        let mut terms = self.terms.clone();
        loop {
            if let Some(term) = self.term() {
                return term;
            }
            if terms.changed().await.is_err() {
                std::future::pending::<()>().await; // the runtime is going down
            }
        }
    }

    /// Does `work` while it leads: begins when elected, drops it when the leadership is lost or
    /// resigned, begins anew with the next term. Returns what the work returns, still leading.
    ///
    /// # Cancel safety
    /// As safe as `work`; it goes on leading.
    pub async fn lead<F: Future>(&self, mut work: impl FnMut(Term) -> F) -> F::Output {
        loop {
            let term = self.elected().await;
            let mut terms = self.terms.clone();
            // none: it resigned between the two
            let Some(_working) = term.work.upgrade() else {
                continue;
            };
            tokio::select! {
                biased;
                _ = term.lost.wait() => {}
                _ = terms.wait_for(|now| now.as_ref() != Some(&term)) => {}
                done = work(term.clone()) => return done,
            }
        }
    }

    /// Stops campaigning and gives the leadership up; returns once it has told so, all work under
    /// [`lead`](Self::lead) is dropped, and the lock is freed (or will be, in the background, where
    /// the store does not answer).
    ///
    /// # Cancel safety
    /// Safe: once polled, it goes on in the background.
    pub async fn resign(&self) {
        let mut number = 0;
        self.orders.send_modify(|orders| {
            orders.campaigns = false;
            orders.resignations += 1;
            number = orders.resignations;
        });
        let mut health = self.health.clone();
        // an error: the task ended with the runtime, and the lock with it
        drop(health.wait_for(|news| news.resignations >= number).await);
    }

    /// Campaigns again after a [`resign`](Self::resign).
    pub fn campaign(&self) {
        self.orders.send_modify(|orders| orders.campaigns = true);
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.task.abort(); // frees the lock in the background
    }
}

// --- the task ------------------------------------------------------------------------------

/// What the task is to do.
#[derive(Clone, Copy, Debug)]
struct Orders {
    campaigns: bool,
    /// Counted, so that one that is taken back at once is not missed.
    resignations: u64,
}

/// What the task reports.
#[derive(Clone, Debug, Default)]
struct News {
    answered: Option<Instant>,
    error: Option<Error>,
    /// The resignations that were carried out.
    resignations: u64,
}

/// Tells the terms; whatever ends the task, the last word is that it does not lead.
struct Told(watch::Sender<Option<Term>>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.send_replace(None);
    }
}

struct Candidate {
    campaign: Campaign,
    ordered: watch::Receiver<Orders>,
    seen: u64,
    terms: Told,
    report: watch::Sender<News>,
}

impl Candidate {
    async fn run(mut self) {
        loop {
            let orders = *self.ordered.borrow_and_update();
            self.seen = orders.resignations;
            self.report.send_modify(|news| news.resignations = orders.resignations);
            if !orders.campaigns {
                match self.ordered.changed().await {
                    Ok(()) => continue,
                    Err(_) => return,
                }
            }
            let Some(taken) = self.unless_resigned(self.take()).await else {
                continue;
            };
            match taken {
                Ok(None) => self.answered(),
                Ok(Some((hold, token))) => {
                    self.answered();
                    if self.lead(hold, token).await == Ended::ItsTime {
                        // others have their turn first
                        self.unless_resigned(tokio::time::sleep(self.campaign.retry)).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(key = %self.campaign.key, %error, "campaigning failed");
                    self.report.send_modify(|news| news.error = Some(error));
                    self.unless_resigned(tokio::time::sleep(self.campaign.retry)).await;
                }
            }
        }
    }

    async fn take(&self) -> Result<Option<(Hold, FencingToken)>> {
        let Campaign { exclusion, key, .. } = &self.campaign;
        let Some(hold) = exclusion.take(key, ROUND).await? else {
            return Ok(None);
        };
        let token = hold.token().await?;
        Ok(Some((hold, token)))
    }

    async fn lead(&self, hold: Hold, token: FencingToken) -> Ended {
        let key = &self.campaign.key;
        let lost = hold.lost();
        let (working, mut workers) = mpsc::channel(1);
        let id = TERMS.fetch_add(1, Ordering::Relaxed);
        let term = Term { id, token, lost: lost.clone(), work: working.downgrade() };
        tracing::info!(%key, %token, "elected");
        // dropped before `hold`: nobody is told of a term whose lock is gone
        let told = Until(&self.terms.0);
        told.0.send_replace(Some(term));
        let its_time = async {
            match self.campaign.max_term {
                Some(term) => tokio::time::sleep(term).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            biased;
            reason = lost.wait() => Ended::Lost(reason),
            time = self.unless_resigned(its_time) => match time {
                Some(()) => Ended::ItsTime,
                None => Ended::Resigned,
            },
        };
        drop(told);
        drop(working);
        if let Ended::Lost(reason) = ended {
            tracing::warn!(%key, %token, reason = reason.as_str(), "leadership lost");
            return ended;
        }
        // work is dropped when its task sees the news: the lock is kept until then
        tokio::select! {
            biased;
            _ = lost.wait() => {}
            _ = workers.recv() => {}
        }
        match hold.release().await {
            Ok(()) => tracing::info!(%key, %token, "leadership given up"),
            Err(error) => tracing::warn!(%key, %token, %error, "leadership given up"),
        }
        ended
    }

    /// None if it is to resign, or nobody is left who could want it to.
    async fn unless_resigned<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut ordered = self.ordered.clone();
        tokio::select! {
            biased;
            _ = ordered.wait_for(|orders| orders.resignations != self.seen) => None,
            done = future => Some(done),
        }
    }

    fn answered(&self) {
        self.report.send_modify(|news| {
            (news.answered, news.error) = (Some(Instant::now()), None);
        });
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Lost(LossReason),
    Resigned,
    ItsTime,
}

struct Until<'a>(&'a watch::Sender<Option<Term>>);

impl Drop for Until<'_> {
    fn drop(&mut self) {
        self.0.send_replace(None);
    }
}
