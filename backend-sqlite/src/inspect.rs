//! Who holds what, taking it away by force, and what is wrong with the files.

use std::io;
use std::path::Path;
use std::time::Duration;

use leasehold_core::{
    Error, ErrorKind, FencingToken, Finding, HeldName, Holding, HoldingQuery, Key, Kind, NameQuery,
    Result,
};
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row};

use crate::alive::is_dead;
use crate::clock::now;
use crate::drivers::{claim_file, claim_prefix, end, is_over};
use crate::error::{file_error, store_error};
use crate::file::{Which, commit};
use crate::schema::wall_clock;
use crate::store::Store;

/// The rows of a namespace whose key is `?2`, or begins with `?3`.
macro_rules! asked {
    () => {
        "namespace = ?1 AND (?2 IS NULL OR key = ?2) AND substr(key, 1, length(?3)) = ?3"
    };
}

const LOCKS: &str = concat!(
    "SELECT key, session, token, ",
    wall_clock!(),
    " - since AS age, (SELECT holder FROM leasehold_session s WHERE s.id = session) AS holder, \
       (SELECT count(*) FROM leasehold_waiter w \
        WHERE w.namespace = l.namespace AND w.key = l.key) AS waiters \
     FROM leasehold_lock l WHERE ",
    asked!(),
    " ORDER BY key"
);
const LEASES: &str = concat!(
    "SELECT key, token, holder, ?5 - since AS age, expires - ?5 AS rest FROM leasehold_lease WHERE ",
    asked!(),
    " AND boot = ?4 AND expires > ?5 ORDER BY key LIMIT ?6"
);
const ENTRIES: &str = concat!(
    "SELECT key, done, holder, ",
    wall_clock!(),
    " - since AS age, expires_at - ",
    wall_clock!(),
    " AS rest FROM {p}_dedupe WHERE ",
    asked!(),
    " AND expires_at > ",
    wall_clock!(),
    " AND (?4 OR NOT done) ORDER BY key LIMIT ?5"
);
/// Journals above this size, in bytes, are told of: a reader may keep them from being cut.
const LARGE_JOURNAL: u64 = 64 << 20;

type Query = sqlx::query::Query<'static, Sqlite, SqliteArguments>;

pub(crate) async fn holdings(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let mut holdings = Vec::new();
    if query.wants(Kind::Lock) {
        holdings.extend(locks(store, query).await?.into_iter().map(|(_, held)| held));
    }
    if query.wants(Kind::Lease) {
        holdings.extend(leases(store, query).await?);
    }
    if query.wants(Kind::Claim) {
        holdings.extend(claims(store, query)?);
    }
    if query.wants(Kind::Dedupe) {
        holdings.extend(entries(store, query).await?);
    }
    Ok(query.arrange(holdings))
}

/// Binds what [`asked`] has.
fn ask(store: &Store, sql: String, query: &HoldingQuery) -> Query {
    let (key, prefix) = match &query.names {
        NameQuery::Key(key) => (Some(key.as_str().to_owned()), String::new()),
        NameQuery::Prefix(prefix) => (None, prefix.clone()),
    };
    sqlx::query(AssertSqlSafe(sql)).bind(store.namespace.clone()).bind(key).bind(prefix)
}

fn limit(query: &HoldingQuery) -> i64 {
    i64::try_from(query.limit).unwrap_or(i64::MAX)
}

/// The locks of live sessions, each with the number of its session.
async fn locks(store: &Store, query: &HoldingQuery) -> Result<Vec<(i64, Holding)>> {
    let rows = store.locks.run(|| Ok(ask(store, LOCKS.to_owned(), query))).await?;
    let mut held = Vec::new();
    for row in rows {
        let session: i64 = row.try_get("session").map_err(store_error)?;
        if held.len() < query.limit && !is_over(&store.files.place, session) {
            let mut holding = read(Kind::Lock, &row)?;
            holding.session = Some(format!("{session:016x}"));
            holding.token = Some(token(&row)?);
            holding.waiters = Some(row.try_get("waiters").map_err(store_error)?);
            held.push((session, holding));
        }
    }
    Ok(held)
}

