//! One server, asked about itself.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use fred::interfaces::{ClientLike, ClusterInterface};
use fred::types::config::{Options, Server};
use fred::types::{ClusterHash, CustomCommand, Value};
use leasehold_core::{Error, ErrorKind, Result};

use crate::conn::Conn;
use crate::error::{mapped, strange};
use crate::locks::{array, number};

/// Questions by which the way to the server is timed.
const TIMED: u32 = 7;

/// The settings that are looked at. `INFO` tells the rest.
const SETTINGS: [&str; 4] =
    ["appendfsync", "min-replicas-to-write", "notify-keyspace-events", "save"];

/// What a server says of itself.
#[derive(Debug, Default)]
pub(super) struct Node {
    info: HashMap<String, String>,
    settings: HashMap<String, String>,
}

/// The way to a server and its clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) median: Duration,
    pub(super) slowest: Duration,
    /// The server's clock, in µs since 1970.
    pub(super) clock: u64,
    /// How far that is from ours, as far as the way lets it be known; in ms.
    pub(super) apart: i64,
}

impl Conn {
    /// Asks one server.
    pub(super) async fn ask_node(
        &self,
        node: Option<Server>,
        name: &'static str,
        words: Vec<Value>,
    ) -> Result<Value> {
        let client = self.clients()[0].with_options(&Options {
            max_attempts: Some(1),
            timeout: Some(self.settings.command_limit),
            cluster_node: node,
            fail_fast: true,
            ..Options::default()
        });
        let command = CustomCommand::new_static(name, ClusterHash::Random, false);
        client.custom(command, words).await.map_err(mapped)
    }

    /// The masters of a cluster; otherwise the one server.
    pub(super) fn nodes(&self) -> Result<Vec<Option<Server>>> {
        if !self.keys.clustered() {
            return Ok(vec![None]);
        }
        let state = self.clients()[0].cached_cluster_state();
        let masters = state.map(|state| state.unique_primary_nodes()).unwrap_or_default();
        if masters.is_empty() {
            let detail = "the cluster's nodes are not known";
            return Err(Error::new(ErrorKind::Unavailable, detail));
        }
        Ok(masters.into_iter().map(Some).collect())
    }

    pub(super) async fn info(&self, node: Option<Server>, of: &'static str) -> Result<Node> {
        let words = if of.is_empty() { Vec::new() } else { vec![Value::from_static_str(of)] };
        let text =
            self.ask_node(node, if of.is_empty() { "INFO" } else { "CLUSTER" }, words).await?;
        let text = text.as_string().ok_or_else(|| strange(&text))?;
        let pairs = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        let info = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Ok(Node { info, ..Node::default() })
    }

    pub(super) async fn settings(&self, node: Option<Server>) -> Result<HashMap<String, String>> {
        let words = ["GET"].into_iter().chain(SETTINGS).map(Value::from_static_str).collect();
        self.ask_node(node, "CONFIG", words).await?.convert().map_err(mapped)
    }

    /// Times the way to a server, and looks at its clock.
    pub(super) async fn way(&self, node: Option<Server>) -> Result<Way> {
        let mut times = Vec::new();
        let (mut clock, mut apart) = (0, 0);
        for _ in 0..TIMED {
            let sent = Instant::now();
            let answer = self.ask_node(node.clone(), "TIME", Vec::new()).await?;
            let took = sent.elapsed();
            let [seconds, micros] = array(&answer)? else { return Err(strange(&answer)) };
            let (Some(seconds), Some(micros)) = (number(Some(seconds)), number(Some(micros)))
            else {
                return Err(strange(&answer));
            };
            clock = seconds.saturating_mul(1_000_000).saturating_add(micros);
            if times.iter().all(|fastest| took < *fastest) {
                #[allow(clippy::disallowed_methods)] // it is shown to people and decides nothing
                let ours = SystemTime::now() - took / 2;
                let ours = ours.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                apart = (clock / 1_000).cast_signed() - (ours.as_millis() as u64).cast_signed();
            }
            times.push(took);
        }
        times.sort_unstable();
        let slowest = times.last().copied().unwrap_or_default();
        Ok(Way { median: times[times.len() / 2], slowest, clock, apart })
    }
}

impl Node {
    pub(super) fn with_settings(self, settings: HashMap<String, String>) -> Self {
        Self { settings, ..self }
    }

    /// What `INFO` says; empty where it says nothing.
    pub(super) fn said(&self, name: &str) -> &str {
        self.info.get(name).map_or("", String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> u64 {
        self.said(name).parse().unwrap_or(0)
    }

    /// A setting; none where the user may not read them.
    pub(super) fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }

    #[cfg(test)]
    pub(super) fn saying(info: &[(&str, &str)]) -> Self {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Self { info: info.iter().map(owned).collect(), ..Self::default() }
    }
}
