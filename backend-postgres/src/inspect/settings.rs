//! What is to be said of the server's settings, as a session of the pool has them.

use std::collections::HashMap;
use std::time::Duration;

use leasehold_core::Finding;

/// Those that are looked at.
pub(super) const NAMES: [&str; 16] = [
    "autovacuum",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "lock_timeout",
    "statement_timeout",
    "synchronous_commit",
    "synchronous_standby_names",
    "tcp_keepalives_count",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_user_timeout",
    "track_counts",
    "transaction_timeout",
];

/// The settings by their names, in the server's units (times in ms, those of keepalives in s).
#[derive(Clone, Debug)]
pub(super) struct Settings(pub(super) HashMap<String, String>);

/// A claim's client that pauses for so long is nothing out of the ordinary.
const PAUSE: Duration = Duration::from_secs(60);
/// A statement waits for so long without being stuck.
const STATEMENT: Duration = Duration::from_secs(5);
/// A host that vanished is noticed soon enough.
const NOTICED: Duration = Duration::from_secs(300);

impl Settings {
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn is_off(&self, name: &str) -> bool {
        self.text(name) == "off"
    }

    /// A number; 0, which mostly means no limit, for a setting that this version lacks.
    fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or(0)
    }

    fn millis(&self, name: &str) -> Duration {
        Duration::from_millis(self.number(name))
    }

    /// All findings; `role` is quoted.
    pub(super) fn findings(&self, role: &str) -> Vec<Finding> {
        vec![
            self.read_only(role),
            self.idle_session(role),
            self.idle_in_transaction(role),
            self.statement("statement_timeout", STATEMENT, role),
            self.statement("transaction_timeout", PAUSE, role),
            self.lock(),
            self.keepalives(),
            self.durability(role),
            self.vacuum(),
        ]
    }

    fn read_only(&self, role: &str) -> Finding {
        const TOPIC: &str = "default_transaction_read_only";
        if self.text(TOPIC) == "on" {
            let advice = format!("ALTER ROLE {role} SET {TOPIC} = off, and connect anew");
            return Finding::fault(TOPIC, "on: leases, claims and dedupe fail", advice);
        }
        Finding::fine(TOPIC, "off")
    }

    fn idle_session(&self, role: &str) -> Finding {
        const TOPIC: &str = "idle_session_timeout";
        let limit = self.millis(TOPIC);
        if limit.is_zero() {
            return Finding::fine(TOPIC, "off");
        }
        let found = format!(
            "{limit:?}: the server ends idle connections of the pool; sessions of named locks turn \
             it off for themselves, unless a pooler in between ends theirs"
        );
        Finding::warning(TOPIC, found, format!("ALTER ROLE {role} SET {TOPIC} = 0"))
    }

    fn idle_in_transaction(&self, role: &str) -> Finding {
        const TOPIC: &str = "idle_in_transaction_session_timeout";
        let limit = self.millis(TOPIC);
        if limit.is_zero() {
            return Finding::fine(TOPIC, "off: a claim lasts for as long as its client");
        }
        let found = format!("{limit:?}: a claim whose client pauses for longer is ended, and lost");
        if limit >= PAUSE {
            return Finding::fine(TOPIC, found);
        }
        let advice = format!(
            "set it above the longest pause within a claim: ALTER ROLE {role} SET {TOPIC} = '5min'"
        );
        Finding::warning(TOPIC, found, advice)
    }

    fn statement(&self, topic: &'static str, least: Duration, role: &str) -> Finding {
        let limit = self.millis(topic);
        if limit.is_zero() {
            return Finding::fine(topic, "off");
        }
        let found = format!("{limit:?}: what takes longer in the pool is ended, claims included");
        if limit >= least {
            return Finding::fine(topic, found);
        }
        Finding::warning(topic, found, format!("ALTER ROLE {role} SET {topic} = '{least:?}'"))
    }

    fn lock(&self) -> Finding {
        const TOPIC: &str = "lock_timeout";
        let limit = self.millis(TOPIC);
        let own = "leasehold's statements set one of their own";
        match limit.is_zero() {
            true => Finding::fine(TOPIC, format!("off; {own}")),
            false => Finding::fine(TOPIC, format!("{limit:?}; {own}")),
        }
    }

    fn keepalives(&self) -> Finding {
        const TOPIC: &str = "tcp_keepalives";
        let seconds = |name| Duration::from_secs(self.number(name));
        let idle = seconds("tcp_keepalives_idle");
        if idle.is_zero() {
            return Finding::fine(TOPIC, "a local socket, which needs none");
        }
        let tries = u32::try_from(self.number("tcp_keepalives_count")).unwrap_or(u32::MAX);
        let answers = match self.millis("tcp_user_timeout") {
            Duration::ZERO => seconds("tcp_keepalives_interval").saturating_mul(tries),
            limit => limit,
        };
        let noticed = idle.saturating_add(answers);
        let found = format!(
            "a claim whose client's host vanishes is held for up to {noticed:?} (named locks: 25s)"
        );
        if noticed <= NOTICED {
            return Finding::fine(TOPIC, found);
        }
        let advice = "ALTER SYSTEM SET tcp_keepalives_idle = 60; ALTER SYSTEM SET \
            tcp_keepalives_interval = 10; ALTER SYSTEM SET tcp_keepalives_count = 6; SELECT \
            pg_reload_conf()";
        Finding::warning(TOPIC, found, advice)
    }

    fn durability(&self, role: &str) -> Finding {
        const TOPIC: &str = "durability";
        let off = ["fsync", "full_page_writes"].into_iter().find(|name| self.is_off(name));
        if let Some(name) = off {
            let found = format!(
                "{name} is off: after a crash of the machine leases can have two holders, and \
                 tokens can be given out again"
            );
            let advice = format!("ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()");
            return Finding::warning(TOPIC, found, advice);
        }
        if self.is_off("synchronous_commit") {
            let found = "synchronous_commit is off: leasehold turns it on for its own \
                transactions, but a crash loses your own last ones";
            let advice = format!("ALTER ROLE {role} SET synchronous_commit = on");
            return Finding::warning(TOPIC, found, advice);
        }
        Finding::fine(TOPIC, "commits are on disk when they are answered")
    }

    fn vacuum(&self) -> Finding {
        const TOPIC: &str = "autovacuum";
        let off = [TOPIC, "track_counts"].into_iter().find(|name| self.is_off(name));
        match off {
            Some(name) => {
                let found = format!("{name} is off: renewals leave rows that nobody clears away");
                let advice = format!("ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()");
                Finding::warning(TOPIC, found, advice)
            }
            None => Finding::fine(TOPIC, "on"),
        }
    }

    /// Standbys that were found attached.
    pub(super) fn replication(&self, standbys: i64) -> Finding {
        const TOPIC: &str = "replication";
        if standbys == 0 {
            return Finding::fine(TOPIC, "no standby is attached");
        }
        let names = self.text("synchronous_standby_names");
        let commit = self.text("synchronous_commit");
        let advice = "where failing over must lose nothing: ALTER SYSTEM SET \
            synchronous_standby_names = 'ANY 1 (*)', and synchronous_commit = on";
        if names.is_empty() {
            let found = format!(
                "{standbys} standbys, none of them synchronous: a failover can lose leases, \
                 dedupe entries and tokens that were acknowledged"
            );
            return Finding::warning(TOPIC, found, advice);
        }
        if commit == "local" {
            let found = "synchronous_commit is local: commits don't wait for the synchronous \
                standbys, and a failover can lose what was acknowledged";
            return Finding::warning(TOPIC, found, advice);
        }
        Finding::fine(TOPIC, format!("{standbys} standbys; synchronous: {names}"))
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::Severity;

    use super::*;

    fn settings(values: &[(&str, &str)]) -> Settings {
        let values = values.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        Settings(values.collect())
    }

    fn bad(values: &[(&str, &str)]) -> Vec<(&'static str, Severity)> {
        let findings = settings(values).findings("\"me\"");
        for finding in &findings {
            let fine = finding.severity == Severity::Fine;
            assert_eq!(finding.advice.is_empty(), fine, "{finding:?}");
        }
        let bad = findings.into_iter().filter(|finding| finding.severity > Severity::Fine);
        bad.map(|finding| (finding.topic, finding.severity)).collect()
    }

    #[test]
    fn each_setting_that_is_off_is_found_alone() {
        let warned = |topic| vec![(topic, Severity::Warning)];
        assert_eq!(bad(&[]), []);
        assert_eq!(
            bad(&[("default_transaction_read_only", "on")]),
            [("default_transaction_read_only", Severity::Fault)]
        );
        for (setting, poor, good, topic) in [
            ("idle_session_timeout", "1", "0", "idle_session_timeout"),
            (
                "idle_in_transaction_session_timeout",
                "59999",
                "60000",
                "idle_in_transaction_session_timeout",
            ),
            ("statement_timeout", "4999", "5000", "statement_timeout"),
            ("transaction_timeout", "59999", "60000", "transaction_timeout"),
            ("tcp_keepalives_idle", "7200", "60", "tcp_keepalives"),
            ("fsync", "off", "on", "durability"),
            ("full_page_writes", "off", "on", "durability"),
            ("synchronous_commit", "off", "local", "durability"),
            ("autovacuum", "off", "on", "autovacuum"),
            ("track_counts", "off", "on", "autovacuum"),
        ] {
            assert_eq!(bad(&[(setting, poor)]), warned(topic), "{setting} = {poor}");
            assert_eq!(bad(&[(setting, good)]), [], "{setting} = {good}");
        }
        let waits = [("tcp_keepalives_idle", "60"), ("tcp_keepalives_interval", "75")];
        let long = [&waits[..], &[("tcp_keepalives_count", "9")]].concat();
        assert_eq!(bad(&long), warned("tcp_keepalives"));
        assert_eq!(bad(&[&long[..], &[("tcp_user_timeout", "20000")]].concat()), []);
    }

    #[test]
    fn a_failover_that_loses_what_was_acknowledged_is_found() {
        let severity =
            |values: &[(&str, &str)], standbys| settings(values).replication(standbys).severity;
        assert_eq!(severity(&[], 0), Severity::Fine);
        assert_eq!(severity(&[("synchronous_standby_names", "")], 2), Severity::Warning);
        let synchronous = ("synchronous_standby_names", "*");
        assert_eq!(severity(&[synchronous], 2), Severity::Fine);
        assert_eq!(severity(&[synchronous, ("synchronous_commit", "local")], 2), Severity::Warning);
    }
}
