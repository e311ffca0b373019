//! `leasehold verify`: the suite that certifies backends, against this store.

mod harness;
mod numbers;
mod report;
mod way;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold_conformance::{CASES, Case, Harness, Outcome as Verdict, Setup, run_case};

use self::harness::StoreHarness;
use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::ui::Ui;
use crate::{exit, store};

/// Where another process of a case finds the store; set by the suite.
const ADDRESS: &str = "LEASEHOLD_CONFORMANCE_ADDRESS";

/// Proves the promises on this store: runs the suite that certifies backends against it
///
/// Other processes, killed and paused ones, cut and silent connections (made by a proxy in front of
/// the store, for this command's own connections only). It works in namespaces of its own, whose
/// names begin with `leasehold-verify-`, so others are not disturbed; but it is load: the cases take
/// a few minutes. What stays are dedupe entries of those namespaces, until they expire.
///
/// Exits with 0 if no case failed and with 1 otherwise.
#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Only cases whose names contain one of these, e.g. `lease::` or `named::excludes`
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,

    /// Cases that run side by side
    #[arg(long, short, value_name = "COUNT", default_value = "4")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,

    /// Lists the cases and what they prove, and runs none
    #[arg(long)]
    list: bool,
}

/// A case that has ended.
#[derive(Debug)]
struct Done {
    case: &'static Case,
    verdict: Verdict,
    time: Duration,
}

/// The exit code of this process if the suite has started it, as another process of a case.
pub(crate) fn helper() -> Option<ExitCode> {
    if std::env::args_os().len() > 1 || std::env::var_os(ADDRESS).is_none() {
        return None;
    }
    Some(leasehold_conformance::main(Setup {
        start: || Err(harness::failed("the suite is started by `leasehold verify`")),
        join: Some(|address| Ok(Arc::new(StoreHarness::join(address)?))),
    }))
}

pub(crate) async fn verify(ui: Ui, globals: &Globals, args: &Verify) -> Outcome {
    let wanted = |case: &&Case| {
        args.filters.is_empty() || args.filters.iter().any(|part| case.name.contains(part.as_str()))
    };
    let cases: Vec<&'static Case> = CASES.iter().filter(wanted).collect();
    if cases.is_empty() {
        let advice = "`leasehold verify --list` shows all of them";
        return Err(Failure::usage("no case has such a name", advice));
    }
    if args.list {
        report::list(ui, &cases);
        return Ok(exit::OK);
    }
    let url = store::url(globals, None)?;
    if store::has_option(&url, "namespace") {
        let message = "the suite works in namespaces of its own and leaves others alone";
        return Err(Failure::usage(message, "leave the namespace away"));
    }
    let harness = Arc::new(StoreHarness::start(&url).await?);
    if globals.verbose == 0 {
        // cases panic on purpose; one that is not meant to is told as failed
        std::panic::set_hook(Box::new(|_| {}));
    }
    let start = Instant::now();
    let done = {
        let (harness, jobs): (Arc<dyn Harness>, _) = (harness.clone(), args.jobs);
        let bar = progress(ui, cases.len());
        let run = tokio::task::spawn_blocking(move || run_all(&harness, cases, jobs.into(), &bar));
        run.await.map_err(|error| Failure::system("the suite", &error.into()))?
    };
    let tidied = harness.tidy().await;
    let failed = done.iter().filter(|done| matches!(done.verdict, Verdict::Failed(_))).count();
    report::report(ui, &harness.name(), &leasehold::redacted(&url), &done, start.elapsed());
    if let Err(error) = tidied {
        let text = format!("the table of the suite stays: {error}");
        ui.news("untidy", serde_json::json!({"error": error.to_string()}), &text);
    }
    Ok(if failed == 0 { exit::OK } else { exit::NO })
}

fn progress(ui: Ui, cases: usize) -> ProgressBar {
    let target = match ui.shows_progress() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(cases as u64), target);
    let style = "{bar:30.cyan/dim} {pos}/{len} {elapsed} {wide_msg}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar
}

/// Runs all cases, so many at once.
fn run_all(
    harness: &Arc<dyn Harness>,
    cases: Vec<&'static Case>,
    jobs: usize,
    bar: &ProgressBar,
) -> Vec<Done> {
    let queue = Mutex::new(VecDeque::from(cases));
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            let (queue, tell) = (&queue, tell.clone());
            scope.spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(case) = next else { return };
                    bar.set_message(case.about);
                    let start = Instant::now();
                    let verdict = run_case(case, harness);
                    bar.inc(1);
                    // nobody listens only if this thread's scope is gone
                    drop(tell.send(Done { case, verdict, time: start.elapsed() }));
                }
            });
        }
        drop(tell);
        let mut done: Vec<Done> = told.iter().collect();
        bar.finish_and_clear();
        done.sort_by_key(|done| done.case.name);
        done
    })
}
