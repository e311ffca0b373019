//! The one subscription of a handle, shared by everybody who waits.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use fred::clients::Client;
use fred::interfaces::{ClientLike, EventInterface, PubsubInterface};
use fred::types::config::{PerformanceConfig, ReconnectPolicy};
use fred::types::{ConnectHandle, Message};
use leasehold_core::backend::{Wake, WakeSource};
use leasehold_core::{Error, ErrorKind, Result};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, broadcast, mpsc, watch};
use tokio::task::AbortHandle;

use crate::conn::Conn;
use crate::error::mapped;
use crate::holder::{connection_name, name_all};
use crate::keys::Keyspace;

/// Asks the subscription for a sign of life so often.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// In front of the news of what was taken away by force, so that its holder looks too.
pub(crate) const TAKEN: char = '!';

/// The subscription, opened when somebody first waits.
#[derive(Debug)]
pub(crate) struct Wakes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    template: Client,
    /// What the connection is called.
    name: String,
    keys: Keyspace,
    limit: Duration,
    keyspace_events: bool,
    /// What is not a message; the engines hear those from the client itself.
    news: broadcast::Sender<Wake>,
    /// The client that is subscribed.
    open: Mutex<Option<Client>>,
    ready: watch::Sender<bool>,
    /// Who waits for a claim, by what its news are called.
    waiting: Mutex<HashMap<u64, Vec<Arc<Notify>>>>,
    /// Whether anybody does: else no message wakes the task, which would slow the engines' waiters.
    claimants: watch::Sender<bool>,
    /// In a cluster: the channels of the slots that somebody waits for.
    channels: Mutex<BTreeSet<String>>,
    wanted: mpsc::UnboundedSender<String>,
    unread: Mutex<Option<mpsc::UnboundedReceiver<String>>>,
    task: OnceLock<AbortHandle>,
}

impl Wakes {
    pub(crate) fn new(conn: &Conn, keyspace_events: bool) -> Self {
        let (wanted, unread) = mpsc::unbounded_channel();
        Self(Arc::new(Shared {
            template: conn.clients()[0].clone(),
            name: connection_name(&conn.settings.holder),
            keys: conn.keys.clone(),
            limit: conn.settings.command_limit,
            keyspace_events,
            news: broadcast::Sender::new(4_096),
            open: Mutex::new(None),
            ready: watch::Sender::new(false),
            waiting: Mutex::default(),
            claimants: watch::Sender::new(false),
            channels: Mutex::default(),
            wanted,
            unread: Mutex::new(Some(unread)),
            task: OnceLock::new(),
        }))
    }

    /// Subscribes, if that has not been done yet, and listens.
    pub(crate) async fn listen(&self) -> Result<Box<dyn WakeSource>> {
        let source = self.source();
        let mut ready = self.0.ready.subscribe();
        let wait = ready.wait_for(|ready| *ready);
        if let Ok(Ok(_)) = tokio::time::timeout(self.0.limit, wait).await {
            return Ok(source);
        }
        let detail = "the subscription for wake-ups could not be opened";
        Err(Error::new(ErrorKind::Unavailable, detail))
    }

    /// Listens to what comes once the subscription is open.
    pub(crate) fn source(&self) -> Box<dyn WakeSource> {
        let news = self.0.news.subscribe();
        self.start();
        let messages = self.0.messages();
        Box::new(Source { shared: self.0.clone(), news, messages })
    }

