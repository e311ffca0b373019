//! Planted faults are found.

use std::sync::Arc;

use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Finding, Inspect, Lease, LeaseOptions, Severity};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;

use crate::support::MySqlHarness;
use crate::{
    Verdict, ensure, eventually, key, namespace, runs_bytes_that_are_no_text, user_url, with_setup,
};

crate::tests!("diagnose":
    a_good_server_has_no_fault,
    settings_of_the_pool_are_found,
    settings_of_the_server_are_found,
    a_replica_is_seen_beside_any_statement,
    missing_grants_are_found,
    missing_and_old_tables_are_found,
);

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn findings(backend: &MySqlBackend) -> Result<Vec<Finding>, Failure> {
    let findings = backend.diagnose().await?;
    for finding in &findings {
        let fine = finding.severity == Severity::Fine;
        ensure!(finding.advice.is_empty() == fine, "{finding:?}");
        ensure!(!finding.found.is_empty(), "{finding:?}");
    }
    Ok(findings)
}

fn of<'a>(findings: &'a [Finding], topic: &str) -> Vec<&'a Finding> {
    findings.iter().filter(|finding| finding.topic == topic).collect()
}

/// The one finding of a topic.
fn the<'a>(findings: &'a [Finding], topic: &str) -> Result<&'a Finding, Failure> {
    let found = of(findings, topic);
    ensure!(found.len() == 1, "{topic}: {findings:#?}");
    Ok(found[0])
}

fn is(findings: &[Finding], topic: &str, severity: Severity) -> Verdict {
    let finding = the(findings, topic)?;
    ensure!(finding.severity == severity, "{finding:?}");
    Ok(())
}

/// Nothing is a fault on the server of the tests, and each topic is told.
async fn a_good_server_has_no_fault(harness: Arc<MySqlHarness>) -> Verdict {
    for user_locks in [true, false] {
        let mut builder = harness.builder(&namespace());
        if !user_locks {
            builder = builder.without_user_locks();
        }
        let found = findings(&builder.connect(harness.url()).await?).await?;
        let faults = found.iter().filter(|one| one.severity == Severity::Fault).count();
        ensure!(faults == 0, "{found:#?}");
        for topic in [
            "version",
            "group or proxy",
            "read_only",
            "tables",
            "privileges",
            "transaction_read_only",
            "wait_timeout",
            "innodb_lock_wait_timeout",
            "binlog_format",
            "replication",
        ] {
            is(&found, topic, Severity::Fine)?;
        }
        for topic in ["inspection", "durability", "connections", "expired rows"] {
            the(&found, topic)?;
        }
        ensure!(of(&found, "user-level locks").len() == usize::from(user_locks), "{found:#?}");
    }
    Ok(())
}

/// As a connection of the pool has them, by whatever means.
async fn settings_of_the_pool_are_found(harness: Arc<MySqlHarness>) -> Verdict {
    let mut planted = vec![
        ("wait_timeout", "5", Severity::Warning),
        ("innodb_lock_wait_timeout", "3600", Severity::Warning),
    ];
    match harness.kind() {
        Kind::MariaDb => planted.extend([
            ("max_statement_time", "1.5", Severity::Warning),
            ("idle_transaction_timeout", "7", Severity::Warning),
            ("tx_read_only", "1", Severity::Fault),
        ]),
        _ => planted.extend([
            ("max_execution_time", "1500", Severity::Warning),
            ("transaction_read_only", "1", Severity::Fault),
        ]),
    }
    let set: Vec<String> =
        planted.iter().map(|(name, value, _)| format!("SESSION {name} = {value}")).collect();
    let setup = format!("SET {}", set.join(", "));
    let backend = with_setup(&harness, &namespace(), &setup).await?;
    let found = findings(&backend).await?;
    for (name, _, severity) in planted {
        let topic = if name == "tx_read_only" { "transaction_read_only" } else { name };
        is(&found, topic, severity)?;
        ensure!(the(&found, topic)?.advice.contains("SET GLOBAL"), "{found:#?}");
    }
    Ok(())
}

/// A server that is read-only, forgets what it has committed, logs statements and has few
/// connections.
async fn settings_of_the_server_are_found(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    let own = tokio::task::spawn_blocking(move || {
        let log = ["--log-bin=log", "--server-id=1", "--sync-binlog=1", "--binlog-format=ROW"];
        MySqlHarness::start_own(kind, &log)
    });
    let own = own.await??;
    let mut admin = own.admin().await?;
    admin.query_drop("SET GLOBAL innodb_flush_log_at_trx_commit = 1").await?;
    let backend = own.builder("x").connect(own.url()).await?;
    let found = findings(&backend).await?;
    for topic in ["read_only", "durability", "binlog_format", "connections"] {
        is(&found, topic, Severity::Fine)?;
    }
    ensure!(the(&found, "binlog_format")?.found == "ROW", "{found:#?}");
    for plant in [
        "SET GLOBAL innodb_flush_log_at_trx_commit = 2, GLOBAL sync_binlog = 0",
        "SET GLOBAL max_connections = 10",
        "SET GLOBAL binlog_format = 'STATEMENT'",
    ] {
        admin.query_drop(plant).await?;
    }
    let late = own.builder("x").connect(own.url()).await?;
    let found = findings(&late).await?;
    is(&found, "durability", Severity::Warning)?;
    is(&found, "connections", Severity::Warning)?;
    is(&found, "binlog_format", Severity::Fault)?;
    let lease = late.lease(&key("x"), LeaseOptions::try_once()).await;
    ensure!(lease.is_err(), "it is no fault: {lease:?}");
    let repair = the(&found, "durability")?.advice.replace(", and in the server's options", "");
    admin.query_drop(repair).await?;
    admin.query_drop("SET GLOBAL read_only = 1").await?;
    let found = findings(&late).await?;
    is(&found, "durability", Severity::Fine)?;
    is(&found, "read_only", Severity::Fault)?;
    is(&found, "privileges", Severity::Warning)?;
    let repair = the(&found, "read_only")?.advice.rsplit(": ").next().unwrap_or_default();
    admin.query_drop(repair).await?;
    let found = findings(&late).await?;
    is(&found, "read_only", Severity::Fine)?;
    is(&found, "privileges", Severity::Fine)
}

