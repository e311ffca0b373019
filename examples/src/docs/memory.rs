use async_trait::async_trait;
use leasehold::memory::MemoryTx;
use leasehold::{Claim, LeaseGuard, Result};

use super::Docs;

/// The names, one a line: the store's map cannot be listed.
const NAMES: &str = "docs";

#[derive(Debug)]
pub(super) struct MemoryDocs;

#[async_trait]
impl Docs for MemoryDocs {
    async fn create(&self, _: &mut Claim) -> Result<()> {
        Ok(())
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>> {
        Ok(claim.tx::<MemoryTx>()?.read(&format!("doc/{name}")))
    }

    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>> {
        let tx = claim.tx::<MemoryTx>()?;
        let names = tx.read(NAMES).unwrap_or_default();
        let wanted = names.lines().filter(|name| name.starts_with(prefix));
        let found = |name: &str| Some((name.to_owned(), tx.read(&format!("doc/{name}"))?));
        let mut found: Vec<_> = wanted.filter_map(found).collect();
        found.sort();
        Ok(found)
    }

    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()> {
        let tx = claim.tx::<MemoryTx>()?;
        tx.write(format!("doc/{name}"), text);
        let names = tx.read(NAMES).unwrap_or_default();
        if !names.lines().any(|known| known == name) {
            tx.write(NAMES, format!("{names}{name}\n"));
        }
        Ok(())
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<MemoryTx>()?).await
    }
}
