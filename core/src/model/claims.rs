//! The claim engine under all schedules up to a bound, over the sessions of [`locks`](super::locks).

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::beliefs::Beliefs;
use super::droppable;
use super::explorer::{Task, finds, holds};
use super::locks::server::{Conversation, Driver, Mutant, Server};
use super::world::World;
use crate::backend::{ClaimDriver, Session, SessionDriver, SessionLimits, Try};
use crate::claim::{ClaimLock, ClaimTx};
use crate::engine::ClaimEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, Keys};
use crate::options::{ClaimOptions, Deadline};
use crate::token::FencingToken;

type Engine = Arc<ClaimEngine<Transactions>>;

/// A transaction is a session that waits for one key after another.
#[derive(Debug)]
struct Transactions {
    sessions: Driver,
    /// Planted: what was taken before a key was not to be had is kept.
    leaks: bool,
}

struct Transaction {
    session: Option<Conversation>,
    token: FencingToken,
}

#[async_trait]
impl ClaimDriver for Transactions {
    type Id = Key;

    fn backend(&self) -> &'static str {
        "model"
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<()>()
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn begin(&self, ids: &[Key], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let mut session = self.sessions.open().await?;
        for id in ids {
            match session.wait(id, deadline.remaining()).await? {
                Try::Granted(_) => {}
                Try::Busy => {
                    if self.leaks {
                        std::mem::forget(session);
                    }
                    return Ok(None);
                }
                Try::Refused(error) => return Err(error),
            }
        }
        let token = self.sessions.token();
        Ok(Some(Box::new(Transaction { session: Some(session), token })))
    }
}

impl Transaction {
    async fn end(&mut self, what: &str) -> Result<()> {
        let Some(session) = self.session.take() else { return Ok(()) };
        session.ends(what).await
    }
}

#[async_trait]
impl ClaimTx for Transaction {
    fn token(&self) -> FencingToken {
        self.token
    }

    fn tx(&mut self) -> &mut (dyn Any + Send) {
        self
    }

    async fn first_seen(&mut self, _: &Key, _: Duration) -> Result<bool> {
        Err(Error::new(ErrorKind::Unsupported, "the model's claims have no dedupe"))
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        self.end("commits").await
    }

    async fn rollback(mut self: Box<Self>) -> Result<()> {
        self.end("rolls back").await
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "transaction of {:?}", self.session)
    }
}

#[derive(Clone)]
struct Scene {
    world: World,
    server: Server,
    beliefs: Beliefs,
    leaks: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Commits,
    RollsBack,
    Drops,
}

impl Scene {
    fn new(world: World, mutant: Mutant, leaks: bool) -> Self {
        let server = Server::new(&world, mutant, false);
        let scene = Self { world, server, beliefs: Beliefs::default(), leaks };
        let checked = scene.clone();
        scene.world.check(move || checked.check());
        let server = scene.server.clone();
        scene.world.at_end(move || server.leftovers());
        scene
    }

    /// A claim whose session was cut fails when it is used: until then it may be believed in, and
    /// keeps the place of its handle.
    fn check(&self) -> Result<(), String> {
        self.beliefs.check(
            |one, two| one.handle == two.handle,
            |belief| self.server.holder(&belief.key) == Some(belief.handle),
            |belief| self.server.took_away(belief.handle, &belief.key),
            Duration::MAX,
        )
    }

    fn open(&self, handle: usize) -> Engine {
        let sessions = self.server.driver(handle, SessionLimits::default());
        Arc::new(ClaimEngine::new(Transactions { sessions, leaks: self.leaks }))
    }