/// A replica that reads the log is told of, also while statements have bytes that are no text.
async fn a_replica_is_seen_beside_any_statement(harness: Arc<MySqlHarness>) -> Verdict {
    let kind = harness.kind();
    let start = |id: &'static str| {
        let log = ["--log-bin=log", id];
        tokio::task::spawn_blocking(move || MySqlHarness::start_own(kind, &log))
    };
    let (source, replica) = tokio::join!(start("--server-id=1"), start("--server-id=2"));
    let (source, replica) = (source??, replica??);
    let mut admin = source.admin().await?;
    admin.query_drop("CREATE USER copier@'%' IDENTIFIED BY 'copies'").await?;
    admin.query_drop("GRANT REPLICATION SLAVE ON *.* TO copier@'%'").await?;
    // an operator's own user is shown all connections
    let url = source.server().admin_url().replace("/mysql", "/test");
    let backend = source.builder("x").connect(&url).await?;
    is(&findings(&backend).await?, "replication", Severity::Fine)?;

    let port = source.server().port();
    let follow = if kind == Kind::MariaDb {
        format!(
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, \
             MASTER_USER = 'copier', MASTER_PASSWORD = 'copies'; START SLAVE IO_THREAD"
        )
    } else {
        format!(
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {port}, \
             SOURCE_USER = 'copier', SOURCE_PASSWORD = 'copies', GET_SOURCE_PUBLIC_KEY = 1; \
             START REPLICA IO_THREAD"
        )
    };
    let busy = runs_bytes_that_are_no_text(&source).await?;
    replica.admin().await?.query_drop(follow).await?;
    eventually("the replica to be seen", || async {
        let found = backend.diagnose().await?;
        Ok(found
            .iter()
            .any(|finding| finding.topic == "replication" && finding.severity == Severity::Warning))
    })
    .await?;
    ensure!(!busy.is_finished(), "the statement with the bytes had ended");
    busy.abort();
    Ok(())
}

/// The advice, carried out, is all that is needed.
async fn missing_grants_are_found(harness: Arc<MySqlHarness>) -> Verdict {
    let user = format!("doctor{:08x}", rand::random::<u32>());
    let mut admin = harness.admin().await?;
    for statement in [
        format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'secret'"),
        format!("GRANT SELECT ON test.leasehold_meta TO '{user}'@'%'"),
        format!("GRANT SELECT, INSERT ON test.leasehold_lease TO '{user}'@'%'"),
        format!("GRANT SELECT, INSERT, DELETE ON test.leasehold_token TO '{user}'@'%'"),
    ] {
        admin.query_drop(statement).await?;
    }
    let url = user_url(&harness, &user, "secret")?;
    let backend = harness.builder(&namespace()).connect(&url).await?;
    let found = findings(&backend).await?;
    let missing = of(&found, "privileges");
    // the floor's, two of the lease's, four of the dedupe's and the claim's, three of the session's
    ensure!(missing.len() == 14, "{missing:#?}");
    ensure!(missing.iter().all(|one| one.severity == Severity::Fault), "{missing:#?}");
    for finding in missing {
        admin.query_drop(&finding.advice).await?;
    }
    is(&findings(&backend).await?, "privileges", Severity::Fine)?;
    backend.lease(&key("x"), LeaseOptions::try_once()).await?.ok_or("not free")?.release().await?;
    backend.housekeep().await?;
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await?;
    Ok(())
}

async fn missing_and_old_tables_are_found(harness: Arc<MySqlHarness>) -> Verdict {
    let prefix = format!("doctor_{:08x}_", rand::random::<u32>());
    let builder = harness.builder(&namespace()).table_prefix(&prefix);
    let backend = builder.connect(harness.url()).await?;
    let found = findings(&backend).await?;
    is(&found, "tables", Severity::Fault)?;
    ensure!(the(&found, "tables")?.found.starts_with("missing"), "{found:#?}");
    ensure!(the(&found, "tables")?.advice.contains("run migrate"), "{found:#?}");
    backend.migrate().await?;
    let found = findings(&backend).await?;
    is(&found, "tables", Severity::Fine)?;
    is(&found, "expired rows", Severity::Fine)?;
    let mut conn = harness.conn().await?;
    conn.query_drop(format!("UPDATE {prefix}meta SET version = 2")).await?;
    is(&findings(&backend).await?, "tables", Severity::Fault)?;
    backend.migrate().await?;
    is(&findings(&backend).await?, "tables", Severity::Fine)?;

    // rows that nobody cleared away
    let digits = "(SELECT 0 n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL \
        SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 \
        UNION ALL SELECT 9 UNION ALL SELECT 10)";
    let rows = format!(
        "INSERT INTO {prefix}dedupe (id, owner, token, done, since, expires) \
         SELECT UNHEX(SHA2(CONCAT_WS(',', a.n, b.n, c.n, d.n), 256)), '', 1, 1, 1, 1 \
         FROM {digits} a, {digits} b, {digits} c, {digits} d"
    );
    conn.query_drop(rows).await?;
    is(&findings(&backend).await?, "expired rows", Severity::Warning)?;
    backend.housekeep().await?;
    is(&findings(&backend).await?, "expired rows", Severity::Fine)
}
