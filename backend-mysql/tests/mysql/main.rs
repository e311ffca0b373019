//! What only MySQL and MariaDB have: their names, sessions, kills, time-outs and grants, each on
//! both servers. Case numbers are those of the list of public failures.

#[path = "../support/mod.rs"]
mod support;

mod claims;
mod clocks;
mod crowds;
mod diagnose;
mod fleet;
mod inspect;
mod kept;
mod migrate;
mod probe;
mod rows_and_tables;
mod scale;
mod sessions;
#[cfg(feature = "rustls")]
mod tls;
mod waiters;

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold_conformance::servers::Kind;
use leasehold_core::{Key, Keys, LockGuard, LockOptions, NamedLock};
use leasehold_mysql::MySqlBackend;
use libtest_mimic::{Arguments, Failed, Trial};
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, OptsBuilder, Pool};
use support::MySqlHarness;

type Failure = Box<dyn Error + Send + Sync>;
type Verdict = Result<(), Failure>;
type Run = fn(Arc<MySqlHarness>) -> Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// A test that has not ended after so long has failed.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a test waits for what must happen soon: generous, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// The names of async functions, as a table.
macro_rules! tests {
    ($module:literal: $($name:ident),+ $(,)?) => {
        pub(crate) const TESTS: &[(&str, crate::Run)] = &[$((
            concat!($module, "::", stringify!($name)),
            |harness| Box::pin($name(harness)),
        )),+];
    };
}
pub(crate) use tests;

/// Fails the test with a message.
macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err(format!($($message)+).into());
        }
    };
}
pub(crate) use ensure;

fn main() -> ExitCode {
    if let Some(code) = fleet::serve_if_asked() {
        return code;
    }
    let mut args = Arguments::from_args();
    // they mostly wait
    args.test_threads.get_or_insert(8);
    let tables: &[&[(&str, Run)]] = &[
        sessions::TESTS,
        claims::TESTS,
        rows_and_tables::TESTS,
        kept::TESTS,
        waiters::TESTS,
        clocks::TESTS,
        crowds::TESTS,
        probe::TESTS,
        inspect::TESTS,
        migrate::TESTS,
        diagnose::TESTS,
        #[cfg(feature = "rustls")]
        tls::TESTS,
        fleet::TESTS,
        scale::TESTS,
    ];
    let kinds = [Kind::MySql, Kind::MariaDb].into_iter();
    let trials = kinds
        .filter(|kind| support::is_meant(*kind))
        .flat_map(|kind| {
            let tests = tables.iter().copied().flatten();
            tests.map(move |(name, run)| trial(kind, name, *run))
        })
        .collect();
    libtest_mimic::run(&args, trials).exit_code()
}

fn trial(kind: Kind, name: &str, run: Run) -> Trial {
    Trial::test(format!("{kind}::{name}"), move || {
        let failed = |error: &dyn std::fmt::Display| Failed::from(error.to_string());
        let harness = shared(kind).map_err(|error| failed(&error))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        let verdict = runtime.block_on(async {
            let test = tokio::spawn(run(harness));
            match tokio::time::timeout(LIMIT, test).await {
                Ok(Ok(verdict)) => verdict,
                Ok(Err(panic)) => Err(panic.into()),
                Err(_) => Err(format!("it did not end within {LIMIT:?}").into()),
            }
        });
        runtime.shutdown_timeout(Duration::from_secs(1));
        verdict.map_err(|error| failed(&error))
    })
}

/// One server of a kind for all tests that change nothing about it.
fn shared(kind: Kind) -> leasehold_core::Result<Arc<MySqlHarness>> {
    static SHARED: LazyLock<Mutex<HashMap<&str, Arc<MySqlHarness>>>> =
        LazyLock::new(Mutex::default);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(harness) = shared.get(kind.name()) {
        return Ok(harness.clone());
    }
    let harness = Arc::new(MySqlHarness::start(kind)?);
    shared.insert(kind.name(), harness.clone());
    Ok(harness)
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).expect("a key")
}

pub(crate) fn keys(names: &[&str]) -> Keys {
    Keys::new(names).expect("keys")
}

/// A namespace that no other test uses.
pub(crate) fn namespace() -> String {
    format!("test-{:016x}", rand::random::<u64>())
}

