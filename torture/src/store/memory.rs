//! A store in this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use leasehold::backend::SessionLimits;
use leasehold::memory::{MemoryBackend, MemoryLink, MemoryStore, MemoryTx};
use leasehold::{Backend, Claim, LeaseGuard, Result};

use super::{ANSWER, Census, KEEPALIVE, Lab, NAMESPACE, Shop};

/// A store in memory, with the ways of its clients.
#[derive(Clone, Debug, Default)]
pub struct MemoryLab {
    store: MemoryStore,
    links: Arc<Mutex<HashMap<String, MemoryLink>>>,
}

impl MemoryLab {
    /// The way of a client, once it has opened its handle.
    pub fn link(&self, client: &str) -> Option<MemoryLink> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).get(client).cloned()
    }
}

#[async_trait]
impl Shop for MemoryLab {
    async fn open(&self, client: &str) -> Result<Arc<dyn Backend>> {
        let mut limits = SessionLimits::default();
        (limits.keepalive, limits.answer) = (KEEPALIVE, ANSWER);
        let builder = MemoryBackend::builder().store(&self.store).namespace(NAMESPACE);
        let backend = builder.session_limits(limits).build();
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.insert(client.to_owned(), backend.link().clone());
        Ok(Arc::new(backend))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64> {
        let text = claim.tx::<MemoryTx>()?.read(name);
        text.map_or(Ok(0), |text| text.parse().map_err(super::failed))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()> {
        lease.verify(claim.tx::<MemoryTx>()?).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        claim.tx::<MemoryTx>()?.write(name, value.to_string());
        Ok(())
    }
}

#[async_trait]
impl Lab for MemoryLab {
    fn shop(&self) -> Arc<dyn Shop> {
        Arc::new(self.clone())
    }

    async fn prepare(&self, _names: &[String]) -> Result<()> {
        Ok(())
    }

    async fn end_sessions(&self, client: &str) -> Result<bool> {
        if let Some(link) = self.link(client) {
            link.end_sessions();
        }
        Ok(true)
    }

    async fn leftovers(&self) -> Result<Vec<String>> {
        Ok(self.store.leftovers(NAMESPACE))
    }

    async fn census(&self) -> Result<Census> {
        Ok(Census::default())
    }

    fn restart(&self) -> Result<()> {
        self.store.restart();
        Ok(())
    }
}
