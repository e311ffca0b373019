//! The server's connections, as it shows them to everybody: one's own user's, or all to one with the
//! privilege `PROCESS`.

use std::collections::HashMap;

use leasehold_core::Result;
use mysql_async::Row;

use crate::store::Store;

/// What is known of the connections.
#[derive(Debug)]
pub(crate) struct Threads(HashMap<u64, Thread>);

#[derive(Debug)]
struct Thread {
    user: String,
    host: String,
    command: String,
    /// The statement that waits for a user-level lock.
    waits: Option<String>,
}

impl Threads {
    pub(crate) async fn read(store: &Store) -> Result<Self> {
        // The one list of connections that needs no privilege on both servers. That of
        // information_schema fails on MySQL while any statement has bytes that are no text.
        let rows: Vec<Row> = store.rows("SHOW FULL PROCESSLIST").await?;
        let text = |row: &Row, column: &str| {
            let text: Option<Vec<u8>> = row.get_opt(column).and_then(std::result::Result::ok);
            text.map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
        };
        let thread = |row: &Row| {
            let waits = text(row, "State") == "User lock";
            let thread = Thread {
                user: text(row, "User"),
                host: text(row, "Host"),
                command: text(row, "Command"),
                waits: waits.then(|| text(row, "Info")),
            };
            let id = row.get_opt::<u64, _>("Id").and_then(std::result::Result::ok);
            id.map(|id| (id, thread))
        };
        Ok(Self(rows.iter().filter_map(thread).collect()))
    }

    /// The ids of all that are shown.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u64> {
        self.0.keys().copied()
    }

    /// A connection in words.
    pub(crate) fn describe(&self, connection: u64) -> String {
        match self.0.get(&connection) {
            Some(Thread { user, host, .. }) => format!("connection {connection}, {user}@{host}"),
            None => format!("connection {connection}"),
        }
    }

    /// How many replicas read the binary log, of those that are shown.
    pub(crate) fn replicas(&self) -> usize {
        self.0.values().filter(|thread| thread.command.starts_with("Binlog Dump")).count()
    }

    /// How many wait for a user-level lock.
    pub(crate) fn waiters(&self, name: &str) -> u32 {
        let call = format!("GET_LOCK('{name}',");
        let waiting = self.0.values().filter_map(|thread| thread.waits.as_ref());
        let count = waiting.filter(|statement| statement.contains(&call)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}
