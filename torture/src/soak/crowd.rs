//! Very many client processes on few keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Options, told};
use crate::check::{Ends, check_all};
use crate::client::crowd::PATIENCE;
use crate::client::{Order, Role};
use crate::event::{Do, read};
use crate::run::clients::Client;
use crate::run::last;
use crate::store::{Lab, StoreKind};

/// Turns of each kind that every client wants.
const TURNS: u32 = 3;
/// All clients have ended within this time.
const END: Duration = PATIENCE.saturating_add(Duration::from_secs(60));
/// Connections of one client with one call at a time: its main session and one that waits, its
/// pool's and those that are kept ready, one that listens, and one that ends others. On MySQL and
/// MariaDB each of those two sessions is watched by another one, and leases, their renewals, the bell
/// and the wait for one have connections of their own.
fn connections(store: StoreKind) -> u64 {
    match store {
        StoreKind::Mysql | StoreKind::Mariadb => 12,
        _ => 8,
    }
}

fn clients(options: &Options) -> u32 {
    if options.short { 12 } else { 100 }
}

pub(super) fn name(options: &Options) -> String {
    format!("{} processes, {TURNS} turns of each kind", clients(options))
}

pub(super) async fn run(options: &Options, lab: &Arc<dyn Lab>) -> Result<String, String> {
    let count = clients(options);
    let record = options.record.join("crowd");
    std::fs::create_dir_all(&record).map_err(told)?;
    let mut clients = Vec::new();
    for number in 0..count {
        let order = Order {
            store: options.store,
            url: lab.url().unwrap_or_default(),
            client: number,
            life: 0,
            seed: 1,
            mutant: None,
            record: record.clone(),
            role: Role::Crowd(TURNS),
        };
        let mut client = Client::new(order, &options.program, None, None);
        client.start(lab).map_err(told)?;
        clients.push(client);
    }
    let most = Arc::new(AtomicU64::new(0));
    let watch = tokio::spawn(watch(lab.clone(), most.clone()));
    let start = Instant::now();
    let mut wrong = Vec::new();
    for client in &mut clients {
        wrong.extend(client.ends(END.saturating_sub(start.elapsed())).await);
    }
    watch.abort();
    let events = read(&record).map_err(told)?;
    let (violations, _) = check_all(options.store, &events, &Ends { last: None, wrong });
    let mut turns: BTreeMap<u32, u32> = BTreeMap::new();
    let mut failures = 0;
    for event in &events {
        match (event.client, &event.what) {
            (Some(client), Do::Got { .. }) => *turns.entry(client).or_default() += 1,
            (_, Do::Failed(_)) => failures += 1,
            _ => {}
        }
    }
    let few = turns.values().filter(|turns| **turns < 3 * TURNS).count() as u32;
    let missing = count - turns.len() as u32;
    if let Some(violation) = violations.first() {
        let (more, rule, what) = (violations.len() - 1, violation.rule, &violation.what);
        return Err(format!("{rule}: {what} (and {more} more)"));
    }
    if few + missing > 0 {
        return Err(format!("{} of {count} did not have all their turns", few + missing));
    }
    let turns: u32 = turns.values().sum();
    let figures = format!("{turns} turns, {failures} failed calls");
    if lab.server().is_none() {
        return Ok(figures);
    }
    let most = most.load(Ordering::Relaxed);
    let bound = connections(options.store);
    if most > bound * u64::from(count) {
        return Err(format!("{most} connections, more than {bound} a process"));
    }
    gone(lab).await?;
    Ok(format!("{figures}, at most {most} connections"))
}

/// Keeps the greatest number of connections.
async fn watch(lab: Arc<dyn Lab>, most: Arc<AtomicU64>) {
    loop {
        // a server that is too busy to say it says it the next time
        if let Ok(census) = lab.census().await {
            most.fetch_max(census.connections.unwrap_or(0), Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until no connection is left.
async fn gone(lab: &Arc<dyn Lab>) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let left = lab.census().await.map_err(told)?.connections.unwrap_or(0);
        if left == 0 {
            return Ok(());
        }
        if start.elapsed() > last::BOUND {
            return Err(format!("{left} connections are left"));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
