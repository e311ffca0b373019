//! A soak run: one client with many tasks works for long and must not grow; then a handle with very
//! many keys, a key with very many waiters, and very many processes on few keys.

mod crowd;
mod grown;
mod report;
mod scale;
mod steady;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::grown::{Grown, What};
pub use self::report::{Part, Report};
use crate::client::leak::Leak;
use crate::run::last;
use crate::store::{self, Lab, MemoryLab, StoreKind};

/// What is wanted of a soak run.
#[derive(Clone, Debug)]
pub struct Options {
    /// On which store.
    pub store: StoreKind,
    /// How long the one client works and rests.
    pub length: Duration,
    /// The rest with fewer keys, waiters and processes.
    pub short: bool,
    /// Only the one client.
    pub steady_only: bool,
    /// The client leaves this behind, and must be found to grow.
    pub leak: Option<Leak>,
    /// This program, which is started again as a client.
    pub program: PathBuf,
    /// Where the record is kept; it must be empty.
    pub record: PathBuf,
}

/// Runs and compares.
///
/// # Errors
/// If the run could not be made: no server, no process, no record.
pub fn soak(options: &Options) -> Result<Report, String> {
    let lab = lab(options.store)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(told)?;
    runtime.block_on(drive(options, lab))
}

/// A server with room for everybody.
fn lab(store: StoreKind) -> Result<Arc<dyn Lab>, String> {
    let arguments: &[&str] = match store {
        StoreKind::Memory => return Ok(Arc::new(MemoryLab::default())),
        StoreKind::Sqlite | StoreKind::Redis | StoreKind::Valkey => &[],
        StoreKind::Postgres => {
            &["-c", "max_connections=1000", "-c", "max_locks_per_transaction=256"]
        }
        StoreKind::Mysql | StoreKind::Mariadb => &["--max-connections=2000"],
    };
    store::start_with(store, arguments).map_err(told)
}

async fn drive(options: &Options, lab: Arc<dyn Lab>) -> Result<Report, String> {
    lab.prepare(&crate::run::numbers()).await.map_err(told)?;
    let mut report = Report::new(options);
    steady::run(options, &lab, &mut report).await?;
    if options.steady_only {
        return Ok(report);
    }
    let parts = scale::parts(options.store, options.short);
    for part in parts {
        let start = Instant::now();
        let (name, done) = part.run(&lab).await;
        report.add(name, start.elapsed(), done, last::leftovers(&lab).await);
    }
    let start = Instant::now();
    let done = crowd::run(options, &lab).await;
    report.add(crowd::name(options), start.elapsed(), done, last::leftovers(&lab).await);
    Ok(report)
}

#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
fn told(error: impl ToString) -> String {
    error.to_string()
}
