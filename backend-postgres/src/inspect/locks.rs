//! Named locks and claims: advisory locks, of which the server knows the number and the session.

use leasehold_core::{
    Error, ErrorKind, HeldName, Holder, Holding, HoldingQuery, Key, Kind, NameQuery, Result,
};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::rows::span;
use crate::error::{code, store_error};
use crate::keys::LockKind;
use crate::sql::Arg;
use crate::store::Store;

/// A session that was told to end is waited for so long, in milliseconds.
const END_WAIT: i64 = 3_000;

/// The advisory locks of this database, by their number.
const ADVISORY: &str = "SELECT pid, (classid::int8 << 32) | objid::int8 AS id, mode, granted \
    FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 \
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// The marks tell sessions of named locks (`$1`) from those of claims (`$2`), both of this
/// namespace only.
fn statement(which: &str) -> String {
    format!(
        "WITH locks AS MATERIALIZED ({ADVISORY}), \
         marked AS (SELECT pid, bool_or(id = $1) AS named, bool_or(id = $2) AS claims FROM locks \
           WHERE id IN ($1, $2) AND granted AND mode = 'ShareLock' GROUP BY pid), \
         waiters AS (SELECT id, count(*) AS n FROM locks WHERE NOT granted GROUP BY id) \
         SELECT l.id, l.pid, coalesce(m.named, false), coalesce(m.claims, false), \
           nullif(a.application_name, ''), host(a.client_addr), \
           (extract(epoch FROM clock_timestamp() - a.xact_start) * 1000000)::int8, \
           coalesce(w.n, 0) \
         FROM locks l LEFT JOIN marked m USING (pid) LEFT JOIN waiters w USING (id) \
         LEFT JOIN pg_stat_activity a USING (pid) \
         WHERE l.granted AND l.mode = 'ExclusiveLock' AND {which}"
    )
}

/// An advisory lock that somebody holds.
struct Held {
    id: i64,
    /// None of a prepared transaction.
    pid: Option<i32>,
    /// Its session has the mark of a kind.
    mark: Option<Kind>,
    application_name: Option<String>,
    client: Option<String>,
    transaction_micros: Option<i64>,
    waiters: i64,
}

impl Held {
    fn read(row: &PgRow) -> sqlx::Result<Self> {
        let mark = match (row.try_get(2)?, row.try_get(3)?) {
            (true, _) => Some(Kind::Lock),
            (false, true) => Some(Kind::Claim),
            (false, false) => None,
        };
        Ok(Self {
            id: row.try_get(0)?,
            pid: row.try_get(1)?,
            mark,
            application_name: row.try_get(4)?,
            client: row.try_get(5)?,
            transaction_micros: row.try_get(6)?,
            waiters: row.try_get(7)?,
        })
    }

    /// As a holding of this kind.
    fn holding(&self, kind: Kind, name: HeldName) -> Holding {
        let mut holding = Holding::new(kind, name);
        let label = self.application_name.as_deref();
        holding.holder = label.and_then(|label| label.parse::<Holder>().ok());
        let mut session = match self.pid {
            Some(pid) => format!("pid {pid}"),
            None => "a prepared transaction".to_owned(),
        };
        let label = label.filter(|_| holding.holder.is_none());
        for more in label.into_iter().chain(self.client.as_deref()) {
            session.push_str(", ");
            session.push_str(more);
        }
        holding.session = Some(session);
        if kind == Kind::Claim {
            holding.held_for = self.transaction_micros.map(span);
        }
        holding.waiters = Some(u32::try_from(self.waiters).unwrap_or(u32::MAX));
        holding
    }
}

fn number(store: &Store, kind: Kind, key: &Key) -> i64 {
    let of = if kind == Kind::Lock { LockKind::Session } else { LockKind::Claim };
    store.keys.advisory(of, key)
}

