//! Mutants of a real backend: the suite, tested where it counts.
//!
//! A mutant is the backend as it is shipped, over a store or a wire that was altered so that one
//! promise is broken: a statement whose guard is gone ([`Rewriter`]), a trigger that spoils a row.
//! [`run`] checks of each that its case fails, for the reason that the case is about, and of each
//! case that it passes on the same set-up with nothing altered.

use std::collections::BTreeSet;
use std::fmt::{self, Debug};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use leasehold_core::Result;
use libtest_mimic::{Arguments, Trial};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::case::Case;
use crate::cases::CASES;
use crate::harness::Harness;
use crate::report::Outcome;
use crate::runner::run_case;

/// They mostly wait.
const THREADS: usize = 12;

/// A case is run so often until it catches a mutant: what comes too early is not seen while the
/// machine stalls.
const TRIES: usize = 3;

/// A mutant: what is altered, and the case that must catch it.
#[derive(Clone, Copy, Debug)]
pub struct Mutant<A: 'static> {
    /// What is wrong with it, as the end of "a backend that …".
    pub name: &'static str,
    /// What is altered, in the terms of the backend's test.
    pub alters: A,
    /// The name of the case that must fail.
    pub case: &'static str,
}

/// A backend over an altered store.
#[derive(Debug)]
pub struct Altered {
    /// The harness.
    pub harness: Arc<dyn Harness>,
    /// What stands in the way to the store, if anything does; one that has altered nothing by the
    /// end of the case makes no mutant.
    pub rewriter: Option<Rewriter>,
}

/// The `main` of a test of mutants (`harness = false`): `open` sets a mutant up, or the same with
/// nothing altered. `--list` prints the table.
pub fn run<A: Sync>(
    table: &'static [Mutant<A>],
    open: fn(Option<&A>) -> Result<Altered>,
) -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(THREADS);
    let caught = table.iter().map(|mutant| {
        let name = format!("one that {} is caught by {}", mutant.name, mutant.case);
        Trial::test(name, move || caught(mutant, open).map_err(Into::into))
    });
    let cases: BTreeSet<&str> = table.iter().map(|mutant| mutant.case).collect();
    let sound = cases.into_iter().map(|case| {
        let name = format!("unaltered it passes {case}");
        Trial::test(name, move || sound(case, open).map_err(Into::into))
    });
    libtest_mimic::run(&args, caught.chain(sound).collect()).exit_code()
}

fn caught<A>(
    mutant: &Mutant<A>,
    open: fn(Option<&A>) -> Result<Altered>,
) -> std::result::Result<(), String> {
    let altered = open(Some(&mutant.alters)).map_err(|error| error.to_string())?;
    let case = case(mutant.case)?;
    let mut outcome = run_case(case, &altered.harness);
    for _ in 1..TRIES {
        if outcome == Outcome::Passed {
            outcome = run_case(case, &altered.harness);
        }
    }
    if altered.rewriter.as_ref().is_some_and(|rewriter| rewriter.rewritten() == 0) {
        return Err(format!("expected something to be altered, nothing was: it {outcome:?}"));
    }
    match outcome {
        Outcome::Failed(message) if is_a_verdict(&message) => {
            println!("{}\n    {}: {message}", mutant.name, mutant.case);
            Ok(())
        }
        other => Err(format!("expected {} to say what is wrong, it {other:?}", mutant.case)),
    }
}

/// Whether a case has said what it expected. A broken statement gives an error instead, and what
/// hangs is told by the runner: both would hide that the case looks for nothing.
fn is_a_verdict(message: &str) -> bool {
    let by_the_runner = message.contains("the case to end within");
    let broken = ["failed as Backend", "failed as Schema"].iter().any(|way| message.contains(way));
    message.starts_with("expected") && !by_the_runner && !broken
}

fn sound<A>(
    name: &str,
    open: fn(Option<&A>) -> Result<Altered>,
) -> std::result::Result<(), String> {
    let unaltered = open(None).map_err(|error| error.to_string())?;
    match run_case(case(name)?, &unaltered.harness) {
        Outcome::Passed => Ok(()),
        other => Err(format!("expected {name} to pass, it {other:?}")),
    }
}

fn case(name: &str) -> std::result::Result<&'static Case, String> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| format!("no case {name}"))
}

/// Stands between clients and a server, and replaces texts in what the clients send by others of
/// the same length, so that no message's frame is broken.
pub struct Rewriter {
    addr: SocketAddr,
    rewritten: Arc<AtomicU64>,
    task: tokio::task::AbortHandle,
}

/// Ours, since the cases' runtimes come and go.
static RUNTIME: LazyLock<std::io::Result<Runtime>> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
});
/// What could be the beginning of a text is kept back for so long.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 2_000 } else { 20 });

