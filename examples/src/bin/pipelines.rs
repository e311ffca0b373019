//! One server of the pipelines: `pipelines --store URL --name web-1`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use leasehold_examples::pipelines::{Server, Settings};
use leasehold_examples::{Journal, Process, process};

/// A server that drives pipelines. It prints what it does as lines of JSON.
#[derive(Debug, Parser)]
struct Args {
    /// The store, e.g. `postgres://me@localhost/app`.
    #[arg(long, env = "LEASEHOLD_URL")]
    store: String,
    /// The name of this server.
    #[arg(long)]
    name: String,
    /// So many pipelines are found.
    #[arg(long, default_value_t = 12)]
    pipelines: u32,
    /// The steps of each.
    #[arg(long, default_value_t = 5)]
    steps: u32,
    /// The time of a step, in milliseconds.
    #[arg(long, default_value_t = 50)]
    step_ms: u64,
    /// It drives so many at once at most.
    #[arg(long, default_value_t = 5)]
    share: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    process::exit_code("pipelines", run(Args::parse()).await)
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut process = Process::start(&args.store).await?;
    let settings = Settings {
        pipelines: args.pipelines,
        steps: args.steps,
        step: Duration::from_millis(args.step_ms),
        tick: Duration::from_millis(50),
        share: args.share,
    };
    let journal = Journal::to_stdout(&args.name);
    journal.tell("started", &process.store.to_string(), 0);
    let server = Server::new(&process.store, process.docs.clone(), settings, journal);
    server.run(process.told_to_end()).await?;
    process.store.close().await?;
    Ok(())
}
