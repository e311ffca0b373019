//! A run: a store, clients, faults; then the checks.

pub(crate) mod clients;
mod faults;
mod hosts;
pub(crate) mod last;
pub mod plan;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::Backend;
use leasehold_conformance::Proxy;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use self::clients::Client;
use self::faults::Hands;
use self::hosts::Host;
use self::plan::{Planned, Reach, plan};
use crate::check::{Ends, check};
use crate::client::{KEYS, Order, Role};
use crate::event::{Event, Log, read};
use crate::mutant::Mutant;
use crate::report::Report;
use crate::store::{self, Lab, MemoryLab, StoreKind};

/// A client that was told to stop ends within this time.
const END: Duration = Duration::from_secs(75);

/// What is wanted of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// On which store.
    pub store: StoreKind,
    /// For how long.
    pub length: Duration,
    /// The plan of faults and the choices of the clients.
    pub seed: u64,
    /// How many clients.
    pub clients: u32,
    /// A backend that is broken on purpose; the run ends with the first violation.
    pub mutant: Option<Mutant>,
    /// Each client is on a host of its own, whose link can be cut and lose packets.
    pub hosts: bool,
    /// This program, which is started again as a client.
    pub program: PathBuf,
    /// Where the record is kept; it must be empty.
    pub record: PathBuf,
}

/// Runs and checks.
///
/// # Errors
/// If the run could not be made: no server, no process, no record. A violation is no error.
pub fn run(options: &Options) -> Result<Report, String> {
    let (lab, memory): (Arc<dyn Lab>, _) = match options.store {
        StoreKind::Memory => {
            let memory = Arc::new(MemoryLab::default());
            (memory.clone(), Some(memory))
        }
        kind => (store::start(kind).map_err(told)?, None),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(told)?;
    runtime.block_on(drive(options, lab, memory))
}

async fn drive(
    options: &Options,
    lab: Arc<dyn Lab>,
    memory: Option<Arc<MemoryLab>>,
) -> Result<Report, String> {
    let names = sequences();
    lab.prepare(&numbers()).await.map_err(told)?;
    let log = Log::open(&options.record.join("controller.jsonl"), None, 0).map_err(told)?;
    let handle = lab.shop().open("controller").await.map_err(told)?;
    let clients = clients(options, &lab).await?;
    let hands = Hands { lab, memory, clients: clients.into(), handle, log, server: Arc::default() };
    for client in hands.clients.iter() {
        client.lock().await.start(&hands.lab).map_err(told)?;
    }
    let reach = Reach {
        processes: hands.lab.url().is_some(),
        network: hands.lab.server().is_some(),
        hosts: options.hosts,
    };
    let planned = plan(options.seed, options.clients, options.length, reach);
    let made = faults(options, &hands, planned).await?;
    let wrong = end(options, &hands).await;
    // what a mutant leaves behind need not be told as well
    let ends = match options.mutant {
        Some(_) => Ends { last: None, wrong },
        None => ends(&hands, names, wrong).await,
    };
    let events = read(&options.record).map_err(told)?;
    let violations = check(options.store, &events, &ends);
    Ok(Report { options: options.clone(), made, violations, events })
}

/// The numbers that sequences are made of.
pub(crate) fn numbers() -> Vec<String> {
    let of = |name: String| [format!("{name}:seq"), format!("{name}:token")];
    sequences().into_iter().flat_map(of).collect()
}

/// The sequences of writes on the store.
fn sequences() -> Vec<String> {
    let of = |kind: &str| KEYS.map(|key| format!("{kind}:{key}"));
    ["lock", "lease", "claim"].into_iter().flat_map(of).collect()
}

async fn clients(options: &Options, lab: &Arc<dyn Lab>) -> Result<Vec<Mutex<Client>>, String> {
    let mut clients = Vec::new();
    for number in 0..options.clients {
        let mut url = lab.url().unwrap_or_default();
        let (mut proxy, mut host) = (None, None);
        if let Some(server) = lab.server() {
            let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
            let seed = options.seed.wrapping_add(u64::from(number) << 32);
            if options.hosts {
                host = Some(Host::new()?);
            }
            let ours = host.as_ref().map_or(Ipv4Addr::LOCALHOST, |host| host.ours);
            let listen = SocketAddr::from((ours, 0));
            let started = Proxy::start_on(listen, upstream, seed).await.map_err(told)?;
            url = url.replace(&upstream.to_string(), &started.addr().to_string());
            proxy = Some(started);
        }
        let order = Order {
            store: options.store,
            url,
            client: number,
            life: 0,
            seed: options.seed,
            mutant: options.mutant,
            record: options.record.clone(),
            role: Role::Torture,
        };
        clients.push(Mutex::new(Client::new(order, &options.program, host, proxy)));
    }
    Ok(clients)
}

/// Makes the planned faults, each at its time. Gives how many of each were made.
async fn faults(
    options: &Options,
    hands: &Hands,
    planned: Vec<Planned>,
) -> Result<BTreeMap<&'static str, u64>, String> {
    let (start, mut made, mut tasks) = (Instant::now(), BTreeMap::new(), JoinSet::new());
    let mut next_look = Duration::from_secs(3);
    let mut planned = planned.into_iter().peekable();
    loop {
        let now = start.elapsed();
        if now >= options.length {
            break;
        }
        if options.mutant.is_some() && now >= next_look {
            // one violation is enough
            next_look = start.elapsed() + Duration::from_secs(3);
            let events = read(&options.record).map_err(told)?;
            if !check(options.store, &events, &Ends::unknown()).is_empty() {
                break;
            }
        }
        if let Some(due) = planned.next_if(|planned| planned.at <= now) {
            let hands = hands.clone();
            tasks.spawn(async move {
                let label = due.fault.label();
                (label, hands.make(due.fault).await)
            });
        }
        let until = planned.peek().map_or(options.length, |planned| planned.at);
        let pause = until.saturating_sub(start.elapsed()).min(Duration::from_millis(100));
        tokio::time::sleep(pause).await;
    }
    while let Some(done) = tasks.join_next().await {
        match done.map_err(told)? {
            (label, Ok(true)) => *made.entry(label).or_default() += 1,
            (_, Ok(false)) => {}
            (label, Err(error)) => return Err(format!("{label}: {error}")),
        }
    }
    Ok(made)
}

