//! Named locks and claims by user-level locks: the server tells everybody which connection has one
//! of a name, and those who may read the performance schema all that there are.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use leasehold_core::{Error, ErrorKind, HeldName, Holding, HoldingQuery, Key, Kind, Result};
use mysql_async::prelude::Queryable;

use super::of_connection;
use crate::error::{code, mapped, server_code};
use crate::names;
use crate::store::Store;
use crate::threads::Threads;

/// A connection that was told to end is waited for so long.
const END_WAIT: Duration = Duration::from_secs(3);

fn name_of(store: &Store, kind: Kind, key: &Key) -> String {
    let kind = if kind == Kind::Lock { names::Kind::Lock } else { names::Kind::Claim };
    store.lock_name(kind, key)
}

/// Who has these connections, as far as they have said so in this namespace. The entry of an earlier
/// connection of the same number counts no more than its marker does.
async fn introduced(store: &Store, connections: &[u64]) -> Result<HashMap<u64, Vec<u8>>> {
    if connections.is_empty() {
        return Ok(HashMap::new());
    }
    let list: Vec<String> = connections.iter().map(u64::to_string).collect();
    let text = format!(
        "SELECT connection, holder FROM {} WHERE connection IN ({}) AND scope = {} \
         AND (marker = '' OR IS_USED_LOCK(marker) = connection)",
        store.tables.session,
        list.join(","),
        store.scope()
    );
    Ok(store.rows::<(u64, Vec<u8>)>(&text).await?.into_iter().collect())
}

/// Who holds a key's locks, of the kinds that are asked for.
pub(super) async fn of_key(store: &Store, query: &HoldingQuery, key: &Key) -> Result<Vec<Holding>> {
    let kinds = [Kind::Lock, Kind::Claim].into_iter().filter(|kind| query.wants(*kind));
    let named: Vec<(Kind, String)> = kinds.map(|kind| (kind, name_of(store, kind, key))).collect();
    let asked: Vec<String> =
        named.iter().map(|(_, n)| format!("SELECT IS_USED_LOCK('{n}')")).collect();
    let connections: Vec<Option<u64>> = store.rows(&asked.join(" UNION ALL ")).await?;
    let held: Vec<(Kind, String, u64)> = named
        .into_iter()
        .zip(connections)
        .filter_map(|((kind, name), connection)| connection.map(|id| (kind, name, id)))
        .collect();
    let name = |_: &str| Some(HeldName::Key(key.clone()));
    described(store, held, name).await
}

/// All that are held in the namespace.
pub(super) async fn list(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let mut held = Vec::new();
    for (name, connection) in visible(store).await? {
        let kind = match name.as_bytes().get(3) {
            Some(b'l') => Kind::Lock,
            Some(b'c') => Kind::Claim,
            _ => continue,
        };
        if query.wants(kind) {
            held.push((kind, name, connection));
        }
    }
    let named = |name: &str| {
        // the letter of the kind is the fourth
        let plain = name.get(4..)?.strip_prefix(':')?;
        let key = plain.strip_prefix(store.namespace.as_str())?.strip_prefix(':')?;
        Key::new(key).ok().filter(|key| query.matches(key)).map(HeldName::Key)
    };
    described(store, held, named).await
}

/// `named`: the key of a lock's name, if it has one that is asked for. What has a hash in its name
/// is of the namespace that its session is of.
async fn described(
    store: &Store,
    held: Vec<(Kind, String, u64)>,
    named: impl Fn(&str) -> Option<HeldName>,
) -> Result<Vec<Holding>> {
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let mut connections: Vec<u64> = held.iter().map(|(.., connection)| *connection).collect();
    connections.sort_unstable();
    connections.dedup();
    let mut holders = HashMap::new();
    for chunk in connections.chunks(1_000) {
        holders.extend(introduced(store, chunk).await?);
    }
    let threads = Threads::read(store).await?;
    let holding = |(kind, name, connection): (Kind, String, u64)| {
        let holder = holders.get(&connection);
        let shown = match named(&name) {
            Some(shown) => shown,
            None if name.as_bytes().get(4) == Some(&b'#') && holder.is_some() => {
                HeldName::Hashed(name.clone())
            }
            None => return None,
        };
        let mut held = of_connection(kind, shown, connection, holder.cloned(), &threads);
        held.waiters = Some(threads.waiters(&name));
        Some(held)
    };
    Ok(held.into_iter().filter_map(holding).collect())
}

