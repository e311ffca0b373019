//! MySQL and MariaDB.

use std::sync::Arc;

use async_trait::async_trait;
use leasehold::mysql::MySqlBackend;
use leasehold::{Backend, Claim, LeaseGuard, Result};
use leasehold_conformance::servers::Server;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool, Transaction};

use super::{ANSWER, Census, KEEPALIVE, Lab, NAMESPACE, Shop, failed};

/// User-level locks, transactions and the names of clients are shown only where these are on.
pub(super) const ARGUMENTS: [&str; 4] = [
    "--performance-schema=ON",
    "--performance-schema-instrument=wait/lock/metadata/sql/mdl=ON",
    "--performance-schema-instrument=transaction=ON",
    "--innodb-flush-log-at-trx-commit=1",
];
/// The connection attribute with a client's name.
const CLIENT: &str = "torture_client";

/// As a client sees it.
#[derive(Debug)]
pub(super) struct MySqlShop {
    url: String,
}

impl MySqlShop {
    pub(super) fn new(url: &str) -> Self {
        Self { url: url.to_owned() }
    }
}

#[async_trait]
impl Shop for MySqlShop {
    async fn open(&self, client: &str) -> Result<Arc<dyn Backend>> {
        let opts = OptsBuilder::from_opts(Opts::from_url(&self.url).map_err(failed)?);
        let opts = opts.prefer_socket(false).connect_attribute(CLIENT, client);
        let builder = MySqlBackend::builder().namespace(NAMESPACE);
        let builder = builder.keepalive(KEEPALIVE).answer(ANSWER);
        Ok(Arc::new(builder.from_pool(Pool::new(opts)).await?))
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<i64> {
        let read = "SELECT value FROM torture WHERE name = ?";
        let tx = claim.tx::<Transaction<'static>>()?;
        let value: Option<i64> = tx.exec_first(read, (name,)).await.map_err(failed)?;
        Ok(value.unwrap_or(0))
    }

    async fn verify(&self, lease: &LeaseGuard, claim: &mut Claim) -> Result<()> {
        lease.verify(claim.tx::<Transaction<'static>>()?).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        let write = "INSERT INTO torture VALUES (?, ?) ON DUPLICATE KEY UPDATE value = ?";
        let tx = claim.tx::<Transaction<'static>>()?;
        tx.exec_drop(write, (name, value, value)).await.map_err(failed)
    }
}

/// As the controller sees it.
#[derive(Debug)]
pub(super) struct MySqlLab {
    server: Server,
    shop: Arc<MySqlShop>,
}

impl MySqlLab {
    pub(super) fn new(server: Server) -> Self {
        let shop = Arc::new(MySqlShop::new(&server.url()));
        Self { server, shop }
    }

    async fn admin(&self) -> Result<Conn> {
        let opts = Opts::from_url(&self.server.admin_url()).map_err(failed)?;
        let opts = OptsBuilder::from_opts(opts).prefer_socket(false);
        Conn::new(opts).await.map_err(failed)
    }
}

#[async_trait]
impl Lab for MySqlLab {
    fn shop(&self) -> Arc<dyn Shop> {
        self.shop.clone()
    }

    async fn prepare(&self, names: &[String]) -> Result<()> {
        let handle = self.shop.open("controller").await?;
        handle.migrate().await?;
        handle.close().await?;
        let mut admin = self.admin().await?;
        let table = "CREATE TABLE test.torture \
            (name VARBINARY(100) PRIMARY KEY, value BIGINT NOT NULL)";
        admin.query_drop(table).await.map_err(failed)?;
        let rows = names.iter().map(|name| (name.as_str(),));
        let insert = "INSERT INTO test.torture VALUES (?, 0)";
        admin.exec_batch(insert, rows).await.map_err(failed)
    }

    fn server(&self) -> Option<&Server> {
        Some(&self.server)
    }

    async fn end_sessions(&self, client: &str) -> Result<bool> {
        let mut admin = self.admin().await?;
        let list = "SELECT PROCESSLIST_ID FROM performance_schema.session_connect_attrs \
            WHERE ATTR_NAME = ? AND ATTR_VALUE = ?";
        let sessions: Vec<u64> = admin.exec(list, (CLIENT, client)).await.map_err(failed)?;
        for session in sessions {
            // one that has ended meanwhile
            drop(admin.query_drop(format!("KILL {session}")).await);
        }
        Ok(true)
    }

    async fn census(&self) -> Result<Census> {
        let mut admin = self.admin().await?;
        let sessions = "SELECT COUNT(*) FROM information_schema.PROCESSLIST p \
            JOIN performance_schema.session_connect_attrs a ON a.PROCESSLIST_ID = p.ID \
            WHERE a.ATTR_NAME = 'torture_client' AND a.ATTR_VALUE <> 'controller'";
        let connections = admin.query_first(sessions).await.map_err(failed)?;
        let tables = ["lease", "dedupe", "claim", "session"];
        let counts = tables.map(|table| format!("(SELECT COUNT(*) FROM test.leasehold_{table})"));
        // the sequence keeps its last thousand
        let tokens = "(SELECT GREATEST(COUNT(*), 1000) - 1000 FROM test.leasehold_token)";
        let sum = format!("SELECT {} + {tokens}", counts.join(" + "));
        let entries = admin.query_first(sum).await.map_err(failed)?;
        Ok(Census { connections, entries })
    }

    async fn leftovers(&self) -> Result<Vec<String>> {
        let mut admin = self.admin().await?;
        let locks = "SELECT CONCAT('user-level lock ', OBJECT_NAME, ' ', LOCK_STATUS) \
            FROM performance_schema.metadata_locks WHERE OBJECT_TYPE = 'USER LEVEL LOCK'";
        // the controller's own are in a pool, which is not the handle's to close
        let sessions = "SELECT CONCAT('session ', t.PROCESSLIST_ID, ' of ', a.ATTR_VALUE, ' ', \
            t.PROCESSLIST_COMMAND, ' ', IFNULL(t.PROCESSLIST_INFO, '')) \
            FROM performance_schema.threads t \
            JOIN performance_schema.session_connect_attrs a USING (PROCESSLIST_ID) \
            WHERE a.ATTR_NAME = 'torture_client' AND a.ATTR_VALUE <> 'controller'";
        let open = "SELECT CONCAT('transaction of ', trx_mysql_thread_id, ': ', \
            IFNULL(trx_query, 'idle')) FROM information_schema.INNODB_TRX \
            WHERE trx_mysql_thread_id <> 0";
        let leases = "SELECT CONCAT('live lease ', CAST(name AS CHAR)) FROM test.leasehold_lease \
            WHERE expires > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
        let mut left = Vec::new();
        for query in [locks, sessions, open, leases] {
            let found: Vec<String> = admin.query(query).await.map_err(failed)?;
            left.extend(found);
        }
        Ok(left)
    }
}
