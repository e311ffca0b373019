//! One pod of the task runners: `tasks --store URL --name pod-1`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use leasehold_examples::tasks::{Pod, Settings};
use leasehold_examples::{Journal, Process, process};

/// A pod that runs tasks. It prints what it does as lines of JSON, its port first.
#[derive(Debug, Parser)]
struct Args {
    /// The store, e.g. `postgres://me@localhost/app`.
    #[arg(long, env = "LEASEHOLD_URL")]
    store: String,
    /// The name of this pod.
    #[arg(long)]
    name: String,
    /// So many runs at a time, over all pods.
    #[arg(long, default_value_t = 3)]
    limit: u64,
    /// So many of them for one repository.
    #[arg(long, default_value_t = 1)]
    per_repo: u64,
    /// The time of a run, in milliseconds.
    #[arg(long, default_value_t = 150)]
    run_ms: u64,
    /// After how many milliseconds a dead pod's runs are put back.
    #[arg(long, default_value_t = 2000)]
    turn_ms: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    process::exit_code("tasks", run(Args::parse()).await)
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut process = Process::start(&args.store).await?;
    let settings = Settings {
        limit: args.limit,
        per_repo: args.per_repo,
        workers: 2,
        run: Duration::from_millis(args.run_ms),
        turn: Duration::from_millis(args.turn_ms),
        tick: Duration::from_millis(250),
    };
    let journal = Journal::to_stdout(&args.name);
    let pod = Pod::new(&process.store, process.docs.clone(), settings, journal)?;
    pod.run(process.told_to_end()).await?;
    process.store.close().await?;
    Ok(())
}
