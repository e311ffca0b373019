//! A server, a namespace and handles for a test.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::Proxy;
use leasehold_conformance::servers::Server;
use leasehold_core::backend::Owner;
use leasehold_core::{Error, ErrorKind, Key, Keys, LeaseOptions};
use leasehold_redis::{Builder, RedisBackend};

use crate::support::{Raw, kind};

/// How long a test waits for what must happen soon, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// A server and a namespace of its own on it.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) server: Server,
    pub(crate) namespace: String,
}

impl Lab {
    /// On the server that all tests share.
    pub(crate) fn shared() -> Self {
        Self::on(blocking(|| Server::shared(kind())).expect("the server can be had"))
    }

    /// On a server of its own, which the test may break.
    pub(crate) fn private(arguments: &[&str]) -> Self {
        let server = blocking(|| Server::start_with(kind(), arguments));
        Self::on(server.expect("a server can be started"))
    }

    fn on(server: Server) -> Self {
        let namespace = format!("t{:x}", Owner::fresh().0);
        Self { server, namespace }
    }

    pub(crate) fn builder(&self) -> Builder {
        RedisBackend::builder()
            .namespace(&self.namespace)
            .command_limit(Duration::from_secs(2))
            .lock_ttl(Duration::from_secs(3))
            .claim_ttl(Duration::from_secs(3))
    }

    pub(crate) async fn open(&self) -> Arc<RedisBackend> {
        let opened = self.builder().connect(&self.server.url()).await;
        Arc::new(opened.expect("the handle opens"))
    }

    /// A handle behind a proxy.
    pub(crate) async fn open_behind(&self, builder: Builder) -> (Arc<RedisBackend>, Proxy) {
        let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, self.server.port()));
        let proxy = Proxy::start(upstream).await.expect("the proxy starts");
        let url = format!("redis://{}/0", proxy.addr());
        let opened = builder.connect(&url).await.expect("the handle opens");
        (Arc::new(opened), proxy)
    }

    pub(crate) async fn raw(&self) -> Raw {
        Raw::open(self.server.port()).await.expect("the server can be reached")
    }

    /// The keys of the namespace of one kind, e.g. `lease`.
    pub(crate) async fn keys(&self, kind: &str) -> Vec<String> {
        let pattern = format!("leasehold:{}:*:{kind}:*", self.namespace);
        let keys = self.raw().await.tell(&["KEYS", &pattern]).await;
        keys.expect("the server answers").texts()
    }

    /// The one key of a kind.
    pub(crate) async fn the_key(&self, kind: &str) -> String {
        let mut keys = self.keys(kind).await;
        assert_eq!(keys.len(), 1, "{keys:?}");
        keys.remove(0)
    }

    /// The key of a kind, if there is one.
    pub(crate) async fn the_key_if_any(&self, kind: &str) -> Option<String> {
        self.keys(kind).await.into_iter().next()
    }

    /// A key for data, in the slot of claims.
    pub(crate) fn data(&self, name: &str) -> String {
        format!("{{{}}}{name}", self.namespace)
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> crate::support::Reply {
        self.raw().await.tell(words).await.expect("the server does it")
    }
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).expect("a valid key")
}

pub(crate) fn keys(names: &[&str]) -> Keys {
    Keys::new(names).expect("valid keys")
}

/// A lease option that tries once.
pub(crate) fn once(ttl_ms: u64) -> LeaseOptions {
    LeaseOptions::try_once().ttl(Duration::from_millis(ttl_ms))
}

/// Waits until a condition holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for what must come soon.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, future).await;
    done.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

/// The kind of a failure that is expected.
pub(crate) fn kind_of<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.expect_err("this must fail").kind()
}

/// For the calls of the test servers, which block.
pub(crate) fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}
