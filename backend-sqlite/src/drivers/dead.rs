//! Dead sessions: how they are known, ended, and cleared away.

use std::path::PathBuf;

use leasehold_core::Result;
use serde_json::json;
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use crate::alive::{Locked, is_dead};
use crate::error::{file_error, store_error};
use crate::file::commit;
use crate::place::Place;
use crate::store::Store;

/// How many sessions of the past are cleared away at a time.
const CLEARED: u32 = 100;

const KILL: &str = "DELETE FROM leasehold_session WHERE id IN (SELECT value FROM json_each(?1))";
/// A lock whose session has no row has lost it in no way that SQLite knows of.
const FREE: &str = "DELETE FROM leasehold_lock WHERE session IN (SELECT value FROM json_each(?1))";
const SESSIONS: &str = "SELECT id FROM leasehold_session LIMIT ?1 OFFSET ?2";

/// Where a session's proof of life is.
pub(super) fn proof_of(place: &Place, id: i64) -> PathBuf {
    place.sessions().join(format!("{id:016x}"))
}

/// Whether a session has ended. One that cannot be looked at, e.g. because too many files are
/// open, counts as alive.
pub(crate) fn is_over(place: &Place, session: i64) -> bool {
    let path = proof_of(place, session);
    is_dead(&path).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "cannot tell whether a session is alive");
        false
    })
}

/// Ends sessions, and frees their locks.
pub(crate) async fn end(conn: &mut SqliteConnection, sessions: &[i64]) -> Result<()> {
    let list = json!(sessions).to_string();
    for sql in [KILL, FREE] {
        let ended = sqlx::query(sql).bind(list.clone()).execute(&mut *conn).await;
        ended.map_err(store_error)?;
    }
    Ok(())
}

/// Clears away what dead sessions have left: rows, and files.
pub(crate) async fn clear_dead(store: &Store) -> Result<()> {
    let place = &store.files.place;
    let mut offset = 0;
    loop {
        let mut lent = store.locks.begin().await?;
        let rows = sqlx::query(SESSIONS).bind(CLEARED).bind(offset).fetch_all(&mut *lent).await;
        let ids = rows.map_err(store_error)?;
        let ids = ids.iter().map(|row| row.try_get(0).map_err(store_error));
        let ids: Vec<i64> = ids.collect::<Result<_>>()?;
        let mut dead = Vec::new();
        for id in &ids {
            if is_over(place, *id) {
                dead.push(*id);
            }
        }
        end(&mut lent, &dead).await?;
        commit(&mut lent).await?;
        lent.give_back();
        if ids.len() < CLEARED as usize {
            break;
        }
        offset += CLEARED - dead.len() as u32;
    }
    for folder in [place.sessions(), place.claims()] {
        let files = std::fs::read_dir(&folder).map_err(|e| file_error("read", &folder, e))?;
        for file in files {
            let path = file.map_err(|e| file_error("read", &folder, e))?.path();
            // who gets the lock removes the file by its drop: nobody lives who needs it
            drop(Locked::try_at(&path).map_err(|e| file_error("clear away", &path, e))?);
        }
    }
    Ok(())
}
