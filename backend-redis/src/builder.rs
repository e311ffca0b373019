//! [`Builder`]: how a [`RedisBackend`] is opened.

use std::time::Duration;

use fred::clients::{Client, Pool};
use fred::interfaces::ClientLike;
use fred::types::ConnectHandle;
use fred::types::config::{
    Config, ConnectionConfig, PerformanceConfig, ReconnectPolicy, UnresponsiveConfig,
};
use leasehold_core::{Error, ErrorKind, Holder, MAX_TTL, Result};

use crate::RedisBackend;
use crate::check::check;
use crate::conn::{Conn, NAME, Settings};
use crate::error::mapped;
use crate::keys::Keyspace;
use crate::quorum::{Member, RedisQuorum};

/// The shortest ttl of locks and claims: below it renewals have no time to arrive.
const MIN_TTL: Duration = Duration::from_millis(500);

/// Opens a [`RedisBackend`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    namespace: String,
    cluster_tag: Option<String>,
    connections: usize,
    allow_eviction: bool,
    holder: Option<Holder>,
    settings: Settings,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            cluster_tag: None,
            connections: 1,
            allow_eviction: false,
            holder: None,
            settings: Settings {
                command_limit: Duration::from_secs(5),
                lock_ttl: Duration::from_secs(10),
                claim_ttl: Duration::from_secs(10),
                replicas: 0,
                keyspace_events: false,
                holder: Holder::this_process(),
            },
        }
    }
}

impl Builder {
    /// Handles of one namespace contend, handles of different ones never meet. All keys on the
    /// server begin with `leasehold:<namespace>:`. Default `default`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// In a cluster: puts everything of this handle into the slot of `{tag}`.
    ///
    /// Without it leases, locks and dedupe entries are spread over the slots and claims share the
    /// one of `{namespace}`. With it a lease can be verified in a claim's transaction and a claim
    /// can use `first_seen`, which needs one slot; the load is on one node then. All handles of a
    /// namespace must be given the same.
    pub fn cluster_tag(mut self, tag: impl Into<String>) -> Self {
        self.cluster_tag = Some(tag.into());
        self
    }

