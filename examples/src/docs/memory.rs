use async_trait::async_trait;
use leasehold::memory::MemoryTx;
use leasehold::{Claim, LeaseGuard, Result};

use super::Docs;

#[derive(Debug)]
pub(super) struct MemoryDocs;

#[async_trait]
impl Docs for MemoryDocs {
    async fn create(&self, claim: Claim) -> Result<()> {
        claim.rollback().await // there is nothing to make
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>> {
        Ok(claim.tx::<MemoryTx>()?.read(name))
    }

    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>> {
        Ok(claim.tx::<MemoryTx>()?.list(prefix).into_iter().collect())
    }

    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()> {
        claim.tx::<MemoryTx>()?.write(name, text);
        Ok(())
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<MemoryTx>()?).await
    }
}