impl Rewriter {
    /// Opens a loopback port that leads to `upstream`. Each pair is a text and its replacement,
    /// which is filled up with blanks.
    ///
    /// # Errors
    /// If no port could be opened, or a replacement is longer than its text.
    pub fn start<F: AsRef<str>, T: AsRef<str>>(
        upstream: SocketAddr,
        rewrites: &[(F, T)],
    ) -> std::io::Result<Self> {
        let pairs = rewrites.iter().map(|(from, to)| {
            let (from, mut to) = (from.as_ref(), to.as_ref().to_owned());
            if from.is_empty() || to.len() > from.len() {
                let why = format!("no room for the replacement of {from:?}");
                return Err(std::io::Error::other(why));
            }
            to.push_str(&" ".repeat(from.len() - to.len()));
            Ok((from.as_bytes().to_vec(), to.into_bytes()))
        });
        let pairs: Arc<Vec<_>> = Arc::new(pairs.collect::<std::io::Result<_>>()?);
        let runtime = RUNTIME.as_ref().map_err(|error| std::io::Error::other(error.to_string()))?;
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let rewritten = Arc::new(AtomicU64::new(0));
        let counter = rewritten.clone();
        let task = runtime.spawn(async move {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            loop {
                match listener.accept().await {
                    Ok((client, _)) => {
                        tokio::spawn(forward(client, upstream, pairs.clone(), counter.clone()));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "no connection accepted");
                        tokio::task::yield_now().await;
                    }
                }
            }
        });
        Ok(Self { addr, rewritten, task: task.abort_handle() })
    }

    /// Where to connect instead of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many texts have been replaced so far.
    pub fn rewritten(&self) -> u64 {
        self.rewritten.load(Ordering::SeqCst)
    }
}

impl Drop for Rewriter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Debug for Rewriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rewriter").field("addr", &self.addr).finish_non_exhaustive()
    }
}

type Pairs = Arc<Vec<(Vec<u8>, Vec<u8>)>>;

async fn forward(client: TcpStream, upstream: SocketAddr, pairs: Pairs, rewritten: Arc<AtomicU64>) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    drop((client.set_nodelay(true), server.set_nodelay(true))); // slower, otherwise
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; 64 * 1024]);
        loop {
            let kept = bytes.len();
            let read = from_client.read(&mut buffer);
            let count = match tokio::time::timeout(PATIENCE, read).await {
                Err(_) if kept == 0 => continue,
                Err(_) => 0, // it was not the beginning of a text
                Ok(Ok(count @ 1..)) => count,
                Ok(_) => return,
            };
            bytes.extend_from_slice(&buffer[..count]);
            rewritten.fetch_add(rewrite(&mut bytes, &pairs), Ordering::SeqCst);
            let keep = if count == 0 { 0 } else { begun(&bytes, &pairs) };
            let rest = bytes.split_off(bytes.len() - keep);
            if to_server.write_all(&bytes).await.is_err() {
                return;
            }
            bytes = rest;
        }
    };
    let answers = tokio::io::copy(&mut from_server, &mut to_client);
    tokio::select! {
        () = requests => {}
        _ = answers => {}
    }
}

/// Replaces; says how often.
fn rewrite(bytes: &mut [u8], pairs: &Pairs) -> u64 {
    let mut count = 0;
    for (from, to) in pairs.iter() {
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(from.len()).position(|window| window == from) {
            bytes[at + found..at + found + from.len()].copy_from_slice(to);
            at += found + from.len();
            count += 1;
        }
    }
    count
}

/// The length of the longest end of `bytes` with which a text begins.
fn begun(bytes: &[u8], pairs: &Pairs) -> usize {
    let longest = |from: &Vec<u8>| {
        (1..from.len()).rev().find(|length| bytes.ends_with(&from[..*length])).unwrap_or(0)
    };
    pairs.iter().map(|(from, _)| longest(from)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    #[test]
    fn a_verdict_says_what_was_expected() {
        assert!(is_a_verdict("expected the waiter to wake"));
        for no in [
            "backend: syntax error at or near",
            "expected the case to end within 60s: something waits for ever",
            "expected the renewal to fail as Lost, it failed as Backend: syntax error",
        ] {
            assert!(!is_a_verdict(no), "{no}");
        }
    }

    #[tokio::test]
    async fn texts_are_replaced_also_where_they_come_in_pieces() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let upstream = server.local_addr().unwrap();
        let rewriter = Rewriter::start(upstream, &[("WHERE mine", "")]).unwrap();
        let mut client = TcpStream::connect(rewriter.addr()).await.unwrap();
        let (mut end, _) = server.accept().await.unwrap();
        client.set_nodelay(true).unwrap();
        client.write_all(b"a WHERE mine; b WHE").await.unwrap();
        // the beginning has arrived when what is before it has
        let mut got = [0; 16];
        timeout(Duration::from_secs(10), end.read_exact(&mut got)).await.unwrap().unwrap();
        assert_eq!(&got, b"a           ; b ");
        client.write_all(b"RE mine WHERE").await.unwrap();
        let mut got = [0; 11];
        timeout(Duration::from_secs(10), end.read_exact(&mut got)).await.unwrap().unwrap();
        assert_eq!(&got, b"           ");
        assert_eq!(rewriter.rewritten(), 2);
        // what is no text after all is passed on, late
        let mut got = [0; 5];
        timeout(Duration::from_secs(10), end.read_exact(&mut got)).await.unwrap().unwrap();
        assert_eq!(&got, b"WHERE");
    }

    #[test]
    fn a_longer_replacement_is_refused() {
        let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        assert!(Rewriter::start(upstream, &[("ab", "abc")]).is_err());
    }
}
