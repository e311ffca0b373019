//! Planted faults are found.

use std::time::Duration;

use leasehold_conformance::servers::redis::{cluster, sentinel};
use leasehold_core::{Finding, Inspect, Severity};
use leasehold_redis::{INSPECT_COMMANDS, LEAST_COMMANDS, RedisBackend};

use crate::lab::{Lab, blocking, until};
use crate::support::{Raw, kind};

async fn findings(handle: &RedisBackend) -> Vec<Finding> {
    let findings = handle.diagnose().await.unwrap();
    for finding in &findings {
        let fine = finding.severity == Severity::Fine;
        assert_eq!(finding.advice.is_empty(), fine, "{finding:?}");
        assert!(!finding.found.is_empty(), "{finding:?}");
    }
    findings
}

/// The one finding of a topic.
fn the<'a>(findings: &'a [Finding], topic: &str) -> &'a Finding {
    let mut found = findings.iter().filter(|finding| finding.topic == topic);
    let one = found.next().unwrap_or_else(|| panic!("{topic}: {findings:#?}"));
    assert_eq!(found.next(), None, "{topic}");
    one
}

/// How bad it is after a change of the settings.
async fn after(lab: &Lab, handle: &RedisBackend, set: [&str; 2], topic: &str) -> Finding {
    lab.ask(&["CONFIG", "SET", set[0], set[1]]).await;
    the(&findings(handle).await, topic).clone()
}

/// A server as it should be has no finding but fine ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_good_server_is_fine() {
    let lab = Lab::private(&["--appendonly", "yes", "--notify-keyspace-events", "KEA"]);
    let builder = lab.builder().keyspace_events(true);
    let handle = builder.connect(&lab.server.url()).await.unwrap();
    let found = findings(&handle).await;
    for topic in [
        "version",
        "role of the server",
        "privileges",
        "inspection",
        "maxmemory-policy",
        "persistence",
        "replication",
        "min-replicas-to-write",
        "connections",
        "notify-keyspace-events",
        "clock",
    ] {
        let one = the(&found, topic);
        assert_eq!(one.severity, Severity::Fine, "{one:?}");
    }
    // these depend on the machine, and on who else uses it
    for topic in ["memory", "latency"] {
        assert_ne!(the(&found, topic).severity, Severity::Fault, "{found:#?}");
    }
}

/// Eviction that is allowed, memory that is full, no persistence, events that are not sent.
#[tokio::test(flavor = "multi_thread")]
async fn planted_settings_are_found() {
    let lab = Lab::private(&["--maxmemory-policy", "volatile-ttl"]);
    let builder = lab.builder().allow_eviction(true).keyspace_events(true);
    let handle = builder.connect(&lab.server.url()).await.unwrap();
    let found = findings(&handle).await;
    let policy = the(&found, "maxmemory-policy");
    assert_eq!(policy.severity, Severity::Warning, "{policy:?}");
    let events = the(&found, "notify-keyspace-events");
    assert_eq!(events.severity, Severity::Fault);
    assert!(events.found.contains("lacks Kgxe$"), "{events:?}");
    let persistence = the(&found, "persistence");
    assert_eq!(persistence.severity, Severity::Warning);
    assert!(persistence.found.starts_with("none"), "{persistence:?}");

    let policy = after(&lab, &handle, ["maxmemory", "1gb"], "maxmemory-policy").await;
    assert_eq!(policy.severity, Severity::Fault);
    assert!(policy.advice.contains("maxmemory-policy noeviction"), "{policy:?}");
    let set = ["maxmemory-policy", "noeviction"];
    assert_eq!(after(&lab, &handle, set, "maxmemory-policy").await.severity, Severity::Fine);
    let full = after(&lab, &handle, ["maxmemory", "1000"], "memory").await;
    assert_eq!(full.severity, Severity::Fault, "{full:?}");
    lab.ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
    let snapshots = after(&lab, &handle, ["save", "3600 1"], "persistence").await;
    assert!(snapshots.found.starts_with("snapshots only"), "{snapshots:?}");
    let logged = after(&lab, &handle, ["appendonly", "yes"], "persistence").await;
    assert_eq!(logged.severity, Severity::Fine, "{logged:?}");
    let risky = after(&lab, &handle, ["appendfsync", "no"], "persistence").await;
    assert_eq!(risky.severity, Severity::Warning, "{risky:?}");
    let few = after(&lab, &handle, ["min-replicas-to-write", "1"], "min-replicas-to-write").await;
    assert_eq!(few.severity, Severity::Fault, "{few:?}");
    let set = ["notify-keyspace-events", "KA"];
    assert_eq!(after(&lab, &handle, set, "notify-keyspace-events").await.severity, Severity::Fine);
}

