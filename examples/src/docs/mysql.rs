use async_trait::async_trait;
use leasehold::{Claim, LeaseGuard, Result};
use mysql_async::Transaction;
use mysql_async::prelude::Queryable;

use super::{Docs, failed};

type Tx = Transaction<'static>;

#[derive(Debug)]
pub(super) struct MySqlDocs;

#[async_trait]
impl Docs for MySqlDocs {
    async fn create(&self, mut claim: Claim) -> Result<()> {
        let sql = "CREATE TABLE IF NOT EXISTS docs \
                   (name varbinary(200) PRIMARY KEY, doc text NOT NULL) ENGINE InnoDB";
        claim.tx::<Tx>()?.query_drop(sql).await.map_err(failed)?;
        // the server has committed by itself, as with every such statement
        drop(claim);
        Ok(())
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>> {
        let sql = "SELECT doc FROM docs WHERE name = ?";
        claim.tx::<Tx>()?.exec_first(sql, (name,)).await.map_err(failed)
    }

    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>> {
        let sql = "SELECT name, doc FROM docs WHERE LEFT(name, LENGTH(?)) = ? ORDER BY name";
        claim.tx::<Tx>()?.exec(sql, (prefix, prefix)).await.map_err(failed)
    }

    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()> {
        let sql = "INSERT INTO docs VALUES (?, ?) ON DUPLICATE KEY UPDATE doc = VALUES(doc)";
        claim.tx::<Tx>()?.exec_drop(sql, (name, text)).await.map_err(failed)
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<Tx>()?).await
    }
}
