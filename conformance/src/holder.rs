//! [`Holder`]: another process of the service under test, that takes and holds on command.
//!
//! The runner starts its own executable again with [`ADDRESS`] set; the child joins the store of
//! that address. Commands and answers are lines of JSON over its standard input and output.

mod recipes;

use std::any::Any;
use std::collections::HashMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{
    ClaimOptions, Error, ErrorKind, Key, LeaseGuard, LeaseOptions, LockGuard, LockOptions,
};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::ctx::{PATIENCE, soon};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::{Handle, Harness};
use crate::history::{Interval, monotonic};
use crate::runner::Join;

/// Where a child process finds the store.
pub(crate) const ADDRESS: &str = "LEASEHOLD_CONFORMANCE_ADDRESS";
/// In which namespace it works.
const NAMESPACE: &str = "LEASEHOLD_CONFORMANCE_NAMESPACE";

/// What a kind of thing a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Kind {
    Lock,
    Lease,
}

/// A command to a holder.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Order {
    /// Take it and keep it.
    Take {
        kind: Kind,
        key: String,
        ttl: Duration,
        wait: Duration,
    },
    Release {
        kind: Kind,
        key: String,
    },
    IsHeld {
        kind: Kind,
        key: String,
    },
    /// Write a number, guarded by the lease.
    Write {
        key: String,
        name: String,
        value: i64,
    },
    /// Add one to a number under a claim, so many times.
    Count {
        key: String,
        name: String,
        times: u32,
    },
    /// Take and release at random, and report the intervals.
    Fuzz {
        kind: Kind,
        keys: Vec<String>,
        rounds: u32,
    },
    /// Something of the recipes.
    Recipe(recipes::RecipeOrder),
    /// Say what the wall clock shows.
    WallClock,
    /// End in the ordinary way, with everything held.
    Exit,
}

/// A holder's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Reply {
    Done,
    Taken(u64),
    Busy,
    Held(bool),
    WallClock(Duration),
    History(Vec<Interval>),
    Ticks(Vec<Duration>),
    Failed { kind: String, message: String },
}

