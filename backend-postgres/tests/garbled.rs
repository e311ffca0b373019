//! Garbled answers of a real server: an error, never a lock.

mod support;

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_conformance::garbled::{Open, check};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Backend, Result};
use leasehold_postgres::PostgresBackend;
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;

struct Postgres(PgConnectOptions);

#[async_trait]
impl Open for Postgres {
    fn server(&self) -> SocketAddr {
        let address = format!("{}:{}", self.0.get_host(), self.0.get_port());
        address.parse().expect("the server's address")
    }

    async fn open(&self, namespace: &str, at: SocketAddr) -> Result<Arc<dyn Backend>> {
        let options = self.0.clone().host(&at.ip().to_string()).port(at.port());
        let builder = PostgresBackend::builder()
            .namespace(namespace)
            .session_limits(support::session_limits());
        Ok(Arc::new(builder.connect(options.to_url_lossy().as_str()).await?))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_garbled_answer_is_never_a_lock() {
    let server = Server::shared(Kind::Postgres15).expect("the server can be had");
    support::PgHarness::over(server.clone()).expect("the tables can be made");
    let options = PgConnectOptions::from_str(&server.url()).expect("a url");
    check(Arc::new(Postgres(options)), 96, 40).await.expect("no belief without a lock");
}
