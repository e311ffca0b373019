//! The session engine under all schedules up to a bound.

pub(super) mod server;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::server::{Driver, Mutant, Server};
use super::beliefs::Beliefs;
use super::explorer::{Task, finds, holds};
use super::world::World;
use super::{droppable, key};
use crate::backend::SessionLimits;
use crate::engine::SessionEngine;
use crate::error::Result;
use crate::key::Key;
use crate::named::{LockGuard, NamedLock};
use crate::options::LockOptions;

type Engine = Arc<SessionEngine<Driver>>;

/// Longer than `keepalive + answer`, within which a loss is noticed.
const LONG: Duration = Duration::from_secs(15);

/// What a scenario is made of.
#[derive(Clone)]
struct Scene {
    world: World,
    server: Server,
    beliefs: Beliefs,
    limits: SessionLimits,
}

/// How a client ends its hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Releases,
    Drops,
    /// Holds until it is told that the lock is lost, or so long.
    After(Duration),
    /// As that, and where it was lost, thinks of the release only when it is late.
    Late(Duration),
}

/// When somebody else holds it by then.
const LATE: Duration = Duration::from_secs(2);

impl Scene {
    fn new(world: World, mutant: Mutant) -> Self {
        let server = Server::new(&world, mutant, true);
        let limits = SessionLimits { waiter_idle: Duration::from_secs(2), ..Default::default() };
        let scene = Self { world, server, beliefs: Beliefs::default(), limits };
        let checked = scene.clone();
        scene.world.check(move || checked.check());
        let server = scene.server.clone();
        scene.world.at_end(move || server.leftovers());
        scene
    }

    /// A lock that is lost is not given anew before its guards have heard of it; whoever believes
    /// in a lock has it on the store, or has lost its session a short time ago.
    fn check(&self) -> Result<(), String> {
        let grace = self.limits.keepalive + self.limits.answer;
        self.beliefs.check(
            |one, two| one.handle == two.handle,
            |belief| self.server.holder(&belief.key) == Some(belief.handle),
            |belief| self.server.took_away(belief.handle, &belief.key),
            grace,
        )
    }

    fn open(&self, handle: usize) -> Engine {
        Arc::new(SessionEngine::new(self.server.driver(handle, self.limits)))
    }

    /// Takes the lock, waiting for as long as it takes; drops the call if the explorer says so.
    async fn take(&self, who: &str, engine: &Engine, key: &Key) -> Option<LockGuard> {
        let (engine, wanted) = (engine.clone(), key.clone());
        let opts = LockOptions::default().wait(Duration::MAX);
        let call = async move { engine.lock(&wanted, opts).await };
        self.world.taken(who, droppable(&self.world, who, call).await)
    }

    async fn client(self, who: &'static str, handle: usize, engine: Engine, key: Key, ends: Ends) {
        let Some(guard) = self.take(who, &engine, &key).await else { return };
        let floor = self.beliefs.floor(&key);
        let ticket = self.beliefs.add(who, handle, &key, None, guard.lost());
        match guard.token().await {
            Ok(token) => {
                if let Err(fault) = self.beliefs.token(&key, floor, token) {
                    self.world.violated(fault);
                }
            }
            Err(error) => self.world.allowed(&error),
        }
        let lost = guard.lost();
        if let Ends::After(time) | Ends::Late(time) = ends {
            drop(tokio::time::timeout(time, lost.wait()).await);
        }
        drop(ticket);
        if matches!(ends, Ends::Late(_)) && lost.is_set() {
            tokio::time::sleep(LATE).await;
        }
        if ends == Ends::Drops {
            drop(guard);
            return;
        }
        if let Some(Err(error)) = droppable(&self.world, who, guard.release()).await {
            self.world.allowed(&error);
        }
    }

    fn start(
        &self,
        who: &'static str,
        handle: usize,
        engine: &Engine,
        key: &Key,
        ends: Ends,
    ) -> tokio::task::JoinHandle<()> {
        let client = self.clone().client(who, handle, engine.clone(), key.clone(), ends);
        self.world.spawn(who, client)
    }

