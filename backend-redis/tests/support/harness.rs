//! [`RedisHarness`]: a Redis or Valkey under the suite.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::servers::redis::{self, Cluster, Sentinel};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_conformance::{Handle, Harness, Link, Need, Proxy};
use leasehold_core::{Claim, Error, ErrorKind, Key, LeaseGuard, Result};
use leasehold_redis::{RedisBackend, RedisTx};

use super::Raw;

/// The hash tag of everything in a cluster, so that leases can be verified in claims.
const TAG: &str = "conf";

/// How the servers are arranged.
#[derive(Debug)]
pub enum Layout {
    One(Server),
    Cluster(Cluster),
    Sentinel(Sentinel),
    /// Another process of the test started them.
    Joined {
        url: String,
        ports: Vec<u16>,
    },
}

/// The harness.
#[derive(Debug)]
pub struct RedisHarness {
    name: String,
    layout: Layout,
    /// Kept, because what a dropped handle still has to do goes through them.
    proxies: Mutex<Vec<Arc<Proxy>>>,
}

impl RedisHarness {
    pub fn one(kind: Kind) -> Result<Arc<dyn Harness>> {
        let server = Server::shared(kind).map_err(failed)?;
        let version = server.version().map_err(failed)?;
        Ok(Arc::new(Self {
            name: format!("{kind} {version}"),
            layout: Layout::One(server),
            proxies: Mutex::default(),
        }))
    }

    pub fn cluster(kind: Kind) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self {
            name: format!("{kind}, a cluster of three"),
            layout: Layout::Cluster(redis::cluster(kind).map_err(failed)?),
            proxies: Mutex::default(),
        }))
    }

    pub fn sentinel(kind: Kind) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self {
            name: format!("{kind}, a sentinel with a replica"),
            layout: Layout::Sentinel(redis::sentinel(kind).map_err(failed)?),
            proxies: Mutex::default(),
        }))
    }

    /// Over the servers of another process.
    #[allow(clippy::unnecessary_wraps)] // the suite wants a function of this type
    pub fn join(address: &str) -> Result<Arc<dyn Harness>> {
        let (url, ports) = address.split_once(' ').unwrap_or((address, ""));
        Ok(Arc::new(Self {
            name: url.to_owned(),
            layout: Layout::Joined {
                url: url.to_owned(),
                ports: ports.split(',').filter_map(|port| port.parse().ok()).collect(),
            },
            proxies: Mutex::default(),
        }))
    }

    fn url(&self) -> String {
        match &self.layout {
            Layout::One(server) => server.url(),
            Layout::Cluster(cluster) => cluster.url(),
            Layout::Sentinel(sentinel) => sentinel.url(),
            Layout::Joined { url, .. } => url.clone(),
        }
    }

    /// The ports of the servers with the data.
    fn ports(&self) -> Vec<u16> {
        match &self.layout {
            Layout::One(server) => vec![server.port()],
            Layout::Cluster(cluster) => cluster.nodes().iter().map(Server::port).collect(),
            Layout::Sentinel(sentinel) => vec![sentinel.primary.port()],
            Layout::Joined { ports, .. } => ports.clone(),
        }
    }

    /// All keys that match.
    async fn keys(&self, pattern: &str) -> Result<Vec<(u16, String)>> {
        let mut found = Vec::new();
        for port in self.ports() {
            let keys = Raw::open(port).await?.tell(&["KEYS", pattern]).await?;
            found.extend(keys.texts().into_iter().map(|key| (port, key)));
        }
        Ok(found)
    }
}

