//! A fleet: several servers, of which one drives each pipeline, as processes of their own.

use std::collections::HashSet;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::{Backend, LockOptions, LockRegistry};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::support::MySqlHarness;
use crate::{PATIENCE, Verdict, ensure, key, namespace, within};

crate::tests!("fleet":
    one_server_drives_and_the_other_takes_over,
    sweep_spares_what_was_taken_meanwhile,
);

const ADDRESS: &str = "LEASEHOLD_FLEET";

/// This program is also a server of the fleet.
pub(crate) fn serve_if_asked() -> Option<ExitCode> {
    let address = std::env::var(ADDRESS).ok()?;
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    Some(match runtime.block_on(serve(&address)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("server: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Every server runs every job: on each tick it drives what it holds. The write is checked by the
/// token, so that a late one is refused.
async fn serve(address: &str) -> Verdict {
    let mut parts = address.split(' ');
    let (name, namespace, url) = (parts.next(), parts.next(), parts.next());
    let (Some(name), Some(namespace), Some(url)) = (name, namespace, url) else {
        return Err(format!("bad address {address:?}").into());
    };
    let backend = Arc::new(
        MySqlBackend::builder()
            .namespace(namespace)
            .keepalive(Duration::from_millis(500))
            .connect(url)
            .await?,
    );
    let registry = LockRegistry::new(backend);
    let pool = mysql_async::Pool::from_url(url)?;
    let mut driving = HashSet::new();
    loop {
        for pipeline in ["p1", "p2", "p3"] {
            let key = key(pipeline);
            // fail closed: without an answer it drives nothing
            if !registry.hold(&key, LockOptions::try_once()).await.unwrap_or(false) {
                driving.remove(pipeline);
                continue;
            }
            let Some(guard) = registry.guard(&key) else { continue };
            let Ok(token) = guard.token().await else { continue };
            let write = "INSERT INTO numbers VALUES (?, ?) \
                         ON DUPLICATE KEY UPDATE value = IF(value <= ?, ?, value)";
            let row = format!("{namespace}-{pipeline}");
            let token = token.value();
            pool.get_conn().await?.exec_drop(write, (row, token, token, token)).await?;
            if driving.insert(pipeline) {
                println!("{name} drives {pipeline} {token}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(name: &str, namespace: &str, url: &str) -> std::io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(ADDRESS, format!("{name} {namespace} {url}"))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().expect("its output is piped");
        Ok(Self { child, lines: BufReader::new(stdout).lines() })
    }

    /// The pipeline that it says to drive next, and with which token.
    async fn says(&mut self) -> Result<(String, u64), Box<dyn std::error::Error + Send + Sync>> {
        let line = within(PATIENCE, "a server to drive", self.lines.next_line()).await??;
        let line = line.ok_or("the server has ended")?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            [_, "drives", pipeline, token] => Ok((pipeline.to_owned(), token.parse()?)),
            _ => Err(format!("it said {line:?}").into()),
        }
    }
}

/// Three pipelines are driven by the first server and by nobody else, until it is killed -9: the
/// other takes over at once, with greater tokens. A paused one that comes back is told.
async fn one_server_drives_and_the_other_takes_over(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let mut first = Process::start("one", &namespace, harness.url())?;
    let mut tokens = std::collections::HashMap::new();
    for _ in 0..3 {
        let (pipeline, token) = first.says().await?;
        tokens.insert(pipeline, token);
    }
    ensure!(tokens.len() == 3, "it drives {tokens:?}");
    let mut second = Process::start("two", &namespace, harness.url())?;
    let quiet = tokio::time::timeout(Duration::from_secs(1), second.says()).await;
    ensure!(quiet.is_err(), "two servers drive: {quiet:?}");
    first.child.start_kill()?;
    let killed = Instant::now();
    for _ in 0..3 {
        let (pipeline, token) = second.says().await?;
        ensure!(tokens[&pipeline] < token, "{pipeline}: {token} after {}", tokens[&pipeline]);
        let written = "SELECT value FROM numbers WHERE name = ?";
        let row = format!("{namespace}-{pipeline}");
        let written: Option<u64> = harness.conn().await?.exec_first(written, (row,)).await?;
        ensure!(written == Some(token), "{pipeline}: {written:?} was written, not {token}");
    }
    println!("taken over {:?} after the kill", killed.elapsed());
    Ok(())
}

/// A scan's sweep frees what is not active any more, and never a lock that was taken after its
/// snapshot, though the query does not know that one yet.
async fn sweep_spares_what_was_taken_meanwhile(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let open = || harness.builder(&namespace).connect(harness.url());
    let backend = Arc::new(open().await?);
    let other = LockRegistry::new(Arc::new(open().await?));
    let registry = Arc::new(LockRegistry::new(backend.clone()));
    let once = LockOptions::try_once();
    for name in ["active", "ended"] {
        ensure!(registry.hold(&key(name), once).await?, "{name} is held by nobody else");
    }
    for round in 0..20 {
        let snapshot = registry.snapshot();
        // the query sees the active set of now; meanwhile a tick takes a new one
        let fresh = format!("fresh-{round}");
        let new = key(&fresh);
        let (taken, queried) = tokio::join!(registry.hold(&new, once), async {
            let mut conn = harness.conn().await?;
            conn.query_drop("DO SLEEP(0.01)").await.map_err(crate::support::failed)
        });
        queried?;
        ensure!(taken?, "{fresh} is held by nobody else");
        let mut active: HashSet<_> = HashSet::from([key("active")]);
        active.extend((0..round).map(|n| key(&format!("fresh-{n}"))));
        snapshot.release_all_except(&active).await?;
        ensure!(registry.is_held(&key(&fresh)), "the sweep freed {fresh}");
        ensure!(!other.hold(&key(&fresh), once).await?, "the sweep freed {fresh} on the server");
    }
    ensure!(!registry.is_held(&key("ended")), "the sweep kept what has ended");
    ensure!(other.hold(&key("ended"), once).await?, "the sweep did not free it on the server");
    ensure!(registry.keys().len() == 21, "it holds {:?}", registry.keys());
    Ok(backend.close().await?)
}
