//! Planted faults are found.

use std::fs;

use leasehold_conformance::servers::{PgBouncer, Server};
use leasehold_core::{Backend, Finding, Inspect, Severity};
use leasehold_postgres::PostgresBackend;

use crate::env::{Env, key, namespace, run, until};

async fn findings(a: &PostgresBackend) -> Vec<Finding> {
    let findings = a.diagnose().await.unwrap();
    for finding in &findings {
        let fine = finding.severity == Severity::Fine;
        assert_eq!(finding.advice.is_empty(), fine, "{finding:?}");
        assert!(!finding.found.is_empty(), "{finding:?}");
    }
    findings
}

fn of<'a>(findings: &'a [Finding], topic: &str) -> Vec<&'a Finding> {
    findings.iter().filter(|finding| finding.topic == topic).collect()
}

/// The one finding of a topic.
fn the<'a>(findings: &'a [Finding], topic: &str) -> &'a Finding {
    let found = of(findings, topic);
    assert_eq!(found.len(), 1, "{topic}: {findings:#?}");
    found[0]
}

/// A new role that may log in; its URL.
async fn role(env: &Env) -> (String, String) {
    let role = format!("doctor_{}", rand::random::<u32>());
    run(&mut env.admin().await, format!("CREATE ROLE {role} LOGIN")).await;
    let url = env.url().replace("//postgres@", &format!("//{role}@"));
    (role, url)
}

/// Nothing is a fault on the server of the tests, and each topic is told.
pub(crate) async fn a_good_server_has_no_fault(env: &Env) {
    let ns = namespace("good");
    let found = findings(&env.handle(&ns).await).await;
    let faults: Vec<_> = found.iter().filter(|one| one.severity == Severity::Fault).collect();
    assert!(faults.is_empty(), "{faults:#?}");
    for topic in [
        "version",
        "role of the server",
        "pooler",
        "tables",
        "privileges",
        "inspection",
        "idle_session_timeout",
        "tcp_keepalives",
        "durability",
        "replication",
        "lock table",
        "connections",
        "expired rows",
    ] {
        the(&found, topic);
    }
    for topic in ["version", "pooler", "tables", "privileges", "idle_session_timeout"] {
        assert_eq!(the(&found, topic).severity, Severity::Fine, "{topic}: {found:#?}");
    }
}

pub(crate) async fn a_pooler_in_transaction_mode_is_found(env: &Env) {
    let server = env.server.clone();
    let pooler = tokio::task::spawn_blocking(move || PgBouncer::start(&server)).await;
    let pooler = pooler.unwrap().unwrap();
    let ns = namespace("pooled");
    let a = env.builder(&ns).connect(&pooler.url()).await.unwrap();
    let found = findings(&a).await;
    let pooled = the(&found, "pooler");
    assert_eq!(pooled.severity, Severity::Fault);
    assert!(pooled.advice.contains("session_options"), "{pooled:?}");
    // what it advises helps
    let a = env.builder(&ns).session_options(env.options()).connect(&pooler.url()).await.unwrap();
    assert_eq!(the(&findings(&a).await, "pooler").severity, Severity::Fine);
}

pub(crate) async fn settings_of_the_role_are_found(env: &Env) {
    let ns = namespace("settings");
    let (role, url) = role(env).await;
    let planted = [
        ("idle_session_timeout", "'1s'", Severity::Warning),
        ("idle_in_transaction_session_timeout", "'2s'", Severity::Warning),
        ("statement_timeout", "'1500ms'", Severity::Warning),
        ("default_transaction_read_only", "on", Severity::Fault),
    ];
    let mut admin = env.admin().await;
    for (setting, value, _) in planted {
        run(&mut admin, format!("ALTER ROLE {role} SET {setting} = {value}")).await;
    }
    let found = findings(&env.builder(&ns).connect(&url).await.unwrap()).await;
    for (setting, _, severity) in planted {
        let finding = the(&found, setting);
        assert_eq!(finding.severity, severity, "{finding:?}");
        assert!(finding.advice.contains(&format!("ALTER ROLE {role} SET")), "{finding:?}");
    }
}

