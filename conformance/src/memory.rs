//! [`MemoryHarness`]: the memory backend under test, and the smallest example of a harness.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::SessionLimits;
use leasehold_core::memory::{MemoryBackend, MemoryLink, MemoryStore, MemoryTx};
use leasehold_core::{Claim, Error, ErrorKind, Key, LeaseGuard, Result};

use crate::harness::{Handle, Harness, Link, Need};

/// The memory backend's harness. Its cases show what the engine and the specification do; they
/// run without any server.
#[derive(Clone, Debug, Default)]
pub struct MemoryHarness {
    store: MemoryStore,
}

impl MemoryHarness {
    /// A harness over a store of its own.
    pub fn new() -> Self {
        Self::default()
    }

    /// The store.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// Limits that make a silent store known soon.
    pub(crate) fn session_limits() -> SessionLimits {
        let mut limits = SessionLimits::default();
        limits.keepalive = Duration::from_secs(1);
        limits.answer = Duration::from_secs(4);
        limits
    }
}

#[async_trait]
impl Harness for MemoryHarness {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn lacks(&self, need: Need) -> Option<&'static str> {
        match need {
            Need::Processes => Some("the store lives in this process"),
            _ => None,
        }
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        let backend = MemoryBackend::builder()
            .store(&self.store)
            .namespace(namespace)
            .session_limits(Self::session_limits())
            .build();
        let link = MemoryWay(backend.link().clone());
        Ok(Handle { backend: Arc::new(backend), link: Arc::new(link) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        Ok(Arc::new(Self::new()))
    }

    async fn restart(&self) -> Result<()> {
        self.store.restart();
        Ok(())
    }

    fn address(&self) -> Option<String> {
        None
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        self.store.delete_lease(namespace, key);
        Ok(())
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        number(claim.tx::<MemoryTx>()?.read(name))
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        claim.tx::<MemoryTx>()?.write(name, value.to_string());
        Ok(())
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        number(self.store.read(name))
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<MemoryTx>()?).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        Ok(self.store.leftovers(namespace))
    }
}

fn number(text: Option<String>) -> Result<Option<i64>> {
    let parse = |text: String| {
        text.parse().map_err(|error| {
            Error::new(ErrorKind::Backend, format!("not a number: {text}"))
                .with_source(std::io::Error::other(format!("{error}")))
        })
    };
    text.map(parse).transpose()
}

/// The faults of a memory handle.
#[derive(Debug)]
pub(crate) struct MemoryWay(pub(crate) MemoryLink);

#[async_trait]
impl Link for MemoryWay {
    async fn end_sessions(&self) -> Result<()> {
        self.0.end_sessions();
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        self.0.silence();
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.0.heal();
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        self.0.lose_next_answer();
        Ok(())
    }
}
