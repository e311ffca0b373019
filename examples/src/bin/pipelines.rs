//! One server of the pipelines: `pipelines --store URL --name web-1`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use leasehold_examples::pipelines::{Server, Settings};
use leasehold_examples::{Journal, docs};
use tokio::signal::unix::{SignalKind, signal};

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
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter("warn").init();
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pipelines: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let mut term = signal(SignalKind::terminate())?;
    let store = leasehold::connect(&args.store).await?;
    store.migrate().await?;
    let docs = Arc::from(docs::open(&store).await?);
    let settings = Settings {
        pipelines: args.pipelines,
        steps: args.steps,
        step: Duration::from_millis(args.step_ms),
        tick: Duration::from_millis(50),
        share: args.share,
    };
    let journal = Journal::to_stdout(&args.name);
    journal.tell("started", &store.to_string(), 0);
    let server = Server::new(&store, docs, settings, journal);
    server
        .run(async {
            term.recv().await;
        })
        .await?;
    store.close().await?;
    Ok(())
}
