//! What the user must be granted. `EXPLAIN` needs the privileges of the statement that it explains,
//! which is not executed.

use leasehold_core::Finding;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

use crate::error::{code, server_code};
use crate::store::Store;

/// A table, a privilege on it, and a statement that needs no other one.
const NEEDED: &[(&str, &str, &str)] = &[
    ("meta", "SELECT", "SELECT version, floor FROM {table}"),
    ("meta", "UPDATE (floor)", "UPDATE {table} SET floor = 0"),
    ("lease", "SELECT", "SELECT * FROM {table}"),
    ("lease", "INSERT", "INSERT INTO {table} (id) VALUES ('')"),
    ("lease", "UPDATE", "UPDATE {table} SET id = '', owner = '', expires = 0, token = 0"),
    ("lease", "DELETE", "DELETE FROM {table}"),
    ("dedupe", "SELECT", "SELECT * FROM {table}"),
    ("dedupe", "INSERT", "INSERT INTO {table} (id) VALUES ('')"),
    ("dedupe", "UPDATE", "UPDATE {table} SET id = '', owner = '', expires = 0, token = 0"),
    ("dedupe", "DELETE", "DELETE FROM {table}"),
    ("token", "SELECT", "SELECT * FROM {table}"),
    ("token", "INSERT", "INSERT INTO {table} VALUES ()"),
    ("token", "DELETE", "DELETE FROM {table}"),
    ("claim", "SELECT", "SELECT * FROM {table}"),
    ("claim", "INSERT", "INSERT INTO {table} (id) VALUES ('')"),
    ("claim", "UPDATE", "UPDATE {table} SET id = '', connection = 0"),
    ("claim", "DELETE", "DELETE FROM {table}"),
    ("session", "SELECT", "SELECT * FROM {table}"),
    ("session", "INSERT", "INSERT INTO {table} (connection) VALUES (0)"),
    ("session", "DELETE", "DELETE FROM {table}"),
];

const TOPIC: &str = "privileges";

/// A finding for each that is missing, with the statement that grants it.
pub(super) async fn look(store: &Store, conn: &mut Conn) -> Vec<Finding> {
    let asked =
        conn.query_first::<(String, Option<String>), _>("SELECT CURRENT_USER(), DATABASE()");
    let (user, database) = match asked.await {
        Ok(Some((user, Some(database)))) => (quoted_user(&user), database),
        Ok(_) => {
            let advice = "name the database in the url";
            return vec![Finding::fault(TOPIC, "no database is chosen", advice)];
        }
        Err(error) => {
            let found = format!("could not be asked: {error}");
            return vec![Finding::warning(TOPIC, found, "look into the server's log")];
        }
    };
    let mut findings = Vec::new();
    // a strict mode refuses the values that the statements do not have
    let lax = "SET SESSION sql_mode = '', sql_safe_updates = 0; \
        SET SESSION TRANSACTION READ WRITE";
    if let Err(error) = conn.query_drop(lax).await {
        let found = format!("could not be asked: {error}");
        return vec![Finding::warning(TOPIC, found, "look into the server's log")];
    }
    for (table, privilege, statement) in NEEDED {
        let name = format!("{}{table}", store.tables.prefix);
        let explain = format!("EXPLAIN {}", statement.replace("{table}", &format!("`{name}`")));
        let Err(error) = conn.query_drop(explain).await else { continue };
        match server_code(&error) {
            Some(code::TABLE_DENIED | code::COLUMN_DENIED) => {
                let found = format!("{user} lacks {privilege} on {name}");
                let database = database.replace('`', "``");
                let advice = format!("GRANT {privilege} ON `{database}`.`{name}` TO {user}");
                findings.push(Finding::fault(TOPIC, found, advice));
            }
            Some(code::READ_ONLY | code::READ_ONLY_MODE) => {
                let found = "cannot be asked of a server that is read-only";
                return vec![Finding::warning(TOPIC, found, "ask again on the primary")];
            }
            // told by the table's finding
            Some(code::NO_SUCH_TABLE | code::NO_SUCH_COLUMN) => {}
            _ => {
                let found = format!("{privilege} on {name} could not be asked: {error}");
                findings.push(Finding::warning(TOPIC, found, "look into the server's log"));
            }
        }
    }
    if findings.is_empty() {
        findings.push(Finding::fine(TOPIC, format!("{user} has all that it needs")));
    }
    findings
}

/// `user@host` as a statement names it.
fn quoted_user(user: &str) -> String {
    let (name, host) = user.rsplit_once('@').unwrap_or((user, "%"));
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "''"));
    format!("{}@{}", quoted(name), quoted(host))
}
