//! What rows tell: leases, dedupe entries, and, where there are no user-level locks, named locks and
//! claims.

use std::collections::HashMap;
use std::time::Duration;

use leasehold_core::{
    Error, ErrorKind, FencingToken, HeldName, Holder, Holding, HoldingQuery, Key, Kind, NameQuery,
    Result,
};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, TxOpts};

use super::of_connection;
use crate::bell::bell_name;
use crate::error::{code, mapped, server_code};
use crate::names::{self, hex};
use crate::store::{NOW, Store, retried};
use crate::threads::Threads;

/// The key, the holder, since when and for how long (microseconds), the token, whether it is done,
/// the bell if it must be rung.
type Fields = (Option<Vec<u8>>, Vec<u8>, i64, i64, u64, u8, u64);

/// As [`Holding`] has it.
fn kind_of(kind: names::Kind) -> Kind {
    match kind {
        names::Kind::Lock | names::Kind::LeasedLock => Kind::Lock,
        names::Kind::Claim => Kind::Claim,
        names::Kind::Lease => Kind::Lease,
        names::Kind::Dedupe => Kind::Dedupe,
    }
}

/// The table, and what [`read`] reads of it.
fn source(store: &Store, kind: names::Kind) -> (&str, String) {
    let times = format!("IF(since = 0, -1, {NOW} - since), expires - {NOW}");
    if kind == names::Kind::Dedupe {
        (&store.tables.dedupe, format!("name, holder, {times}, token, done, 0"))
    } else {
        (&store.tables.lease, format!("name, holder, {times}, token, 0, IF(awaited, bell, 0)"))
    }
}

pub(super) async fn list(
    store: &Store,
    query: &HoldingQuery,
    kind: names::Kind,
) -> Result<Vec<Holding>> {
    let (table, columns) = source(store, kind);
    let which = match &query.names {
        NameQuery::Key(key) => format!("id = {}", hex(&store.row(kind, key))),
        NameQuery::Prefix(prefix) => {
            let named = format!(
                "scope = {} AND LEFT(name, {}) = {}",
                store.scope(),
                prefix.len(),
                hex(prefix.as_bytes())
            );
            // a named lock that is a lease is told from a lease of that name by its hash only
            if kind == names::Kind::Dedupe {
                named
            } else {
                format!("{named} AND id = {}", names::row_id_of_column(kind, &store.namespace))
            }
        }
    };
    let states = if kind == names::Kind::Dedupe && !query.done { " AND NOT done" } else { "" };
    let text = format!(
        "SELECT {columns} FROM {table} WHERE {which} AND expires > {NOW}{states} \
         ORDER BY name LIMIT {}",
        query.limit
    );
    let rows: Vec<Fields> = store.rows(&text).await?;
    let asked = match &query.names {
        NameQuery::Key(key) => Some(key),
        NameQuery::Prefix(_) => None,
    };
    rows.into_iter().map(|row| read(kind, asked, row)).collect()
}

/// `asked`: the key, which rows of an older version do not have.
fn read(kind: names::Kind, asked: Option<&Key>, row: Fields) -> Result<Holding> {
    let (name, holder, held, left, token, done, _) = row;
    let key = match (asked, name) {
        (Some(key), _) => key.clone(),
        (None, name) => {
            let name = String::from_utf8(name.unwrap_or_default()).map_err(|error| {
                Error::new(ErrorKind::Backend, "a row's key is no text").with_source(error)
            })?;
            Key::new(name)?
        }
    };
    let mut holding = Holding::new(kind_of(kind), HeldName::Key(key));
    holding.holder = self::holder(Some(holder));
    holding.held_for = (held >= 0).then(|| span(held));
    holding.expires_in = Some(span(left));
    holding.token = Some(FencingToken(token));
    holding.done = done != 0;
    Ok(holding)
}

/// A time in microseconds; the server's clock may have been set back.
fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

pub(super) fn holder(label: Option<Vec<u8>>) -> Option<Holder> {
    label.and_then(|label| String::from_utf8(label).ok())?.parse().ok()
}

/// Frees a row, or only if it is held under this token; it keeps its token until it is purged, so
/// that the next one's is greater.
pub(super) async fn free(
    store: &Store,
    kind: names::Kind,
    key: &Key,
    token: Option<FencingToken>,
) -> Result<Option<Holding>> {
    let mut conn = store.own.get_conn().await.map_err(mapped)?;
    let Some(row) = retried!(take_away(&mut conn, store, kind, key, token)).map_err(mapped)? else {
        return Ok(None);
    };
    let bell = row.6;
    if bell != 0 {
        // a wake-up only: who is not woken looks by itself, within `max_poll`
        let ring = format!("KILL IS_USED_LOCK('{}')", bell_name(bell));
        if let Err(error) = conn.query_drop(ring).await {
            tracing::debug!(%error, "those who wait for what was taken away look later");
        }
    }
    read(kind, Some(key), row).map(Some)
}