pub(super) async fn held(store: &Store, query: &HoldingQuery) -> Result<Vec<Holding>> {
    match &query.names {
        NameQuery::Key(key) => {
            let held = named(store, key).await?.into_iter();
            let wanted = held.filter(|(kind, _)| query.wants(*kind));
            Ok(wanted.map(|(kind, held)| held.holding(kind, HeldName::Key(key.clone()))).collect())
        }
        NameQuery::Prefix(_) => {
            let all = ask(store, "m.pid IS NOT NULL", Vec::new()).await?.into_iter();
            let wanted = all.filter_map(|held| held.mark.map(|kind| (kind, held)));
            let wanted = wanted.filter(|(kind, _)| query.wants(*kind));
            let hashed = |held: &Held| HeldName::Hashed(held.id.to_string());
            Ok(wanted.map(|(kind, held)| held.holding(kind, hashed(&held))).collect())
        }
    }
}

/// Who holds a key's locks. Where both kinds have one number, which the caller's own mapping may
/// give them, the mark of the session tells which it is.
async fn named(store: &Store, key: &Key) -> Result<Vec<(Kind, Held)>> {
    let ids = [Kind::Lock, Kind::Claim].map(|kind| (number(store, kind, key), kind));
    let asked = vec![Arg::Ints(ids.iter().map(|(id, _)| *id).collect())];
    let held = ask(store, "l.id = ANY($3)", asked).await?.into_iter();
    let kind = |held: &Held| {
        let fits = ids.iter().filter(|(id, _)| *id == held.id).map(|(_, kind)| *kind);
        fits.clone().find(|kind| held.mark == Some(*kind)).or_else(|| fits.clone().next())
    };
    Ok(held.filter_map(|held| kind(&held).map(|kind| (kind, held))).collect())
}

async fn ask(store: &Store, which: &str, more: Vec<Arg<'_>>) -> Result<Vec<Held>> {
    let mark = |kind| Arg::Int(store.keys.mark(kind));
    let mut args = vec![mark(LockKind::Session), mark(LockKind::Claim)];
    args.extend(more);
    let rows = store.run(&store.names.statement(&statement(which)), args).await?;
    rows.iter().map(|row| Held::read(row).map_err(store_error)).collect()
}

/// Ends the session that holds a lock.
pub(super) async fn end_holder(store: &Store, kind: Kind, key: &Key) -> Result<Option<Holding>> {
    let held = named(store, key).await?;
    let Some((_, held)) = held.into_iter().find(|(held, _)| *held == kind) else {
        return Ok(None);
    };
    let holding = held.holding(kind, HeldName::Key(key.clone()));
    let Some(pid) = held.pid else {
        let detail = "a prepared transaction holds it: find it in pg_prepared_xacts, and end it \
            with ROLLBACK PREPARED";
        return Err(Error::new(ErrorKind::Backend, detail));
    };
    // whose number it was may be another's by now, which does not hold the lock
    let end = store.names.statement(&format!(
        "WITH locks AS ({ADVISORY}) SELECT pg_terminate_backend($1::int4, {END_WAIT}) \
         WHERE EXISTS (SELECT 1 FROM locks WHERE pid = $1::int4 AND id = $2 AND granted \
           AND mode = 'ExclusiveLock')"
    ));
    let mode = store.server().await?.mode();
    let ended = store.run_as(mode, &end, vec![Arg::Int(pid.into()), Arg::Int(held.id)]).await;
    let ended = ended.map_err(|error| match code(&error).as_deref() {
        Some("42501") => {
            let detail = format!(
                "the role may not end the session that holds it ({}), which is another role's: \
                 GRANT pg_signal_backend to it; a superuser's session only a superuser can end",
                holding.session.as_deref().unwrap_or_default()
            );
            Error::new(ErrorKind::Backend, detail).with_source(error)
        }
        _ => store_error(error),
    })?;
    let Some(row) = ended.first() else {
        return Ok(None); // it has let go by itself
    };
    if row.try_get(0).map_err(store_error)? {
        return Ok(Some(holding));
    }
    let detail =
        format!("the session that holds it was told to end and goes on after {END_WAIT} ms");
    Err(Error::new(ErrorKind::Unavailable, detail))
}
