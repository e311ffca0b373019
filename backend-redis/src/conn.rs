//! [`Conn`]: the connections of a handle, and how scripts and commands are run on them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fred::clients::{Client, WithOptions};
use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, ConnectHandle, CustomCommand, Value};
use leasehold_core::{Error, ErrorKind, Holder, Result};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::batch::Queue;
use crate::error::{is_noscript, mapped, strange};
use crate::keys::{Keyspace, Place};
use crate::locks::{Held, Wanted};
use crate::script::Script;

/// The name of the backend in messages.
pub(crate) const NAME: &str = "redis";

type FredResult<T> = std::result::Result<T, fred::error::Error>;

/// What the handle was told.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) command_limit: Duration,
    pub(crate) lock_ttl: Duration,
    pub(crate) claim_ttl: Duration,
    pub(crate) replicas: u32,
    pub(crate) keyspace_events: bool,
    pub(crate) holder: Holder,
}

/// What decides how long, and when, the handle's holder is written down.
#[derive(Debug)]
pub(crate) struct Telling {
    /// The longest ttl that was asked for, in ms.
    longest: AtomicU64,
    /// It is to be written anew.
    pub(crate) again: Notify,
}

impl Telling {
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_millis(self.longest.load(Ordering::Relaxed))
    }

    /// Something is asked for that may be held for so long without a renewal.
    pub(crate) fn keep_for(&self, ttl: Duration) {
        let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        if millis > self.longest.load(Ordering::Relaxed)
            && millis > self.longest.fetch_max(millis, Ordering::Relaxed)
        {
            self.again.notify_one();
        }
    }
}

/// What a script is given.
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) keys: Vec<Value>,
    pub(crate) args: Vec<Value>,
}

/// The connections of a handle.
#[derive(Debug)]
pub(crate) struct Conn {
    clients: Vec<Client>,
    /// The tasks of the clients that the handle opened; a client given by the caller has none.
    tasks: Mutex<Vec<ConnectHandle>>,
    pub(crate) keys: Keyspace,
    pub(crate) settings: Settings,
    /// Ends open claims when the handle is closed.
    pub(crate) closing: CancellationToken,
    /// The open claims' tasks, and releases under way.
    pub(crate) tasks_of_claims: TaskTracker,
    pub(crate) acquisitions: Queue<Wanted>,
    pub(crate) releases: Queue<Held>,
    pub(crate) told: Arc<Telling>,
}

impl Conn {
    pub(crate) fn new(
        clients: Vec<Client>,
        tasks: Vec<ConnectHandle>,
        keys: Keyspace,
        settings: Settings,
    ) -> Self {
        let longest = settings.lock_ttl.max(settings.claim_ttl).as_millis();
        let longest = AtomicU64::new(u64::try_from(longest).unwrap_or(u64::MAX));
        Self {
            clients,
            tasks: Mutex::new(tasks),
            keys: keys.of_instance(settings.holder.instance),
            settings,
            closing: CancellationToken::new(),
            tasks_of_claims: TaskTracker::new(),
            acquisitions: Queue::default(),
            releases: Queue::default(),
            told: Arc::new(Telling { longest, again: Notify::new() }),
        }
    }

    /// A client, always the same one for a key: what is sent first arrives first.
    pub(crate) fn client(&self, wake: u64) -> &Client {
        &self.clients[(wake % self.clients.len() as u64) as usize]
    }