async fn take_away(
    conn: &mut Conn,
    store: &Store,
    kind: names::Kind,
    key: &Key,
    token: Option<FencingToken>,
) -> mysql_async::Result<Option<Fields>> {
    let (table, columns) = source(store, kind);
    let id = hex(&store.row(kind, key));
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    let only = token.map(|token| format!(" AND token = {token}")).unwrap_or_default();
    let lock = format!(
        "SELECT {columns} FROM {table} WHERE id = {id}{only} AND expires > {NOW} FOR UPDATE"
    );
    let row: Option<Fields> = tx.query_first(lock).await?;
    if row.is_some() {
        let more = if kind == names::Kind::Dedupe { "done = 0" } else { "awaited = 0" };
        let free = format!("UPDATE {table} SET owner = '', expires = 0, {more} WHERE id = {id}");
        tx.query_drop(free).await?;
    }
    tx.commit().await?;
    Ok(row)
}

type ClaimRow = (String, u64, u64, i64, Vec<u8>);

/// The rows that an open transaction has locked, as it wrote them: what is read of one that is not
/// committed differs from what is committed. In this order: a commit in between ends it.
async fn held_claims(store: &Store, which: &str) -> Result<Vec<ClaimRow>> {
    let table = &store.tables.claim;
    let written = format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT LOWER(HEX(id)), mark, connection, since, holder FROM {table} WHERE {which}"
    );
    let written: Vec<ClaimRow> = store.rows(&written).await?;
    if written.is_empty() {
        return Ok(written);
    }
    let ids: Vec<String> = written.iter().map(|row| format!("x'{}'", row.0)).collect();
    // our own connections are at READ COMMITTED
    let committed =
        format!("SELECT LOWER(HEX(id)), mark FROM {table} WHERE id IN ({})", ids.join(","));
    let committed: HashMap<String, u64> = store.rows(&committed).await?.into_iter().collect();
    let open = |row: &ClaimRow| committed.get(&row.0).is_some_and(|mark| *mark != row.1);
    Ok(written.into_iter().filter(open).collect())
}

/// Claims, where they lock rows. The table has hashes only.
pub(super) async fn claims(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let (which, name) = match &query.names {
        NameQuery::Key(key) => {
            let id = hex(&store.row(names::Kind::Claim, key));
            (format!("id = {id}"), Some(HeldName::Key(key.clone())))
        }
        NameQuery::Prefix(_) => (format!("scope = {}", store.scope()), None),
    };
    let rows = held_claims(store, &which).await?;
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let threads = Threads::read(store).await?;
    let now: Vec<i64> = store.rows(&format!("SELECT {NOW}")).await?;
    let now = now.first().copied().unwrap_or_default();
    let holding = |(id, _, connection, since, holder): ClaimRow| {
        let name = name.clone().unwrap_or(HeldName::Hashed(id));
        let mut held = of_connection(Kind::Claim, name, connection, Some(holder), &threads);
        held.held_for = Some(span(now - since));
        held
    };
    Ok(rows.into_iter().map(holding).collect())
}

/// Ends the connection whose transaction has locked the row.
pub(super) async fn end_claim(store: &Store, key: &Key) -> Result<Option<Holding>> {
    let query = HoldingQuery::key(key).kinds([Kind::Claim]);
    let Some(held) = claims(store, &query).await?.pop() else {
        return Ok(None);
    };
    let which = format!("id = {}", hex(&store.row(names::Kind::Claim, key)));
    // looked at again in the same message, lest another transaction of that connection is hit
    let table = &store.tables.claim;
    let look = format!(
        "SET @leasehold_mark = NULL, @leasehold_connection = 0, @leasehold_old = NULL; \
         SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED; \
         SELECT mark, connection INTO @leasehold_mark, @leasehold_connection FROM {table} \
           WHERE {which}; \
         SET TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SELECT mark"
    );
    let kill = format!(
        "{look} INTO @leasehold_old FROM {table} WHERE {which}; \
         KILL IF(@leasehold_mark <> @leasehold_old, @leasehold_connection, 0)"
    );
    let mut conn = store.own.get_conn().await.map_err(mapped)?;
    if !super::locks::killed(conn.query_drop(kill).await, &held)? {
        return Ok(None);
    }
    drop(conn); // it may be the only one
    let gone = format!("{look} = @leasehold_mark FROM {table} WHERE {which}");
    super::locks::until_ended(store, &gone).await?;
    Ok(Some(held))
}

/// Whether the table is there.
pub(super) fn is_missing(error: &mysql_async::Error) -> bool {
    server_code(error) == Some(code::NO_SUCH_TABLE)
}
