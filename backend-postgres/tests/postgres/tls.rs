//! TLS, where the crate is built with it.

use leasehold_conformance::servers::certificates::{self, Files};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Backend, Lease, LeaseOptions, LockOptions, NamedLock, Result};
use leasehold_postgres::PostgresBackend;
use sqlx::AssertSqlSafe;

use crate::env::{Env, got, key, until};

/// A server that also speaks TLS, with this certificate.
async fn server(kind: Kind, pair: (&str, &str)) -> (Env, Files) {
    let env = Env::over(Server::start(kind).unwrap());
    let folder = env.server.data_dir().expect("the server is ours");
    let files = Files::write(&folder, pair).unwrap();
    let mut admin = env.admin().await;
    for (name, value) in [
        ("ssl_cert_file", files.certificate.to_str().unwrap()),
        ("ssl_key_file", files.key.to_str().unwrap()),
        ("ssl", "on"),
    ] {
        let set = AssertSqlSafe(format!("ALTER SYSTEM SET {name} = '{value}'"));
        sqlx::raw_sql(set).execute(&mut admin).await.unwrap();
    }
    sqlx::raw_sql("SELECT pg_reload_conf()").execute(&mut admin).await.unwrap();
    until("the server to speak tls", || async {
        let url = format!("{}?sslmode=require", env.url());
        PostgresBackend::builder().connect(&url).await.is_ok()
    })
    .await;
    (env, files)
}

async fn connect(env: &Env, mode: &str, files: Option<&Files>) -> Result<PostgresBackend> {
    let root = files.map_or_else(String::new, |files| {
        format!("&sslrootcert={}", files.authority.to_str().expect("a path of ours"))
    });
    let url = format!("{}?sslmode={mode}{root}", env.url());
    env.builder("tls").connect(&url).await
}

/// Where certificates are to be verified, one of an unknown authority is refused, and one that does
/// not name the host; the right one is taken, and all connections of the handle are secure.
async fn certificates_are_checked(kind: Kind) {
    let env = Env::new(kind);
    let plain = connect(&env, "verify-full", None).await;
    assert!(plain.is_err(), "a server without tls was spoken to in the clear");
    let plain = connect(&env, "require", None).await;
    assert!(plain.is_err(), "a server without tls was spoken to in the clear");

    let (env, files) = server(kind, certificates::HERE).await;
    for mode in ["verify-ca", "verify-full"] {
        let refused = connect(&env, mode, None).await;
        assert!(refused.is_err(), "{mode}: a certificate of an unknown authority was taken");
    }
    let backend = connect(&env, "verify-full", Some(&files)).await.unwrap();
    let lock = got(backend.lock(&key("x"), LockOptions::try_once()).await);
    let lease = got(backend.lease(&key("x"), LeaseOptions::try_once()).await);
    let clear = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
        WHERE NOT ssl AND backend_type = 'client backend' AND application_name = $1";
    let clear: i64 = sqlx::query_scalar(clear)
        .bind(crate::support::mark("tls"))
        .fetch_one(&mut env.admin().await)
        .await
        .unwrap();
    assert_eq!(clear, 0, "connections of the handle are in the clear");
    lease.release().await.unwrap();
    lock.release().await.unwrap();
    backend.close().await.unwrap();

    let (env, files) = server(kind, certificates::ELSEWHERE).await;
    let refused = connect(&env, "verify-full", Some(&files)).await;
    assert!(refused.is_err(), "a certificate for another host was taken");
    // it is the name alone
    connect(&env, "verify-ca", Some(&files)).await.unwrap().close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_checked_15() {
    certificates_are_checked(Kind::Postgres15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_checked_18() {
    certificates_are_checked(Kind::Postgres18).await;
}