async fn leases(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let rows = store.leases.run(|| {
        let now = now()?;
        let asked = ask(store, LEASES.to_owned(), query);
        Ok(asked.bind(now.boot).bind(now.micros).bind(limit(query)))
    });
    let read = |row: &SqliteRow| {
        let mut holding = read(Kind::Lease, row)?;
        holding.expires_in = Some(micros(row, "rest")?);
        holding.token = Some(token(row)?);
        Ok(holding)
    };
    rows.await?.iter().map(read).collect()
}

async fn entries(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let sql = ENTRIES.replace("{p}", &store.files.prefix);
    let rows =
        store.main.run(|| Ok(ask(store, sql.clone(), query).bind(query.done).bind(limit(query))));
    let read = |row: &SqliteRow| {
        let mut holding = read(Kind::Dedupe, row)?;
        holding.expires_in = Some(micros(row, "rest")?);
        holding.done = row.try_get("done").map_err(store_error)?;
        Ok(holding)
    };
    rows.await?.iter().map(read).collect()
}

/// What all rows have.
fn read(kind: Kind, row: &SqliteRow) -> Result<Holding> {
    let key: String = row.try_get("key").map_err(store_error)?;
    let holder: Option<String> = row.try_get("holder").map_err(store_error)?;
    let mut holding = Holding::new(kind, HeldName::Key(Key::new(key)?));
    holding.holder = holder.and_then(|text| text.parse().ok());
    holding.held_for = Some(micros(row, "age")?);
    Ok(holding)
}

fn token(row: &SqliteRow) -> Result<FencingToken> {
    let token: i64 = row.try_get("token").map_err(store_error)?;
    Ok(FencingToken(token.cast_unsigned()))
}

