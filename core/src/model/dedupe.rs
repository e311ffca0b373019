//! The dedupe engine under all schedules up to a bound.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::beliefs::Beliefs;
use super::explorer::{Task, finds, holds};
use super::world::World;
use super::{droppable, key};
use crate::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use crate::dedupe::{Admission, Dedupe};
use crate::engine::DedupeEngine;
use crate::error::Result;
use crate::key::Key;
use crate::options::DedupeOptions;
use crate::token::FencingToken;

const IN_PROGRESS: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// What is in progress is first once more.
    AdmitsTwice,
    /// What is done is first once more.
    ForgetsDone,
    /// An abandon removes the entry of whoever has it.
    AbandonsAnybodys,
    /// An abandon is answered and left undone.
    KeepsAbandoned,
    /// A repeated request finds its own entry to be somebody else's.
    ForgetsOwners,
}

#[derive(Clone)]
struct Server {
    world: World,
    mutant: Mutant,
    rows: Arc<Mutex<Rows>>,
}

#[derive(Default)]
struct Rows {
    rows: BTreeMap<Key, Row>,
    last_token: u64,
}

struct Row {
    owner: Owner,
    token: FencingToken,
    done: bool,
    until: Instant,
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self, item: &Admit) -> AdmitAnswer {
        let mut state = self.lock();
        let now = Instant::now();
        if let Some(row) = state.rows.get(&item.key).filter(|row| row.until > now) {
            let ours = row.owner == item.owner && self.mutant != Mutant::ForgetsOwners;
            let again = match row.done {
                true => self.mutant == Mutant::ForgetsDone,
                false => self.mutant == Mutant::AdmitsTwice,
            };
            match row.done {
                _ if ours => return AdmitAnswer::First(row.token),
                _ if again => {}
                true => return AdmitAnswer::Done { at: SystemTime::UNIX_EPOCH },
                false => return AdmitAnswer::InProgress { since: SystemTime::UNIX_EPOCH },
            }
        }
        state.last_token += 1;
        let token = FencingToken(state.last_token);
        let until = now + item.in_progress.unwrap_or(item.retain);
        let (owner, done) = (item.owner, item.in_progress.is_none());
        state.rows.insert(item.key.clone(), Row { owner, token, done, until });
        AdmitAnswer::First(token)
    }

    fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> bool {
        let mut state = self.lock();
        let Some(row) = state.rows.get_mut(key).filter(|row| row.owner == owner) else {
            return false;
        };
        (row.done, row.until) = (true, Instant::now() + retain);
        true
    }

    fn abandon(&self, key: &Key, owner: Owner) -> bool {
        let mut state = self.lock();
        let ours = state.rows.get(key).is_some_and(|row| {
            !row.done && (row.owner == owner || self.mutant == Mutant::AbandonsAnybodys)
        });
        if ours && self.mutant != Mutant::KeepsAbandoned {
            state.rows.remove(key);
        }
        ours
    }
}

struct Driver {
    server: Server,
    handle: usize,
}

impl Driver {
    async fn ask<T: Send + 'static>(
        &self,
        what: &str,
        run: impl FnOnce(&Server) -> T + Send + 'static,
    ) -> Result<T> {
        let server = self.server.clone();
        let name = format!("handle {} {what}", self.handle);
        self.server.world.ask(name, move || run(&server)).await
    }
}

#[async_trait]
impl DedupeDriver for Driver {
    fn backend(&self) -> &'static str {
        "model"
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let items = items.to_vec();
        let admit = move |server: &Server| items.iter().map(|item| server.admit(item)).collect();
        self.ask("admits", admit).await
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        let key = key.clone();
        self.ask("completes", move |server| server.complete(&key, owner, retain)).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        let key = key.clone();
        self.ask("abandons", move |server| server.abandon(&key, owner)).await
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver of handle {}", self.handle)
    }
}

#[derive(Clone)]
struct Scene {
    server: Server,
    beliefs: Beliefs,
    /// How often it was said to be done.
    done: Arc<Mutex<u32>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Completes,
    Abandons,
    Drops,
}

impl Scene {
    fn new(world: World, mutant: Mutant) -> Self {
        let server = Server { world, mutant, rows: Arc::default() };
        let scene = Self { server, beliefs: Beliefs::default(), done: Arc::default() };
        let checked = scene.clone();
        scene.server.world.check(move || checked.check());
        scene
    }

    /// One at a time, and what is done is done once.
    fn check(&self) -> Result<(), String> {
        let done = *self.done.lock().unwrap_or_else(PoisonError::into_inner);
        if done > 1 {
            return Err(format!("it was done {done} times"));
        }
        let token = |key: &Key| self.server.lock().rows.get(key).map(|row| row.token);
        self.beliefs.check(
            |_, _| true,
            |belief| token(&belief.key) == belief.token,
            |_| false,
            Duration::ZERO,
        )
    }

