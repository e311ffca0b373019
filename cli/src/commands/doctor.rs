//! `leasehold doctor`.

use std::future::Future;
use std::time::{Duration, Instant};

use clap::Args;
use leasehold::{
    ClaimOptions, DedupeOptions, Error, ErrorKind, Finding, HoldingQuery, Key, Keys, LeaseOptions,
    LockOptions, Reach, Result, Severity, Store,
};
use serde_json::{Value, json};

use crate::cli::Globals;
use crate::failure::{Failure, Outcome, advice};
use crate::table::printable;
use crate::ui::Ui;
use crate::{duration, exit, store, style};

/// Each look takes at most so long.
const LIMIT: Duration = Duration::from_secs(15);
/// A round trip longer than this is worth a word.
const SLOW: Duration = Duration::from_millis(100);
/// Round trips that are measured.
const TRIPS: usize = 10;
/// What is taken for a try: always the same name, so that no more than one trace stays.
const NAME: &str = "leasehold-doctor";

/// Looks for what is wrong or risky with the store and the way to it
///
/// Version, rights, poolers, time-outs, eviction, replication, clock; a lock, a lease, a claim and a
/// dedupe entry named `leasehold-doctor` are taken and freed for a try. Each finding says what to do.
///
/// Exits with 0 if no fault was found (warnings may be) and with 1 otherwise.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Only looks: tries nothing that writes
    #[arg(long)]
    read_only: bool,
}

pub(crate) async fn doctor(ui: Ui, globals: &Globals, args: &Doctor) -> Outcome {
    let url = store::url(globals, None)?;
    let start = Instant::now();
    let opened = Box::pin(limited(leasehold::connect(&url))).await;
    let took = start.elapsed();
    let findings = match &opened {
        Ok(store) => {
            let mut findings = vec![connected(store, took)];
            findings.extend(look(store, args.read_only).await);
            findings
        }
        Err(error) if error.kind() == ErrorKind::InvalidOptions => {
            return Err(Failure::from(error.clone()));
        }
        Err(error) => vec![failed("connect", error)],
    };
    if let Ok(store) = &opened {
        store::close(store).await;
    }
    report(ui, &leasehold::redacted(&url), &findings);
    let has_fault = findings.iter().any(|finding| finding.severity == Severity::Fault);
    Ok(if has_fault { exit::NO } else { exit::OK })
}

fn connected(store: &Store, took: Duration) -> Finding {
    Finding::fine("connect", format!("to {} in {}", store.name(), duration::human(took)))
}

/// All that can be asked of a store that answers.
async fn look(store: &Store, read_only: bool) -> Vec<Finding> {
    let mut findings = abilities(store);
    findings.push(round_trip(store).await);
    match limited(store.diagnose()).await {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(failed("diagnosis", &error)),
    }
    if !read_only {
        findings.extend(tries(store).await);
    }
    findings
}

fn abilities(store: &Store) -> Vec<Finding> {
    let can = store.capabilities();
    let session = match can.session_locks {
        true => Finding::fine("lock", "is free the moment its holder's session ends"),
        false => Finding::fine("lock", "is renewed; a killed holder's is free after its ttl"),
    };
    let durable = match can.durable {
        true => Finding::fine("durability", "leases, dedupe and tokens survive a restart"),
        false => Finding::warning(
            "durability",
            "leases, dedupe entries and the order of tokens may not survive a restart",
            "let the store write to disk, or guard what matters elsewhere too",
        ),
    };
    let mut findings = vec![session, durable];
    if can.reach == Reach::Machine {
        let found = "it coordinates the processes of one machine";
        findings.push(Finding::fine("reach", found));
    }
    findings
}

async fn round_trip(store: &Store) -> Finding {
    let Ok(key) = Key::new(NAME) else { return Finding::fine("round trip", "not measured") };
    let query = HoldingQuery::key(&key).kinds([leasehold::Kind::Lease]);
    let mut times = Vec::with_capacity(TRIPS);
    for _ in 0..TRIPS {
        let start = Instant::now();
        match limited(store.holdings(&query)).await {
            Ok(_) => times.push(start.elapsed()),
            Err(error) => return failed("holdings", &error),
        }
    }
    times.sort_unstable();
    let (median, worst) = (times[TRIPS / 2], times[TRIPS - 1]);
    let found = format!(
        "a question takes {}, at most {} of {TRIPS}",
        duration::human(median),
        duration::human(worst)
    );
    match median > SLOW {
        true => Finding::warning("round trip", found, "use a store that is nearer"),
        false => Finding::fine("round trip", found),
    }
}