/// A child process. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Holder {
    child: Child,
    orders: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    pub(crate) async fn start(
        harness: &dyn Harness,
        namespace: &str,
        env: &[(&str, &str)],
    ) -> Result<Self, Fault> {
        let Some(address) = harness.address() else {
            return Err(Fault::new("the harness has no address for other processes"));
        };
        let mut child = Command::new(std::env::current_exe()?)
            .env(ADDRESS, address)
            .env(NAMESPACE, namespace)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(orders), Some(replies)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Fault::new("the process has no standard input and output"));
        };
        let mut holder = Self { child, orders, replies: BufReader::new(replies).lines() };
        holder.reply().await?; // it has joined the store
        Ok(holder)
    }

    async fn ask(&mut self, order: &Order) -> Result<Reply, Fault> {
        let mut line = serde_json::to_string(order).map_err(|e| Fault::new(e.to_string()))?;
        line.push('\n');
        self.orders.write_all(line.as_bytes()).await?;
        self.reply().await
    }

    async fn reply(&mut self) -> Result<Reply, Fault> {
        let bound = PATIENCE * 4; // a fuzz takes a while
        let line = crate::ctx::within(bound, "an answer of the process", self.replies.next_line());
        let Some(line) = line.await?? else {
            return Err(Fault::new("the process ended without an answer"));
        };
        serde_json::from_str(&line)
            .map_err(|error| Fault::new(format!("not an answer of the process: {line}: {error}")))
    }

    /// Takes what must be to be had, and gives its token.
    pub(crate) async fn takes(
        &mut self,
        kind: Kind,
        key: &str,
        ttl: Duration,
    ) -> Result<u64, Fault> {
        let taken = self.tries(kind, key, ttl, PATIENCE).await?;
        taken.ok_or_else(|| Fault::new(format!("expected the process to get {kind:?} {key:?}")))
    }

    /// Tries to take, and gives the token.
    pub(crate) async fn tries(
        &mut self,
        kind: Kind,
        key: &str,
        ttl: Duration,
        wait: Duration,
    ) -> Result<Option<u64>, Fault> {
        let key = key.to_owned();
        let order = Order::Take { kind, key, ttl, wait };
        match self.ask(&order).await? {
            Reply::Taken(token) => Ok(Some(token)),
            Reply::Busy => Ok(None),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn releases(&mut self, kind: Kind, key: &str) -> Verdict {
        let key = key.to_owned();
        done(self.ask(&Order::Release { kind, key }).await?)
    }

    pub(crate) async fn believes_to_hold(&mut self, kind: Kind, key: &str) -> Result<bool, Fault> {
        let key = key.to_owned();
        match self.ask(&Order::IsHeld { kind, key }).await? {
            Reply::Held(held) => Ok(held),
            other => Err(unexpected(&other)),
        }
    }

    /// A write guarded by its lease: whether it was let through.
    pub(crate) async fn writes(
        &mut self,
        key: &str,
        name: &str,
        value: i64,
    ) -> Result<bool, Fault> {
        let (key, name) = (key.to_owned(), name.to_owned());
        match self.ask(&Order::Write { key, name, value }).await? {
            Reply::Done => Ok(true),
            Reply::Failed { kind, .. } if kind == format!("{:?}", ErrorKind::Lost) => Ok(false),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn counts(&mut self, key: &str, name: &str, times: u32) -> Verdict {
        let (key, name) = (key.to_owned(), name.to_owned());
        done(self.ask(&Order::Count { key, name, times }).await?)
    }

    pub(crate) async fn fuzzes(
        &mut self,
        kind: Kind,
        keys: &[&str],
        rounds: u32,
    ) -> Result<Vec<Interval>, Fault> {
        let keys = keys.iter().map(ToString::to_string).collect();
        match self.ask(&Order::Fuzz { kind, keys, rounds }).await? {
            Reply::History(intervals) => Ok(intervals),
            other => Err(unexpected(&other)),
        }
    }

    /// What its wall clock shows, since 1970.
    pub(crate) async fn wall_clock(&mut self) -> Result<Duration, Fault> {
        match self.ask(&Order::WallClock).await? {
            Reply::WallClock(time) => Ok(time),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends in the ordinary way, holding what it holds.
    pub(crate) async fn exits(mut self) -> Verdict {
        done(self.ask(&Order::Exit).await?)?;
        let status = soon("the process to end", self.child.wait()).await??;
        ensure!(status.success(), "expected the process to end well: {status}");
        Ok(())
    }

    /// As `kill -9`; returns once it is dead.
    pub(crate) async fn dies(mut self) -> Verdict {
        soon("the process to die", self.child.kill()).await??;
        Ok(())
    }

    /// Stops the process, as a long pause would.
    pub(crate) fn stops(&self) -> Verdict {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it go on.
    pub(crate) fn goes_on(&self) -> Verdict {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Verdict {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        let Some(pid) = pid else {
            return Err(Fault::new("the process has ended"));
        };
        kill(Pid::from_raw(pid), signal).map_err(|error| Fault::new(format!("{signal}: {error}")))
    }
}

fn done(reply: Reply) -> Verdict {
    match reply {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> Fault {
    Fault::new(format!("unexpected answer of the process: {reply:?}"))
}

// --- the child -----------------------------------------------------------------------------

/// Serves as a holder until its input ends.
pub(crate) fn serve(address: &str, join: Join) -> Verdict {
    let namespace = std::env::var(NAMESPACE).map_err(|error| Fault::new(error.to_string()))?;
    let harness = join(address)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let handle = harness.open(&namespace).await?;
        let (locks, leases, recipes) = (HashMap::new(), HashMap::new(), Vec::new());
        let mut held = Held { harness, handle, locks, leases, recipes };
        say(&Reply::Done).await?;
        let mut orders = BufReader::new(tokio::io::stdin()).lines();
        while let Some(line) = orders.next_line().await? {
            let order =
                serde_json::from_str(&line).map_err(|error| Fault::new(error.to_string()))?;
            if matches!(order, Order::Exit) {
                say(&Reply::Done).await?;
                break;
            }
            let reply = held.carry_out(order).await.unwrap_or_else(|error| Reply::Failed {
                kind: format!("{:?}", error.kind()),
                message: error.to_string(),
            });
            say(&reply).await?;
        }
        Ok(())
    })
}

async fn say(reply: &Reply) -> Verdict {
    let mut line = serde_json::to_string(reply).map_err(|e| Fault::new(e.to_string()))?;
    line.push('\n');
    let mut out = tokio::io::stdout();
    out.write_all(line.as_bytes()).await?;
    Ok(out.flush().await?)
}

struct Held {
    harness: Arc<dyn Harness>,
    handle: Handle,
    locks: HashMap<String, LockGuard>,
    leases: HashMap<String, LeaseGuard>,
    recipes: Vec<Box<dyn Any + Send>>,
}

impl Held {
    async fn carry_out(&mut self, order: Order) -> Result<Reply, Error> {
        match order {
            Order::Take { kind, key, ttl, wait } => self.take(kind, key, ttl, wait).await,
            Order::Release { kind, key } => self.release(kind, &key).await.map(|()| Reply::Done),
            Order::IsHeld { kind, key } => Ok(Reply::Held(match kind {
                Kind::Lock => self.locks.get(&key).is_some_and(LockGuard::is_held),
                Kind::Lease => self.leases.get(&key).is_some_and(LeaseGuard::is_held),
            })),
            Order::Write { key, name, value } => {
                let lease = self.leases.get(&key).ok_or_else(|| nothing(&key))?;
                let (harness, handle) = (&self.harness, &self.handle);
                harness.guarded_write(handle, lease, &name, value).await?;
                Ok(Reply::Done)
            }
            Order::Count { key, name, times } => {
                let keys = Key::new(key)?.into();
                for _ in 0..times {
                    let opts = ClaimOptions::default().wait(PATIENCE);
                    let claim = self.handle.backend.claim(&keys, opts).await?;
                    let mut claim = claim.ok_or_else(|| nothing("the claim"))?;
                    let count = self.harness.read(&mut claim, &name).await?.unwrap_or(0);
                    self.harness.write(&mut claim, &name, count + 1).await?;
                    claim.commit().await?;
                }
                Ok(Reply::Done)
            }
            Order::Fuzz { kind, keys, rounds } => self.fuzz(kind, &keys, rounds).await,
            Order::Recipe(order) => self.recipe(order).await,
            Order::WallClock => {
                let time = clock_gettime(ClockId::CLOCK_REALTIME);
                let failed =
                    |error| Error::new(ErrorKind::Unsupported, "no wall clock").with_source(error);
                Ok(Reply::WallClock(time.map_err(failed)?.into()))
            }
            Order::Exit => Ok(Reply::Done),
        }
    }

    async fn take(
        &mut self,
        kind: Kind,
        name: String,
        ttl: Duration,
        wait: Duration,
    ) -> Result<Reply, Error> {
        let key = Key::new(&name)?;
        let backend = &self.handle.backend;
        let token = match kind {
            Kind::Lock => {
                let opts = LockOptions::default().wait(wait);
                let Some(guard) = backend.lock(&key, opts).await? else {
                    return Ok(Reply::Busy);
                };
                let token = guard.token().await?;
                self.locks.insert(name, guard);
                token
            }
            Kind::Lease => {
                let opts = LeaseOptions::default().ttl(ttl).wait(wait);
                let Some(guard) = backend.lease(&key, opts).await? else {
                    return Ok(Reply::Busy);
                };
                let token = guard.token();
                self.leases.insert(name, guard);
                token
            }
        };
        Ok(Reply::Taken(token.value()))
    }

    async fn release(&mut self, kind: Kind, key: &str) -> Result<(), Error> {
        match kind {
            Kind::Lock => {
                let guard = self.locks.remove(key).ok_or_else(|| nothing(key))?;
                guard.release().await
            }
            Kind::Lease => {
                let guard = self.leases.remove(key).ok_or_else(|| nothing(key))?;
                guard.release().await
            }
        }
    }

    async fn fuzz(&mut self, kind: Kind, keys: &[String], rounds: u32) -> Result<Reply, Error> {
        let mut intervals = Vec::new();
        let holder = format!("process {}", std::process::id());
        for round in 0..rounds {
            let key = &keys[rand::random_range(0..keys.len())];
            let wait = [Duration::ZERO, Duration::from_millis(300)][round as usize % 2];
            let ttl = Duration::from_secs(60);
            let Reply::Taken(token) = self.take(kind, key.clone(), ttl, wait).await? else {
                continue;
            };
            let from = monotonic();
            tokio::time::sleep(Duration::from_millis(rand::random_range(0..4))).await;
            let to = monotonic();
            self.release(kind, key).await?;
            intervals.push(Interval { key: key.clone(), holder: holder.clone(), from, to, token });
        }
        Ok(Reply::History(intervals))
    }
}

fn nothing(key: &str) -> Error {
    Error::new(ErrorKind::Lost, "the process does not hold it").on(key)
}
