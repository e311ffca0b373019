//! The runner: every case on a harness, side by side, each with a time limit.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use leasehold_core::Result;
use libtest_mimic::{Arguments, Trial};

use crate::case::Case;
use crate::cases::CASES;
use crate::ctx::Ctx;
use crate::fault::{Fault, Verdict, panic_message};
use crate::harness::Harness;
use crate::holder;
use crate::report::{Outcome, Report};

/// A case that has not ended after so long has failed.
pub const CASE_LIMIT: Duration = Duration::from_secs(60);
/// Cases run side by side, unless `--test-threads` says otherwise: they mostly wait.
const THREADS: usize = 8;

/// How a backend's test gets its store.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Opens the store under test, once, before the first case.
    pub start: fn() -> Result<Arc<dyn Harness>>,
    /// Opens the store at [`Harness::address`] in another process; none if it has no address.
    pub join: Option<fn(&str) -> Result<Arc<dyn Harness>>>,
}

/// The `main` of a backend's conformance test (`harness = false`).
///
/// It takes the arguments of Rust's own test harness: filters, `--list`, `--exact`, `--skip`,
/// `--test-threads`, `--format json` and so on, and works under nextest.
pub fn main(setup: Setup) -> ExitCode {
    if let (Ok(address), Some(join)) = (std::env::var(holder::ADDRESS), setup.join) {
        return match holder::serve(&address, join) {
            Ok(()) => ExitCode::SUCCESS,
            Err(fault) => {
                eprintln!("holder: {fault}");
                ExitCode::FAILURE
            }
        };
    }
    let args = Arguments::from_args();
    if args.list {
        let trials = CASES.iter().map(|case| trial(case)).collect();
        return libtest_mimic::run(&args, trials).exit_code();
    }
    let cases: Vec<&Case> =
        CASES.iter().filter(|case| !args.is_filtered_out(&trial(case))).collect();
    let filtered_out = CASES.len() - cases.len();
    if cases.is_empty() {
        let report = Report::new(&args, cases.len());
        return report.close(filtered_out);
    }
    match (setup.start)() {
        Ok(harness) => run(&args, &harness, cases, filtered_out),
        Err(error) => {
            eprintln!("the store under test cannot be had: {error}");
            ExitCode::FAILURE
        }
    }
}

fn trial(case: &Case) -> Trial {
    Trial::test(case.name, || Ok(()))
}

fn run(
    args: &Arguments,
    harness: &Arc<dyn Harness>,
    cases: Vec<&'static Case>,
    filtered_out: usize,
) -> ExitCode {
    let mut report = Report::new(args, cases.len());
    report.title(&harness.name());
    let threads = args.test_threads.unwrap_or(THREADS).clamp(1, cases.len());
    let queue = Mutex::new(VecDeque::from(cases));
    let (done, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (queue, done) = (&queue, done.clone());
            scope.spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(case) = next else { return };
                    let start = Instant::now();
                    let outcome = run_case(case, harness);
                    if done.send((case, outcome, start.elapsed())).is_err() {
                        return; // nobody listens any more
                    }
                }
            });
        }
        drop(done);
        for (case, outcome, time) in finished {
            report.case(case, outcome, time);
        }
    });
    report.close(filtered_out)
}

/// Runs one case on a runtime of its own, and looks what it left behind.
pub fn run_case(case: &Case, harness: &Arc<dyn Harness>) -> Outcome {
    if let Some(reason) = case.needs.iter().find_map(|need| harness.lacks(*need)) {
        return Outcome::Ignored(reason.to_owned());
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return Outcome::Failed(format!("no runtime: {error}")),
    };
    let ctx = Ctx::new(harness.clone());
    let whole = whole(*case, ctx.clone());
    let verdict = runtime.block_on(async {
        // a task of its own, so that a case that blocks its thread cannot block this one
        let task = tokio::spawn(tokio::time::timeout(CASE_LIMIT, whole));
        let late = CASE_LIMIT + Duration::from_secs(5);
        match tokio::time::timeout(late, task).await {
            Ok(Ok(Ok(verdict))) => verdict,
            Ok(Ok(Err(_))) => Err(Fault::new(format!(
                "expected the case to end within {CASE_LIMIT:?}: something waits for ever"
            ))),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(Fault::new(format!(
                "expected the case to end within {CASE_LIMIT:?}: something blocks its thread"
            ))),
        }
    });
    // best effort: the verdict counts
    drop(runtime.block_on(async { tokio::time::timeout(CASE_LIMIT, ctx.tidy()).await }));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match verdict {
        Ok(()) => Outcome::Passed,
        Err(fault) if fault.is_ignored() => Outcome::Ignored(fault.message().to_owned()),
        Err(fault) => Outcome::Failed(fault.message().to_owned()),
    }
}

async fn whole(case: Case, ctx: Ctx) -> Verdict {
    let ran = AssertUnwindSafe((case.run)(ctx.clone())).catch_unwind().await;
    ran.unwrap_or_else(|panic| {
        let message = panic_message(&*panic);
        Err(Fault::new(format!("the case panicked: {message}")))
    })?;
    ctx.nothing_left().await
}