pub(crate) async fn locked(
    locks: &impl NamedLock,
    name: &str,
) -> Result<LockGuard, Box<dyn Error + Send + Sync>> {
    let guard = locks.lock(&key(name), LockOptions::default()).await?;
    guard.ok_or_else(|| format!("{name:?} was not to be had").into())
}

/// A handle whose connections begin with a statement.
pub(crate) async fn with_setup(
    harness: &MySqlHarness,
    namespace: &str,
    setup: &str,
) -> leasehold_core::Result<MySqlBackend> {
    let opts = OptsBuilder::from_opts(Opts::from_url(harness.url()).map_err(support::failed)?)
        .setup(vec![setup.to_owned()]);
    harness.builder(namespace).from_pool(Pool::new(opts)).await
}

pub(crate) async fn is_free(locks: &impl NamedLock, name: &str) -> leasehold_core::Result<bool> {
    Ok(locks.lock(&key(name), LockOptions::try_once()).await?.is_some())
}

/// A new user with the grants of the README; its name and its URL.
pub(crate) async fn least_privileged(
    harness: &MySqlHarness,
) -> Result<(String, String), Box<dyn Error + Send + Sync>> {
    let user = format!("least{:08x}", rand::random::<u32>());
    let readme = include_str!("../../README.md");
    let grants = readme
        .split("```sql\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .ok_or("the readme has no grants")?;
    let mut admin = harness.admin().await?;
    for statement in grants.replace("'app'", &format!("'{user}'")).split(';').map(str::trim) {
        if !statement.is_empty() {
            admin.query_drop(statement).await?;
        }
    }
    let url = user_url(harness, &user, "secret")?;
    Ok((user, url))
}

/// The URL of a user.
pub(crate) fn user_url(
    harness: &MySqlHarness,
    user: &str,
    password: &str,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let port = Opts::from_url(harness.url())?.tcp_port();
    Ok(format!("mysql://{user}:{password}@127.0.0.1:{port}/test"))
}

/// Looks again and again until it holds.
pub(crate) async fn eventually<F>(what: &str, mut holds: impl FnMut() -> F) -> Verdict
where
    F: Future<Output = Result<bool, Box<dyn Error + Send + Sync>>>,
{
    let start = Instant::now();
    while !holds().await? {
        ensure!(start.elapsed() < PATIENCE, "expected {what} within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

pub(crate) async fn within<T>(
    limit: Duration,
    what: &str,
    future: impl Future<Output = T>,
) -> Result<T, Box<dyn Error + Send + Sync>> {
    let ended = tokio::time::timeout(limit, future).await;
    ended.map_err(|_| format!("expected {what} within {limit:?}").into())
}

/// A statement with bytes that are no text, which runs until it is aborted: the list of connections in
/// `information_schema` fails beside it on MySQL.
pub(crate) async fn runs_bytes_that_are_no_text(
    harness: &MySqlHarness,
) -> Result<tokio::task::JoinHandle<mysql_async::Result<()>>, Failure> {
    let mut conn = harness.admin().await?;
    let busy = tokio::spawn(async move {
        let noise: &[u8] = &[0xef, b'&', b'Q', b'r', 0xfa, 0x96, 0xe3];
        conn.exec_drop("SELECT SLEEP(600), HEX(?)", (noise,)).await
    });
    eventually("the statement", || async {
        let rows: Vec<mysql_async::Row> =
            harness.admin().await?.query("SHOW FULL PROCESSLIST").await?;
        let info = |row: &mysql_async::Row| row.get::<Option<Vec<u8>>, _>("Info").flatten();
        let runs = |text: Vec<u8>| text.starts_with(b"SELECT SLEEP(600)");
        Ok(rows.iter().filter_map(info).any(runs))
    })
    .await?;
    Ok(busy)
}

/// Waits until no lock, transaction or lease of a namespace is left.
pub(crate) async fn nothing_left(harness: &MySqlHarness, namespace: &str) -> Verdict {
    use leasehold_conformance::Harness;
    let start = Instant::now();
    loop {
        let left = harness.leftovers(namespace).await?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(start.elapsed() < PATIENCE, "left behind: {}", left.join("; "));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
