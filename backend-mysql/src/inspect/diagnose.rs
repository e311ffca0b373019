//! Looks for what is wrong or risky.

use leasehold_core::{ErrorKind, Finding, Result};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

use super::settings::{NAMES, STATUS, Settings};
use super::{locks, privileges};
use crate::error::{code, mapped, server_code};
use crate::flavour::{Facts, Flavour, ServerInfo};
use crate::probe;
use crate::schema::{self, VERSION};
use crate::store::{NOW, Store};
use crate::threads::Threads;

/// So many expired rows are worth a word.
const MANY_ROWS: u64 = 10_000;

/// Everything, in the order in which one puts it right.
pub(super) async fn look(store: &Store, user_locks: bool) -> Result<Vec<Finding>> {
    let mut conn = store.connect().await?;
    let mut findings = Vec::new();
    match Facts::read(&mut conn).await {
        Ok(facts) => {
            findings.push(version(&facts.info));
            findings.push(group(&facts, user_locks));
        }
        Err(error) => findings.push(unasked("version", &error)),
    }
    let settings = match settings(&mut conn).await {
        Ok(settings) => {
            findings.push(settings.primary());
            Some(settings)
        }
        Err(error) => {
            findings.push(unasked("settings", &mapped(error)));
            None
        }
    };
    if user_locks {
        findings.push(proxy(store, &mut conn).await);
    }
    findings.push(tables(store, &mut conn).await);
    findings.extend(privileges::look(store, &mut conn).await);
    findings.push(inspection(store, &mut conn, user_locks).await);
    if let Some(settings) = settings {
        findings.extend(settings.findings());
        findings
            .push(settings.replication(Threads::read(store).await.map_or(0, |all| all.replicas())));
    }
    findings.push(expired(store, &mut conn).await);
    drop(conn.disconnect().await); // it has done its work
    Ok(findings)
}

/// What could not be asked is a finding.
fn unasked(topic: &'static str, error: &leasehold_core::Error) -> Finding {
    Finding::warning(topic, format!("could not be asked: {error}"), "look into the server's log")
}

fn version(info: &ServerInfo) -> Finding {
    const TOPIC: &str = "version";
    let (name, oldest, latest) = match info.flavour {
        Flavour::MySql => ("MySQL", (8, 0), (9, 7)),
        Flavour::MariaDb => ("MariaDB", (10, 6), (10, 11)),
    };
    let found = format!("{name} {}", info.banner);
    let (major, minor, _) = info.version;
    if (major, minor) < oldest {
        let advice = format!("upgrade the server to {name} {}.{} or later", oldest.0, oldest.1);
        return Finding::fault(TOPIC, found, advice);
    }
    if (major, minor) > latest {
        let advice = format!(
            "tested is {name} {}.{}: run the conformance suite against this one",
            latest.0, latest.1
        );
        return Finding::warning(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, found)
}

fn group(facts: &Facts, user_locks: bool) -> Finding {
    const TOPIC: &str = "group or proxy";
    match facts.no_user_locks() {
        Some(why) if user_locks => {
            let advice = "build every handle without_user_locks";
            Finding::fault(TOPIC, why, advice)
        }
        Some(why) => Finding::fine(TOPIC, format!("{why}; they are not used")),
        None if facts.is_in_group() && user_locks => {
            let found = "a group with one primary: user-level locks are local to it, and free \
                when another becomes it";
            let advice = "see that every handle reaches the primary, never another member";
            Finding::warning(TOPIC, found, advice)
        }
        None => Finding::fine(TOPIC, "a server by itself"),
    }
}

/// Whether user-level locks are locks, all the way to the server.
async fn proxy(store: &Store, conn: &mut Conn) -> Finding {
    const TOPIC: &str = "user-level locks";
    match probe::check(conn, store.opts.clone()).await {
        Ok(()) => Finding::fine(TOPIC, "one session has one, and loses it when it ends"),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let advice = "connect to the server itself, past the proxy or pooler, or build every \
                handle without_user_locks";
            Finding::fault(TOPIC, error.detail(), advice)
        }
        Err(error) => {
            let advice = "see that the server has connections to spare, and look into its log";
            Finding::warning(TOPIC, format!("could not be tried: {error}"), advice)
        }
    }
}