    /// Opens the subscription if that has not been done yet.
    pub(crate) fn start(&self) {
        self.0.task.get_or_init(|| {
            let unread = lock(&self.0.unread).take();
            let shared = Arc::downgrade(&self.0);
            let task = tokio::spawn(async move {
                let Some(mut unread) = unread else { return };
                let mut pause = Duration::from_millis(50);
                loop {
                    let Some(shared) = shared.upgrade() else {
                        return;
                    };
                    let Err(error) = subscribe(&shared, &mut unread, &mut pause).await;
                    shared.ready.send_replace(false);
                    *lock(&shared.open) = None;
                    tracing::debug!(%error, "the subscription for wake-ups ended");
                    drop(shared);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
            });
            task.abort_handle()
        });
    }

    /// Sees to it that the news of a slot arrive. Without effect outside of a cluster.
    pub(crate) fn want(&self, tag: &str) {
        if !self.0.keys.clustered() {
            return;
        }
        let channel = self.0.keys.channel(tag);
        if lock(&self.0.channels).insert(channel.clone()) {
            drop(self.0.wanted.send(channel)); // nobody subscribes yet: it is in the set
        }
    }

    /// Registers somebody who waits for any of some news.
    pub(crate) fn register(&self, ids: Vec<u64>) -> Registration {
        self.start();
        let notify = Arc::new(Notify::new());
        let mut waiting = lock(&self.0.waiting);
        for id in &ids {
            waiting.entry(*id).or_default().push(notify.clone());
        }
        self.0.claimants.send_if_modified(|any| !std::mem::replace(any, !waiting.is_empty()));
        drop(waiting);
        Registration { shared: self.0.clone(), ids, notify }
    }

    /// Ends the subscription.
    pub(crate) fn stop(&self) {
        if let Some(task) = self.0.task.get() {
            task.abort();
        }
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A registration; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Registration {
    shared: Arc<Shared>,
    ids: Vec<u64>,
    notify: Arc<Notify>,
}

impl Registration {
    /// Waits for news; those that came since the last call count.
    pub(crate) async fn woken(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut waiting = lock(&self.shared.waiting);
        for id in &self.ids {
            if let Some(list) = waiting.get_mut(id) {
                list.retain(|waiter| !Arc::ptr_eq(waiter, &self.notify));
                if list.is_empty() {
                    waiting.remove(id);
                }
            }
        }
        if waiting.is_empty() {
            self.shared.claimants.send_if_modified(|any| std::mem::replace(any, false));
        }
    }
}

impl Shared {
    /// Tells everybody.
    fn deliver(&self, wake: Wake) {
        self.notify(wake);
        drop(self.news.send(wake)); // nobody listens: nobody misses it
    }

    /// Tells those who wait for a claim.
    fn notify(&self, wake: Wake) {
        match wake {
            Wake::Released(id) | Wake::Changed(id) => {
                if let Some(list) = lock(&self.waiting).get(&id) {
                    list.iter().for_each(|waiter| waiter.notify_one());
                }
            }
            Wake::Missed => {
                for list in lock(&self.waiting).values() {
                    list.iter().for_each(|waiter| waiter.notify_one());
                }
            }
        }
    }

    /// The messages from now on.
    fn messages(&self) -> Option<broadcast::Receiver<Message>> {
        lock(&self.open).as_ref().map(Client::message_rx)
    }
}

/// What a message means.
fn read(message: &Message) -> Option<Wake> {
    let text = message.value.as_str()?;
    match text.strip_prefix(TAKEN) {
        Some(id) => id.parse().ok().map(Wake::Changed),
        None => text.parse().ok().map(Wake::Released),
    }
}

/// A client that is closed when it is dropped.
struct Subscriber {
    client: Client,
    task: Option<ConnectHandle>,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Connects, subscribes and delivers until something fails for good.
async fn subscribe(
    shared: &Arc<Shared>,
    wanted: &mut mpsc::UnboundedReceiver<String>,
    pause: &mut Duration,
) -> Result<std::convert::Infallible> {
    let template = &shared.template;
    let performance =
        PerformanceConfig { broadcast_channel_capacity: 4_096, ..template.perf_config() };
    let mut policy = ReconnectPolicy::new_exponential(0, 20, 2_000, 2);
    policy.set_jitter(20);
    let connection = template.connection_config().clone();
    let client =
        Client::new(template.client_config(), Some(performance), Some(connection), Some(policy));
    let mut claimants = shared.claimants.subscribe();
    claimants.mark_changed();
    let mut messages: Option<broadcast::Receiver<Message>> = None;
    let mut events = client.keyspace_event_rx();
    let mut reconnects = client.reconnect_rx();
    let mut changes = client.cluster_change_rx();
    let mut subscriber = Subscriber { client, task: None };
    subscriber.task = Some(subscriber.client.init().await.map_err(mapped)?);
    let client = &subscriber.client;
    // the first connection counts as one more
    while reconnects.try_recv().is_ok() {}
    name_all(client, &shared.name, shared.limit).await;
    all(shared, client).await?;
    *lock(&shared.open) = Some(client.clone());
    shared.ready.send_replace(true);
    shared.deliver(Wake::Missed);
    *pause = Duration::from_millis(50);
    let mut keepalive = tokio::time::interval(KEEPALIVE);
    keepalive.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // its sender is in `shared`
            Ok(()) = claimants.changed() => {
                let any = *claimants.borrow_and_update();
                if any && messages.is_none() {
                    messages = Some(client.message_rx());
                    // what came before is missed
                    shared.notify(Wake::Missed);
                } else if !any {
                    messages = None;
                }
            },
            message = next(&mut messages) => match message {
                Ok(message) => if let Some(wake) = read(&message) {
                    shared.notify(wake);
                },
                Err(RecvError::Lagged(_)) => shared.notify(Wake::Missed),
                Err(RecvError::Closed) => return Err(ended()),
            },
            event = events.recv() => match event {
                Ok(event) => {
                    // our own releases are published as well; what else removes a lock is news
                    let removed = ["del", "unlink", "expired", "evicted", "rename_from", "set"];
                    let name = event.key.as_str().unwrap_or_default();
                    if removed.contains(&event.operation.as_str())
                        && let Some(id) = shared.keys.wake_of(name)
                    {
                        shared.deliver(Wake::Changed(id));
                    }
                }
                Err(RecvError::Lagged(_)) => shared.deliver(Wake::Missed),
                Err(RecvError::Closed) => return Err(ended()),
            },
            reconnected = reconnects.recv() => match reconnected {
                Ok(_) | Err(RecvError::Lagged(_)) => {
                    name_all(client, &shared.name, shared.limit).await;
                    all(shared, client).await?;
                    shared.deliver(Wake::Missed);
                }
                Err(RecvError::Closed) => return Err(ended()),
            },
            // slots have moved: so have their channels
            Ok(_) = changes.recv() => {
                all(shared, client).await?;
                shared.deliver(Wake::Missed);
            }
            Some(channel) = wanted.recv() => {
                limited(shared, client.ssubscribe(channel)).await?;
                shared.deliver(Wake::Missed);
            }
            _ = keepalive.tick() => {
                limited(shared, client.ping::<()>(None)).await?;
            }
        }
    }
}

async fn next(
    messages: &mut Option<broadcast::Receiver<Message>>,
) -> std::result::Result<Message, RecvError> {
    match messages {
        Some(messages) => messages.recv().await,
        None => std::future::pending().await,
    }
}

/// Subscribes to everything and waits until the server has done it.
async fn all(shared: &Shared, client: &Client) -> Result<()> {
    let keys = &shared.keys;
    if keys.clustered() {
        let channels: Vec<String> = lock(&shared.channels).iter().cloned().collect();
        for channel in channels {
            limited(shared, client.ssubscribe(channel)).await?;
        }
        return Ok(());
    }
    limited(shared, client.subscribe(keys.channel(""))).await?;
    if shared.keyspace_events {
        let database = client.client_config().database.unwrap_or(0);
        limited(shared, client.psubscribe(keys.events(database))).await?;
    }
    // the client takes a subscription for done when it is sent; this answer comes after it
    limited(shared, client.ping::<()>(None)).await
}

async fn limited<T>(
    shared: &Shared,
    call: impl Future<Output = std::result::Result<T, fred::error::Error>>,
) -> Result<T> {
    match tokio::time::timeout(shared.limit, call).await {
        Ok(done) => done.map_err(mapped),
        Err(_) => Err(Error::new(ErrorKind::Unavailable, "the subscription is silent")),
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the subscription has ended")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The news for an engine. It hears messages from the client itself: a task in between would cost
/// a waiter as much time as the message takes from the server.
#[derive(Debug)]
struct Source {
    shared: Arc<Shared>,
    news: broadcast::Receiver<Wake>,
    messages: Option<broadcast::Receiver<Message>>,
}

#[async_trait]
impl WakeSource for Source {
    async fn next(&mut self) -> Result<Wake> {
        enum Heard {
            News(std::result::Result<Wake, RecvError>),
            Message(std::result::Result<Message, RecvError>),
        }
        loop {
            let news = self.news.recv();
            // both are cancel safe
            let heard = match &mut self.messages {
                None => Heard::News(news.await),
                Some(messages) => tokio::select! {
                    biased;
                    news = news => Heard::News(news),
                    message = messages.recv() => Heard::Message(message),
                },
            };
            match heard {
                // it may be another client than before
                Heard::News(Ok(Wake::Missed) | Err(RecvError::Lagged(_)))
                | Heard::Message(Err(RecvError::Lagged(_))) => {
                    self.messages = self.shared.messages();
                    return Ok(Wake::Missed);
                }
                Heard::News(Ok(wake)) => return Ok(wake),
                Heard::News(Err(RecvError::Closed)) => return Err(ended()),
                Heard::Message(Ok(message)) => {
                    if let Some(wake) = read(&message) {
                        return Ok(wake);
                    }
                }
                // the next one is told as missed news
                Heard::Message(Err(RecvError::Closed)) => self.messages = None,
            }
        }
    }
}
