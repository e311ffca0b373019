use async_trait::async_trait;
use leasehold::redis::RedisTx;
use leasehold::{Claim, LeaseGuard, Result};

use super::Docs;

#[derive(Debug)]
pub(super) struct RedisDocs;

/// The key of a text; in the claim's slot, where there is a cluster.
fn doc(tx: &RedisTx, name: &str) -> String {
    format!("{{{}}}:doc:{name}", tx.tag())
}

/// The key of the set of all names.
fn names(tx: &RedisTx) -> String {
    format!("{{{}}}:docs", tx.tag())
}

#[async_trait]
impl Docs for RedisDocs {
    async fn create(&self, claim: Claim) -> Result<()> {
        claim.rollback().await // there is nothing to make
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>> {
        let tx = claim.tx::<RedisTx>()?;
        tx.get(doc(tx, name)).await
    }

    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>> {
        let tx = claim.tx::<RedisTx>()?;
        let mut all: Vec<String> = tx.read("SMEMBERS", [names(tx)]).await?;
        all.retain(|name| name.starts_with(prefix));
        all.sort();
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let keys = all.iter().map(|name| doc(tx, name));
        let texts: Vec<Option<String>> = tx.read("MGET", keys.collect::<Vec<_>>()).await?;
        let both = all.into_iter().zip(texts);
        Ok(both.filter_map(|(name, text)| Some((name, text?))).collect())
    }

    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()> {
        let tx = claim.tx::<RedisTx>()?;
        let (doc, names) = (doc(tx, name), names(tx));
        tx.set(doc, text)?.sadd(names, name)?;
        Ok(())
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<RedisTx>()?).await
    }
}
