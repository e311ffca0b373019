//! The clients: processes that the controller starts, kills and stops; threads where the store
//! lives in this process.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::Proxy;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};

use super::hosts::Host;
use crate::client::{Order, be};
use crate::event::Do;
use crate::store::{Lab, Shop};

/// A client, over all of its lives.
#[derive(Debug)]
pub(crate) struct Client {
    order: Order,
    program: PathBuf,
    /// The host that it runs on, if it is not this one.
    pub(crate) host: Option<Host>,
    body: Option<Body>,
    /// Its way to the server, if there is a network.
    pub(crate) proxy: Option<Proxy>,
}

#[derive(Debug)]
enum Body {
    Process(Child),
    Thread {
        stop: watch::Sender<bool>,
        vanish: Option<oneshot::Sender<()>>,
        ended: oneshot::Receiver<Result<(), String>>,
    },
}

impl Client {
    pub(crate) fn new(
        order: Order,
        program: &Path,
        host: Option<Host>,
        proxy: Option<Proxy>,
    ) -> Self {
        Self { order, program: program.to_owned(), host, body: None, proxy }
    }

    pub(crate) fn name(&self) -> String {
        self.order.name()
    }

    /// Begins its next life, unless it lives.
    pub(crate) fn start(&mut self, lab: &Arc<dyn Lab>) -> io::Result<()> {
        if self.body.is_some() {
            return Ok(());
        }
        self.order.life += 1;
        self.body = Some(match lab.url() {
            Some(_) => Body::Process(self.spawn()?),
            None => thread(self.order.clone(), lab.shop()),
        });
        Ok(())
    }

    fn spawn(&self) -> io::Result<Child> {
        let order = serde_json::to_string(&self.order).map_err(io::Error::other)?;
        let errors = self.order.record.join(format!("{}-{}.err", self.name(), self.order.life));
        let there = self.host.as_ref().map(Host::command).unwrap_or_default();
        let mut command = match there.split_first() {
            None => Command::new(&self.program),
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&self.program);
                command
            }
        };
        command
            .arg("client")
            .arg(order)
            // it ends when this closes
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(errors)?)
            .kill_on_drop(true)
            .spawn()
    }

    /// As `kill -9`; returns when it is gone.
    pub(crate) async fn kill(&mut self) -> io::Result<()> {
        match self.body.take() {
            Some(Body::Process(mut child)) => child.kill().await,
            Some(Body::Thread { vanish, ended, .. }) => {
                vanish.map(|vanish| vanish.send(()));
                drop(ended.await); // its runtime is gone with all tasks
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Stops the process or lets it go on. False: there is none.
    pub(crate) fn signal(&self, signal: Signal) -> bool {
        let Some(Body::Process(child)) = &self.body else { return false };
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        pid.is_some_and(|pid| kill(Pid::from_raw(pid), signal).is_ok())
    }

    /// Tells it to finish what it does, and to end.
    pub(crate) fn stop(&mut self) {
        match &mut self.body {
            Some(Body::Process(child)) => drop(child.stdin.take()),
            Some(Body::Thread { stop, .. }) => drop(stop.send(true)),
            None => {}
        }
    }

    /// Waits for its end after [`stop`](Self::stop); otherwise says what went wrong.
    pub(crate) async fn ends(&mut self, within: Duration) -> Option<String> {
        let name = self.name();
        let ended = match &mut self.body {
            None => return None,
            Some(Body::Process(child)) => {
                tokio::time::timeout(within, child.wait()).await.map(|status| match status {
                    Ok(status) if status.success() => None,
                    Ok(status) => Some(format!("{name} ended with {status}")),
                    Err(error) => Some(format!("{name} cannot be waited for: {error}")),
                })
            }
            Some(Body::Thread { ended, .. }) => {
                tokio::time::timeout(within, ended).await.map(|ended| match ended {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(format!("{name} ended with {error}")),
                    Err(_) => Some(format!("the thread of {name} panicked")),
                })
            }
        };
        if let Ok(fault) = ended {
            self.body = None;
            return fault.map(|fault| format!("{fault}{}", self.last_words()));
        }
        drop(self.kill().await);
        Some(format!("{name} did not end within {within:?}{}", self.last_words()))
    }

    /// The end of what the process wrote to its standard error.
    fn last_words(&self) -> String {
        let errors = self.order.record.join(format!("{}-{}.err", self.name(), self.order.life));
        let text = std::fs::read_to_string(errors).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(12).collect();
        lines.iter().rev().flat_map(|line| ["\n    ", line]).collect()
    }
}

/// A client with a runtime of its own, with which everything of it can vanish.
fn thread(order: Order, shop: Arc<dyn Shop>) -> Body {
    let (stop, stopped) = watch::channel(false);
    let (vanish, mut vanished) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let result = match runtime {
            Err(error) => Err(error.to_string()),
            Ok(runtime) => {
                let result = runtime.block_on(async {
                    tokio::select! {
                        _ = &mut vanished => {
                            let log = order.log();
                            log.map(|log| log.put(0, Do::Vanish)).map_err(|e| e.to_string())
                        }
                        done = be(&order, shop, stopped) => done.map_err(|e| e.to_string()),
                    }
                });
                runtime.shutdown_timeout(Duration::from_secs(10));
                result
            }
        };
        drop(end.send(result)); // nobody waits for one that is given up
    });
    Body::Thread { stop, vanish: Some(vanish), ended }
}
