//! What the programs of both services do: connect, serve until TERM, end.

use std::fmt::Display;
use std::process::ExitCode;
use std::sync::Arc;

use leasehold::Store;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::docs::{self, Docs};

/// A service's way to its store, and the signal to end.
#[derive(Debug)]
pub struct Process {
    /// The store, with its tables.
    pub store: Store,
    /// The service's own data.
    pub docs: Arc<dyn Docs>,
    term: Signal,
}

impl Process {
    /// Logs to the standard error, connects to the store and makes what tables are missing. Once in
    /// a process.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn start(url: &str) -> Result<Self, Box<dyn std::error::Error>> {
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter("warn").init();
        let term = signal(SignalKind::terminate())?;
        let store = leasehold::connect(url).await?;
        store.migrate().await?;
        let docs = Arc::from(docs::open(&store).await?);
        Ok(Self { store, docs, term })
    }

    /// Waits for TERM.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn told_to_end(&mut self) {
        self.term.recv().await;
    }
}

/// The exit code of how a program ended; an error is said on the standard error.
pub fn exit_code<E: Display>(name: &str, ended: Result<(), E>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}
