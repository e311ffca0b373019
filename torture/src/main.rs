//! `torture`: runs clients and faults on a store, and checks what they saw.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold_torture::client::leak::Leak;
use leasehold_torture::client::steady::steady;
use leasehold_torture::client::{Order, Role, be};
use leasehold_torture::mutant::Mutant;
use leasehold_torture::run::{Options, recheck, run};
use leasehold_torture::soak::{self, Report, soak};
use leasehold_torture::store::{Lab, MemoryLab, StoreKind, join};
use tokio::io::{AsyncBufReadExt, AsyncReadExt};
use tokio::sync::{mpsc, watch};

/// Several processes on one store under random faults; every operation is recorded and checked.
///
/// The faults and the choices of the clients follow from the seed: a run with the same seed has the
/// same plan, though not the same timing. Prints the counts of operations, faults and violations,
/// and around a violation the history of its key. Fails if there is one.
#[derive(Debug, Parser)]
#[command(name = "torture", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,

    /// How long a run takes, in minutes.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,

    /// A run for each; a random one by default, which is printed.
    #[arg(long = "seed", value_name = "SEED")]
    seeds: Vec<u64>,

    /// A run on each; all by default.
    #[arg(long = "backend", value_enum, value_name = "BACKEND")]
    backends: Vec<StoreKind>,

    /// How many client processes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: u32,

    /// Breaks the clients' backend in this way, and fails unless a violation is found.
    #[arg(long, value_enum)]
    mutant: Option<Mutant>,

    /// Each client on a host of its own: a network namespace, joined by a link that is cut and
    /// loses packets; needs root, `ip` and `tc`.
    #[arg(long)]
    hosts: bool,

    /// Keeps the records below this folder, one a run.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// A client; started by the controller.
    #[command(hide = true)]
    Client {
        /// What it is to do, as JSON.
        order: String,
    },
    /// One client with many tasks for long, without faults, and what is there may not grow; then
    /// very many keys, waiters and processes.
    Soak(Soak),
    /// Checks a record that was kept.
    Check {
        /// Of this backend.
        backend: StoreKind,
        /// Its folder.
        record: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct Soak {
    /// How long the client works and rests, in minutes.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,

    /// A run on each; all by default.
    #[arg(value_enum, value_name = "BACKEND")]
    backends: Vec<StoreKind>,

    /// Fewer keys, waiters and processes.
    #[arg(long)]
    short: bool,

    /// Only the client that must not grow.
    #[arg(long)]
    steady_only: bool,

    /// All backends at the same time.
    #[arg(long)]
    together: bool,

    /// The client leaves this behind, and the run fails unless it is found to grow.
    #[arg(long, value_enum)]
    leak: Option<Leak>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match &arguments.action {
        Some(Action::Client { order }) => client(order),
        Some(Action::Check { backend, record }) => match recheck(*backend, record) {
            Ok((events, violations)) => {
                println!("{} events, {} violations", events.len(), violations.len());
                violations.iter().for_each(|v| println!("  {}: {}", v.rule, v.what));
                if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => failure(&error),
        },
        Some(Action::Soak(arguments)) => soaks(arguments),
        None => runs(&arguments),
    }
}

/// A soak run on each backend.
fn soaks(arguments: &Soak) -> ExitCode {
    let backends = match arguments.backends.as_slice() {
        [] => &StoreKind::ALL,
        some => some,
    };
    let one = |store: &StoreKind| {
        let store = *store;
        println!("soak {store}: {} minutes ...", arguments.minutes);
        match soak_one(arguments, store) {
            Ok(report) => {
                print!("{report}");
                report.is_sound() == arguments.leak.is_none()
            }
            Err(error) => {
                println!("soak {store} could not be run: {error}");
                false
            }
        }
    };
    let passed = if arguments.together {
        std::thread::scope(|scope| {
            let runs: Vec<_> = backends.iter().map(|store| scope.spawn(|| one(store))).collect();
            runs.into_iter().filter_map(|run| run.join().ok()).filter(|passed| *passed).count()
        })
    } else {
        backends.iter().filter(|store| one(store)).count()
    };
    concluded(passed, backends.len() - passed)
}

fn soak_one(arguments: &Soak, store: StoreKind) -> Result<Report, String> {
    let record = tempfile::tempdir().map_err(|error| error.to_string())?;
    soak(&soak::Options {
        store,
        length: Duration::from_secs_f64(arguments.minutes * 60.0),
        short: arguments.short,
        steady_only: arguments.steady_only,
        leak: arguments.leak,
        program: std::env::current_exe().map_err(|error| error.to_string())?,
        record: record.path().to_owned(),
    })
}

fn concluded(passed: usize, failed: usize) -> ExitCode {
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All runs, one after another.
fn runs(arguments: &Arguments) -> ExitCode {
    let backends = match arguments.backends.as_slice() {
        [] => &StoreKind::ALL,
        some => some,
    };
    let seeds = match arguments.seeds.as_slice() {
        [] => vec![rand::random_range(1..1_000_000)],
        some => some.to_vec(),
    };
    let (mut passed, mut failed) = (0usize, 0usize);
    for backend in backends {
        for seed in &seeds {
            println!("torture {backend}: seed {seed} ...");
            match one(arguments, *backend, *seed) {
                Ok(true) => passed += 1,
                Ok(false) => failed += 1,
                Err(error) => {
                    failed += 1;
                    println!("torture {backend}: seed {seed} could not be run: {error}");
                }
            }
        }
    }
    concluded(passed, failed)
}

/// One run; whether it was as it must be.
fn one(arguments: &Arguments, store: StoreKind, seed: u64) -> Result<bool, String> {
    let temporary = tempfile::tempdir().map_err(|error| error.to_string())?;
    let record = match &arguments.keep {
        None => temporary.path().to_owned(),
        Some(folder) => {
            let unique = std::process::id();
            let folder = folder.join(format!("{store}-{seed}-{unique}"));
            std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
            std::path::absolute(folder).map_err(|error| error.to_string())?
        }
    };
    let report = run(&Options {
        store,
        length: Duration::from_secs_f64(arguments.minutes * 60.0),
        seed,
        clients: arguments.clients,
        mutant: arguments.mutant,
        hosts: arguments.hosts,
        program: std::env::current_exe().map_err(|error| error.to_string())?,
        record,
    })?;
    print!("{report}");
    let found = !report.violations.is_empty();
    if found {
        let Arguments { minutes, clients, .. } = arguments;
        println!(
            "\n  again: ./test torture --backend {store} --minutes {minutes} --clients {clients} \
             --seed {seed}"
        );
    }
    if let Some(mutant) = arguments.mutant {
        println!("  the mutant {mutant:?} was {}", if found { "found" } else { "not found" });
    }
    Ok(found == arguments.mutant.is_some())
}

/// A client process: works until its standard input ends.
fn client(order: &str) -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("LEASEHOLD_TORTURE_LOG"))
        .init();
    let order: Order = match serde_json::from_str(order) {
        Ok(order) => order,
        Err(error) => return failure(&format!("not an order: {error}")),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return failure(&error.to_string()),
    };
    let done = match order.role {
        Role::Steady(leak) => runtime.block_on(steady_client(&order, leak)),
        Role::Torture | Role::Crowd(_) => {
            let (stop, stopped) = watch::channel(false);
            runtime.spawn(async move {
                // nothing is ever sent: its end is the order to finish
                drop(tokio::io::stdin().read(&mut [0; 1]).await);
                stop.send_replace(true);
            });
            runtime.block_on(async {
                let shop = join(order.store, &order.url)?;
                be(&order, shop, stopped).await
            })
        }
    };
    // a read of the standard input may still block a thread
    runtime.shutdown_timeout(Duration::from_secs(10));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error.to_string()),
    }
}

/// Is told by a line to work and by the next one to rest, and answers with a line.
async fn steady_client(order: &Order, leak: Option<Leak>) -> leasehold::Result<()> {
    let shop = match order.store {
        StoreKind::Memory => MemoryLab::default().shop(),
        store => join(store, &order.url)?,
    };
    let (tell, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut lines = tokio::io::BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(_)) = lines.next_line().await {
            let _ = tell.send(()); // one that has ended does not listen
        }
    });
    let answer = |rested| println!("{}", serde_json::json!(rested));
    steady(order, shop, leak, told, answer).await
}

fn failure(error: &str) -> ExitCode {
    eprintln!("torture: {error}");
    ExitCode::FAILURE
}
