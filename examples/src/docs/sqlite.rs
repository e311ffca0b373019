use async_trait::async_trait;
use leasehold::{Claim, LeaseGuard, Result};
use sqlx::{Sqlite, Transaction};

use super::{Docs, failed};

type Tx = Transaction<'static, Sqlite>;

#[derive(Debug)]
pub(super) struct SqliteDocs;

#[async_trait]
impl Docs for SqliteDocs {
    async fn create(&self, mut claim: Claim) -> Result<()> {
        let sql = "CREATE TABLE IF NOT EXISTS docs (name text PRIMARY KEY, doc text NOT NULL)";
        sqlx::query(sql).execute(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        claim.commit().await
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<String>> {
        let query = sqlx::query_scalar("SELECT doc FROM docs WHERE name = $1").bind(name);
        query.fetch_optional(&mut **claim.tx::<Tx>()?).await.map_err(failed)
    }

    async fn list(&self, claim: &mut Claim, prefix: &str) -> Result<Vec<(String, String)>> {
        let sql = "SELECT name, doc FROM docs WHERE substr(name, 1, length($1)) = $1 ORDER BY name";
        let query = sqlx::query_as(sql).bind(prefix);
        query.fetch_all(&mut **claim.tx::<Tx>()?).await.map_err(failed)
    }

    async fn write(&self, claim: &mut Claim, name: &str, text: &str) -> Result<()> {
        let sql = "INSERT INTO docs VALUES ($1, $2) \
                   ON CONFLICT (name) DO UPDATE SET doc = excluded.doc";
        let query = sqlx::query(sql).bind(name).bind(text);
        query.execute(&mut **claim.tx::<Tx>()?).await.map_err(failed)?;
        Ok(())
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        lease.verify(claim.tx::<Tx>()?).await
    }
}