    /// Afterwards everybody can have every key, soon, while the other handles are still there.
    async fn all_is_free(&self, keys: &[&str], within: Duration) {
        let probe = self.open(9);
        let start = Instant::now();
        for name in keys {
            let key = key(name);
            match probe.lock(&key, LockOptions::default().wait(LONG * 4)).await {
                Ok(Some(guard)) => {
                    drop(self.beliefs.add("the probe", 9, &key, None, guard.lost()));
                    if let Err(error) = guard.release().await {
                        self.world.allowed(&error);
                    }
                }
                Ok(None) => self.world.violated(format!("{name} cannot be had afterwards")),
                Err(error) => self.world.allowed(&error),
            }
        }
        self.world.in_time(start, within, "all could be had too late");
    }
}

/// Without faults no time has to pass for a lock to be handed on.
const AT_ONCE: Duration = Duration::ZERO;

async fn joined(start: Instant, scene: &Scene, clients: Vec<tokio::task::JoinHandle<()>>) {
    for client in clients {
        drop(client.await); // a panic is a violation by itself
    }
    scene.world.in_time(start, AT_ONCE, "somebody was woken too late");
}

/// Three callers of one process on one key.
async fn queue(scene: Scene) {
    let (engine, a, start) = (scene.open(0), key("a"), Instant::now());
    let clients = vec![
        scene.start("first", 0, &engine, &a, Ends::Releases),
        scene.start("second", 0, &engine, &a, Ends::Drops),
        scene.start("third", 0, &engine, &a, Ends::Releases),
    ];
    joined(start, &scene, clients).await;
    scene.all_is_free(&["a"], AT_ONCE).await;
}

/// Two processes on one key, one of them with two callers.
async fn processes(scene: Scene) {
    let (one, two, a, start) = (scene.open(0), scene.open(1), key("a"), Instant::now());
    let clients = vec![
        scene.start("one", 0, &one, &a, Ends::Releases),
        scene.start("two", 1, &two, &a, Ends::Releases),
        scene.start("second of two", 1, &two, &a, Ends::Drops),
    ];
    joined(start, &scene, clients).await;
    scene.all_is_free(&["a"], AT_ONCE).await;
}

/// Several keys that go out in one batch, one of them held by another process.
async fn batch(scene: Scene) {
    let (one, two, start) = (scene.open(0), scene.open(1), Instant::now());
    let clients = vec![
        scene.start("one a", 0, &one, &key("a"), Ends::Releases),
        scene.start("one b", 0, &one, &key("b"), Ends::Drops),
        scene.start("two b", 1, &two, &key("b"), Ends::Releases),
    ];
    joined(start, &scene, clients).await;
    scene.all_is_free(&["a", "b"], AT_ONCE).await;
}

/// A holder that goes on until it is told of its loss, and one that waits for it.
async fn loss(scene: Scene) {
    let (one, two, a) = (scene.open(0), scene.open(1), key("a"));
    let clients = vec![
        scene.start("holder", 0, &one, &a, Ends::After(LONG)),
        scene.start("next", 0, &one, &a, Ends::Releases),
        scene.start("other", 1, &two, &a, Ends::Releases),
    ];
    for client in clients {
        drop(client.await);
    }
    scene.all_is_free(&["a"], AT_ONCE).await;
}

/// A holder that releases long after its loss, when the next one of its own process holds.
async fn late_release(scene: Scene) {
    let (one, a) = (scene.open(0), key("a"));
    let clients = vec![
        scene.start("holder", 0, &one, &a, Ends::Late(LONG)),
        scene.start("next", 0, &one, &a, Ends::After(LATE * 2)),
    ];
    for client in clients {
        drop(client.await);
    }
    scene.all_is_free(&["a"], AT_ONCE).await;
}

/// A handle that is closed while its callers hold and wait.
async fn close(scene: Scene) {
    let (one, a) = (scene.open(0), key("a"));
    let closed = scene.clone();
    let engine = one.clone();
    let caller = |who: &'static str| {
        let (scene, engine, a) = (closed.clone(), one.clone(), a.clone());
        closed.world.spawn(who, async move {
            let opts = LockOptions::default().wait(Duration::MAX);
            if let Ok(Some(guard)) = engine.lock(&a, opts).await {
                let _ticket = scene.beliefs.add(who, 0, &a, None, guard.lost());
                // held until the close tells
                guard.lost().wait().await;
            }
        })
    };
    let clients = vec![caller("holder"), caller("waiter")];
    let closer = scene.world.spawn("closer", async move {
        engine.close().await;
        // the close is over: nothing is held any more, and nothing is given
        let late = engine.lock(&key("a"), LockOptions::try_once()).await;
        matches!(late, Err(_) | Ok(None))
    });
    if closer.await.is_ok_and(|refused| !refused) {
        scene.world.violated("a closed handle gave a lock".to_owned());
    }
    for client in clients {
        drop(client.await);
    }
    scene.all_is_free(&["a"], AT_ONCE).await;
}