    /// All of them.
    pub(crate) fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// Whether the handle opened them itself.
    pub(crate) fn owns_clients(&self) -> bool {
        !self.tasks.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// How long the engines wait for an answer: a little more than the command's own limit, so
    /// that it is the client who gives up, and then does not send what it has not sent yet.
    pub(crate) fn answer_limit(&self) -> Duration {
        let mut limit = self.settings.command_limit + Duration::from_millis(250);
        if self.settings.replicas > 0 {
            limit += self.settings.command_limit;
        }
        limit
    }

    fn limited(&self, wake: u64, limit: Duration) -> WithOptions<Client> {
        self.client(wake).with_options(&Options {
            // One attempt: the callers know when to ask again. In a cluster a redirection counts
            // as one, and what was in flight on a broken connection still fails at once.
            max_attempts: Some(if self.keys.clustered() { 3 } else { 1 }),
            timeout: Some(limit),
            fail_fast: true,
            ..Options::default()
        })
    }

    /// Runs a script on the server of its first key. `words` gives its keys and its other
    /// arguments; it is asked again if the server does not know the script.
    pub(crate) async fn run(
        &self,
        script: &'static Script,
        wake: u64,
        limit: Duration,
        words: impl Fn() -> Words + Send + Sync,
    ) -> FredResult<Value> {
        let client = self.limited(wake, limit);
        let request = |name: &'static str, first: &'static str| {
            let Words { keys, args } = words();
            let count = Value::Integer(i64::try_from(keys.len()).unwrap_or(i64::MAX));
            let mut all = Vec::with_capacity(2 + keys.len() + args.len());
            all.extend([Value::from_static_str(first), count]);
            all.extend(keys);
            all.extend(args);
            client.custom(CustomCommand::new_static(name, ClusterHash::Offset(2), false), all)
        };
        match request("EVALSHA", &script.sha).await {
            // restarted, failed over or flushed: this runs it and makes it known again
            Err(error) if is_noscript(&error) => {
                self.told.again.notify_one();
                request("EVAL", script.text).await
            }
            answer => answer,
        }
    }

    /// As [`run`](Self::run), within the handle's limit.
    pub(crate) async fn call(
        &self,
        script: &'static Script,
        wake: u64,
        words: impl Fn() -> Words + Send + Sync,
    ) -> Result<Value> {
        let limit = self.settings.command_limit;
        self.run(script, wake, limit, words).await.map_err(mapped)
    }

    /// Runs a command.
    pub(crate) async fn command(
        &self,
        wake: u64,
        name: &str,
        hash: ClusterHash,
        args: Vec<Value>,
    ) -> Result<Value> {
        let client = self.limited(wake, self.settings.command_limit);
        let command = CustomCommand::new(name, hash, false);
        client.custom(command, args).await.map_err(mapped)
    }

    /// Waits until as many replicas as wanted have what was written for a place.
    pub(crate) async fn replicated(&self, place: &Place) -> Result<()> {
        let wanted = self.settings.replicas;
        if wanted == 0 {
            return Ok(());
        }
        let limit = self.settings.command_limit;
        let slot = fred::util::redis_keyslot(place.name.as_bytes());
        let command = CustomCommand::new_static("WAIT", ClusterHash::Custom(slot), false);
        // the server's own limit is the shorter one: what it counted until then is an answer
        let millis = (limit.as_millis() * 9 / 10).max(1);
        let args = vec![
            Value::Integer(i64::from(wanted)),
            Value::Integer(i64::try_from(millis).unwrap_or(i64::MAX)),
        ];
        let client = self.limited(place.wake, limit);
        let reached: Value = client.custom(command, args).await.map_err(mapped)?;
        let reached = reached.as_i64().ok_or_else(|| strange(&reached))?;
        if reached >= i64::from(wanted) {
            return Ok(());
        }
        let detail = format!("only {reached} of {wanted} replicas confirmed the write in time");
        Err(Error::new(ErrorKind::Unavailable, detail))
    }

    /// Closes what the handle opened.
    pub(crate) async fn quit(&self) {
        let tasks = {
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *tasks)
        };
        for (client, task) in self.clients.iter().zip(&tasks) {
            let limit = self.settings.command_limit;
            // it is closed one way or the other
            drop(tokio::time::timeout(limit, client.quit()).await);
            task.abort();
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for task in tasks.drain(..) {
            task.abort();
        }
    }
}
