//! No password in any output: of handles, builders, guards, errors, and what the library and its
//! drivers write to the log at its lowest level, whether all goes well or nothing does.

use std::error::Error as _;
use std::fmt::{Debug, Write as _};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::mysql::MySqlBackend;
use leasehold::postgres::PostgresBackend;
use leasehold::redis::RedisBackend;
use leasehold::{
    Backend, ClaimOptions, DedupeOptions, HoldingQuery, Key, Keys, LeaseOptions, LockOptions,
    Result,
};
use leasehold_conformance::servers::{Kind, Server};
use mysql_async::prelude::Queryable;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tracing_subscriber::fmt::MakeWriter;

const SECRET: &str = "hunter2-c0rrect-h0rse";

/// What is logged.
#[derive(Clone, Debug, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Logged {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// A server at which one must say [`SECRET`], with the URL of somebody who does.
async fn guarded(kind: Kind) -> (Server, String) {
    let start = tokio::task::spawn_blocking(move || Server::start(kind));
    let server = start.await.unwrap().unwrap();
    let port = server.port();
    let url = match kind {
        Kind::Postgres15 => {
            let mut admin = PgConnection::connect(&server.url()).await.unwrap();
            let role = format!("CREATE ROLE app SUPERUSER LOGIN PASSWORD '{SECRET}'");
            sqlx::raw_sql(AssertSqlSafe(role)).execute(&mut admin).await.unwrap();
            let rules = server.data_dir().unwrap().join("pg_hba.conf");
            std::fs::write(rules, "host all all 127.0.0.1/32 scram-sha-256\n").unwrap();
            sqlx::raw_sql("SELECT pg_reload_conf()").execute(&mut admin).await.unwrap();
            format!("postgres://app:{SECRET}@127.0.0.1:{port}/postgres")
        }
        Kind::MySql | Kind::MariaDb => {
            let opts = mysql_async::Opts::from_url(&server.admin_url()).unwrap();
            let mut admin = mysql_async::Conn::new(opts).await.unwrap();
            let user = format!("CREATE USER app@'%' IDENTIFIED BY '{SECRET}'");
            admin.query_drop(user).await.unwrap();
            admin.query_drop("GRANT ALL ON test.* TO app@'%'").await.unwrap();
            format!("mysql://app:{SECRET}@127.0.0.1:{port}/test")
        }
        _ => {
            let mut admin = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let user = format!("ACL SETUSER app on >{SECRET} ~* &* +@all\r\n");
            admin.write_all(user.as_bytes()).unwrap();
            let mut answer = [0; 5];
            admin.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"+OK\r\n");
            format!("redis://app:{SECRET}@127.0.0.1:{port}/0")
        }
    };
    (server, url)
}

/// Opens a handle, and what its builder prints.
async fn open(kind: Kind, url: &str) -> (String, Result<Arc<dyn Backend>>) {
    let limit = Duration::from_secs(3);
    match kind {
        Kind::Postgres15 => {
            let builder = PostgresBackend::builder();
            let opened = builder.clone().connect(url).await;
            (format!("{builder:?} {opened:?}"), opened.map(|handle| Arc::new(handle) as _))
        }
        Kind::MySql | Kind::MariaDb => {
            let builder = MySqlBackend::builder();
            let opened = builder.clone().connect(url).await;
            (format!("{builder:?} {opened:?}"), opened.map(|handle| Arc::new(handle) as _))
        }
        _ => {
            let builder = RedisBackend::builder().command_limit(limit);
            let opened = builder.clone().connect(url).await;
            (format!("{builder:?} {opened:?}"), opened.map(|handle| Arc::new(handle) as _))
        }
    }
}

/// All that a caller may print of an outcome.
fn printed<T: Debug>(said: &mut String, outcome: &Result<T>) {
    writeln!(said, "{outcome:?}").unwrap();
    let Err(error) = outcome else { return };
    writeln!(said, "{error} {error:#?} {}", error.detail()).unwrap();
    let mut source = error.source();
    while let Some(error) = source {
        writeln!(said, "{error} {error:?}").unwrap();
        source = error.source();
    }
}

/// Everything once.
async fn operate(handle: &dyn Backend, said: &mut String) {
    printed(said, &handle.migrate().await);
    let key = Key::new("x").unwrap();
    let lock = handle.lock(&key, LockOptions::try_once()).await;
    printed(said, &lock);
    printed(said, &handle.lock(&key, LockOptions::try_once()).await);
    let lock = lock.unwrap().unwrap();
    printed(said, &lock.token().await);
    let lease = handle.lease(&key, LeaseOptions::try_once()).await;
    printed(said, &lease);
    let lease = lease.unwrap().unwrap();
    printed(said, &lease.renew().await);
    let claim = handle.claim(&Keys::from(key.clone()), ClaimOptions::default()).await;
    printed(said, &claim);
    printed(said, &claim.unwrap().unwrap().commit().await);
    printed(said, &handle.admit(&key, DedupeOptions::default()).await);
    printed(said, &handle.holdings(&HoldingQuery::default()).await);
    printed(said, &handle.diagnose().await);
    printed(said, &handle.housekeep().await);
    printed(said, &lease.release().await);
    printed(said, &lock.release().await);
    printed(said, &handle.close().await);
    printed(said, &handle.lock(&key, LockOptions::try_once()).await);
}

/// What shows the secret, without showing it.
fn free_of_it(kind: Kind, what: &str, text: &str) {
    let lines = text.lines().filter(|line| line.contains(SECRET));
    let lines: Vec<_> = lines.map(|line| line.replace(SECRET, "[the password]")).collect();
    assert!(lines.is_empty(), "{kind:?}: {what}: {}", lines.join("\n"));
}

#[test]
fn no_output_tells_a_password() {
    let logged = Logged::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(logged.clone())
        .with_ansi(false)
        .finish();
    // of all threads and tasks, those of the drivers too
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for kind in [Kind::Postgres15, Kind::MySql, Kind::MariaDb, Kind::Redis7, Kind::Valkey] {
        let (server, url) = runtime.block_on(guarded(kind));
        logged.0.lock().unwrap().clear(); // those were ours
        let (mut said, opened) = runtime.block_on(open(kind, &url));
        let handle = opened.unwrap();
        runtime.block_on(operate(&*handle, &mut said));
        let port = server.port();
        let wrong = [
            url.replace(SECRET, &format!("{SECRET}x")),
            url.replace("app:", "nobody:"),
            url.replace(&format!(":{port}/"), ":1/"),
            format!("{url}_no_such_database"),
            // sqlx warns of the value of an option that it does not know
            format!("{url}?no_such_option={}", if kind == Kind::Postgres15 { "x" } else { SECRET }),
            url.replace("127.0.0.1", "[::"),
            url.replace("://", ":/"),
        ];
        let mut failed = 0;
        for url in &wrong {
            let (more, opened) = runtime.block_on(open(kind, url));
            said.push_str(&more);
            failed += u32::from(opened.is_err());
            printed(&mut said, &opened);
        }
        assert!(failed >= 4, "{kind:?}: the bad urls worked but for {failed}");
        free_of_it(kind, "what is printed", &said);
        let log = String::from_utf8_lossy(&logged.0.lock().unwrap()).into_owned();
        let told = log.contains("leasehold") && log.lines().count() > 8;
        assert!(told, "{kind:?}: hardly anything is logged: {log}");
        free_of_it(kind, "the log", &log);
    }
}
