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
use crate::ctx::{Ctx, PATIENCE};
use crate::fault::{Fault, Verdict, panic_message};
use crate::harness::Harness;
use crate::holder;
use crate::report::{Outcome, Report};

/// A case that has not ended after so long has failed.
pub const CASE_LIMIT: Duration = Duration::from_secs(60);
/// Cases run side by side, unless `--test-threads` says otherwise: they mostly wait.
const THREADS: usize = 8;
/// Closing the handles of a case takes at most so long.
const TIDY_LIMIT: Duration = Duration::from_secs(15);

/// Opens the store under test.
pub type Start = fn() -> Result<Arc<dyn Harness>>;
/// Opens the store at an address that another process's harness gave.
pub type Join = fn(&str) -> Result<Arc<dyn Harness>>;

/// How a backend's test gets its store.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Opens the store under test, once, before the first case.
    pub start: Start,
    /// Opens the store at [`Harness::address`] in another process; none if it has no address.
    pub join: Option<Join>,
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
        let trials = CASES.iter().map(trial).collect();
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

/// Runs one case on a thread and a runtime of its own, and looks what it left behind.
pub fn run_case(case: &Case, harness: &Arc<dyn Harness>) -> Outcome {
    run_within(case, harness, CASE_LIMIT, PATIENCE)
}

fn run_within(
    case: &Case,
    harness: &Arc<dyn Harness>,
    limit: Duration,
    cleared_within: Duration,
) -> Outcome {
    if let Some(reason) = case.needs.iter().find_map(|need| harness.lacks(*need)) {
        return Outcome::Ignored(reason.to_owned());
    }
    let (case, ctx) = (*case, Ctx::new(harness.clone()));
    let (tell, told) = mpsc::channel();
    // not joined: a case that blocks all threads of its runtime must not block the run
    std::thread::spawn(move || {
        let verdict = on_own_runtime(case, &ctx, limit, cleared_within, &tell);
        drop(tell.send(verdict)); // it was told before, or nobody waits for it any more
    });
    let verdict = told.recv_timeout(limit + TIDY_LIMIT.min(limit)).unwrap_or_else(|_| {
        Err(Fault::new(format!(
            "expected the case to end within {limit:?}: something blocks its threads"
        )))
    });
    match verdict {
        Ok(()) => Outcome::Passed,
        Err(fault) if fault.is_ignored() => Outcome::Ignored(fault.message().to_owned()),
        Err(fault) => Outcome::Failed(fault.message().to_owned()),
    }
}

fn on_own_runtime(
    case: Case,
    ctx: &Ctx,
    limit: Duration,
    cleared_within: Duration,
    tell: &mpsc::Sender<Verdict>,
) -> Verdict {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let whole = whole(case, ctx.clone(), cleared_within);
    let limited = async {
        // a task of its own: where it blocks its thread, the limit is told on another
        let ended = tokio::time::timeout(limit, tokio::spawn(whole)).await;
        ended.map_err(|_| {
            Fault::new(format!(
                "expected the case to end within {limit:?}: something waits for ever"
            ))
        })??
    };
    let verdict = runtime.block_on(limited);
    if verdict.is_err() {
        drop(tell.send(verdict.clone())); // what follows may hang where a case has failed
    }
    // best effort: the verdict counts
    drop(runtime.block_on(async { tokio::time::timeout(TIDY_LIMIT, ctx.tidy()).await }));
    runtime.shutdown_timeout(Duration::from_secs(1));
    verdict
}

async fn whole(case: Case, ctx: Ctx, cleared_within: Duration) -> Verdict {
    let ran = AssertUnwindSafe((case.run)(ctx.clone())).catch_unwind().await;
    ran.unwrap_or_else(|panic| {
        let message = panic_message(&*panic);
        Err(Fault::new(format!("the case panicked: {message}")))
    })?;
    ctx.nothing_left(cleared_within).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Subject, cases};
    use crate::ctx::{HandleExt, key};
    use crate::fault::ensure;
    use crate::harness::Need;
    use crate::memory::MemoryHarness;
    use leasehold_core::LockOptions;

    mod samples {
        use super::*;

        cases!(Backend in "samples" {
            passes = "a case that passes";
            fails = "a case that fails";
            panics = "a case that panics";
            waits_for_ever = "a case that waits for ever";
            blocks_its_threads = "a case that blocks both threads of its runtime";
            leaves_a_lock = "a case that leaves a lock behind";
            needs_processes = "a case that needs what memory lacks" [Processes];
        });

        async fn passes(ctx: Ctx) -> Verdict {
            let guard = ctx.open().await?.locked("x").await?;
            drop(guard); // freed in the background, and waited for
            Ok(())
        }

        async fn fails(_: Ctx) -> Verdict {
            ensure!(1 > 2, "expected {} to be more", 1);
            Ok(())
        }

        async fn panics(_: Ctx) -> Verdict {
            std::panic::resume_unwind(Box::new("on purpose"));
        }

        async fn waits_for_ever(_: Ctx) -> Verdict {
            std::future::pending().await
        }

        async fn blocks_its_threads(_: Ctx) -> Verdict {
            for _ in 0..4 {
                tokio::spawn(async { std::thread::sleep(Duration::from_secs(30)) });
            }
            std::future::pending().await
        }

        async fn leaves_a_lock(ctx: Ctx) -> Verdict {
            let a = ctx.open().await?;
            let taken = a.backend.lock(&key("forgotten"), LockOptions::try_once()).await?;
            std::mem::forget(taken);
            Ok(())
        }

        async fn needs_processes(_: Ctx) -> Verdict {
            Ok(())
        }
    }

    fn outcome(name: &str) -> Outcome {
        let case = samples::CASES.iter().find(|case| case.name.ends_with(name)).unwrap();
        assert_eq!(case.subject, Subject::Backend);
        let harness: Arc<dyn Harness> = Arc::new(MemoryHarness::new());
        run_within(case, &harness, Duration::from_secs(2), Duration::from_millis(300))
    }

    fn message(name: &str) -> String {
        match outcome(name) {
            Outcome::Failed(message) => message,
            other => panic!("expected {name} to be told as failed, it {other:?}"),
        }
    }

    #[test]
    fn each_end_of_a_case_is_told_as_what_it_is() {
        assert_eq!(outcome("passes"), Outcome::Passed);
        assert_eq!(message("fails"), "expected 1 to be more");
        assert_eq!(message("panics"), "the case panicked: on purpose");
        let reason = MemoryHarness::new().lacks(Need::Processes).unwrap();
        assert_eq!(outcome("needs_processes"), Outcome::Ignored(reason.to_owned()));
    }

    #[test]
    fn a_case_that_does_not_end_fails() {
        assert!(message("waits_for_ever").contains("something waits for ever"));
    }

    #[test]
    fn a_case_that_blocks_all_its_threads_fails() {
        assert!(message("blocks_its_threads").contains("something blocks its threads"));
    }

    #[test]
    fn what_a_case_leaves_behind_fails_it() {
        let message = message("leaves_a_lock");
        assert!(message.contains("expected nothing to be left"), "{message}");
        assert!(message.contains("forgotten"), "{message}");
    }
}
