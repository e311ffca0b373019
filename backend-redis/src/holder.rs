//! Who the handle is: a key of its own by which others find its holder, and the names of its
//! connections.

use std::sync::{Arc, Weak};
use std::time::Duration;

use fred::clients::Client;
use fred::interfaces::{ClientLike, EventInterface};
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Value};
use leasehold_core::{Holder, Result};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

use crate::conn::Conn;
use crate::keys::millis;

/// The key of a holder is written anew so often, in case the server has lost it.
const AGAIN: Duration = Duration::from_secs(60);
/// So much longer than the longest ttl that the handle has asked for, its holder is known.
const KEEP: Duration = Duration::from_secs(15 * 60);
/// The longest name of a connection.
const NAME_BYTES: usize = 200;

/// The tasks that tell who the handle is. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Told {
    _tasks: JoinSet<()>,
}

impl Told {
    pub(crate) fn start(conn: &Arc<Conn>) -> Self {
        let mut tasks = JoinSet::new();
        tasks.spawn(tell_on(Arc::downgrade(conn)));
        if conn.owns_clients() {
            for client in conn.clients() {
                let name = connection_name(&conn.settings.holder);
                tasks.spawn(name_on(client.clone(), name, conn.settings.command_limit));
            }
        }
        Self { _tasks: tasks }
    }
}

impl Conn {
    /// Writes down who the handle is. Nothing depends on it, so a failure is only logged.
    pub(crate) async fn tell_holder(&self) {
        let holder = &self.settings.holder;
        let keep = KEEP.saturating_add(self.told.longest());
        let words = vec![
            self.keys.holder(holder.instance),
            holder.to_string().into(),
            Value::from_static_str("PX"),
            millis(keep),
        ];
        let told: Result<Value> = self.command(0, "SET", ClusterHash::FirstKey, words).await;
        if let Err(error) = told {
            tracing::debug!(%error, "the holder could not be written down");
        }
    }
}

/// Writes it at once, now and then, and when there is a reason to.
async fn tell_on(conn: Weak<Conn>) {
    loop {
        let (told, closing) = {
            let Some(conn) = conn.upgrade() else { return };
            conn.tell_holder().await;
            (conn.told.clone(), conn.closing.clone())
        };
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            () = told.again.notified() => {}
            () = closing.cancelled() => return,
        }
    }
}

/// Names the connections of a client, also those that it opens anew.
async fn name_on(client: Client, name: String, limit: Duration) {
    let mut reconnects = client.reconnect_rx();
    loop {
        name_all(&client, &name, limit).await;
        if let Err(RecvError::Closed) = reconnects.recv().await {
            return;
        }
    }
}

/// Names the connections that a client has. Without the permission they have no name.
pub(crate) async fn name_all(client: &Client, name: &str, limit: Duration) {
    let nodes = match client.is_clustered() {
        true => client.active_connections().into_iter().map(Some).collect(),
        false => vec![None],
    };
    for node in nodes {
        let client = client.with_options(&Options {
            max_attempts: Some(1),
            timeout: Some(limit),
            cluster_node: node,
            fail_fast: true,
            ..Options::default()
        });
        let command = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let words = vec![Value::from_static_str("SETNAME"), name.into()];
        if let Err(error) = client.custom::<Value, Value>(command, words).await {
            tracing::debug!(%error, "a connection could not be named");
        }
    }
}

/// The label as the server takes it: printable ASCII without spaces.
pub(crate) fn connection_name(holder: &Holder) -> String {
    let label = holder.label(NAME_BYTES);
    label.chars().map(|c| if c.is_ascii_graphic() { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_a_name_that_servers_take() {
        let holder = Holder::this_process().named("my app é\u{1F512}");
        let name = connection_name(&holder);
        assert!(name.starts_with("my-app---@"), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
    }
}
