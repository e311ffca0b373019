//! Named locks over leases, which are handed on within a process.

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use std::time::Duration;

use super::super::explorer::{Task, finds, holds};
use super::super::world::World;
use super::super::{droppable, key};
use super::server::Mutant;
use super::{Engine, HOLD, Scene, TTL};
use crate::options::LeaseOptions;

/// What a client does with its lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// Releases it at once.
    Nothing,
    /// Drops it at once.
    Drops,
    /// Asks for its token.
    Asks,
    /// Holds it until it is told that it is lost, or so long, and then asks for its token.
    Stays(Duration),
}

impl Scene {
    async fn locker(self, who: &'static str, handle: usize, engine: Engine, does: Does) {
        let opts = LeaseOptions::default().ttl(TTL).wait(Duration::MAX);
        let call = async move { engine.lock(&key("a"), opts).await };
        let call = droppable(&self.world, who, call).await;
        let Some(guard) = self.world.taken(who, call) else { return };
        let floor = self.beliefs.floor(guard.key());
        let lost = guard.lost();
        let ticket = self.beliefs.add(who, handle, guard.key(), None, lost.clone());
        if let Does::Stays(time) = does {
            drop(timeout(time, lost.wait()).await);
        }
        if matches!(does, Does::Asks | Does::Stays(_)) {
            match guard.token().await {
                Ok(token) => {
                    if let Err(fault) = self.beliefs.token(guard.key(), floor, token) {
                        self.world.violated(fault);
                    }
                }
                Err(error) => self.world.allowed(&error),
            }
        }
        drop(ticket);
        if does == Does::Drops {
            return drop(guard);
        }
        if let Some(Err(error)) = droppable(&self.world, who, guard.release()).await {
            self.world.allowed(&error);
        }
    }

    fn lock(
        &self,
        who: &'static str,
        handle: usize,
        engine: &Engine,
        does: Does,
    ) -> JoinHandle<()> {
        self.world.spawn(who, self.clone().locker(who, handle, engine.clone(), does))
    }
}

/// More callers of one process than a lock is handed on to in a row.
async fn queue(scene: Scene) {
    let engine = scene.open(0);
    let clients = vec![
        scene.lock("first", 0, &engine, Does::Asks),
        scene.lock("second", 0, &engine, Does::Drops),
        scene.lock("third", 0, &engine, Does::Asks),
        scene.lock("fourth", 0, &engine, Does::Asks),
    ];
    scene.joined(clients, Duration::from_millis(2)).await;
}

/// Two processes.
async fn processes(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.lock("first", 0, &one, Does::Nothing),
        scene.lock("second", 0, &one, Does::Asks),
        scene.lock("other", 1, &two, Does::Asks),
    ];
    scene.joined(clients, Duration::from_millis(2)).await;
}

/// One that was handed on is held for longer than its ttl, and another process waits.
async fn renewals(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.lock("first", 0, &one, Does::Nothing),
        scene.lock("second", 0, &one, Does::Stays(HOLD)),
        scene.lock("other", 1, &two, Does::Nothing),
    ];
    scene.joined(clients, HOLD + Duration::from_millis(2)).await;
}

/// A handle that is closed while its locks are handed on.
async fn close(scene: Scene) {
    let one = scene.open(0);
    let caller = |who: &'static str, stays: bool| {
        let (scene, engine) = (scene.clone(), one.clone());
        scene.world.clone().spawn(who, async move {
            let opts = LeaseOptions::default().ttl(TTL).wait(Duration::MAX);
            if let Ok(Some(guard)) = engine.lock(&key("a"), opts).await {
                let lost = guard.lost();
                let _ticket = scene.beliefs.add(who, 0, guard.key(), None, lost.clone());
                if stays {
                    lost.wait().await;
                }
            }
        })
    };
    let clients = vec![caller("first", false), caller("second", true)];
    sleep(Duration::from_millis(1)).await;
    if let Err(error) = one.close().await {
        scene.world.allowed(&error);
    }
    for client in clients {
        drop(client.await);
    }
    sleep(Duration::from_millis(1)).await;
    scene.all_is_free().await;
}

#[test]
fn a_queue_is_handed_on_right_under_every_schedule() {
    holds("locks on leases: queue", scenario!(queue), &[(2, 0), (1, 1)], 600);
}

#[test]
fn processes_get_what_was_handed_on_right_under_every_schedule() {
    holds("locks on leases: processes", scenario!(processes), &[(2, 0), (1, 1)], 3500);
}

#[test]
fn what_was_handed_on_is_kept_or_its_loss_told_under_every_schedule() {
    holds("locks on leases: renewals", scenario!(renewals), &[(1, 0), (0, 1)], 240);
}

#[test]
fn a_close_frees_what_was_handed_on_under_every_schedule() {
    holds("locks on leases: close", scenario!(close), &[(2, 0), (1, 1)], 290);
}

#[test]
fn planted_faults_are_found() {
    finds("locks on leases: a token is the one before", scenario!(queue, Mutant::KeepsTokens));
    finds("locks on leases: a token is forgotten", scenario!(processes, Mutant::ForgetsTokens));
    finds("locks on leases: tokens do not rise", scenario!(queue, Mutant::RepeatsTokens));
    finds("locks on leases: a lock is given twice", scenario!(processes, Mutant::GrantsTwice));
    finds("locks on leases: renewals of anything", scenario!(renewals, Mutant::RenewsAnything));
    finds("locks on leases: releases are forgotten", scenario!(queue, Mutant::ForgetsReleases));
}