    fn open(&self, handle: usize) -> Arc<DedupeEngine<Driver>> {
        Arc::new(DedupeEngine::new(Driver { server: self.server.clone(), handle }))
    }

    fn start(
        &self,
        who: &'static str,
        handle: usize,
        engine: &Arc<DedupeEngine<Driver>>,
        ends: Ends,
    ) -> JoinHandle<()> {
        let (scene, engine, world) = (self.clone(), engine.clone(), self.server.world.clone());
        self.server.world.spawn(who, async move {
            let key = key("a");
            let call = {
                let key = key.clone();
                let opts = DedupeOptions::default().in_progress(IN_PROGRESS);
                async move { engine.admit(&key, opts).await }
            };
            let guard = match droppable(&world, who, call).await {
                Some(Ok(Admission::First(guard))) => guard,
                Some(Err(error)) => return world.allowed(&error),
                None | Some(Ok(_)) => return,
            };
            let (token, floor) = (guard.token(), scene.beliefs.floor(&key));
            let ticket = scene.beliefs.add(who, handle, &key, Some(token), guard.lost());
            if let Err(fault) = scene.beliefs.token(&key, floor, token) {
                world.violated(fault);
            }
            tokio::task::yield_now().await;
            drop(ticket);
            let ended = match ends {
                Ends::Drops => return drop(guard),
                Ends::Abandons => droppable(&world, who, guard.abandon()).await,
                Ends::Completes => {
                    let completed = droppable(&world, who, guard.complete()).await;
                    if matches!(completed, Some(Ok(()))) {
                        *scene.done.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                    }
                    completed
                }
            };
            if let Some(Err(error)) = ended {
                world.allowed(&error);
            }
        })
    }

    /// Afterwards it is done, if anybody was told so, and is not in progress for long.
    async fn is_settled(&self, clients: Vec<JoinHandle<()>>) {
        for client in clients {
            drop(client.await); // a panic is a violation by itself
        }
        let (probe, start) = (self.open(9), Instant::now());
        let key = key("a");
        loop {
            let within = match self.server.world.failures() {
                0 => Duration::from_millis(1),
                _ => IN_PROGRESS + Duration::from_secs(20),
            };
            let opts = DedupeOptions::default().in_progress(IN_PROGRESS);
            match probe.admit(&key, opts).await {
                Ok(Admission::First(guard)) => {
                    let done = *self.done.lock().unwrap_or_else(PoisonError::into_inner);
                    if done > 0 {
                        self.server.world.violated("what is done was admitted again".to_owned());
                    }
                    drop(guard.abandon().await);
                    return;
                }
                Ok(Admission::Done { .. }) => return,
                Ok(Admission::InProgress { .. }) if start.elapsed() > within => {
                    let what = format!("it is in progress after {:?}", start.elapsed());
                    return self.server.world.violated(what);
                }
                Ok(Admission::InProgress { .. }) => sleep(within / 4).await,
                Err(error) => self.server.world.allowed(&error),
            }
        }
    }
}

async fn one_works(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.start("one", 0, &one, Ends::Completes),
        scene.start("two", 1, &two, Ends::Completes),
        scene.start("three", 1, &two, Ends::Drops),
    ];
    scene.is_settled(clients).await;
}

async fn one_gives_up(scene: Scene) {
    let (one, two) = (scene.open(0), scene.open(1));
    let clients = vec![
        scene.start("one", 0, &one, Ends::Abandons),
        scene.start("two", 1, &two, Ends::Completes),
        scene.start("three", 1, &two, Ends::Abandons),
    ];
    scene.is_settled(clients).await;
}

#[test]
fn it_is_done_once_under_every_schedule() {
    holds("dedupe: one works", scenario!(one_works), &[(3, 0), (1, 1), (0, 2)], 3200);
}

#[test]
fn who_gives_up_leaves_it_to_others_under_every_schedule() {
    holds("dedupe: one gives up", scenario!(one_gives_up), &[(3, 0), (1, 1), (0, 2)], 3300);
}

#[test]
fn planted_faults_are_found() {
    finds("dedupe: in progress twice", scenario!(one_works, Mutant::AdmitsTwice));
    finds("dedupe: done twice", scenario!(one_works, Mutant::ForgetsDone));
    finds("dedupe: a stranger's is abandoned", scenario!(one_gives_up, Mutant::AbandonsAnybodys));
    finds("dedupe: an abandon is left undone", scenario!(one_gives_up, Mutant::KeepsAbandoned));
    finds(
        "dedupe: a repeated request is a stranger's",
        scenario!(one_works, Mutant::ForgetsOwners),
    );
}