    /// Who the handle's locks, leases, claims and dedupe entries say that they belong to, and what
    /// the handle's connections are called (`CLIENT SETNAME`; not those of a client or pool that
    /// is brought along). Default [`Holder::this_process`], a new one for each handle.
    pub fn holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }

    /// Connections for commands, besides the one that listens for wake-ups; default 1, which
    /// pipelines what all tasks send.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections.max(1);
        self
    }

    /// The longest time that a command may take; default 5 s. It is tried once; what was given
    /// up and arrives late finds that out and does nothing.
    pub fn command_limit(mut self, limit: Duration) -> Self {
        self.settings.command_limit = limit;
        self
    }

    /// How long the server keeps a named lock without a renewal: how long the locks of a dead
    /// process last. Renewed at a third of it. Default 10 s.
    pub fn lock_ttl(mut self, ttl: Duration) -> Self {
        self.settings.lock_ttl = ttl;
        self
    }

    /// How long the server keeps a claim without a renewal. Renewed at a third of it. Default
    /// 10 s.
    pub fn claim_ttl(mut self, ttl: Duration) -> Self {
        self.settings.claim_ttl = ttl;
        self
    }

    /// Waits after each acquisition until so many replicas have it (`WAIT`); otherwise the
    /// acquisition fails as unavailable. Default 0.
    ///
    /// It makes the loss of a lock by a failover much less likely, not impossible: a replica that
    /// has it need not be the one that is promoted. `WAIT` holds up everything else on its
    /// connection for as long as the replicas take.
    pub fn wait_replicas(mut self, replicas: u32) -> Self {
        self.settings.replicas = replicas;
        self
    }

    /// Accepts a server that may evict keys (a `maxmemory-policy` other than `noeviction`), and
    /// thereby that a lock may be lost while it is held, or a delivery forgotten. Default false.
    pub fn allow_eviction(mut self, allow: bool) -> Self {
        self.allow_eviction = allow;
        self
    }

    /// Listens to the server's keyspace events, so that a lock that somebody deletes by hand is
    /// lost at once rather than at the next renewal. The server must send them
    /// (`notify-keyspace-events` with `K`, `g`, `x`, `e`, and `$` for an overwritten lock); each
    /// acquisition and release of the namespace then costs a message to each handle. Not in a
    /// cluster. Default false.
    pub fn keyspace_events(mut self, listen: bool) -> Self {
        self.settings.keyspace_events = listen;
        self
    }

    /// Connects by a URL: `redis://user:password@host:port/database`,
    /// `redis-sentinel://host:port?sentinelServiceName=name&node=host:port`,
    /// `redis-cluster://host:port?node=host:port`, `rediss…` with a feature for TLS,
    /// `redis+unix://` with the feature `unix-sockets`;
    /// `valkey` in place of `redis` means the same.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a URL or an option that is none,
    /// [`ErrorKind::Unavailable`] if the server cannot be reached, [`ErrorKind::Unsupported`] if it
    /// is a replica, evicts keys, is older than 7.0 or has no sane clock.
    ///
    /// # Cancel safety
    /// Safe: nothing stays open.
    pub async fn connect(self, url: &str) -> Result<RedisBackend> {
        self.connect_config(config_of(url)?).await
    }

    /// Connects by a configuration of fred.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn connect_config(self, config: Config) -> Result<RedisBackend> {
        self.check_options().map_err(|error| error.at(NAME, "connect"))?;
        let mut opened = Opened::default();
        for _ in 0..self.connections {
            let (performance, connection, policy) = self.configs();
            let client =
                Client::new(config.clone(), Some(performance), Some(connection), Some(policy));
            let connect = tokio::time::timeout(self.settings.command_limit, client.init());
            let Ok(connected) = connect.await else {
                let detail = format!("no answer within {:?}", self.settings.command_limit);
                return Err(Error::new(ErrorKind::Unavailable, detail).at(NAME, "connect"));
            };
            let task = connected.map_err(|error| mapped(error).at(NAME, "connect"))?;
            opened.tasks.push(task);
            opened.clients.push(client);
        }
        self.finish(opened).await.map_err(|error| error.at(NAME, "connect"))
    }

    /// Uses a connected client of the caller's. It is not closed with the handle. Wake-ups get a
    /// connection of their own with its configuration.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn with_client(self, client: Client) -> Result<RedisBackend> {
        self.with_clients(vec![client]).await
    }

    /// Uses a connected pool of the caller's, as [`with_client`](Self::with_client).
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn with_pool(self, pool: Pool) -> Result<RedisBackend> {
        self.with_clients(pool.clients().to_vec()).await
    }

    /// Connects to independent servers, for locks and leases by a majority of them: see
    /// [`RedisQuorum`]. A minority may be unreachable; it is connected to when it comes back.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`ErrorKind::InvalidOptions`] for fewer than three URLs, and
    /// for those of a cluster.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn connect_quorum<U: AsRef<str>>(
        mut self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<RedisQuorum> {
        self.check_options().map_err(|error| error.at(NAME, "connect"))?;
        let configs: Result<Vec<Config>> =
            urls.into_iter().map(|url| config_of(url.as_ref())).collect();
        let configs = configs?;
        let count = configs.len();
        if count < 3 || configs.iter().any(|config| config.server.is_clustered()) {
            let detail = "a quorum has three independent servers or more, and no cluster";
            return Err(Error::new(ErrorKind::InvalidOptions, detail).at(NAME, "connect"));
        }
        // one for all servers
        self.holder.get_or_insert_with(Holder::this_process);
        let opening = configs.into_iter().map(|config| self.open_member(config));
        let opened = futures_util::future::join_all(opening).await;
        let (mut members, mut failed) = (Vec::with_capacity(count), Vec::new());
        for member in opened {
            let (member, reached) = member.map_err(|error| error.at(NAME, "connect"))?;
            members.push(member);
            failed.extend(reached.err());
        }
        if failed.len() > (count - 1) / 2
            && let Some(error) = failed.pop()
        {
            return Err(error.at(NAME, "connect"));
        }
        Ok(RedisQuorum::over(members, self.settings.lock_ttl))
    }

    /// A server of a quorum, and whether it could be reached. One that is reached and refused
    /// fails.
    async fn open_member(&self, mut config: Config) -> Result<(Member, Result<()>)> {
        config.fail_fast = false; // it tries on
        let (performance, connection, policy) = self.configs();
        let client = Client::new(config, Some(performance), Some(connection), Some(policy));
        let mut opened = Opened { clients: vec![client.clone()], tasks: vec![client.connect()] };
        let limit = self.settings.command_limit;
        let reached = match tokio::time::timeout(limit, client.wait_for_connect()).await {
            Ok(Ok(())) => check(&client, limit, self.allow_eviction).await,
            Ok(Err(error)) => Err(mapped(error)),
            Err(_) => {
                let detail = format!("no answer within {limit:?}");
                Err(Error::new(ErrorKind::Unavailable, detail))
            }
        };
        if let Err(error) = &reached
            && !error.is_retryable()
        {
            return Err(error.clone());
        }
        let keys = Keyspace::new(&self.namespace, self.cluster_tag.clone(), false)?;
        let (clients, tasks) = opened.take();
        Ok((Member::new(Conn::new(clients, tasks, keys, self.settings())), reached))
    }

    async fn with_clients(self, clients: Vec<Client>) -> Result<RedisBackend> {
        let opened = Opened { clients, tasks: Vec::new() };
        self.finish(opened).await.map_err(|error| error.at(NAME, "connect"))
    }

    async fn finish(self, mut opened: Opened) -> Result<RedisBackend> {
        self.check_options()?;
        let Some(first) = opened.clients.first() else {
            let detail = "the pool has no clients";
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        };
        let clustered = first.is_clustered();
        if clustered && self.settings.keyspace_events {
            let detail = "keyspace events are not listened to in a cluster";
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        let settings = self.settings();
        let keys = Keyspace::new(&self.namespace, self.cluster_tag, clustered)?;
        check(first, self.settings.command_limit, self.allow_eviction).await?;
        let (clients, tasks) = opened.take();
        let conn = Conn::new(clients, tasks, keys, settings);
        // before anything can be held
        conn.tell_holder().await;
        Ok(RedisBackend::over(conn))
    }

    fn settings(&self) -> Settings {
        let holder = self.holder.clone().unwrap_or_else(Holder::this_process);
        Settings { holder, ..self.settings.clone() }
    }

    fn check_options(&self) -> Result<()> {
        for (what, ttl) in
            [("lock_ttl", self.settings.lock_ttl), ("claim_ttl", self.settings.claim_ttl)]
        {
            if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
                let detail =
                    format!("{what} is {ttl:?}, it must be from {MIN_TTL:?} to {MAX_TTL:?}");
                return Err(Error::new(ErrorKind::InvalidOptions, detail));
            }
        }
        if self.settings.command_limit < Duration::from_millis(50) {
            let detail = "command_limit must be 50 ms or more";
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        Ok(())
    }

    fn configs(&self) -> (PerformanceConfig, ConnectionConfig, ReconnectPolicy) {
        let limit = self.settings.command_limit;
        let performance =
            PerformanceConfig { default_command_timeout: limit, ..PerformanceConfig::default() };
        let connection = ConnectionConfig {
            connection_timeout: limit,
            internal_command_timeout: limit,
            // a connection on which nothing is answered is given up
            unresponsive: UnresponsiveConfig {
                max_timeout: Some(limit),
                interval: (limit / 4).min(Duration::from_secs(1)),
            },
            ..ConnectionConfig::default()
        };
        let mut policy = ReconnectPolicy::new_exponential(0, 20, 1_000, 2);
        policy.set_jitter(20);
        (performance, connection, policy)
    }
}

fn config_of(url: &str) -> Result<Config> {
    let refused = |why: &str| {
        let detail = format!("not a URL of Redis or Valkey: {why}");
        Error::new(ErrorKind::InvalidOptions, detail).at(NAME, "connect")
    };
    let url = match url.strip_prefix("valkey") {
        Some(rest) => format!("redis{rest}"),
        None if url.starts_with("redis") => url.to_owned(),
        None => return Err(refused("it begins with neither redis nor valkey")),
    };
    Config::from_url(&url).map_err(|error| refused(error.details()))
}

/// Clients that are closed unless they are taken.
#[derive(Default)]
struct Opened {
    clients: Vec<Client>,
    tasks: Vec<ConnectHandle>,
}

impl Opened {
    fn take(&mut self) -> (Vec<Client>, Vec<ConnectHandle>) {
        (std::mem::take(&mut self.clients), std::mem::take(&mut self.tasks))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