/// More keys than a session may hold, one of them wanted twice.
async fn spread(mut scene: Scene) {
    scene.limits.max_per_session = 1;
    let (one, start) = (scene.open(0), Instant::now());
    let clients = vec![
        scene.start("a", 0, &one, &key("a"), Ends::Releases),
        scene.start("b", 0, &one, &key("b"), Ends::Releases),
        scene.start("second a", 0, &one, &key("a"), Ends::Drops),
    ];
    joined(start, &scene, clients).await;
    scene.all_is_free(&["a", "b"], AT_ONCE).await;
}

/// Waits that end before the lock is free.
async fn finite(scene: Scene) {
    let (one, two, a) = (scene.open(0), scene.open(1), key("a"));
    let wait = Duration::from_secs(1);
    let holder = scene.start("holder", 0, &one, &a, Ends::After(wait * 2));
    let caller = |who: &'static str, handle, engine: &Engine| {
        let (scene, engine, a) = (scene.clone(), engine.clone(), a.clone());
        scene.world.clone().spawn(who, async move {
            let start = Instant::now();
            let got = engine.lock(&a, LockOptions::default().wait(wait)).await;
            let took = start.elapsed();
            if took > wait && scene.world.failures() == 0 {
                scene.world.violated(format!("{who} waited for {took:?}"));
            }
            match got {
                Ok(Some(guard)) => drop(scene.beliefs.add(who, handle, &a, None, guard.lost())),
                Ok(None) => {}
                Err(error) => scene.world.allowed(&error),
            }
        })
    };
    let callers = vec![caller("near", 0, &one), caller("far", 1, &two)];
    for caller in callers {
        drop(caller.await);
    }
    drop(holder.await);
    scene.all_is_free(&["a"], AT_ONCE).await;
}

#[test]
fn the_queue_of_a_process_is_right_under_every_schedule() {
    holds("locks: queue", scenario!(queue), &[(2, 0), (1, 1)], 1900);
}

#[test]
fn processes_on_one_key_are_right_under_every_schedule() {
    holds("locks: processes", scenario!(processes), &[(2, 0), (0, 1)], 1300);
}

#[test]
fn a_batch_is_right_under_every_schedule() {
    holds("locks: batch", scenario!(batch), &[(2, 0), (0, 1)], 1100);
}

#[test]
fn a_loss_is_told_under_every_schedule() {
    holds("locks: loss", scenario!(loss), &[(1, 0), (0, 1)], 500);
}

#[test]
fn a_late_release_frees_no_successor_under_every_schedule() {
    holds("locks: late release", scenario!(late_release), &[(1, 0), (0, 1)], 120);
}

#[test]
fn a_close_frees_all_under_every_schedule() {
    holds("locks: close", scenario!(close), &[(2, 1)], 500);
}

#[test]
fn sessions_beyond_the_main_one_are_right_under_every_schedule() {
    holds("locks: spread", scenario!(spread), &[(2, 0), (0, 1)], 1200);
}

#[test]
fn waits_end_in_time_under_every_schedule() {
    holds("locks: finite waits", scenario!(finite), &[(2, 0), (0, 1)], 800);
}

#[test]
fn planted_faults_are_found() {
    finds("locks: a try is granted twice", scenario!(processes, Mutant::GrantsTwice));
    finds("locks: a loss is not told", scenario!(loss, Mutant::ForgetsLoss));
    finds("locks: a session reconnects by itself", scenario!(loss, Mutant::Reconnects));
    finds("locks: kills are left undone", scenario!(loss, Mutant::IgnoresKills));
    finds("locks: a release is left undone", scenario!(processes, Mutant::ForgetsReleases));
    finds("locks: a release is repeated", scenario!(late_release, Mutant::RepeatsReleases));
    finds("locks: a grant is not told", scenario!(processes, Mutant::ForgetsToWake));
    finds("locks: tokens do not rise", scenario!(queue, Mutant::RepeatsTokens));
    finds("locks: answers are left out", scenario!(batch, Mutant::ShortAnswers));
    finds("locks: a dropped session stays", scenario!(queue, Mutant::KeepsSessions));
    finds("locks: a place outlives its wait", scenario!(finite, Mutant::KeepsPlaces));
}