/// The user-level locks of all programs with this library, and the connections that have them.
///
/// # Errors
/// [`ErrorKind::Backend`] if the performance schema must not be read, [`ErrorKind::Unsupported`] if
/// it does not show them.
pub(super) async fn visible(store: &Store) -> Result<Vec<(String, u64)>> {
    let mut conn = store.connect().await?;
    // one of our own, to be seen
    let ours = format!("lh:look:{:032x}", rand::random::<u128>());
    let take = format!("DO GET_LOCK('{ours}', 0)");
    conn.query_drop(take).await.map_err(mapped)?;
    let text = "SELECT l.OBJECT_NAME, t.PROCESSLIST_ID \
         FROM performance_schema.metadata_locks l \
         JOIN performance_schema.threads t ON t.THREAD_ID = l.OWNER_THREAD_ID \
         WHERE l.OBJECT_TYPE = 'USER LEVEL LOCK' AND l.LOCK_STATUS = 'GRANTED' \
           AND l.OBJECT_NAME LIKE 'lh:%' AND t.PROCESSLIST_ID IS NOT NULL";
    let rows = conn.query::<(String, u64), _>(text).await;
    drop(conn.disconnect().await); // it has done its work
    let rows = match rows {
        Err(error) if is_denied(&error) => {
            let detail = "the user may not see the named locks and claims of others: grant it \
                SELECT on performance_schema.metadata_locks and performance_schema.threads, or ask \
                for one key, or for leases and dedupe entries only";
            return Err(Error::new(ErrorKind::Backend, detail).with_source(error));
        }
        Err(error) if super::rows::is_missing(&error) => return Err(hidden()),
        rows => rows.map_err(mapped)?,
    };
    if !rows.iter().any(|(name, _)| *name == ours) {
        return Err(hidden());
    }
    Ok(rows)
}

fn is_denied(error: &mysql_async::Error) -> bool {
    matches!(server_code(error), Some(code::TABLE_DENIED | code::COLUMN_DENIED))
}

fn hidden() -> Error {
    let detail = "the server does not show user-level locks: start it with \
        performance_schema = ON and \
        performance-schema-instrument = 'wait/lock/metadata/sql/mdl=ON', or ask for one key, or \
        for leases and dedupe entries only";
    Error::new(ErrorKind::Unsupported, detail)
}

/// Ends the connection that holds a key's lock.
pub(super) async fn end_holder(store: &Store, kind: Kind, key: &Key) -> Result<Option<Holding>> {
    let name = name_of(store, kind, key);
    let holds = format!("SELECT IS_USED_LOCK('{name}')");
    let connection: Vec<Option<u64>> = store.rows(&holds).await?;
    let Some(connection) = connection.into_iter().next().flatten() else {
        return Ok(None);
    };
    let shown = |_: &str| Some(HeldName::Key(key.clone()));
    let held = described(store, vec![(kind, name.clone(), connection)], shown).await?.pop();
    let Some(held) = held else { return Ok(None) };
    let mut conn = store.own.get_conn().await.map_err(mapped)?;
    // by now it may hold other things only; zero is nobody's number
    let kill = format!("KILL IF(IS_USED_LOCK('{name}') = {connection}, {connection}, 0)");
    if !killed(conn.query_drop(kill).await, &held)? {
        return Ok(None);
    }
    drop(conn);
    until_ended(store, &format!("SELECT NOT IS_USED_LOCK('{name}') <=> {connection}")).await?;
    Ok(Some(held))
}

/// Whether a connection was told to end; it may have let go by itself.
pub(super) fn killed(answer: mysql_async::Result<()>, held: &Holding) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if server_code(&error) == Some(code::NO_SUCH_THREAD) => Ok(false),
        Err(error) if server_code(&error) == Some(code::KILL_DENIED) => {
            let detail = format!(
                "the user may not end the session that holds it ({}), which is another user's: \
                 grant it CONNECTION_ADMIN (MySQL) or CONNECTION ADMIN (MariaDB)",
                held.session.as_deref().unwrap_or_default()
            );
            Err(Error::new(ErrorKind::Backend, detail).with_source(error))
        }
        Err(error) => Err(mapped(error)),
    }
}

/// Waits until this gives anything but 0.
pub(super) async fn until_ended(store: &Store, gone: &str) -> Result<()> {
    let start = Instant::now();
    while store.rows::<Option<u8>>(gone).await?.first() == Some(&Some(0)) {
        if start.elapsed() > END_WAIT {
            let detail =
                format!("the session that holds it was told to end and goes on after {END_WAIT:?}");
            return Err(Error::new(ErrorKind::Unavailable, detail));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}
