//! The lease engine under all schedules up to a bound.

mod hand_on;
mod server;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use self::server::{Driver, Mutant, Server};
use super::beliefs::Beliefs;
use super::explorer::{Task, finds, holds};
use super::world::World;
use super::{droppable, key};
use crate::engine::LeaseEngine;
use crate::error::ErrorKind;
use crate::lease::{Lease, LeaseGuard};
use crate::options::LeaseOptions;

type Engine = Arc<LeaseEngine<Driver>>;

const TTL: Duration = Duration::from_secs(10);
/// That of a lease which nobody may wait for to expire.
const LONG_TTL: Duration = Duration::from_secs(100);
/// Longer than the ttl, and not a time at which somebody looks by himself.
const HOLD: Duration = Duration::from_millis(15_300);

#[derive(Clone)]
struct Scene {
    world: World,
    server: Server,
    beliefs: Beliefs,
}

/// How a client ends its hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Releases,
    Drops,
    /// Holds until it is told that the lease is lost, or so long.
    After(Duration),
    /// Does not renew, and thinks of the release only when it is late.
    Forgets,
}

impl Scene {
    fn new(world: World, mutant: Mutant) -> Self {
        let server = Server::new(&world, mutant);
        let scene = Self { world, server, beliefs: Beliefs::default() };
        let checked = scene.clone();
        scene.world.check(move || checked.check());
        let server = scene.server.clone();
        scene.world.at_end(move || server.leftovers());
        scene
    }

    /// Who believes in a lease has it on the store, always.
    fn check(&self) -> Result<(), String> {
        self.beliefs.check(
            |_, _| true,
            |belief| {
                // a named lock may have been handed on, with a token that the store doesn't know yet
                let (handle, token) = self.server.holder(&belief.key).unzip();
                handle == Some(belief.handle) && (belief.token.is_none() || token == belief.token)
            },
            |_| false,
            Duration::ZERO,
        )
    }

    fn open(&self, handle: usize) -> Engine {
        Arc::new(LeaseEngine::new(self.server.driver(handle)))
    }

    async fn take(&self, who: &str, engine: &Engine, opts: LeaseOptions) -> Option<LeaseGuard> {
        let engine = engine.clone();
        let call = async move { engine.lease(&key("a"), opts).await };
        self.world.taken(who, droppable(&self.world, who, call).await)
    }

    async fn client(self, who: &'static str, handle: usize, engine: Engine, ends: Ends) {
        let mut opts = LeaseOptions::default().ttl(TTL).wait(Duration::MAX);
        opts.auto_renew = ends != Ends::Forgets;
        let Some(guard) = self.take(who, &engine, opts).await else { return };
        let floor = self.beliefs.floor(guard.key());
        let (token, lost) = (guard.token(), guard.lost());
        let ticket = self.beliefs.add(who, handle, guard.key(), Some(token), lost.clone());
        if let Err(fault) = self.beliefs.token(guard.key(), floor, token) {
            self.world.violated(fault);
        }
        match ends {
            Ends::Releases => {}
            Ends::Drops => {
                drop(ticket);
                return drop(guard);
            }
            Ends::After(time) => drop(timeout(time, lost.wait()).await),
            Ends::Forgets => {
                lost.wait().await;
                drop(ticket);
                sleep(Duration::from_secs(2)).await;
                return drop(guard);
            }
        }
        drop(ticket);
        if let Some(Err(error)) = droppable(&self.world, who, guard.release()).await {
            self.world.allowed(&error);
        }
    }

    fn start(
        &self,
        who: &'static str,
        handle: usize,
        engine: &Engine,
        ends: Ends,
    ) -> JoinHandle<()> {
        self.world.spawn(who, self.clone().client(who, handle, engine.clone(), ends))
    }

    /// Afterwards everybody can have the lease, soon.
    async fn all_is_free(&self) {
        let (probe, start) = (self.open(9), Instant::now());
        let opts = LeaseOptions::default().ttl(TTL).wait(TTL * 4);
        match probe.lease(&key("a"), opts).await {
            Ok(Some(guard)) => {
                if let Err(error) = guard.release().await {
                    self.world.allowed(&error);
                }
            }
            Ok(None) => self.world.violated("it cannot be had afterwards".to_owned()),
            Err(error) => self.world.allowed(&error),
        }
        self.in_time(start, Duration::ZERO);
    }

    fn in_time(&self, start: Instant, within: Duration) {
        self.world.in_time(start, within, "somebody was woken too late");
    }

    async fn joined(&self, clients: Vec<JoinHandle<()>>, within: Duration) {
        let start = Instant::now();
        for client in clients {
            drop(client.await); // a panic is a violation by itself
        }
        self.in_time(start, within);
        self.all_is_free().await;
    }
}

/// Three callers of one process.
async fn queue(scene: Scene) {
    let engine = scene.open(0);
    let clients = vec![
        scene.start("first", 0, &engine, Ends::Releases),
        scene.start("second", 0, &engine, Ends::Drops),
        scene.start("third", 0, &engine, Ends::Releases),
    ];
    scene.joined(clients, Duration::ZERO).await;
}

