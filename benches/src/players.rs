//! Who takes part, taking turns.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_peers::{Locker, Outcome};
use tokio::time::timeout;

use crate::record::{Record, Role};
use crate::scene::{Entrant, Scene};

/// A turn that takes longer than this is the player's last: the others need not wait for it again.
const SLOW: Duration = Duration::from_secs(4);
/// A turn that takes longer than this counts as one that does not end.
const LIMIT: Duration = Duration::from_secs(40);

/// One who takes part, with its handles open.
#[derive(Clone)]
pub struct Player {
    /// What it is in the comparison.
    pub role: Role,
    /// Its name, with the version.
    pub name: String,
    /// As many as were asked for; each is as a process of its own.
    pub handles: Vec<Arc<dyn Locker>>,
}

impl std::fmt::Debug for Player {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Player").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All who take part in a scenario.
#[derive(Debug)]
pub struct Players {
    playing: Vec<Player>,
    /// Who can't, and why.
    out: Vec<(Role, String, String)>,
    /// Rounds that do not count.
    warm_up: usize,
}

/// A turn of one player, which gives a number for each record.
pub type Turn = Pin<Box<dyn Future<Output = Outcome<Vec<f64>>> + Send>>;

impl Players {
    /// Opens the handles of all.
    pub async fn open(entrants: &[Entrant], handles: usize) -> Self {
        let mut all = Self { playing: Vec::new(), out: Vec::new(), warm_up: 1 };
        for entrant in entrants {
            let (role, name) = (entrant.role, entrant.name().to_owned());
            match timeout(LIMIT, open(entrant, handles)).await {
                Ok(Ok(handles)) => all.playing.push(Player { role, name, handles }),
                Ok(Err(error)) => all.out.push((role, name, error.to_string())),
                Err(_) => all.out.push((role, name, "it did not connect in time".into())),
            }
        }
        all
    }

    /// Whose rounds all count, as each begins anew.
    #[must_use]
    pub fn without_warm_up(mut self) -> Self {
        self.warm_up = 0;
        self
    }

    /// Has them take turns for so many rounds, one round to warm up before; who begins changes.
    /// The records get a number a turn, in their order.
    pub async fn play(
        mut self,
        scene: &Scene,
        rounds: usize,
        records: &mut [Record],
        turn: &(dyn Fn(Player) -> Turn + Sync),
    ) {
        // the report's order is that of the entrants, whoever is first to finish
        for (role, name) in self.names() {
            for record in &mut *records {
                record.of(role, &name);
            }
        }
        for (role, name, why) in self.out.drain(..) {
            cannot(records, role, &name, &why);
        }
        for round in 0..self.warm_up + rounds {
            let counts = round >= self.warm_up;
            if let Some(record) = records.first() {
                scene.progress(&record.title, round + 1 - self.warm_up, rounds);
            }
            let players = self.playing.len();
            let mut leaves = vec![false; players];
            for step in 0..players {
                let at = (round + step) % players;
                let player = self.playing[at].clone();
                let (role, name) = (player.role, player.name.clone());
                let start = Instant::now();
                let numbers = match timeout(LIMIT, turn(player)).await {
                    Ok(Ok(numbers)) => numbers,
                    failed => {
                        let why = match failed {
                            Ok(Err(error)) => error.to_string(),
                            _ => format!("not done within {} s", LIMIT.as_secs()),
                        };
                        cannot(records, role, &name, &why);
                        leaves[at] = true;
                        continue;
                    }
                };
                // a slow one does without warming up
                leaves[at] = start.elapsed() > SLOW;
                if counts || leaves[at] {
                    for (record, number) in records.iter_mut().zip(numbers) {
                        record.add(role, &name, number);
                    }
                }
            }
            let mut leaves = leaves.into_iter();
            self.playing.retain(|_| !leaves.next().unwrap_or_default());
        }
        scene.progress_over();
    }

    fn names(&self) -> Vec<(Role, String)> {
        let out = self.out.iter().map(|(role, name, _)| (*role, name.clone()));
        let mut names: Vec<_> = self
            .playing
            .iter()
            .map(|player| (player.role, player.name.clone()))
            .chain(out)
            .collect();
        names.sort_by_key(|(role, _)| *role);
        names
    }
}

async fn open(entrant: &Entrant, handles: usize) -> Outcome<Vec<Arc<dyn Locker>>> {
    let mut opened = Vec::with_capacity(handles);
    for _ in 0..handles {
        opened.push(entrant.contender.open().await?);
    }
    Ok(opened)
}

fn cannot(records: &mut [Record], role: Role, name: &str, why: &str) {
    for record in records {
        record.cannot(role, name, why);
    }
}
