//! [`RedisQuorum`]: leases and named locks by a majority of independent servers.

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fred::interfaces::ClientLike;
use futures_util::future::join_all;
use leasehold_core::backend::{
    LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, Wake, WakeSource,
};
use leasehold_core::engine::LeaseEngine;
use leasehold_core::{
    Error, ErrorKind, FencingToken, Finding, Inspect, Key, Lease, LeaseGuard, LeaseOptions,
    LockGuard, LockOptions, NamedLock, Result,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;

use crate::claim::jittered;
use crate::conn::{Conn, NAME, Words};
use crate::error::strange;
use crate::holder::Told;
use crate::inspect::{of_server, unreached};
use crate::keys::{KEEP_LAST, Kind, Place, millis};
use crate::script::RAISE;
use crate::wake::Wakes;

/// Tries of one request after votes that were split.
const VOTES: u32 = 4;

/// Named locks and leases held by a majority of independent servers (*Redlock*).
///
/// A lock is taken on all servers at once and held if a majority gave it within its ttl, less the
/// drift margin that every lease has; otherwise it is given back on all. It stays available and
/// exclusive while a minority of the servers is down or has lost its data. Open one with
/// [`Builder::connect_quorum`](crate::Builder::connect_quorum); an odd number of servers, at least
/// three, none a replica of another.
///
/// Its token is the highest that the majority gave, written back to a majority before the lock is
/// given to the caller, so that the next majority, which has a server in common with this one,
/// gives a greater one.
///
/// **What it does not give:**
/// - It is no consensus. A server that restarts without its data within the ttl of a lock may give
///   it to somebody else, and so may one whose clock is set forward; with a majority of such
///   servers two hold it. Let a server that lost its data stay away for the longest ttl, or persist
///   with `appendfsync always`.
/// - It is no fence, as no lock is: a holder that was paused may act late. Compare the token.
/// - No claims and no dedupe: there is no one place to commit to. A lease cannot be verified in a
///   transaction.
/// - A server that did not answer may keep a lock that was not won until its ttl has passed: that
///   concerns a minority only.
/// - It does not tell who holds what, and releases nothing by force (of [`Inspect`], it has
///   [`diagnose`](Inspect::diagnose) only): a
///   [`RedisBackend`](crate::RedisBackend) on one of the servers, in the same namespace, tells what
///   that server knows. What is released by force on a majority of them is lost.
/// - It costs two round trips to all servers, and votes may be split under contention: then it
///   tries again after a random pause, and [`LeaseOptions::try_once`] may miss a free lock.
///
/// It defends against the loss of a server, which [`RedisBackend`](crate::RedisBackend) with a
/// sentinel and [`wait_replicas`](crate::Builder::wait_replicas) mostly does as well at less cost;
/// where exclusion must not fail, use a store that promises it.
#[derive(Debug)]
pub struct RedisQuorum {
    locks: LeaseEngine<Votes>,
    leases: LeaseEngine<Votes>,
    servers: Arc<[Member]>,
    lock_ttl: Duration,
}

/// One of the servers.
#[derive(Debug)]
pub(crate) struct Member {
    conn: Arc<Conn>,
    wakes: Wakes,
    /// What it is asked, also after a majority has answered.
    asked: TaskTracker,
    _told: Told,
}

impl Member {
    pub(crate) fn new(conn: Conn) -> Self {
        let wakes = Wakes::new(&conn, false);
        let conn = Arc::new(conn);
        Self { _told: Told::start(&conn), conn, wakes, asked: TaskTracker::new() }
    }
}

impl RedisQuorum {
    pub(crate) fn over(servers: Vec<Member>, lock_ttl: Duration) -> Self {
        let servers: Arc<[Member]> = servers.into();
        let engine = |kind| LeaseEngine::new(Votes { servers: servers.clone(), kind });
        Self { locks: engine(Kind::Lock), leases: engine(Kind::Lease), servers, lock_ttl }
    }

    /// How many servers there are.
    pub fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Frees everything, tells every guard, and closes the connections. Later calls fail.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if no majority answered.
    ///
    /// # Cancel safety
    /// What is held is freed once it was polled; the connections close with the handle.
    pub async fn close(&self) -> Result<()> {
        let (locks, leases) = tokio::join!(self.locks.close(), self.leases.close());
        for server in &*self.servers {
            server.wakes.stop();
        }
        let ended = self.servers.iter().map(|server| async {
            // a majority has freed what was held: the others have their answer limit for it
            server.asked.close();
            server.asked.wait().await;
            server.conn.quit().await;
        });
        join_all(ended).await;
        locks.and(leases).map_err(|error| error.at(NAME, "close"))
    }
}

#[async_trait]
impl NamedLock for RedisQuorum {
    async fn lock(&self, key: &Key, opts: LockOptions) -> Result<Option<LockGuard>> {
        let opts = LeaseOptions::default().ttl(self.lock_ttl).wait(opts.wait);
        self.locks.lock(key, opts).await
    }
}

#[async_trait]
impl Lease for RedisQuorum {
    async fn lease(&self, key: &Key, opts: LeaseOptions) -> Result<Option<LeaseGuard>> {
        self.leases.lease(key, opts).await
    }
}

/// Only [`diagnose`](Inspect::diagnose) is told, of each server.
#[async_trait]
impl Inspect for RedisQuorum {
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = join_all(self.servers.iter().map(|server| server.conn.diagnose())).await;
        let (mut findings, mut failed) = (Vec::new(), None);
        let mut reached = 0;
        for (server, found) in self.servers.iter().zip(asked) {
            let hosts = server.conn.clients()[0].client_config().server.hosts();
            let at = hosts.first().map_or_else(String::new, |host| format!("{host}: "));
            match found {
                Ok(found) => {
                    reached += 1;
                    findings.extend(found.into_iter().map(|finding| of_server(&at, finding)));
                }
                Err(error) => {
                    findings.push(unreached(&at, &error));
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if reached == 0 => Err(error.at(NAME, "diagnose")),
            _ => Ok(findings),
        }
    }
}

/// The statements, put to the vote.
#[derive(Debug)]
struct Votes {
    servers: Arc<[Member]>,
    kind: Kind,
}

/// How a vote went.
enum Vote {
    Won {
        token: FencingToken,
    },
    /// Others have it.
    Lost {
        expires_in: Duration,
    },
    /// Nobody has a majority.
    Split,
}

impl Votes {
    fn majority(&self) -> usize {
        self.servers.len() / 2 + 1
    }

    fn place(&self, key: &Key) -> Place {
        self.servers[0].conn.keys.place(self.kind, key)
    }

    /// Asks all servers; each goes on when the asking has ended.
    fn ask<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        limit: Duration,
        question: impl Fn(Arc<Conn>) -> F,
    ) -> Answers<T> {
        let (tell, answers) = mpsc::unbounded_channel();
        for server in &*self.servers {
            let (answer, tell) = (question(server.conn.clone()), tell.clone());
            server.asked.spawn(async move {
                let answer = tokio::time::timeout(limit, answer).await;
                drop(tell.send(answer.unwrap_or_else(|_| Err(silent())))); // enough have answered
            });
        }
        Answers(answers)
    }

    async fn vote(&self, place: &Place, owner: Owner, ttl: Duration) -> Result<Vote> {
        let majority = self.majority();
        let limit = self.limit(ttl);
        let mut answers = self.ask(limit, |conn| {
            let place = place.clone();
            async move { conn.acquire(place, owner, ttl).await }
        });
        let (mut tokens, mut busy, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(answer) = answers.0.recv().await {
            match answer {
                Ok(LeaseTry::Acquired(token)) => tokens.push(token),
                Ok(LeaseTry::Busy { expires_in }) => busy.push(expires_in),
                Err(error) => failed.push(error),
            }
            if tokens.len() >= majority || busy.len() >= majority || failed.len() >= majority {
                break;
            }
        }
        if tokens.len() >= majority
            && let Some(token) = tokens.into_iter().max()
            && self.agree(place, owner, token, limit).await >= majority
        {
            return Ok(Vote::Won { token });
        }
        self.give_back(place, owner, limit).await;
        if failed.len() >= majority {
            return Err(failed.pop().unwrap_or_else(silent));
        }
        if busy.len() < majority {
            return Ok(Vote::Split);
        }
        // the time after which a majority may be free
        busy.sort_unstable();
        let expires_in = busy.get(majority - 1).copied().unwrap_or_default();
        Ok(Vote::Lost { expires_in })
    }

    /// Tells the token to those who gave the lock; how many have taken it down.
    async fn agree(
        &self,
        place: &Place,
        owner: Owner,
        token: FencingToken,
        limit: Duration,
    ) -> usize {
        let mut answers = self.ask(limit, |conn| {
            let place = place.clone();
            async move { conn.raise(&place, owner, token).await }
        });
        let mut agreed = 0;
        while let Some(answer) = answers.0.recv().await {
            agreed += usize::from(matches!(answer, Ok(true)));
            if agreed >= self.majority() {
                break;
            }
        }
        agreed
    }

    /// Frees what was won of a vote that was lost, without refusing later votes of this owner.
    async fn give_back(&self, place: &Place, owner: Owner, limit: Duration) {
        let mut answers = self.ask(limit, |conn| {
            let place = place.clone();
            async move { conn.give_back(place, owner).await }
        });
        let mut heard = 0;
        while heard < self.majority() && answers.0.recv().await.is_some() {
            heard += 1;
        }
    }

    /// How long one server may take: a slow one must not eat up the ttl.
    fn limit(&self, ttl: Duration) -> Duration {
        let limit = self.servers[0].conn.settings.command_limit;
        limit.min(ttl / 5).max(Duration::from_millis(20))
    }
}

struct Answers<T>(mpsc::UnboundedReceiver<Result<T>>);

fn silent() -> Error {
    Error::new(ErrorKind::Unavailable, "no majority of the servers answered in time")
}

impl Conn {
    /// Gives a lock that its owner holds the token that the majority agreed on.
    async fn raise(&self, place: &Place, owner: Owner, token: FencingToken) -> Result<bool> {
        let words = || Words {
            keys: vec![self.keys.last_lease(&place.tag), place.name.as_str().into()],
            args: vec![self.keys.owner(owner).into(), token.to_string().into(), millis(KEEP_LAST)],
        };
        let answer = self.call(&RAISE, place.wake, words).await?;
        Ok(answer.as_i64().ok_or_else(|| strange(&answer))? == 1)
    }
}

#[async_trait]
impl LeaseDriver for Votes {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        for server in &*self.servers {
            server.conn.told.keep_for(ttl);
        }
        let place = self.place(key);
        for vote in 1..=VOTES {
            match self.vote(&place, owner, ttl).await? {
                Vote::Won { token } => return Ok(LeaseTry::Acquired(token)),
                Vote::Lost { expires_in } => return Ok(LeaseTry::Busy { expires_in }),
                Vote::Split if vote < VOTES => {
                    tokio::time::sleep(jittered(Duration::from_millis(10) * vote)).await;
                }
                Vote::Split => {}
            }
        }
        Ok(LeaseTry::Busy { expires_in: jittered(Duration::from_millis(50)) })
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let shortest = renewals.iter().map(|renewal| renewal.ttl).min().unwrap_or_default();
        let limit = self.limit(shortest);
        let wanted: Arc<Vec<(Place, Owner, Duration)>> = Arc::new(
            renewals
                .iter()
                .map(|renewal| (self.place(&renewal.key), renewal.owner, renewal.ttl))
                .collect(),
        );
        let mut answers = self.ask(limit, |conn| {
            let wanted = wanted.clone();
            async move {
                let renewals: Vec<_> =
                    wanted.iter().map(|(place, owner, ttl)| (place, *owner, *ttl)).collect();
                conn.renew(&renewals, limit).await
            }
        });
        let mut held = vec![0; renewals.len()];
        let mut heard = 0;
        while let Some(answer) = answers.0.recv().await {
            let Ok(answer) = answer else { continue };
            heard += 1;
            for (held, renewed) in held.iter_mut().zip(answer) {
                *held += usize::from(renewed);
            }
            if heard >= self.majority() && held.iter().all(|held| *held >= self.majority()) {
                break;
            }
        }
        let unheard = self.servers.len() - heard;
        if held.iter().any(|held| *held < self.majority() && held + unheard >= self.majority()) {
            return Err(silent());
        }
        Ok(held.into_iter().map(|held| held >= self.majority()).collect())
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let place = self.place(key);
        let limit = self.servers[0].conn.settings.command_limit;
        let mut answers = self.ask(limit, |conn| {
            let place = place.clone();
            async move { Ok(conn.release(place, owner).await?.ours) }
        });
        let (mut freed, mut not_held) = (0, 0);
        while let Some(answer) = answers.0.recv().await {
            match answer {
                Ok(true) => freed += 1,
                Ok(false) => not_held += 1,
                Err(_) => {}
            }
            if freed >= self.majority() {
                return Ok(true);
            }
        }
        if not_held >= self.majority() { Ok(false) } else { Err(silent()) }
    }

    async fn verify(&self, _: &Key, _: Owner, _: &mut (dyn Any + Send)) -> Result<()> {
        let detail = "a quorum has no transactions: compare the token in the guarded write";
        Err(Error::new(ErrorKind::Unsupported, detail))
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.servers[0].conn.keys.wake(self.kind, key)
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        let (tell, news) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for server in &*self.servers {
            let (mut source, tell) = (server.wakes.source(), tell.clone());
            tasks.spawn(async move {
                while let Ok(wake) = source.next().await {
                    if tell.send(wake).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Some(Box::new(Merged { news, _tasks: tasks })))
    }

    fn limits(&self) -> LeaseLimits {
        let conn = &self.servers[0].conn;
        let mut limits = LeaseLimits::default();
        // a vote, the agreement and the way back, as often as votes are split
        limits.answer = conn.answer_limit() * 3;
        limits
    }
}

/// The news of all servers.
#[derive(Debug)]
struct Merged {
    news: mpsc::UnboundedReceiver<Wake>,
    _tasks: JoinSet<()>,
}

#[async_trait]
impl WakeSource for Merged {
    async fn next(&mut self) -> Result<Wake> {
        let ended = || Error::new(ErrorKind::Unavailable, "the subscriptions have ended");
        self.news.recv().await.ok_or_else(ended)
    }
}