/// Two processes.
async fn processes(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients =
        vec![scene.start("one", 0, &one, Ends::Releases), scene.start("two", 1, &two, Ends::Drops)];
    scene.joined(clients, Duration::ZERO).await;
}

/// A holder for longer than its ttl, and another process that waits.
async fn renewals(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.start("holder", 0, &one, Ends::After(HOLD)),
        scene.start("other", 1, &two, Ends::Releases),
    ];
    scene.joined(clients, HOLD).await;
}

/// A holder that does not renew, and releases when others hold.
async fn expiry(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.start("holder", 0, &one, Ends::Forgets),
        scene.start("next", 0, &one, Ends::After(Duration::from_secs(5))),
        scene.start("other", 1, &two, Ends::After(Duration::from_secs(5))),
    ];
    scene.joined(clients, TTL * 3).await;
}

/// Callers that give up at once if their try has no answer, on a lease that would live for long if
/// nobody freed it.
async fn orphans(scene: Scene) {
    let one = scene.open(0);
    let caller = |who: &'static str| {
        let (scene, engine) = (scene.clone(), one.clone());
        scene.world.clone().spawn(who, async move {
            let opts = LeaseOptions::try_once().ttl(LONG_TTL);
            let call = async move { engine.lease(&key("a"), opts).await };
            match droppable(&scene.world, who, call).await {
                Some(Ok(Some(guard))) => {
                    let (token, lost) = (guard.token(), guard.lost());
                    drop(scene.beliefs.add(who, 0, guard.key(), Some(token), lost));
                }
                Some(Err(error)) => scene.world.allowed(&error),
                Some(Ok(None)) | None => {}
            }
        })
    };
    let callers = vec![caller("first"), caller("second")];
    for caller in callers {
        drop(caller.await);
    }
    let opts = LeaseOptions::default().ttl(TTL).wait(LONG_TTL / 2);
    match scene.open(9).lease(&key("a"), opts).await {
        Ok(Some(guard)) => drop(guard.release().await),
        Ok(None) => scene.world.violated("an orphan is in the way until its ttl".to_owned()),
        Err(error) => scene.world.allowed(&error),
    }
}

/// A handle that is closed while its callers hold and wait.
async fn close(scene: Scene) {
    let one = scene.open(0);
    let caller = |who: &'static str| {
        let (scene, engine) = (scene.clone(), one.clone());
        scene.world.clone().spawn(who, async move {
            let opts = LeaseOptions::default().ttl(TTL).wait(Duration::MAX);
            if let Ok(Some(guard)) = engine.lease(&key("a"), opts).await {
                let (token, lost) = (guard.token(), guard.lost());
                let _ticket = scene.beliefs.add(who, 0, guard.key(), Some(token), lost.clone());
                lost.wait().await; // held until the close tells
            }
        })
    };
    let clients = vec![caller("holder"), caller("waiter")];
    if let Err(error) = one.close().await {
        scene.world.allowed(&error);
    }
    let late = one.lease(&key("a"), LeaseOptions::try_once()).await;
    if !late.is_err_and(|error| error.kind() == ErrorKind::Unavailable) {
        scene.world.violated("a closed handle did not refuse".to_owned());
    }
    for client in clients {
        drop(client.await);
    }
    sleep(Duration::from_millis(1)).await;
    scene.all_is_free().await;
}

#[test]
fn the_queue_of_a_process_is_right_under_every_schedule() {
    holds("leases: queue", scenario!(queue), &[(2, 0), (1, 1)], 1000);
}

#[test]
fn processes_are_right_under_every_schedule() {
    holds("leases: processes", scenario!(processes), &[(2, 0), (1, 1)], 2500);
}

#[test]
fn renewals_keep_a_lease_or_its_loss_is_told_under_every_schedule() {
    holds("leases: renewals", scenario!(renewals), &[(1, 0), (0, 1)], 200);
}

#[test]
fn a_lease_expires_for_its_holder_first_under_every_schedule() {
    holds("leases: expiry", scenario!(expiry), &[(1, 0), (0, 1)], 250);
}

#[test]
fn a_try_without_an_answer_leaves_no_orphan_under_every_schedule() {
    holds("leases: orphans", scenario!(orphans), &[(2, 0), (1, 1), (0, 2)], 950);
}

#[test]
fn a_close_frees_all_under_every_schedule() {
    holds("leases: close", scenario!(close), &[(2, 0), (1, 1)], 160);
}

#[test]
fn planted_faults_are_found() {
    finds("leases: a lease is given twice", scenario!(processes, Mutant::GrantsTwice));
    finds("leases: a renewal of anything succeeds", scenario!(renewals, Mutant::RenewsAnything));
    finds("leases: a release frees a stranger's", scenario!(expiry, Mutant::ReleasesAnybodys));
    finds("leases: a release is left undone", scenario!(processes, Mutant::ForgetsReleases));
    finds("leases: an early release is said to be done", scenario!(orphans, Mutant::FreesNothing));
    finds("leases: a release wakes nobody", scenario!(renewals, Mutant::WakesNobody));
    finds("leases: tokens do not rise", scenario!(queue, Mutant::RepeatsTokens));
    finds("leases: a lease is over too early", scenario!(renewals, Mutant::ExpiresEarly));
}
