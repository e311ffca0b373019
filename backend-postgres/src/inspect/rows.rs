//! Leases and dedupe entries: rows that say whose they are.

use std::time::Duration;

use leasehold_core::{
    Error, ErrorKind, FencingToken, HeldName, Holding, HoldingQuery, Key, Kind, NameQuery, Result,
};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::drivers::{CHANGED, CONFIG, channel, millis};
use crate::error::store_error;
use crate::keys::Use;
use crate::sql::Arg;
use crate::store::Store;

/// A row that another transaction has locked is waited for so long.
const ROW_WAIT: Duration = Duration::from_millis(4_500);

/// What [`read`] reads of a row, beside the server's time. An entry's token is not kept.
fn columns(kind: Kind) -> String {
    let own = if kind == Kind::Lease { "token, false" } else { "NULL::int8, done" };
    let micros = |span: &str| format!("(extract(epoch FROM {span}) * 1000000)::int8");
    let (held, left) = (micros("now.at - since"), micros("expires_at - now.at"));
    format!("key, holder, {held}, {left}, {own}")
}

/// The server's time, once.
const NOW: &str = "(SELECT clock_timestamp() AS at) now";

pub(super) async fn leases(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    list(store, query, Kind::Lease, "{lease}", "true").await
}

pub(super) async fn entries(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let states = if query.done { "true" } else { "NOT done" };
    list(store, query, Kind::Dedupe, "{dedupe}", states).await
}

async fn list(
    store: &Store,
    query: &HoldingQuery,
    kind: Kind,
    table: &str,
    states: &str,
) -> Result<Vec<Holding>> {
    let columns = columns(kind);
    let sql = |names: &str| {
        store.names.statement(&format!(
            "SELECT {columns} FROM {table}, {NOW} WHERE {names} AND expires_at > now.at \
             AND {states} ORDER BY key LIMIT $1"
        ))
    };
    let limit = Arg::Int(i64::try_from(query.limit).unwrap_or(i64::MAX));
    let rows = match &query.names {
        NameQuery::Key(key) => {
            let id = id(store, kind, key);
            store.run(&sql("id = $2"), vec![limit, Arg::Bytes(&id)]).await?
        }
        NameQuery::Prefix(prefix) => {
            let named = sql("namespace = $2 AND substr(key, 1, length($3)) = $3");
            let namespace = Arg::Bytes(store.keys.namespace().as_bytes());
            store.run(&named, vec![limit, namespace, Arg::Bytes(prefix.as_bytes())]).await?
        }
    };
    rows.iter().map(|row| read(kind, row)).collect()
}

fn id(store: &Store, kind: Kind, key: &Key) -> Vec<u8> {
    store.keys.row(if kind == Kind::Lease { Use::Lease } else { Use::Dedupe }, key)
}

fn read(kind: Kind, row: &PgRow) -> Result<Holding> {
    let fields = || {
        Ok((
            row.try_get::<Vec<u8>, _>(0)?,
            row.try_get::<Option<Vec<u8>>, _>(1)?,
            row.try_get::<Option<i64>, _>(2)?,
            row.try_get::<i64, _>(3)?,
            row.try_get::<Option<i64>, _>(4)?,
            row.try_get::<bool, _>(5)?,
        ))
    };
    let (key, holder, held, left, token, done) = fields().map_err(store_error)?;
    let key = String::from_utf8(key).map_err(|error| {
        Error::new(ErrorKind::Backend, "a row's key is no text").with_source(error)
    })?;
    let mut holding = Holding::new(kind, HeldName::Key(Key::new(key)?));
    let holder = holder.and_then(|holder| String::from_utf8(holder).ok());
    holding.holder = holder.and_then(|holder| holder.parse().ok());
    holding.held_for = held.map(span);
    holding.expires_in = Some(span(left));
    holding.token = token.map(|token| FencingToken(token.cast_unsigned()));
    holding.done = done;
    Ok(holding)
}

/// A time in microseconds; the server's clock may have been set back.
pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}

/// Deletes the lease; its holder and those who wait for it hear of it where they listen.
pub(super) async fn delete_lease(store: &Store, key: &Key) -> Result<Option<Holding>> {
    delete(store, Kind::Lease, "{lease}", "true", key, "pg_notify($3, $4)", news(store, key)).await
}

/// Deletes the lease if it is held under this token.
pub(super) async fn release_lease(store: &Store, key: &Key, token: FencingToken) -> Result<bool> {
    let mut more = news(store, key);
    more.push(Arg::Int(token.value().cast_signed()));
    let also = "pg_notify($3, $4)";
    let deleted = delete(store, Kind::Lease, "{lease}", "t.token = $5", key, also, more);
    Ok(deleted.await?.is_some())
}

/// What is told of a lease that was deleted.
fn news(store: &Store, key: &Key) -> Vec<Arg<'static>> {
    let told = format!("{CHANGED}{}", store.keys.wake_id(key));
    vec![Arg::Text(channel(store)), Arg::Text(told)]
}

pub(super) async fn delete_entry(store: &Store, key: &Key) -> Result<Option<Holding>> {
    delete(store, Kind::Dedupe, "{dedupe}", "true", key, "NULL", Vec::new()).await
}

async fn delete(
    store: &Store,
    kind: Kind,
    table: &str,
    which: &str,
    key: &Key,
    also: &str,
    more: Vec<Arg<'_>>,
) -> Result<Option<Holding>> {
    let columns = columns(kind);
    let statement = store.names.statement(&format!(
        "WITH {CONFIG}, gone AS (DELETE FROM {table} t USING config \
           WHERE t.id = $2 AND {which} AND t.expires_at > clock_timestamp() RETURNING t.*) \
         SELECT {columns}, {also} FROM gone, {NOW}"
    ));
    let id = id(store, kind, key);
    let mut args = vec![millis(ROW_WAIT), Arg::Bytes(&id)];
    args.extend(more);
    let rows = store.run(&statement, args).await?;
    rows.first().map(|row| read(kind, row)).transpose()
}
