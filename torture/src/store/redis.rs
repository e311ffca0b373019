//! Redis and Valkey.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold::redis::{RedisBackend, RedisTx};
use leasehold::{Backend, Claim, ClaimOptions, Keys, LeaseGuard, Result};
use leasehold_conformance::servers::Server;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{Census, LOCK_TTL, Lab, NAMESPACE, Shop, failed};

/// As a client sees it.
#[derive(Debug)]
pub(super) struct RedisShop {
    url: String,
}

impl RedisShop {
    pub(super) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

#[async_trait]
impl Shop for RedisShop {
    async fn open(&self, _client: &str) -> Result<Arc<dyn Backend>> {
        let builder = RedisBackend::builder().namespace(NAMESPACE).lock_ttl(LOCK_TTL);
        let builder = builder.claim_ttl(LOCK_TTL).command_limit(Duration::from_secs(3));
        Ok(Arc::new(builder.connect(&self.url).await?))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64> {
        let value: Option<i64> = claim.tx::<RedisTx>()?.get(name.to_owned()).await?;
        Ok(value.unwrap_or(0))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()> {
        lease.verify(claim.tx::<RedisTx>()?).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        claim.tx::<RedisTx>()?.set(name.to_owned(), value)?;
        Ok(())
    }
}

/// As the controller sees it.
#[derive(Debug)]
pub(super) struct RedisLab {
    server: Server,
    shop: Arc<RedisShop>,
}

impl RedisLab {
    pub(super) fn new(server: Server) -> Self {
        let shop = Arc::new(RedisShop::new(&server.url()));
        Self { server, shop }
    }
}

#[async_trait]
impl Lab for RedisLab {
    fn shop(&self) -> Arc<dyn Shop> {
        self.shop.clone()
    }

    async fn prepare(&self, _names: &[String]) -> Result<()> {
        Ok(())
    }

    fn server(&self) -> Option<&Server> {
        Some(&self.server)
    }

    /// Its connections are cut by the proxy instead: nothing belongs to them.
    async fn end_sessions(&self, _client: &str) -> Result<bool> {
        Ok(false)
    }

    /// Asked in the server's own words: a client of ours would be among those that are counted.
    async fn census(&self) -> Result<Census> {
        let (reader, mut writer) = TcpStream::connect(("127.0.0.1", self.server.port()))
            .await
            .map_err(failed)?
            .into_split();
        let mut lines = BufReader::new(reader).lines();
        let ask = format!("INFO clients\r\nKEYS leasehold:{NAMESPACE}:*\r\n");
        writer.write_all(ask.as_bytes()).await.map_err(failed)?;
        let mut census = Census::default();
        while let Some(line) = lines.next_line().await.map_err(failed)? {
            if let Some(count) = line.strip_prefix("connected_clients:") {
                // this one is among them
                census.connections = count.parse::<u64>().ok().map(|count| count - 1);
            } else if let Some(count) = line.strip_prefix('*') {
                census.entries = count.parse().ok();
                return Ok(census);
            }
        }
        Err(failed("the server does not answer"))
    }

    async fn leftovers(&self) -> Result<Vec<String>> {
        let handle = self.shop.open("controller").await?;
        let claim = handle.claim(&Keys::none(), ClaimOptions::default()).await?;
        let mut claim = claim.ok_or_else(|| failed("nobody can be in the way of no keys"))?;
        let tx = claim.tx::<RedisTx>()?;
        let mut left = Vec::new();
        let keys: Vec<String> = tx.read("KEYS", [format!("leasehold:{NAMESPACE}:*")]).await?;
        for name in keys {
            // -1: no ttl, which no key of ours is ever without; -2: it has expired meanwhile
            let ttl: i64 = tx.read("PTTL", [name.clone()]).await?;
            let held =
                ["lock", "lease", "claim"].iter().any(|kind| name.contains(&format!("}}:{kind}:")));
            if ttl == -1 {
                left.push(format!("{name} without a ttl"));
            } else if held && ttl > 0 {
                left.push(format!("{name} for {ttl} ms"));
            }
        }
        claim.rollback().await?;
        handle.close().await?;
        Ok(left)
    }
}
