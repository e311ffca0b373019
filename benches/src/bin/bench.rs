//! `./bench --help` says what it does.

use std::process::ExitCode;

use clap::Parser;
use leasehold_benches::cli::Cli;
use leasehold_benches::{run, scenarios, special};

#[tokio::main]
async fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let done = match words.get(1).map(String::as_str) {
        // not for people: what a scenario with several processes starts
        Some("client") => match words.get(2).map(|job| serde_json::from_str(job)) {
            Some(Ok(job)) => scenarios::client(job).await,
            _ => Err("a client needs a job".into()),
        },
        Some("hold") => match words.get(2).map(|job| serde_json::from_str(job)) {
            Some(Ok(job)) => special::hold(job).await,
            _ => Err("who holds needs a job".into()),
        },
        // on a worker, as a service's tasks are: the main thread is woken up anew for each answer
        _ => {
            let cli = Cli::parse();
            match tokio::spawn(async move { run::run(&cli).await.map(drop) }).await {
                Ok(done) => done,
                Err(error) => Err(error.into()),
            }
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}
