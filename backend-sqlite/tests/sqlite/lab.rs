//! What these tests share: a file of their own, and other processes on it.

use std::future::Future;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use leasehold_core::{
    Backend, Claim, ClaimLock, ClaimLockExt, ClaimOptions, DedupeExt, Key, Keys, LockOptions,
    NamedLock,
};
use leasehold_sqlite::{SqliteBackend, SqliteBuilder};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::support::{SqliteHarness, Tx, read, write};

/// How long what must happen soon may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const LONG: Duration = Duration::from_secs(120);

const URL: &str = "LEASEHOLD_SQLITE_URL";
const ORDER: &str = "LEASEHOLD_SQLITE_ORDER";

/// A file of its own.
pub(crate) struct Lab {
    pub(crate) folder: TempDir,
    pub(crate) harness: SqliteHarness,
}

impl Lab {
    /// With the file, and the table of the harness.
    pub(crate) async fn new() -> Self {
        let lab = Self::empty();
        lab.harness.prepare().await.unwrap();
        lab
    }

    /// Without any file.
    pub(crate) fn empty() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let harness = SqliteHarness::at(&folder.path().join("test.db"));
        Self { folder, harness }
    }

    pub(crate) fn main(&self) -> PathBuf {
        self.folder.path().join("test.db")
    }

    pub(crate) fn locks(&self) -> PathBuf {
        self.harness.folder().join("locks.db")
    }

    pub(crate) fn leases(&self) -> PathBuf {
        self.harness.folder().join("leases.db")
    }

    pub(crate) async fn open(&self) -> SqliteBackend {
        self.open_with(SqliteBackend::builder()).await
    }

    pub(crate) async fn open_with(&self, builder: SqliteBuilder) -> SqliteBackend {
        builder.connect(&self.harness.url()).await.unwrap()
    }

    pub(crate) fn process(&self, order: &str) -> Process {
        Process::start(&self.harness.url(), order)
    }
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub(crate) fn keys(names: &[&str]) -> Keys {
    Keys::new(names).unwrap()
}

pub(crate) fn lock_within(wait: Duration) -> LockOptions {
    LockOptions::default().wait(wait)
}

pub(crate) fn claim_within(wait: Duration) -> ClaimOptions {
    ClaimOptions::default().wait(wait)
}

pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, future).await;
    done.unwrap_or_else(|_| panic!("expected {what} within {PATIENCE:?}"))
}

pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "expected {what} within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Another process, which carries out an order. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    /// Its end tells the process to end.
    orders: Option<ChildStdin>,
    words: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(url: &str, order: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lab::child", "--nocapture", "--test-threads=1"])
            .env(URL, url)
            .env(ORDER, order)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let orders = child.stdin.take();
        let words = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, orders, words }
    }

    /// The next thing that it says.
    pub(crate) async fn says(&mut self) -> String {
        soon("the process to say something", async {
            loop {
                let line = self.words.next_line().await.unwrap();
                let line = line.expect("the process ended without a word");
                if let Some((_, word)) = line.split_once("> ") {
                    return word.to_owned();
                }
            }
        })
        .await
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("it lives")
    }

    pub(crate) fn signal(&self, signal: &str) {
        let kill = std::process::Command::new("kill")
            .args([format!("-{signal}"), self.pid().to_string()])
            .status();
        assert!(kill.unwrap().success());
    }

    /// As `kill -9`.
    pub(crate) async fn dies(mut self) {
        soon("the process to die", self.child.kill()).await.unwrap();
    }

    pub(crate) async fn ends(mut self) {
        drop(self.orders.take());
        let status = soon("the process to end", self.child.wait()).await.unwrap();
        assert!(status.success(), "expected the process to end well: {status}");
    }
}

/// The other process; in an ordinary run there is no order, and nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let (Ok(url), Ok(order)) = (std::env::var(URL), std::env::var(ORDER)) else {
        return;
    };
    let store = SqliteBackend::connect(&url).await.unwrap();
    let (order, rest) = order.split_once(' ').unwrap_or((&order, ""));
    match order {
        "connect" => println!("> connected"),
        "lock" => {
            let guard = store.lock(&key(rest), lock_within(LONG)).await.unwrap().unwrap();
            println!("> {}", guard.token().await.unwrap().value());
            orders_end().await;
        }
        // holds, and starts a program that outlives it
        "lock-and-spawn" => {
            let guard = store.lock(&key(rest), lock_within(LONG)).await.unwrap().unwrap();
            let claim = store.claim(&keys(&[rest]), ClaimOptions::default()).await.unwrap();
            let mut program = std::process::Command::new("sleep")
                .arg("120")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            println!("> {}", program.id());
            orders_end().await;
            drop((guard, claim));
            program.wait().unwrap();
        }
        // an open claim that has written
        "claim" => {
            let claim = store.claim(&keys(&[rest]), claim_within(LONG)).await.unwrap();
            let mut claim = claim.unwrap();
            write(claim.tx::<Tx>().unwrap(), "n", 13).await.unwrap();
            println!("> {}", claim.token().value());
            orders_end().await;
        }
        "hammer" => {
            hammer(&store, rest.parse().unwrap()).await;
            println!("> done");
        }
        other => panic!("unknown order {other}"),
    }
    store.close().await.unwrap();
}

/// Waits for the end of the standard input.
async fn orders_end() {
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    while input.next_line().await.unwrap().is_some() {}
}

/// Uses everything at once, from a few tasks. Nothing here may fail, least of all as locked.
pub(crate) async fn hammer(store: &SqliteBackend, rounds: u32) {
    for round in 0..rounds {
        let lock = store.lock(&key("hammer"), lock_within(LONG)).await.unwrap().unwrap();
        let first = store.first_seen(&key(&format!("round {round}")), LONG).await.unwrap();
        let counted: Result<Option<()>, Box<dyn std::error::Error + Send + Sync>> = store
            .with_claim(&keys(&["count"]), claim_within(LONG), async |claim: &mut Claim| {
                let tx = claim.tx::<Tx>()?;
                for (name, more) in [("count", 1), ("first", i64::from(first))] {
                    let count = read(tx, name).await?.unwrap_or(0);
                    write(tx, name, count + more).await?;
                }
                Ok(())
            })
            .await;
        counted.unwrap().unwrap();
        lock.release().await.unwrap();
    }
}
