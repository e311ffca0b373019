//! The example services, run as several processes on every store, while processes are killed,
//! paused and started again; then it is looked at what really happened.

mod fleet;
mod http;
mod pipelines;
mod stores;
mod tasks;

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};

use crate::fleet::{Fleet, Program};
use crate::stores::Place;

/// A run that takes longer has got stuck.
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2); // each is several processes and a server
    let only = std::env::var("LEASEHOLD_TEST_ONLY").unwrap_or_default();
    let places = Place::ALL.into_iter().filter(|place| only.is_empty() || only == place.name());
    let trials = places.flat_map(|place| {
        let trial = |program: &Program| format!("{} on {}", program.name, place.name());
        [
            Trial::test(trial(&pipelines::PROGRAM), move || {
                run(place, &pipelines::PROGRAM, pipelines::check)
            }),
            Trial::test(trial(&tasks::PROGRAM), move || run(place, &tasks::PROGRAM, tasks::check)),
        ]
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}

fn run(
    place: Place,
    program: &'static Program,
    check: impl AsyncFnOnce(&mut Fleet) -> Result<String, Failed>,
) -> Result<(), Failed> {
    let runtime = tokio::runtime::Runtime::new()?;
    let outcome = runtime.block_on(async {
        let mut fleet = Fleet::new(place, program).await?;
        let checked = tokio::time::timeout(LIMIT, check(&mut fleet)).await;
        let checked = checked.unwrap_or_else(|_| Err(format!("not done within {LIMIT:?}").into()));
        checked.map_err(|failed| {
            let why = failed.message().unwrap_or("failed").to_owned();
            Failed::from(format!("{why}\n{}", fleet.story()))
        })
    });
    println!("{} on {}: {}", program.name, place.name(), outcome?);
    Ok(())
}
