//! What is to be said of the server's settings, as a connection of the pool has them.

use std::collections::HashMap;

use leasehold_core::Finding;

/// Variables that are looked at.
pub(super) const NAMES: &[&str] = &[
    "binlog_format",
    "idle_transaction_timeout",
    "idle_write_transaction_timeout",
    "innodb_flush_log_at_trx_commit",
    "innodb_lock_wait_timeout",
    "log_bin",
    "max_connections",
    "max_execution_time",
    "max_statement_time",
    "max_user_connections",
    "read_only",
    "rpl_semi_sync_master_enabled",
    "rpl_semi_sync_source_enabled",
    "super_read_only",
    "sync_binlog",
    "transaction_read_only",
    "tx_read_only",
    "wait_timeout",
];
/// Counters that are looked at.
pub(super) const STATUS: &[&str] = &["Threads_connected", "Slaves_connected"];

/// A client of the pool that pauses for so many seconds is nothing out of the ordinary.
const PAUSE: f64 = 60.0;
/// A statement takes so many seconds without being stuck.
const STATEMENT: f64 = 5.0;
/// One that waits for a row for so many seconds is stuck.
const ROW_WAIT: f64 = 300.0;

/// A busy handle has so many connections beside its pool.
const HANDLE: f64 = 25.0;

/// The variables and counters by their names.
#[derive(Clone, Debug)]
pub(super) struct Settings(pub(super) HashMap<String, String>);