#[async_trait]
impl Harness for RedisHarness {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn lacks(&self, need: Need) -> Option<&'static str> {
        match (need, &self.layout) {
            (Need::SessionLocks, _) => Some("named locks live by a ttl here"),
            (_, Layout::One(_)) => None,
            (Need::EndSessions | Need::Silence | Need::LoseAnswer, _) => {
                Some("clients connect to the addresses that the servers announce")
            }
            (Need::Restart, _) => Some("restarts are tested on a server of its own"),
            _ => None,
        }
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        let builder = RedisBackend::builder()
            .namespace(namespace)
            .cluster_tag(TAG)
            .command_limit(Duration::from_secs(3))
            .lock_ttl(Duration::from_secs(4))
            .claim_ttl(Duration::from_secs(4));
        let (backend, proxy) = match &self.layout {
            Layout::One(server) => {
                let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
                let proxy = Arc::new(Proxy::start(upstream).await.map_err(failed)?);
                self.proxies.lock().expect("not poisoned").push(proxy.clone());
                let url = format!("redis://{}/0", proxy.addr());
                (builder.connect(&url).await?, Some(proxy))
            }
            _ => (builder.connect(&self.url()).await?, None),
        };
        Ok(Handle { backend: Arc::new(backend), link: Arc::new(Way(proxy)) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        let Layout::One(server) = &self.layout else {
            return Err(failed("there is no private one of it"));
        };
        let kind = server.kind();
        let arguments = ["--appendonly", "yes", "--appendfsync", "always"];
        let start = move || Server::start_with(kind, &arguments);
        let server = tokio::task::spawn_blocking(start).await.map_err(failed)?;
        Ok(Arc::new(Self {
            name: format!("{kind}, private"),
            layout: Layout::One(server.map_err(failed)?),
            proxies: Mutex::default(),
        }))
    }

    async fn restart(&self) -> Result<()> {
        let Layout::One(server) = &self.layout else {
            return Err(failed("only a private server is restarted"));
        };
        let server = server.clone();
        let restart = move || server.kill().and_then(|()| server.restart());
        let restarted = tokio::task::spawn_blocking(restart).await.map_err(failed)?;
        restarted.map_err(failed)
    }

    fn address(&self) -> Option<String> {
        let ports: Vec<String> = self.ports().iter().map(u16::to_string).collect();
        Some(format!("{} {}", self.url(), ports.join(",")))
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        let end = format!("}}:lease:{key}");
        for (port, name) in self.keys(&format!("leasehold:{namespace}:*")).await? {
            if name.ends_with(&end) {
                Raw::open(port).await?.tell(&["DEL", &name]).await?;
                return Ok(());
            }
        }
        Err(failed(format!("there is no lease {key}")))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        claim.tx::<RedisTx>()?.get(number(name)).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        claim.tx::<RedisTx>()?.set(number(name), value)?;
        Ok(())
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        for port in self.ports() {
            let mut raw = Raw::open(port).await?;
            // a node of a cluster that has not the slot says MOVED
            if let super::Reply::Text(text) = raw.ask(&["GET", &number(name)]).await? {
                return text.parse().map(Some).map_err(failed);
            }
        }
        Ok(None)
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<RedisTx>()?).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for (port, name) in self.keys(&format!("leasehold:{namespace}:*")).await? {
            let mut raw = Raw::open(port).await?;
            // no key without a ttl ever exists; -2: it has expired meanwhile
            let ttl = raw.tell(&["PTTL", &name]).await?.number();
            // after the tag; a key may be named like anything
            let what = name.split_once("}:").map_or("", |(_, what)| what);
            let held = ["lock:", "lease:", "claim:"].iter().any(|kind| what.starts_with(kind));
            if ttl == -1 {
                left.push(format!("{name} without a ttl"));
            } else if held && ttl > 0 {
                left.push(format!("{name} for {ttl} ms"));
            }
        }
        Ok(left)
    }
}

/// The key of a number.
fn number(name: &str) -> String {
    format!("{{{TAG}}}{name}")
}

/// The way of a handle: through its proxy, if there is one.
#[derive(Debug)]
struct Way(Option<Arc<Proxy>>);

impl Way {
    fn proxy(&self) -> Result<&Proxy> {
        self.0.as_deref().ok_or_else(|| failed("there is no proxy on this way"))
    }
}

#[async_trait]
impl Link for Way {
    async fn end_sessions(&self) -> Result<()> {
        self.proxy()?.cut();
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        self.proxy()?.silence();
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        if let Some(proxy) = &self.0 {
            proxy.heal();
        }
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        self.proxy()?.lose_next_answer();
        Ok(())
    }
}

#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
fn failed(error: impl ToString) -> Error {
    Error::new(ErrorKind::Backend, error.to_string())
}
