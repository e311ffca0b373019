//! Garbled answers of real servers: an error, never a lock.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_conformance::garbled::{Open, check};
use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Result};
use mysql_async::{Opts, OptsBuilder, Pool};
use support::MySqlHarness;

struct MySql(MySqlHarness);

#[async_trait]
impl Open for MySql {
    fn server(&self) -> SocketAddr {
        let opts = Opts::from_url(self.0.url()).expect("a url");
        let address = format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port());
        address.parse().expect("the server's address")
    }

    async fn open(&self, namespace: &str, at: SocketAddr) -> Result<Arc<dyn Backend>> {
        let opts = OptsBuilder::from_opts(Opts::from_url(self.0.url()).expect("a url"))
            .ip_or_hostname(at.ip().to_string())
            .tcp_port(at.port())
            .prefer_socket(false);
        Ok(Arc::new(self.0.builder(namespace).from_pool(Pool::new(opts)).await?))
    }
}

async fn on(kind: Kind) {
    if !support::is_meant(kind) {
        return;
    }
    let start = tokio::task::spawn_blocking(move || MySqlHarness::start(kind)).await;
    let harness = start.expect("no panic").expect("the server can be had");
    check(Arc::new(MySql(harness)), 96, 40).await.expect("no belief without a lock");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbled_answer_of_mysql_is_never_a_lock() {
    on(Kind::MySql).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbled_answer_of_mariadb_is_never_a_lock() {
    on(Kind::MariaDb).await;
}