impl Settings {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        self.text(name).is_some_and(|value| !matches!(value, "OFF" | "0" | ""))
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.text(name)?.parse().ok()
    }

    /// Whether it takes writes at all.
    pub(super) fn primary(&self) -> Finding {
        const TOPIC: &str = "read_only";
        if self.is_on(TOPIC) || self.is_on("super_read_only") {
            let found = "on: a replica, or a primary that was demoted, whose locks exclude nobody \
                elsewhere";
            let advice = "connect to the primary, or make this one it: SET GLOBAL read_only = 0";
            return Finding::fault(TOPIC, found, advice);
        }
        Finding::fine(TOPIC, "off: a primary")
    }

    /// All but those.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = vec![self.read_only_transactions(), self.idle()];
        for topic in ["idle_transaction_timeout", "idle_write_transaction_timeout"] {
            findings.extend(self.idle_transaction(topic));
        }
        findings.extend(self.statement("max_execution_time", 1_000.0));
        findings.extend(self.statement("max_statement_time", 1.0));
        findings.push(self.row_wait());
        findings.push(self.durability());
        findings.push(self.binlog());
        findings.push(self.connections());
        findings
    }

    fn read_only_transactions(&self) -> Finding {
        const TOPIC: &str = "transaction_read_only";
        if self.is_on(TOPIC) || self.is_on("tx_read_only") {
            let found = "on: leases, claims and dedupe fail";
            let advice = "SET GLOBAL transaction_read_only = 0 (tx_read_only on MariaDB before \
                11.1), and in what the pool sends first, and connect anew";
            return Finding::fault(TOPIC, found, advice);
        }
        Finding::fine(TOPIC, "off")
    }

    /// The sessions of named locks have a limit of their own, and none of ours is interactive.
    fn idle(&self) -> Finding {
        const TOPIC: &str = "wait_timeout";
        let seconds = self.number(TOPIC).unwrap_or_default();
        let found = format!(
            "{seconds} s: a connection of the pool that is idle for longer is ended, with the claim \
             that it is in"
        );
        if seconds >= PAUSE {
            return Finding::fine(TOPIC, found);
        }
        let advice = format!(
            "SET GLOBAL {TOPIC} = 28800, and in the server's options; at least above the longest \
             pause within a claim"
        );
        Finding::warning(TOPIC, found, advice)
    }

    /// MariaDB only.
    fn idle_transaction(&self, topic: &'static str) -> Option<Finding> {
        let seconds = self.number(topic)?;
        if seconds == 0.0 {
            return Some(Finding::fine(topic, "off: a claim lasts for as long as its client"));
        }
        let found = format!("{seconds} s: a claim whose client pauses for longer is lost");
        if seconds >= PAUSE {
            return Some(Finding::fine(topic, found));
        }
        let advice = format!("SET GLOBAL {topic} = 300: above the longest pause within a claim");
        Some(Finding::warning(topic, found, advice))
    }

    fn statement(&self, topic: &'static str, unit: f64) -> Option<Finding> {
        let seconds = self.number(topic)? / unit;
        if seconds == 0.0 {
            return Some(Finding::fine(topic, "off"));
        }
        let found = format!(
            "{seconds} s: what takes longer in the pool is cut, statements within claims included"
        );
        if seconds >= STATEMENT {
            return Some(Finding::fine(topic, found));
        }
        Some(Finding::warning(topic, found, format!("SET GLOBAL {topic} = 0, or a larger number")))
    }

    fn row_wait(&self) -> Finding {
        const TOPIC: &str = "innodb_lock_wait_timeout";
        let seconds = self.number(TOPIC).unwrap_or_default();
        let found = format!(
            "{seconds} s: a statement within a claim waits so long for a row that others have locked"
        );
        if (1.0..=ROW_WAIT).contains(&seconds) {
            return Finding::fine(TOPIC, found);
        }
        Finding::warning(TOPIC, found, format!("SET GLOBAL {TOPIC} = 50"))
    }

    fn durability(&self) -> Finding {
        const TOPIC: &str = "durability";
        let mut lacks = Vec::new();
        if self.text("innodb_flush_log_at_trx_commit") != Some("1") {
            lacks.push("innodb_flush_log_at_trx_commit");
        }
        if self.is_on("log_bin") && self.text("sync_binlog") != Some("1") {
            lacks.push("sync_binlog");
        }
        if lacks.is_empty() {
            return Finding::fine(TOPIC, "what is committed is on disk");
        }
        let found = format!(
            "{} not 1: a crash may lose the last second of leases, dedupe entries and tokens, so \
             that two have a lease and a token is given twice",
            lacks.iter().map(|name| format!("{name} is")).collect::<Vec<_>>().join(", ")
        );
        let set: Vec<String> = lacks.iter().map(|name| format!("SET GLOBAL {name} = 1")).collect();
        let advice = format!("{}, and in the server's options", set.join("; "));
        Finding::warning(TOPIC, found, advice)
    }

    fn binlog(&self) -> Finding {
        const TOPIC: &str = "binlog_format";
        let format = self.text(TOPIC).unwrap_or("ROW");
        if !self.is_on("log_bin") {
            return Finding::fine(TOPIC, "there is no binary log");
        }
        if format == "STATEMENT" {
            let found = "STATEMENT: the server refuses to write at READ COMMITTED, at which leases, \
                claims and dedupe write";
            let advice = "SET GLOBAL binlog_format = ROW (or MIXED), and connect anew";
            return Finding::fault(TOPIC, found, advice);
        }
        Finding::fine(TOPIC, format)
    }

    fn connections(&self) -> Finding {
        const TOPIC: &str = "connections";
        let used = self.number("Threads_connected").unwrap_or_default();
        let most = self.number("max_connections").unwrap_or_default();
        let of_user = self.number("max_user_connections").filter(|most| *most > 0.0);
        let mut found = format!("{used} of {most} are in use");
        if let Some(of_user) = of_user {
            found = format!("{found}; a user may have {of_user}");
        }
        let few = of_user.is_some_and(|of_user| of_user < HANDLE);
        if !few && most - used >= (most / 10.0).max(HANDLE) {
            return Finding::fine(TOPIC, found);
        }
        let advice = "a handle opens up to 12 for leases and dedupe, 5 to wake waiters, 2 or more for \
            named locks and 16 that wait for them, beside its pool: lower the sizes of the pools \
            (own_connections, max_waiters), or raise max_connections and max_user_connections";
        Finding::warning(TOPIC, found, advice)
    }

    /// `replicas`: how many are known to read the log.
    pub(super) fn replication(&self, replicas: usize) -> Finding {
        const TOPIC: &str = "replication";
        let semi = self.is_on("rpl_semi_sync_source_enabled")
            || self.is_on("rpl_semi_sync_master_enabled");
        let counted = self.number("Slaves_connected").filter(|count| *count > 0.0);
        if replicas == 0 && counted.is_none() {
            let found = if self.is_on("log_bin") {
                "no replica is seen (which needs the privilege PROCESS)"
            } else {
                "there is no binary log, and so no replica"
            };
            return Finding::fine(TOPIC, found);
        }
        if semi {
            return Finding::fine(TOPIC, "semi-synchronous");
        }
        let found = "asynchronous: after a failover the last leases, dedupe entries and tokens may \
            be missing, so that two have a lease and a token is given twice";
        let advice = "turn on semi-synchronous replication, or fail over only to a replica that has \
            caught up";
        Finding::warning(TOPIC, found, advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::Severity;

    fn settings(all: &[(&str, &str)]) -> Settings {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Settings(all.iter().map(owned).collect())
    }

    #[test]
    fn replication_that_may_lose_tokens_is_told() {
        let log = ("log_bin", "ON");
        for (variables, replicas, severity) in [
            (vec![log], 0, Severity::Fine),
            (vec![log], 1, Severity::Warning),
            (vec![log, ("Slaves_connected", "1")], 0, Severity::Warning),
            (vec![log, ("rpl_semi_sync_source_enabled", "ON")], 1, Severity::Fine),
            (vec![log, ("rpl_semi_sync_master_enabled", "ON")], 2, Severity::Fine),
        ] {
            let finding = settings(&variables).replication(replicas);
            assert_eq!(finding.severity, severity, "{variables:?} {finding:?}");
        }
    }

    #[test]
    fn a_binary_log_of_statements_is_a_fault() {
        let format = ("binlog_format", "STATEMENT");
        assert_eq!(settings(&[format, ("log_bin", "1")]).binlog().severity, Severity::Fault);
        assert_eq!(settings(&[format, ("log_bin", "OFF")]).binlog().severity, Severity::Fine);
    }

    #[test]
    fn few_connections_are_told() {
        let connected = |used| ("Threads_connected", used);
        let most = ("max_connections", "100");
        for (variables, severity) in [
            (vec![most, connected("50")], Severity::Fine),
            (vec![most, connected("90")], Severity::Warning),
            (vec![most, connected("5"), ("max_user_connections", "10")], Severity::Warning),
            (vec![most, connected("5"), ("max_user_connections", "0")], Severity::Fine),
        ] {
            let finding = settings(&variables).connections();
            assert_eq!(finding.severity, severity, "{variables:?} {finding:?}");
        }
    }
}
