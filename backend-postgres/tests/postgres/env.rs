//! What a test has at hand.

use std::future::Future;
use std::time::Duration;

use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Key, Result};
use leasehold_postgres::{PostgresBackend, PostgresBuilder};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool, Row};
use std::str::FromStr;

use crate::support::{PgHarness, connect, leftovers, mark};

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A server, migrated.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) server: Server,
}

impl Env {
    /// The shared server of a version.
    pub(crate) fn new(kind: Kind) -> Self {
        Self::over(Server::shared(kind).unwrap())
    }

    pub(crate) fn over(server: Server) -> Self {
        PgHarness::over(server.clone()).unwrap();
        Self { server }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        PgConnectOptions::from_str(&self.url()).unwrap()
    }

    pub(crate) async fn admin(&self) -> PgConnection {
        connect(&self.url()).await.unwrap()
    }

    /// A builder whose connections can be told by the namespace.
    #[allow(clippy::unused_self)] // it reads well beside the others
    pub(crate) fn builder(&self, namespace: &str) -> PostgresBuilder {
        PostgresBackend::builder().namespace(namespace).application_name(mark(namespace))
    }

    /// A pool whose connections can be told by the namespace.
    pub(crate) fn pool(&self, namespace: &str, size: u32) -> PgPool {
        let options = self.options().application_name(&mark(namespace));
        PgPoolOptions::new().max_connections(size).connect_lazy_with(options)
    }

    /// A handle with a pool of its own.
    pub(crate) async fn handle(&self, namespace: &str) -> PostgresBackend {
        self.builder(namespace).connect(&self.url()).await.unwrap()
    }

    /// Waits until nothing of the namespace is left on the server.
    pub(crate) async fn nothing_is_left(&self, namespace: &str) {
        let mut admin = self.admin().await;
        let mut left = Vec::new();
        for _ in 0..200 {
            left = leftovers(&mut admin, namespace).await.unwrap();
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(PATIENCE / 200).await;
        }
        panic!("left on the server: {left:?}");
    }

    /// Ends the sessions of a namespace; says how many.
    pub(crate) async fn end_sessions(&self, namespace: &str) -> usize {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
            WHERE starts_with(application_name, $1)";
        let ended = sqlx::query(sql).bind(mark(namespace)).fetch_all(&mut self.admin().await).await;
        ended.unwrap().len()
    }

    /// How many sessions of a namespace wait for an advisory lock.
    pub(crate) async fn waiting(&self, namespace: &str) -> i64 {
        let sql = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity a USING (pid) \
            WHERE locktype = 'advisory' AND NOT granted AND starts_with(a.application_name, $1)";
        let query = sqlx::query_scalar(sql).bind(mark(namespace));
        query.fetch_one(&mut self.admin().await).await.unwrap()
    }
}

/// A namespace of this test only.
pub(crate) fn namespace(test: &str) -> String {
    format!("{test}-{}", rand::random::<u64>())
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// Waits for a condition, with a deadline.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let looking = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, looking).await;
    assert!(found.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// Drops a future after `limit`, unless it has ended.
pub(crate) async fn cancel<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, future).await.ok()
}

/// Waits for a future that must end.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(PATIENCE, future).await;
    done.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}

pub(crate) async fn run(conn: &mut PgConnection, sql: impl Into<String>) {
    sqlx::raw_sql(AssertSqlSafe(sql.into())).execute(conn).await.unwrap();
}

/// The first column of the first row, as text.
pub(crate) async fn ask(conn: &mut PgConnection, sql: impl Into<String>) -> String {
    let row = sqlx::raw_sql(AssertSqlSafe(sql.into())).fetch_one(conn).await.unwrap();
    row.try_get::<String, _>(0).unwrap()
}

/// The value, held.
pub(crate) fn got<T>(acquired: Result<Option<T>>) -> T {
    acquired.unwrap().expect("it is free")
}