/// Each command that the user lacks is named, with what gives it.
#[tokio::test(flavor = "multi_thread")]
async fn missing_permissions_are_found() {
    let lab = Lab::private(&["--appendonly", "yes"]);
    let (keys, channels) =
        (format!("~leasehold:{}:*", lab.namespace), format!("&leasehold:{}:*", lab.namespace));
    let all = LEAST_COMMANDS.iter().chain(INSPECT_COMMANDS);
    let all: Vec<String> = all.map(|command| format!("+{command}")).collect();
    let base = ["ACL", "SETUSER", "doctor", "reset", "on", ">secret", &keys, &channels];
    let base: Vec<&str> = base.into_iter().chain(all.iter().map(String::as_str)).collect();
    lab.ask(&base).await;
    let url = format!("redis://doctor:secret@127.0.0.1:{}", lab.server.port());
    let handle = lab.builder().connect(&url).await.unwrap();
    let found = findings(&handle).await;
    assert_eq!(the(&found, "privileges").severity, Severity::Fine, "{found:#?}");
    assert_eq!(the(&found, "inspection").severity, Severity::Fine, "{found:#?}");
    for command in LEAST_COMMANDS.iter().chain(INSPECT_COMMANDS) {
        // without these nothing else can be asked
        if ["eval", "time"].contains(command) {
            continue;
        }
        lab.ask(&["ACL", "SETUSER", "doctor", &format!("-{command}")]).await;
        let found = findings(&handle).await;
        let optional = INSPECT_COMMANDS.contains(command);
        let one = the(&found, if optional { "inspection" } else { "privileges" });
        assert_ne!(one.severity, Severity::Fine, "{command}: {one:?}");
        assert!(one.found.contains(command), "{one:?}");
        let fix: Vec<&str> = one.advice.split(' ').collect();
        assert!(!optional || one.severity == Severity::Warning, "{one:?}");
        // the advice is the command that puts it right
        lab.ask(&fix).await;
        let found = findings(&handle).await;
        assert_eq!(the(&found, "privileges").severity, Severity::Fine, "{command}: {found:#?}");
        assert_eq!(the(&found, "inspection").severity, Severity::Fine, "{command}: {found:#?}");
    }
    lab.ask(&["ACL", "SETUSER", "doctor", "resetkeys", "~other:*"]).await;
    let found = findings(&handle).await;
    let one = the(&found, "privileges");
    assert!(one.found.contains("set") && one.advice.contains(&keys), "{one:?}");
    lab.ask(&["ACL", "SETUSER", "doctor", "-eval"]).await;
    let found = findings(&handle).await;
    assert!(the(&found, "privileges").found.starts_with("no script can be run"), "{found:#?}");
    lab.ask(&["ACL", "SETUSER", "doctor", "-time"]).await;
    assert!(handle.diagnose().await.is_err(), "nothing can be asked");
}

/// Replicas that a failover would lose locks with, that are waited for in vain, and a primary
/// that becomes a replica.
#[tokio::test(flavor = "multi_thread")]
async fn replication_is_looked_at() {
    let servers = blocking(|| sentinel(kind())).unwrap();
    let builder = RedisBackend::builder().command_limit(Duration::from_secs(2));
    let url = format!("redis://127.0.0.1:{}", servers.primary.port());
    let none = builder.clone().connect(&url).await.unwrap();
    let found = findings(&none).await;
    let replication = the(&found, "replication");
    assert_eq!(replication.severity, Severity::Warning, "{replication:?}");
    assert_eq!(the(&found, "min-replicas-to-write").severity, Severity::Warning, "{found:#?}");
    let one = builder.clone().wait_replicas(1).connect(&url).await.unwrap();
    assert_eq!(the(&findings(&one).await, "replication").severity, Severity::Fine);
    let two = builder.wait_replicas(2).connect(&url).await.unwrap();
    assert_eq!(the(&findings(&two).await, "replication").severity, Severity::Fault);
    let mut raw = Raw::open(servers.primary.port()).await.unwrap();
    let port = servers.replica.port().to_string();
    raw.tell(&["REPLICAOF", "127.0.0.1", &port]).await.unwrap();
    until("it is a replica", || async {
        let found = none.diagnose().await.unwrap_or_default();
        let role = found.iter().find(|one| one.topic == "role of the server");
        role.is_some_and(|role| role.severity == Severity::Fault)
    })
    .await;
}

/// Each master of a cluster is looked at; slots that nobody serves are found.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_looked_at() {
    let cluster = blocking(|| cluster(kind())).unwrap();
    let builder = RedisBackend::builder().command_limit(Duration::from_secs(2));
    let handle = builder.connect(&cluster.url()).await.unwrap();
    let found = findings(&handle).await;
    for topic in ["version", "cluster", "privileges", "clock"] {
        let of: Vec<_> = found.iter().filter(|one| one.topic == topic).collect();
        assert_eq!(of.len(), 3, "{topic}: {found:#?}");
        assert!(of.iter().all(|one| one.severity == Severity::Fine), "{topic}: {found:#?}");
        for node in cluster.nodes() {
            let at = format!("127.0.0.1:{}: ", node.port());
            assert!(of.iter().any(|one| one.found.starts_with(&at)), "{at} {of:?}");
        }
    }
    let mut raw = Raw::open(cluster.nodes()[0].port()).await.unwrap();
    raw.tell(&["CLUSTER", "DELSLOTS", "1"]).await.unwrap();
    until("the fault is found", || async {
        let found = handle.diagnose().await.unwrap();
        found.iter().any(|one| one.topic == "cluster" && one.severity == Severity::Fault)
    })
    .await;
}
