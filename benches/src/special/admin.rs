//! A look from outside: one connection that counts what the contenders use.

use leasehold_conformance::servers::{Kind, Server};
use leasehold_peers::Outcome;
use leasehold_redis::fred::clients::Client;
use leasehold_redis::fred::cmd;
use leasehold_redis::fred::prelude::*;
use mysql_async::prelude::Queryable;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection};

use super::usage;

/// The administrator's connection.
pub(super) enum Admin {
    Postgres(PgConnection),
    MySql(mysql_async::Conn),
    Redis(Client),
}

impl Admin {
    /// One with all rights.
    pub(super) async fn connect(server: &Server) -> Outcome<Self> {
        let url = server.admin_url();
        Ok(match server.kind() {
            Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
                Self::Postgres(PgConnection::connect(&url).await?)
            }
            Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
                Self::MySql(mysql_async::Conn::from_url(&url).await?)
            }
            _ => {
                let client = Builder::from_config(Config::from_url(&url)?).build()?;
                client.init().await?;
                Self::Redis(client)
            }
        })
    }

    /// Runs statements that answer nothing.
    pub(super) async fn run(&mut self, sql: String) -> Outcome {
        match self {
            Self::Postgres(conn) => {
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await?;
            }
            Self::MySql(conn) => conn.query_drop(sql).await?,
            Self::Redis(_) => return Err("no SQL here".into()),
        }
        Ok(())
    }

    /// Connections of clients, without this one.
    pub(super) async fn connections(&mut self) -> Outcome<f64> {
        let all: i64 = match self {
            Self::Postgres(conn) => {
                let count = "SELECT count(*) FROM pg_stat_activity \
                     WHERE backend_type = 'client backend'";
                sqlx::query_scalar(count).fetch_one(conn).await?
            }
            Self::MySql(conn) => status(conn, "Threads_connected").await?,
            Self::Redis(client) => info(client, "clients", "connected_clients:").await?,
        };
        Ok((all - 1) as f64)
    }

    /// What the server's data and connections take, in KiB: by its own account on Redis, by its
    /// processes' elsewhere.
    pub(super) async fn memory(&self, server: &Server) -> Outcome<f64> {
        match self {
            Self::Redis(client) => {
                Ok(info(client, "memory", "used_memory:").await? as f64 / 1024.0)
            }
            _ => Ok(usage::memory(&server.pids())),
        }
    }

    /// Statements until now: transactions on Postgres, as each of leasehold's is one; scripts on
    /// Redis.
    pub(super) async fn statements(&mut self) -> Outcome<f64> {
        let count: i64 = match self {
            Self::Postgres(conn) => {
                let count = "SELECT xact_commit FROM pg_stat_database \
                     WHERE datname = current_database()";
                sqlx::query_scalar(count).fetch_one(conn).await?
            }
            Self::MySql(conn) => status(conn, "Questions").await?,
            Self::Redis(client) => {
                let calls = |name| info(client, "commandstats", name);
                calls("cmdstat_evalsha:calls=").await? + calls("cmdstat_eval:calls=").await?
            }
        };
        Ok(count as f64)
    }
}

async fn status(conn: &mut mysql_async::Conn, name: &str) -> Outcome<i64> {
    let row: Option<(String, i64)> =
        conn.query_first(format!("SHOW GLOBAL STATUS LIKE '{name}'")).await?;
    Ok(row.ok_or("the server has no such counter")?.1)
}

/// A number of a section; zero if it is not there, as of a command that nobody has sent yet.
async fn info(client: &Client, section: &str, name: &str) -> Outcome<i64> {
    let text: String = client.custom(cmd!("INFO"), vec![section]).await?;
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    let digits = found.unwrap_or("0").split(|c: char| !c.is_ascii_digit()).next();
    Ok(digits.unwrap_or("0").parse()?)
}
