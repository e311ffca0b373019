//! Garbled answers of real servers: an error, never a lock.

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::garbled::{Open, check};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Backend, Result};
use leasehold_redis::RedisBackend;

struct Redis(Server);

#[async_trait]
impl Open for Redis {
    fn server(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.0.port()))
    }

    async fn open(&self, namespace: &str, at: SocketAddr) -> Result<Arc<dyn Backend>> {
        let builder = RedisBackend::builder()
            .namespace(namespace)
            .command_limit(Duration::from_secs(2))
            .lock_ttl(Duration::from_secs(3))
            .claim_ttl(Duration::from_secs(3));
        Ok(Arc::new(builder.connect(&format!("redis://{at}/0")).await?))
    }
}

async fn on(kind: Kind) {
    if !support::wanted(kind) {
        return;
    }
    let server = tokio::task::spawn_blocking(move || Server::shared(kind)).await;
    let server = server.expect("no panic").expect("the server can be had");
    check(Arc::new(Redis(server)), 120, 20).await.expect("no belief without a lock");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbled_answer_of_redis_is_never_a_lock() {
    on(Kind::Redis7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbled_answer_of_valkey_is_never_a_lock() {
    on(Kind::Valkey).await;
}
