//! What the user may not do: asked of the server without doing it.

use fred::interfaces::ClientLike;
use fred::types::Value;
use fred::types::config::Server;
use leasehold_core::{Error, Finding, Result};

use crate::conn::Conn;
use crate::keys::glob_escaped;
use crate::locks::array;
use crate::script::RIGHTS;

/// A command with words that it is used with.
struct Right {
    /// In the form of `ACL SETUSER … +command`.
    command: &'static str,
    words: Vec<String>,
    need: Need,
}

/// What goes without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// Nothing.
    All,
    /// All but what this says.
    Most,
    /// All but inspection.
    Inspection,
}

const PRIVILEGES: &str = "privileges";
const INSPECTION: &str = "inspection";

impl Conn {
    pub(super) async fn rights(&self, node: Option<Server>) -> Vec<Finding> {
        let rights = self.wanted_rights();
        match self.forbidden(node, &rights).await {
            Ok(forbidden) => self.told_rights(&rights, &forbidden),
            Err(error) => {
                let advice = format!(
                    "ACL SETUSER {} +eval +evalsha, and see the crate's list of commands",
                    self.user()
                );
                let found = format!("no script can be run: {error}{}", cause(&error));
                vec![Finding::fault(PRIVILEGES, found, advice)]
            }
        }
    }

    fn wanted_rights(&self) -> Vec<Right> {
        let key = self.keys.example();
        let channel = self.keys.channel(self.keys.claim_tag());
        let mut rights = Vec::new();
        let mut right = |command, words: &[&str], need| {
            let words = words.iter().map(|word| (*word).to_owned()).collect();
            rights.push(Right { command, words, need });
        };
        let key = key.as_str();
        right("evalsha", &["EVALSHA", "0", "1", key], Need::All);
        right("mget", &["MGET", key], Need::All);
        right("get", &["GET", key], Need::All);
        right("set", &["SET", key, ""], Need::All);
        right("del", &["DEL", key], Need::All);
        right("pexpire", &["PEXPIRE", key, "1"], Need::All);
        right("pttl", &["PTTL", key], Need::All);
        right("time", &["TIME"], Need::All);
        right("type", &["TYPE", key], Need::All);
        if self.keys.clustered() {
            right("spublish", &["SPUBLISH", &channel, ""], Need::All);
            right("ssubscribe", &["SSUBSCRIBE", &channel], Need::Most);
            right("cluster|slots", &["CLUSTER", "SLOTS"], Need::All);
            right("cluster|info", &["CLUSTER", "INFO"], Need::All);
        } else {
            right("publish", &["PUBLISH", &channel, ""], Need::All);
            right("subscribe", &["SUBSCRIBE", &channel], Need::Most);
        }
        right("ping", &["PING"], Need::Most);
        right("info", &["INFO"], Need::Most);
        right("client|id", &["CLIENT", "ID"], Need::Most);
        if self.settings.replicas > 0 {
            right("wait", &["WAIT", "1", "1"], Need::All);
        }
        if self.settings.keyspace_events {
            let pattern = self.keyspace_pattern();
            right("psubscribe", &["PSUBSCRIBE", &pattern], Need::Most);
        }
        right("scan", &["SCAN", "0"], Need::Inspection);
        right("config|get", &["CONFIG", "GET", "save"], Need::Inspection);
        right("client|setname", &["CLIENT", "SETNAME", "x"], Need::Inspection);
        rights
    }

    async fn forbidden(&self, node: Option<Server>, rights: &[Right]) -> Result<Vec<usize>> {
        let mut words = vec![Value::from_static_str(RIGHTS.text), Value::Integer(0)];
        for right in rights {
            words.push(right.words.len().to_string().into());
            words.extend(right.words.iter().map(|word| Value::from(word.as_str())));
        }
        let answer = self.ask_node(node, "EVAL", words).await?;
        let numbers = array(&answer)?.iter().filter_map(Value::as_usize);
        Ok(numbers.filter_map(|number| number.checked_sub(1)).collect())
    }

    fn told_rights(&self, rights: &[Right], forbidden: &[usize]) -> Vec<Finding> {
        let user = self.user();
        let lacks = |need| {
            let missing = forbidden.iter().filter_map(|index| rights.get(*index));
            let missing = missing.filter(|right| right.need == need).map(|right| right.command);
            missing.collect::<Vec<_>>()
        };
        let advice = |missing: &[&str]| {
            let prefix = glob_escaped(self.keys.prefix());
            let commands: Vec<String> = missing.iter().map(|name| format!("+{name}")).collect();
            format!("ACL SETUSER {user} ~{prefix}* &{prefix}* {}", commands.join(" "))
        };
        let mut findings = Vec::new();
        let missing = lacks(Need::All);
        if !missing.is_empty() {
            let found = format!("{user} may not run {}, or not on our keys", missing.join(", "));
            findings.push(Finding::fault(PRIVILEGES, found, advice(&missing)));
        }
        let missing = lacks(Need::Most);
        if !missing.is_empty() {
            let found = format!(
                "{user} may not run {}: without info the server goes unchecked, without a \
                 subscription and ping waiters poll",
                missing.join(", ")
            );
            findings.push(Finding::warning(PRIVILEGES, found, advice(&missing)));
        }
        if findings.is_empty() {
            findings.push(Finding::fine(PRIVILEGES, format!("{user} has all that it needs")));
        }
        let missing = lacks(Need::Inspection);
        findings.push(if missing.is_empty() {
            Finding::fine(INSPECTION, "holdings are listed, settings are read")
        } else {
            let found = format!(
                "{user} may not run {}: without scan nothing is listed, without config|get \
                 settings are not looked at, without client|setname connections have no name",
                missing.join(", ")
            );
            Finding::warning(INSPECTION, found, advice(&missing))
        });
        findings
    }

    fn user(&self) -> String {
        self.clients()[0].client_config().username.unwrap_or_else(|| "default".to_owned())
    }

    fn keyspace_pattern(&self) -> String {
        self.keys.events(self.clients()[0].client_config().database.unwrap_or(0))
    }
}

/// What the server said.
pub(super) fn cause(error: &Error) -> String {
    std::error::Error::source(error).map(|cause| format!(" ({cause})")).unwrap_or_default()
}