async fn tables(store: &Store, conn: &mut Conn) -> Finding {
    const TOPIC: &str = "tables";
    match schema::version(conn, &store.tables).await {
        Ok(Some(VERSION)) => Finding::fine(TOPIC, format!("version {VERSION}")),
        Ok(found) => {
            let found = found.map_or_else(
                || "missing, or their version must not be read".to_owned(),
                |found| format!("version {found}"),
            );
            let advice = format!(
                "this program works with version {VERSION}: run migrate, as a user who may create \
                 and alter them, or upgrade the program"
            );
            Finding::fault(TOPIC, found, advice)
        }
        Err(error) => Finding::fault(
            TOPIC,
            format!("could not be asked: {error}"),
            "see that the url names the database that has them, and run migrate",
        ),
    }
}

/// What those who look are shown, and may end.
async fn inspection(store: &Store, conn: &mut Conn, user_locks: bool) -> Finding {
    const TOPIC: &str = "inspection";
    let grants: Vec<String> = conn.query("SHOW GRANTS").await.unwrap_or_default();
    let all = grants.iter().any(|grant| {
        let everywhere = grant.contains(" ON *.* ");
        let words = ["ALL PRIVILEGES", "SUPER", "CONNECTION_ADMIN", "CONNECTION ADMIN"];
        everywhere && words.iter().any(|word| grant.contains(word))
    });
    let ends = format!(
        "releases by force the locks and claims of {}",
        if all { "all users" } else { "its own user only" }
    );
    if !user_locks {
        return Finding::fine(TOPIC, ends);
    }
    match locks::visible(store).await {
        Ok(_) => Finding::fine(TOPIC, format!("lists all named locks and claims, {ends}")),
        Err(error) => {
            let found = "shows who holds a named lock or claim by its key, but can list none";
            Finding::warning(TOPIC, format!("{found}; {ends}"), error.detail())
        }
    }
}

async fn settings(conn: &mut Conn) -> mysql_async::Result<Settings> {
    let names = |names: &[&str]| {
        names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
    };
    let text = format!("SHOW VARIABLES WHERE Variable_name IN ({})", names(NAMES));
    let mut all: Vec<(String, String)> = conn.query(text).await?;
    let text = format!("SHOW GLOBAL STATUS WHERE Variable_name IN ({})", names(STATUS));
    all.extend(conn.query::<(String, String), _>(text).await?);
    Ok(Settings(all.into_iter().collect()))
}

async fn expired(store: &Store, conn: &mut Conn) -> Finding {
    const TOPIC: &str = "expired rows";
    let count = |table: &str| {
        format!(
            "(SELECT COUNT(*) FROM (SELECT 1 FROM {table} WHERE expires <= {NOW} LIMIT {}) expired)",
            MANY_ROWS + 1
        )
    };
    let text = format!("SELECT {} + {}", count(&store.tables.lease), count(&store.tables.dedupe));
    match conn.query_first::<u64, _>(text).await {
        Ok(count) => {
            let count = count.unwrap_or_default();
            if count > MANY_ROWS {
                let found = format!("more than {MANY_ROWS} leases and dedupe entries");
                Finding::warning(TOPIC, found, "call housekeep now and then, e.g. every 30 s")
            } else {
                Finding::fine(TOPIC, format!("{count} leases and dedupe entries"))
            }
        }
        Err(error) => {
            let advice = match server_code(&error) {
                Some(code::NO_SUCH_TABLE | code::TABLE_DENIED) => {
                    "run migrate, and grant the user what it lacks"
                }
                _ => "look into the server's log",
            };
            Finding::warning(TOPIC, format!("could not be asked: {error}"), advice)
        }
    }
}
