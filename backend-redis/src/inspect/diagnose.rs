//! Looks for what is wrong or risky with the server, the way to it and its settings.

use std::time::Duration;

use fred::types::config::Server;
use leasehold_core::{Error, Finding, Result};

use super::node::{Node, Way};
use super::rights::cause;
use crate::check::{OLDEST, SANE};
use crate::conn::Conn;

/// The newest versions that the suite runs on.
const TESTED: [(&str, u64); 2] = [("Redis", 8), ("Valkey", 8)];
/// Clocks that are so far apart are not kept in step.
const APART_MILLIS: u64 = 2_000;

impl Conn {
    /// Everything, in the order in which one puts it right.
    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>> {
        let nodes = self.nodes()?;
        let (mut findings, mut failed) = (Vec::new(), None);
        let mut reached = 0;
        for node in nodes {
            let at = node.as_ref().map(|server| format!("{server}: ")).unwrap_or_default();
            match self.way(node.clone()).await {
                Ok(way) => {
                    reached += 1;
                    let found = self.diagnose_node(node, way).await;
                    findings.extend(found.into_iter().map(|finding| of_server(&at, finding)));
                }
                Err(error) => {
                    findings.push(unreached(&at, &error));
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if reached == 0 => Err(error),
            _ => Ok(findings),
        }
    }

    async fn diagnose_node(&self, node: Option<Server>, way: Way) -> Vec<Finding> {
        let mut findings = Vec::new();
        let rights = self.rights(node.clone()).await;
        match self.info(node.clone(), "").await {
            Ok(about) => {
                findings.extend([version(&about), role(&about)]);
                findings.extend(self.cluster(node.clone()).await);
                findings.extend(rights);
                let about = match self.settings(node).await {
                    Ok(settings) => about.with_settings(settings),
                    Err(_) => about, // the missing right has been told
                };
                let replicas = u64::from(self.settings.replicas);
                findings.extend([
                    eviction(&about),
                    memory(&about),
                    persistence(&about),
                    replication(&about, replicas),
                    least_replicas(&about),
                    connections(&about),
                ]);
                if self.settings.keyspace_events {
                    findings.push(events(&about));
                }
            }
            Err(error) => {
                findings.extend(rights);
                let found = format!("INFO cannot be asked: {error}{}", cause(&error));
                let advice = "let the user run INFO: version, role, eviction, persistence and \
                    replication were not looked at";
                findings.push(Finding::warning("server", found, advice));
            }
        }
        findings.extend([clock(way), self.latency(way)]);
        findings
    }

    async fn cluster(&self, node: Option<Server>) -> Option<Finding> {
        const TOPIC: &str = "cluster";
        let advice = "see CLUSTER NODES and CLUSTER SLOTS: bring back the nodes of the slots that \
            fail, or let their replicas take over (CLUSTER FAILOVER)";
        node.as_ref()?;
        let state = match self.info(node, "INFO").await {
            Ok(state) => state,
            Err(error) => {
                let found = format!("could not be asked: {error}{}", cause(&error));
                return Some(Finding::warning(TOPIC, found, advice));
            }
        };
        let found = format!(
            "state {}, {} of 16384 slots are served, by {} masters",
            state.said("cluster_state"),
            state.said("cluster_slots_ok"),
            state.said("cluster_size")
        );
        let sound =
            state.said("cluster_state") == "ok" && state.number("cluster_slots_ok") == 16_384;
        Some(if sound { Finding::fine(TOPIC, found) } else { Finding::fault(TOPIC, found, advice) })
    }

    fn latency(&self, way: Way) -> Finding {
        const TOPIC: &str = "latency";
        let Way { median, slowest, .. } = way;
        let found = format!("{median:.1?}, at worst {slowest:.1?}");
        let settings = &self.settings;
        let most = (settings.command_limit / 4)
            .min(settings.lock_ttl.min(settings.claim_ttl) / 10)
            .max(Duration::from_millis(20));
        if slowest <= most {
            return Finding::fine(TOPIC, found);
        }
        let advice = "see SLOWLOG GET and LATENCY DOCTOR, and the way to the server; or give \
            locks more time: lock_ttl, claim_ttl and the ttl of leases";
        Finding::warning(TOPIC, format!("{found}: renewals may come too late"), advice)
    }
}

/// A finding for a server that said nothing.
pub(crate) fn unreached(at: &str, error: &Error) -> Finding {
    let found = format!("{at}{error}{}", cause(error));
    let advice = "see that the server runs, that it can be reached from here, and that the user may \
        run TIME";
    Finding::fault("connection", found, advice)
}

/// Names the server in front.
pub(crate) fn of_server(at: &str, finding: Finding) -> Finding {
    let mut finding = finding;
    finding.found.insert_str(0, at);
    finding
}

fn version(about: &Node) -> Finding {
    const TOPIC: &str = "version";
    let valkey = about.said("valkey_version");
    let (server, version) = if valkey.is_empty() {
        (TESTED[0], about.said("redis_version"))
    } else {
        (TESTED[1], valkey)
    };
    let found = format!("{} {version}", server.0);
    let major: u64 = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    if major < u64::from(OLDEST) {
        let advice = format!("upgrade the server to {OLDEST}.0 or later");
        return Finding::fault(TOPIC, found, advice);
    }
    if major > server.1 {
        let advice =
            format!("tested are versions up to {}: run the conformance suite against it", server.1);
        return Finding::warning(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, found)
}

fn role(about: &Node) -> Finding {
    const TOPIC: &str = "role of the server";
    if about.said("role") == "slave" {
        let found = format!("a replica of {}: it takes no locks", about.said("master_host"));
        let advice = "connect to the primary, e.g. by redis-sentinel:// or redis-cluster://, or \
            promote it: REPLICAOF NO ONE";
        return Finding::fault(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, "a primary")
}

fn eviction(about: &Node) -> Finding {
    const TOPIC: &str = "maxmemory-policy";
    let policy = about.said("maxmemory_policy");
    if policy == "noeviction" {
        return Finding::fine(TOPIC, policy);
    }
    let advice = "CONFIG SET maxmemory-policy noeviction, and in the server's configuration; \
        use a server of its own for locks where a cache needs eviction";
    if about.number("maxmemory") == 0 {
        let found = format!("{policy}: nothing is evicted as long as maxmemory is 0");
        return Finding::warning(TOPIC, found, advice);
    }
    let found = format!(
        "{policy}: locks may be lost while they are held, and deliveries forgotten ({} keys were \
         evicted)",
        about.number("evicted_keys")
    );
    Finding::fault(TOPIC, found, advice)
}

fn memory(about: &Node) -> Finding {
    const TOPIC: &str = "memory";
    let used = about.number("used_memory");
    let (most, of) = match (about.number("maxmemory"), about.number("total_system_memory")) {
        (0, 0) => return Finding::fine(TOPIC, format!("{} in use", mib(used))),
        (0, system) => (system, "of the machine"),
        (most, _) => (most, "of maxmemory"),
    };
    let found = format!("{} of the {} {of} are in use", mib(used), mib(most));
    if used < most / 10 * 9 {
        return Finding::fine(TOPIC, found);
    }
    let advice = "raise maxmemory or free memory: without any, new locks and leases fail as \
        exhausted, and what is held can only be renewed and freed";
    if used < most {
        Finding::warning(TOPIC, found, advice)
    } else {
        Finding::fault(TOPIC, found, advice)
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / 1_048_576.0)
}

fn persistence(about: &Node) -> Finding {
    const TOPIC: &str = "persistence";
    let failed = ["aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"];
    if let Some(failed) = failed.into_iter().find(|name| about.said(name) == "err") {
        let advice = "see the server's log and the space on its disk: it may refuse writes \
            (MISCONF) until that is put right";
        return Finding::fault(TOPIC, format!("{failed} is err"), advice);
    }
    let advice = "CONFIG SET appendonly yes, and in the server's configuration";
    if about.number("aof_enabled") == 1 {
        return match about.setting("appendfsync") {
            Some("no") => {
                let found = "appendonly, but appendfsync no: a crash of the machine forgets what \
                    was not written yet, locks and deliveries included";
                Finding::warning(TOPIC, found, "CONFIG SET appendfsync everysec, or always")
            }
            Some("always") => Finding::fine(TOPIC, "appendonly, each write is on disk"),
            Some(often) => {
                let found = format!(
                    "appendonly, appendfsync {often}: a crash of the machine \
                    forgets up to about 2 s"
                );
                Finding::fine(TOPIC, found)
            }
            None => Finding::fine(TOPIC, "appendonly"),
        };
    }
    let (found, advice) = match about.setting("save") {
        Some("") => (
            "none: a restart forgets all locks, leases and deliveries, and gives them to others; \
             tokens rise all the same",
            advice,
        ),
        Some(_) => (
            "snapshots only: a restart forgets the locks, leases and deliveries since the last \
             one; tokens rise all the same",
            advice,
        ),
        None => (
            "no appendonly: a restart forgets what is in no snapshot; whether there are any could \
             not be asked",
            "let the user run CONFIG GET (+config|get), or CONFIG SET appendonly yes",
        ),
    };
    Finding::warning(TOPIC, found, advice)
}

fn replication(about: &Node, wanted: u64) -> Finding {
    const TOPIC: &str = "replication";
    let replicas = about.number("connected_slaves");
    let found = format!("{replicas} connected replicas, {wanted} are waited for");
    if wanted > replicas {
        let advice = "bring the replicas back, or lower wait_replicas: locks and leases cannot be \
            taken";
        return Finding::fault(TOPIC, found, advice);
    }
    let behind = (0..replicas).filter_map(|n| {
        let state = about.said(&format!("slave{n}"));
        let lag = state.split(',').find_map(|part| part.strip_prefix("lag="))?;
        lag.parse::<i64>().ok()
    });
    let behind = behind.max().unwrap_or(0);
    if behind > 10 {
        let advice = "see to the replica and the way to it: a failover would forget so much";
        return Finding::warning(TOPIC, format!("{found}; one is {behind} s behind"), advice);
    }
    if replicas > 0 && wanted == 0 {
        let found = format!("{found}: a failover may lose a lock that was acknowledged");
        return Finding::warning(TOPIC, found, "set wait_replicas(1) in the builder or URL");
    }
    Finding::fine(TOPIC, found)
}

fn least_replicas(about: &Node) -> Finding {
    const TOPIC: &str = "min-replicas-to-write";
    let replicas = about.number("connected_slaves");
    // INFO counts the good ones only where the setting is above 0
    let good = about.said("min_slaves_good_slaves").parse::<u64>().ok();
    let least = about.setting(TOPIC).and_then(|least| least.parse::<u64>().ok());
    match (least, good) {
        (Some(least), Some(good)) if good < least => {
            let found = format!("{least}, and {good} replicas are good: writes fail (NOREPLICAS)");
            let advice = "bring the replicas back, or CONFIG SET min-replicas-to-write to fewer";
            Finding::fault(TOPIC, found, advice)
        }
        (None, Some(0)) => {
            let advice = "bring the replicas back: writes fail (NOREPLICAS)";
            Finding::fault(TOPIC, "above 0, and no replica is good", advice)
        }
        (_, Some(good)) => Finding::fine(TOPIC, format!("set, and {good} replicas are good")),
        (_, None) if replicas > 0 => {
            let found = "0: a primary that is cut off from its replicas goes on giving locks, \
                which the others give as well after the failover";
            let advice = "CONFIG SET min-replicas-to-write 1, and in the server's configuration";
            Finding::warning(TOPIC, found, advice)
        }
        (_, None) => Finding::fine(TOPIC, "0, and there are no replicas"),
    }
}

fn connections(about: &Node) -> Finding {
    const TOPIC: &str = "connections";
    let (used, most) = (about.number("connected_clients"), about.number("maxclients"));
    let found = format!("{used} of {most} are in use");
    if most == 0 || used < most / 10 * 9 {
        return Finding::fine(TOPIC, found);
    }
    let advice = "CONFIG SET maxclients, or open fewer handles: each has one connection and one \
        that listens";
    Finding::warning(TOPIC, found, advice)
}

fn events(about: &Node) -> Finding {
    const TOPIC: &str = "notify-keyspace-events";
    let Some(set) = about.setting(TOPIC) else {
        let advice = "let the user run CONFIG GET (+config|get)";
        return Finding::warning(TOPIC, "could not be asked", advice);
    };
    let classes: &[char] = &['g', 'x', 'e', '$'];
    let has = |class: char| set.contains(class) || (set.contains('A') && classes.contains(&class));
    let missing: String = ['K'].iter().chain(classes).filter(|class| !has(**class)).collect();
    if missing.is_empty() {
        return Finding::fine(TOPIC, set);
    }
    let found = format!("{set:?} lacks {missing}: a lock that is deleted by hand is noticed late");
    let advice = "CONFIG SET notify-keyspace-events Kgxe$, and in the server's configuration";
    Finding::fault(TOPIC, found, advice)
}

fn clock(way: Way) -> Finding {
    const TOPIC: &str = "clock";
    let found = format!("{} ms from ours", way.apart);
    if way.clock < SANE {
        let advice = "set the server's clock: tokens are made of it";
        return Finding::fault(TOPIC, format!("{found}: it was never set"), advice);
    }
    if way.apart.unsigned_abs() > APART_MILLIS {
        let advice = "keep the clocks in step (NTP), those of primaries and replicas above all: \
            tokens rise across a failover only if they are. Ours decides nothing";
        return Finding::warning(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::Severity;

    #[test]
    fn versions_are_judged() {
        for (info, severity) in [
            (vec![("redis_version", "6.2.1")], Severity::Fault),
            (vec![("redis_version", "7.0.15")], Severity::Fine),
            (vec![("redis_version", "9.0.0")], Severity::Warning),
            (vec![("redis_version", "7.2.4"), ("valkey_version", "8.1.0")], Severity::Fine),
            (vec![("redis_version", "7.2.4"), ("valkey_version", "10.0.0")], Severity::Warning),
        ] {
            assert_eq!(version(&Node::saying(&info)).severity, severity, "{info:?}");
        }
    }

    #[test]
    fn memory_that_runs_out_is_found() {
        let at = |used: &str| {
            let info = [("used_memory", used), ("maxmemory", "1000"), ("total_system_memory", "9")];
            memory(&Node::saying(&info)).severity
        };
        assert_eq!(at("800"), Severity::Fine);
        assert_eq!(at("950"), Severity::Warning);
        assert_eq!(at("1000"), Severity::Fault);
    }

    #[test]
    fn a_clock_that_is_off_is_found() {
        let way = |clock, apart| {
            let time = Duration::from_millis(1);
            super::clock(Way { median: time, slowest: time, clock, apart }).severity
        };
        assert_eq!(way(SANE, 0), Severity::Fine);
        assert_eq!(way(SANE, -60_000), Severity::Warning);
        assert_eq!(way(SANE - 1, 0), Severity::Fault);
    }

    #[test]
    fn a_replica_that_lags_and_one_that_is_missing_are_found() {
        let lagging = [
            ("connected_slaves", "1"),
            ("slave0", "ip=127.0.0.1,port=1,state=online,offset=1,lag=30"),
        ];
        let lagging = Node::saying(&lagging);
        assert!(replication(&lagging, 1).found.contains("30 s behind"));
        assert_eq!(replication(&lagging, 2).severity, Severity::Fault);
        assert_eq!(replication(&Node::saying(&[]), 0).severity, Severity::Fine);
    }
}