/// A time of a column; none where a clock was set back.
fn micros(row: &SqliteRow, column: &str) -> Result<Duration> {
    let micros: i64 = row.try_get(column).map_err(store_error)?;
    Ok(Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
}

fn claims(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    let mut held = Vec::new();
    if let NameQuery::Key(key) = &query.names {
        held.extend(claim(&claim_file(store, key), Some(key))?);
        return Ok(held);
    }
    let (folder, prefix) = (store.files.place.claims(), claim_prefix(store));
    let failed = |error| file_error("read", &folder, error);
    for file in std::fs::read_dir(&folder).map_err(failed)? {
        let file = file.map_err(failed)?;
        if file.file_name().to_string_lossy().starts_with(&prefix) {
            let claim = claim(&file.path(), None)?;
            let wanted = |held: &Holding| held.name.key().is_none_or(|key| query.matches(key));
            held.extend(claim.filter(wanted));
        }
    }
    Ok(held)
}

/// The claim whose file this is; none if nobody has it locked.
fn claim(path: &Path, key: Option<&Key>) -> Result<Option<Holding>> {
    if is_dead(path).map_err(|error| file_error("look at", path, error))? {
        return Ok(None);
    }
    // it may be empty for a moment, or gone
    let told = std::fs::read(path).unwrap_or_default();
    let told = serde_json::from_slice::<(String, String, u64, String, i64)>(&told);
    let Ok(told) = told else {
        let hash = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = key.map_or_else(|| HeldName::Hashed(hash()), |key| HeldName::Key(key.clone()));
        return Ok(Some(Holding::new(Kind::Claim, name)));
    };
    let (name, holder, token, boot, since) = told;
    let now = now()?;
    let mut holding = Holding::new(Kind::Claim, HeldName::Key(Key::new(name)?));
    holding.holder = holder.parse().ok();
    holding.token = Some(FencingToken(token));
    if boot == now.boot {
        let age = u64::try_from(now.micros - since).unwrap_or(0);
        holding.held_for = Some(Duration::from_micros(age));
    }
    Ok(Some(holding))
}

pub(crate) async fn force_release(store: &Store, kind: Kind, key: &Key) -> Result<Option<Holding>> {
    let query = HoldingQuery::key(key).kinds([kind]).done(true);
    let name = || key.as_str().to_owned();
    match kind {
        Kind::Lock => {
            let Some((session, held)) = locks(store, &query).await?.pop() else {
                return Ok(None);
            };
            let mut lent = store.locks.begin().await?;
            end(&mut lent, &[session]).await?;
            commit(&mut lent).await?;
            lent.give_back();
            Ok(Some(held))
        }
        Kind::Lease => {
            let held = leases(store, &query).await?.pop();
            let sql = "DELETE FROM leasehold_lease WHERE namespace = ?1 AND key = ?2 RETURNING 1";
            let delete = || Ok(sqlx::query(sql).bind(store.namespace.clone()).bind(name()));
            let gone = store.leases.run(delete).await?.is_empty();
            Ok(held.filter(|_| !gone))
        }
        Kind::Claim => {
            let Some(held) = claims(store, &query)?.pop() else {
                return Ok(None);
            };
            // its holder does not commit without it, and the next one makes another
            let path = claim_file(store, key);
            match std::fs::remove_file(&path) {
                Ok(()) => Ok(Some(held)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(file_error("remove", &path, error)),
            }
        }
        Kind::Dedupe => {
            let held = entries(store, &query).await?.pop();
            let prefix = &store.files.prefix;
            let sql = format!(
                "DELETE FROM {prefix}_dedupe WHERE namespace = ?1 AND key = ?2 RETURNING 1"
            );
            let delete = || {
                let delete = sqlx::query(AssertSqlSafe(sql.clone()));
                Ok(delete.bind(store.namespace.clone()).bind(name()))
            };
            let gone = store.main.run(delete).await?.is_empty();
            Ok(held.filter(|_| !gone))
        }
    }
}

/// Deletes the lease if it is held under this token.
pub(crate) async fn release_lease(store: &Store, key: &Key, token: FencingToken) -> Result<bool> {
    let sql = "DELETE FROM leasehold_lease WHERE namespace = ?1 AND key = ?2 AND token = ?3 \
        AND boot = ?4 AND expires > ?5 RETURNING 1";
    let deleted = store.leases.run(|| {
        let now = now()?;
        let delete = sqlx::query(sql).bind(store.namespace.clone()).bind(key.as_str().to_owned());
        Ok(delete.bind(token.value().cast_signed()).bind(now.boot).bind(now.micros))
    });
    Ok(!deleted.await?.is_empty())
}

pub(crate) async fn diagnose(store: &Store) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let rows = store.main.run(|| Ok(sqlx::query("SELECT sqlite_version()"))).await?;
    let version: String = rows[0].try_get(0).map_err(store_error)?;
    findings.push(Finding::fine("version", format!("SQLite {version}")));
    let path = store.files.place.main.display();
    let reach = format!("{path}: the processes of this machine coordinate by it");
    findings.push(Finding::fine("reach", reach));
    for which in [Which::Main, Which::Locks, Which::Leases] {
        let mut wal = store.files.path(which).into_os_string();
        wal.push("-wal");
        let size = std::fs::metadata(&wal).map_or(0, |data| data.len());
        let found = format!("{} has {size} bytes", Path::new(&wal).display());
        findings.push(match size > LARGE_JOURNAL {
            false => Finding::fine("journal", found),
            true => Finding::warning(
                "journal",
                found,
                "a transaction that is open for long keeps it from being cut: end it",
            ),
        });
    }
    let rows = store.locks.run(|| Ok(sqlx::query("SELECT id FROM leasehold_session"))).await?;
    let ids = rows.iter().map(|row| row.try_get::<i64, _>(0).map_err(store_error));
    let ids: Vec<i64> = ids.collect::<Result<_>>()?;
    let dead = ids.iter().filter(|id| is_over(&store.files.place, **id)).count();
    let found = format!("{} live, {dead} dead", ids.len() - dead);
    findings.push(match dead > 100 {
        false => Finding::fine("sessions", found),
        true => Finding::warning("sessions", found, "run housekeeping now and then"),
    });
    findings.push(match integrity(store).await {
        Ok(text) if text == "ok" => Finding::fine("integrity", "the files are sound"),
        Ok(text) => Finding::fault("integrity", text, "restore the database from a backup"),
        Err(error) => Finding::fault("integrity", error.to_string(), "look at the disk"),
    });
    Ok(findings)
}

/// What SQLite's own quick look says of the main file.
async fn integrity(store: &Store) -> Result<String> {
    let rows = store.main.run(|| Ok(sqlx::query("PRAGMA quick_check(1)"))).await?;
    let row = rows
        .first()
        .ok_or_else(|| Error::new(ErrorKind::Backend, "the look at the file had no outcome"))?;
    row.try_get(0).map_err(store_error)
}