/// Ends all faults and clients, some by a kill, and looks at what is left. Gives what went wrong.
async fn end(options: &Options, hands: &Hands) -> Vec<String> {
    hands.heal().await;
    let mut wrong = Vec::new();
    for (number, client) in hands.clients.iter().enumerate() {
        let mut client = client.lock().await;
        // every third is killed with what it holds
        if number % 3 == 2 {
            if let Err(error) = client.kill().await {
                wrong.push(format!("{} cannot be killed: {error}", client.name()));
            }
        } else {
            client.stop();
        }
    }
    for client in hands.clients.iter() {
        wrong.extend(client.lock().await.ends(END).await);
    }
    if options.mutant.is_none() {
        wrong.extend(last::acquire_all(&hands.lab).await);
    }
    wrong
}

/// The last values of the sequences; closes the controller's handle and looks at what is left.
async fn ends(hands: &Hands, names: Vec<String>, mut wrong: Vec<String>) -> Ends {
    let mut last = BTreeMap::new();
    for name in names {
        let value =
            last::committed(&*hands.lab.shop(), &*hands.handle, &format!("{name}:seq")).await;
        match value {
            Ok(value) => drop(last.insert(name, value)),
            Err(error) => wrong.push(format!("{name} cannot be read after the end: {error}")),
        }
    }
    if let Err(error) = closed(&*hands.handle).await {
        wrong.push(format!("the controller's handle cannot be closed: {error}"));
    }
    wrong.extend(last::leftovers(&hands.lab).await);
    Ends { last: Some(last), wrong }
}

async fn closed(handle: &dyn Backend) -> Result<(), String> {
    match tokio::time::timeout(last::BOUND, handle.close()).await {
        Ok(closed) => closed.map_err(told),
        Err(_) => Err("no answer".to_owned()),
    }
}

/// Whether this machine lets a run have [hosts](Options::hosts) of its own; otherwise why not.
///
/// # Errors
/// The reason: no root, no `ip`, no `tc`, no network namespaces.
pub fn hosts_possible() -> Result<(), String> {
    hosts::possible()
}

/// Reads a record of before and checks it again. What was left at its end is not known.
///
/// # Errors
/// If it cannot be read.
pub fn recheck(
    store: StoreKind,
    record: &Path,
) -> Result<(Vec<Event>, Vec<crate::check::Violation>), String> {
    let events = read(record).map_err(told)?;
    let violations = check(store, &events, &Ends::unknown());
    Ok((events, violations))
}

#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
fn told(error: impl ToString) -> String {
    error.to_string()
}