/// Takes and frees one of each kind.
async fn tries(store: &Store) -> Vec<Finding> {
    let wait = Duration::from_secs(2);
    let key = match Key::new(NAME) {
        Ok(key) => key,
        Err(error) => return vec![failed("try", &error)],
    };
    let keys = Keys::from(key.clone());
    let lock = tried("take a lock", async {
        match store.lock(&key, LockOptions::default().wait(wait)).await? {
            Some(guard) => {
                guard.token().await?;
                guard.release().await.map(|()| true)
            }
            None => Ok(false),
        }
    });
    let lease = tried("take a lease", async {
        let opts = LeaseOptions::default().wait(wait).ttl(Duration::from_secs(10));
        match store.lease(&key, opts).await? {
            Some(guard) => {
                guard.renew().await?;
                guard.release().await.map(|()| true)
            }
            None => Ok(false),
        }
    });
    let claim = tried("claim", async {
        match store.claim(&keys, ClaimOptions::default().wait(wait)).await? {
            Some(claim) => claim.rollback().await.map(|()| true),
            None => Ok(false),
        }
    });
    let dedupe = tried("dedupe", async {
        let opts = DedupeOptions::default().in_progress(Duration::from_secs(10));
        match store.admit(&key, opts).await?.first() {
            Some(guard) => guard.abandon().await.map(|()| true),
            None => Ok(false),
        }
    });
    vec![lock.await, lease.await, claim.await, dedupe.await]
}

async fn tried(topic: &'static str, attempt: impl Future<Output = Result<bool>>) -> Finding {
    let start = Instant::now();
    match limited(attempt).await {
        Ok(true) => Finding::fine(topic, format!("works, in {}", duration::human(start.elapsed()))),
        Ok(false) => {
            let advice = "run it again when no other doctor is at work";
            Finding::warning(topic, format!("not tried: {NAME} is held"), advice)
        }
        Err(error) => failed(topic, &error),
    }
}

async fn limited<T>(call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(LIMIT, call).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Unavailable, format!("no answer within {LIMIT:?}")))
    })
}

/// What fails is a finding.
fn failed(topic: &'static str, error: &Error) -> Finding {
    match error.kind() {
        ErrorKind::Unsupported if topic == "holdings" || topic == "diagnosis" => {
            let advice = "leasehold list, show and release do not work here; locks do";
            Finding::warning(topic, error.detail(), advice)
        }
        kind => Finding::fault(topic, error.to_string(), advice(kind)),
    }
}

fn report(ui: Ui, url: &str, findings: &[Finding]) {
    let count = |severity| findings.iter().filter(|found| found.severity == severity).count();
    let (faults, warnings) = (count(Severity::Fault), count(Severity::Warning));
    if ui.is_json() {
        let rows: Vec<Value> = findings.iter().map(to_json).collect();
        ui.print_json(&json!({
            "store": url, "faults": faults, "warnings": warnings, "findings": rows,
        }));
        return;
    }
    for finding in findings {
        let (word, style) = shown(finding.severity);
        let (topic, found) = (finding.topic, printable(&finding.found));
        if !ui.is_terminal() {
            ui.print(&format!("{word}\t{topic}\t{found}\t{}\n", printable(&finding.advice)));
            continue;
        }
        let name = style::NAME;
        ui.print(&format!("{style}{word:<7}{style:#} {name}{topic}{name:#}: {found}\n"));
        if !finding.advice.is_empty() {
            let dim = style::DIM;
            ui.print(&format!("        {dim}do:{dim:#} {}\n", printable(&finding.advice)));
        }
    }
    ui.remark(&format!("\n{url}: {faults} faults, {warnings} warnings"));
}

fn shown(severity: Severity) -> (&'static str, anstyle::Style) {
    match severity {
        Severity::Fine => ("ok", style::GOOD),
        Severity::Warning => ("warning", style::WARN),
        Severity::Fault => ("fault", style::BAD),
    }
}

fn to_json(finding: &Finding) -> Value {
    json!({
        "severity": shown(finding.severity).0, "topic": finding.topic, "found": finding.found,
        "advice": finding.advice,
    })
}