/// The advice, carried out, is all that is needed.
pub(crate) async fn missing_grants_are_found(env: &Env) {
    let ns = namespace("grants");
    let (role, url) = role(env).await;
    let mut admin = env.admin().await;
    let granted = format!(
        "GRANT USAGE ON SCHEMA leasehold TO {role}; GRANT SELECT, INSERT ON leasehold.lease TO \
         {role}; GRANT SELECT ON leasehold.version TO {role}"
    );
    run(&mut admin, granted).await;
    let a = env.builder(&ns).connect(&url).await.unwrap();
    let found = findings(&a).await;
    let missing = of(&found, "privileges");
    assert!(missing.iter().all(|one| one.severity == Severity::Fault), "{missing:#?}");
    // two of the lease's, four of the dedupe's and the sequence
    assert_eq!(missing.len(), 7, "{missing:#?}");
    for finding in missing {
        run(&mut admin, finding.advice.clone()).await;
    }
    assert_eq!(the(&findings(&a).await, "privileges").severity, Severity::Fine);

    // without any grant, the schema's comes first
    let (_, url) = self::role(env).await;
    let a = env.builder(&ns).connect(&url).await.unwrap();
    let found = findings(&a).await;
    assert_eq!(the(&found, "tables").severity, Severity::Fault);
    assert_eq!(of(&found, "privileges").len(), 11, "{found:#?}");
    assert!(the(&found, "tables").advice.contains("GRANT USAGE ON SCHEMA"), "{found:#?}");
}

pub(crate) async fn missing_and_old_tables_are_found(env: &Env) {
    let schema = format!("doctor \"{}'", rand::random::<u32>());
    let a = PostgresBackend::builder().schema(&schema).connect(&env.url()).await.unwrap();
    let found = findings(&a).await;
    let tables = the(&found, "tables");
    assert_eq!((tables.severity, tables.found.as_str()), (Severity::Fault, "missing"));
    assert!(tables.advice.contains("run migrate"), "{tables:?}");
    a.migrate().await.unwrap();
    assert_eq!(the(&findings(&a).await, "tables").severity, Severity::Fine);
    let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
    let mut admin = env.admin().await;
    run(&mut admin, format!("UPDATE {quoted}.version SET version = 1")).await;
    assert_eq!(the(&findings(&a).await, "tables").severity, Severity::Fault);
    a.migrate().await.unwrap();

    // rows that nobody cleared away, and those that were deleted
    let rows = format!(
        "INSERT INTO {quoted}.dedupe (id, namespace, key, owner, done, since, expires_at) \
         SELECT sha256(n::text::bytea), '', n::text::bytea, '', true, now(), now() - interval '1s' \
         FROM generate_series(1, 10001) n"
    );
    run(&mut admin, rows).await;
    let expired = findings(&a).await;
    assert_eq!(the(&expired, "expired rows").severity, Severity::Warning);
    run(&mut admin, format!("ALTER TABLE {quoted}.dedupe SET (autovacuum_enabled = off)")).await;
    assert_eq!(a.housekeep().await.unwrap().dedupe, 10_001);
    assert_eq!(the(&findings(&a).await, "expired rows").severity, Severity::Fine);
    until("the dead rows are counted", || async {
        let found = findings(&a).await;
        let dead = of(&found, "dead rows");
        dead.iter().any(|one| one.severity == Severity::Warning && one.found.contains("dedupe"))
    })
    .await;
    a.close().await.unwrap();
    run(&mut admin, format!("DROP SCHEMA {quoted} CASCADE")).await;
}

/// A standby, and a lock table that is nearly full.
pub(crate) async fn a_standby_and_a_full_lock_table_are_found(env: &Env) {
    let kind = env.server.kind();
    let server = tokio::task::spawn_blocking(move || Server::start(kind)).await.unwrap().unwrap();
    let own = Env::over(server.clone());
    let a = own.handle("full").await;
    assert_eq!(the(&findings(&a).await, "lock table").severity, Severity::Fine);
    let mut hog = own.admin().await;
    let room = "current_setting('max_locks_per_transaction')::int8 \
        * current_setting('max_connections')::int8";
    let fill = |percent: u32| {
        format!(
            "SELECT count(pg_advisory_lock(n)) FROM generate_series(1, {room} * {percent} / 100) n"
        )
    };
    run(&mut hog, fill(60)).await;
    assert_eq!(the(&findings(&a).await, "lock table").severity, Severity::Warning);
    run(&mut hog, fill(95)).await;
    assert_eq!(the(&findings(&a).await, "lock table").severity, Severity::Fault);
    drop(hog);

    let standby = tokio::task::spawn_blocking(move || {
        server.stop().unwrap();
        fs::write(server.data_dir().unwrap().join("standby.signal"), "").unwrap();
        server.restart().unwrap();
        server
    });
    let standby = standby.await.unwrap();
    let pool = sqlx::PgPool::connect_lazy(&standby.url()).unwrap();
    let b = PostgresBackend::builder().build(pool).unwrap();
    let found = findings(&b).await;
    assert_eq!(the(&found, "role of the server").severity, Severity::Fault);
    assert!(b.force_release(leasehold_core::Kind::Lock, &key("x")).await.is_err());
}