    async fn client(
        self,
        who: &'static str,
        handle: usize,
        engine: Engine,
        names: &'static [&'static str],
        ends: Ends,
    ) {
        let keys = Keys::new(names).expect("valid keys");
        let call = {
            let (engine, keys) = (engine.clone(), keys.clone());
            async move { engine.claim(&keys, ClaimOptions::default().wait(Duration::MAX)).await }
        };
        let call = droppable(&self.world, who, call).await;
        let Some(claim) = self.world.taken(who, call) else { return };
        let mut tickets = Vec::new();
        for key in &keys {
            let (token, floor) = (claim.token(), self.beliefs.floor(key));
            tickets.push(self.beliefs.add(who, handle, key, Some(token), claim.lost()));
            if let Err(fault) = self.beliefs.token(key, floor, token) {
                self.world.violated(fault);
            }
        }
        tokio::task::yield_now().await;
        drop(tickets);
        let ended = match ends {
            Ends::Drops => return drop(claim),
            Ends::Commits => droppable(&self.world, who, claim.commit()).await,
            Ends::RollsBack => droppable(&self.world, who, claim.rollback()).await,
        };
        if let Some(Err(error)) = ended {
            self.world.allowed(&error);
        }
    }

    fn start(
        &self,
        who: &'static str,
        handle: usize,
        engine: &Engine,
        names: &'static [&'static str],
        ends: Ends,
    ) -> JoinHandle<()> {
        let client = self.clone().client(who, handle, engine.clone(), names, ends);
        self.world.spawn(who, client)
    }

    async fn joined(&self, clients: Vec<JoinHandle<()>>, engines: &[Engine]) {
        let start = Instant::now();
        for client in clients {
            drop(client.await); // a panic is a violation by itself
        }
        // also by those who have been there: a place in a local queue is left behind by nobody
        let probe = self.open(9);
        for engine in engines.iter().chain([&probe]) {
            let keys = Keys::new(["a", "b"]).expect("valid keys");
            let opts = ClaimOptions::default().wait(Duration::from_secs(60));
            match engine.claim(&keys, opts).await {
                Ok(Some(claim)) => {
                    if let Err(error) = claim.rollback().await {
                        self.world.allowed(&error);
                    }
                }
                Ok(None) => self.world.violated("they cannot be had afterwards".to_owned()),
                Err(error) => self.world.allowed(&error),
            }
        }
        let took = start.elapsed();
        if self.world.failures() == 0 && !took.is_zero() {
            self.world.violated(format!("somebody was woken too late: it took {took:?}"));
        }
    }
}

/// Overlapping sets in two processes, one of which has two callers.
async fn sets(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.start("one", 0, &one, &["a", "b"], Ends::Commits),
        scene.start("two", 1, &two, &["b", "a"], Ends::RollsBack),
        scene.start("second of one", 0, &one, &["b"], Ends::Drops),
    ];
    scene.joined(clients, &[one, two]).await;
}

/// A claim that gives up while it has a part of its keys.
async fn gives_up(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let late = scene.clone();
    let holder = scene.world.spawn("holder", async move {
        let keys = Keys::new(["b"]).expect("a valid key");
        let claim = one.claim(&keys, ClaimOptions::default()).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        drop(claim);
        let keys = Keys::new(["a"]).expect("a valid key");
        match one.claim(&keys, ClaimOptions::default()).await {
            Ok(Some(claim)) => drop(claim.commit().await),
            Ok(None) => late.world.violated("a part of a claim stayed".to_owned()),
            Err(error) => late.world.allowed(&error),
        }
    });
    let keys = Keys::new(["a", "b"]).expect("valid keys");
    match two.claim(&keys, ClaimOptions::default().wait(Duration::from_secs(1))).await {
        Ok(claim) => drop(claim),
        Err(error) => scene.world.allowed(&error),
    }
    drop(holder.await);
}

#[test]
fn overlapping_sets_are_right_under_every_schedule() {
    holds("claims: sets", scenario!(sets, Mutant::None, false), &[(2, 0), (0, 1)], 700);
}

#[test]
fn a_claim_that_gives_up_leaves_nothing_under_every_schedule() {
    holds("claims: gives up", scenario!(gives_up, Mutant::None, false), &[(2, 0), (1, 1)], 1000);
}

#[test]
fn planted_faults_are_found() {
    finds("claims: a part stays", scenario!(gives_up, Mutant::None, true));
    finds("claims: a key is given twice", scenario!(sets, Mutant::GrantsTwice, false));
    finds("claims: a grant is not told", scenario!(sets, Mutant::ForgetsToWake, false));
    finds("claims: a dropped session stays", scenario!(sets, Mutant::KeepsSessions, false));
}
