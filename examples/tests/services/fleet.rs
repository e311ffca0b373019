//! [`Fleet`]: the copies of a service, as processes, or in this one where the store is memory.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::Store;
use leasehold::memory::{MemoryBackend, MemoryLink, MemoryStore};
use leasehold_examples::{Docs, Event, Journal, docs};
use libtest_mimic::Failed;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use crate::stores::{Place, Started};

/// How a copy of the service is started.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) args: &'static [&'static str],
    /// In this process.
    pub(crate) task: fn(Store, Arc<dyn Docs>, Journal) -> JoinHandle<()>,
}

/// The copies of a service on one store.
pub(crate) struct Fleet {
    program: &'static Program,
    place: Where,
    copies: BTreeMap<String, Copy>,
    events: Arc<Mutex<Vec<Event>>>,
    /// The test's own way to the store.
    pub(crate) store: Store,
    pub(crate) docs: Arc<dyn Docs>,
}

enum Where {
    Memory(MemoryStore),
    Store(Started),
}

enum Copy {
    Task(JoinHandle<()>, MemoryLink),
    Process(Child),
}

impl Fleet {
    pub(crate) async fn new(place: Place, program: &'static Program) -> Result<Self, Failed> {
        let (place, store) = if let Some(started) = place.start()? {
            let store = leasehold::connect(&started.url).await?;
            (Where::Store(started), store)
        } else {
            let memory = MemoryStore::new();
            let backend = MemoryBackend::builder().store(&memory).build();
            (Where::Memory(memory), Store::new(Arc::new(backend)))
        };
        store.migrate().await?;
        let docs = Arc::from(docs::open(&store).await?);
        let (copies, events) = (BTreeMap::new(), Arc::default());
        Ok(Self { program, place, copies, events, store, docs })
    }

    /// Starts a copy.
    pub(crate) fn start(&mut self, name: &str) -> Result<(), Failed> {
        let events = self.events.clone();
        let note = move |event| events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        let copy = match &self.place {
            Where::Memory(memory) => {
                let backend = MemoryBackend::builder().store(memory).build();
                let link = backend.link().clone();
                let store = Store::new(Arc::new(backend));
                let journal = Journal::new(name, note);
                Copy::Task((self.program.task)(store, self.docs.clone(), journal), link)
            }
            Where::Store(Started { url, .. }) => {
                let mut child = Command::new(self.program.path)
                    .args(["--store", url, "--name", name])
                    .args(self.program.args)
                    .stdout(Stdio::piped())
                    .kill_on_drop(true)
                    .spawn()?;
                let out = child.stdout.take().ok_or("the process has no standard output")?;
                tokio::spawn(async move {
                    let mut lines = BufReader::new(out).lines();
                    while let Ok(Some(line)) = lines.next_line().await {
                        if let Ok(event) = serde_json::from_str(&line) {
                            note(event);
                        }
                    }
                });
                Copy::Process(child)
            }
        };
        self.copies.insert(name.to_owned(), copy);
        Ok(())
    }

    /// Kills a copy at once (`kill -9`).
    pub(crate) async fn kill(&mut self, name: &str) -> Result<(), Failed> {
        match self.copies.remove(name).ok_or("no such copy")? {
            Copy::Task(task, link) => {
                link.silence(); // its last words reach nobody
                link.end_sessions();
                task.abort();
                drop(task.await); // aborted
            }
            Copy::Process(mut child) => child.kill().await?,
        }
        Ok(())
    }

    /// Stops a copy in the middle of whatever it does, until [`resume`](Self::resume).
    pub(crate) fn pause(&self, name: &str) -> Result<(), Failed> {
        match self.copies.get(name).ok_or("no such copy")? {
            Copy::Task(_, link) => link.silence(),
            Copy::Process(child) => signal(child, Signal::SIGSTOP)?,
        }
        Ok(())
    }

    pub(crate) fn resume(&self, name: &str) -> Result<(), Failed> {
        match self.copies.get(name).ok_or("no such copy")? {
            Copy::Task(_, link) => link.heal(),
            Copy::Process(child) => signal(child, Signal::SIGCONT)?,
        }
        Ok(())
    }

    /// Everything that was told so far, in the order of time.
    pub(crate) fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        events.sort_by_key(|event| event.at);
        events
    }

    /// How often `what` was told.
    pub(crate) fn count(&self, what: &str) -> usize {
        self.events().iter().filter(|event| event.what == what).count()
    }

    /// Waits until the condition holds.
    pub(crate) async fn until(
        &self,
        what: &str,
        limit: Duration,
        mut holds: impl AsyncFnMut(&Self) -> Result<bool, Failed>,
    ) -> Result<(), Failed> {
        let waited = tokio::time::timeout(limit, async {
            while !holds(self).await? {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        });
        waited.await.unwrap_or_else(|_| Err(format!("expected {what} within {limit:?}").into()))
    }

    /// What happened last, for one who looks for a fault.
    pub(crate) fn story(&self) -> String {
        let events = self.events();
        let from = events.len().saturating_sub(60);
        let mut story = format!("the last of {} events:\n", events.len());
        for Event { at, server, what, subject, token } in &events[from..] {
            let at = at.as_secs_f64();
            let _ = writeln!(story, "{at:.3} {server}: {what} {subject} (token {token})");
        }
        story
    }
}

fn signal(child: &Child, signal: Signal) -> Result<(), Failed> {
    let pid = child.id().ok_or("the process has ended by itself")?;
    Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?)
}
