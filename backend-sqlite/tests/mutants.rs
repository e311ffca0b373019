//! SQLite, spoiled: the suite must see what is missing. Each mutant has files of its own, in one of
//! which a trigger or a table is not as the backend made it.

mod support;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_conformance::mutants::{self, Altered, Mutant};
use leasehold_core::Result;
use support::{SqliteHarness, failed};
use tempfile::TempDir;

/// The file that is altered.
#[derive(Clone, Copy, Debug)]
enum Of {
    Locks,
    Leases,
    Main,
}

/// A file, and the statements that alter it.
type Alters = (Of, &'static str);

const fn altered(
    name: &'static str,
    case: &'static str,
    of: Of,
    statements: &'static str,
) -> Mutant<Alters> {
    Mutant { name, case, alters: (of, statements) }
}

const NOT_RELEASED: &str = "CREATE TRIGGER spoiled AFTER DELETE ON leasehold_lease BEGIN \
       INSERT INTO leasehold_lease \
         (namespace, key, owner, token, boot, expires, since, holder) VALUES (OLD.namespace, \
         OLD.key, OLD.owner, OLD.token, OLD.boot, OLD.expires, OLD.since, OLD.holder); END";
#[rustfmt::skip] // a table
const TABLE: &[Mutant<Alters>] = &[
    // named locks
    altered("forgets its locks", "named::excludes", Of::Locks,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_lock BEGIN \
           DELETE FROM leasehold_lock WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("does not unlock", "named::can_be_taken_again_after_release", Of::Locks,
        "CREATE TRIGGER spoiled AFTER DELETE ON leasehold_lock BEGIN \
           INSERT INTO leasehold_lock VALUES \
             (OLD.namespace, OLD.key, OLD.session, OLD.token, OLD.since); END"),
    altered("folds the case of a lock", "keys::zoo_of_locks", Of::Locks,
        "DROP TABLE leasehold_lock; \
         CREATE TABLE leasehold_lock (namespace TEXT NOT NULL, key TEXT NOT NULL COLLATE NOCASE, \
           session INTEGER NOT NULL, token INTEGER NOT NULL, since INTEGER NOT NULL, \
           PRIMARY KEY (namespace, key)) WITHOUT ROWID"),
    altered("cuts off blanks at the end of a lock's key", "keys::zoo_of_locks", Of::Locks,
        "DROP TABLE leasehold_lock; \
         CREATE TABLE leasehold_lock (namespace TEXT NOT NULL, key TEXT NOT NULL COLLATE RTRIM, \
           session INTEGER NOT NULL, token INTEGER NOT NULL, since INTEGER NOT NULL, \
           PRIMARY KEY (namespace, key)) WITHOUT ROWID"),
    altered("takes a lock away from its holder", "named::wait_bounds_everything", Of::Locks,
        "DROP TABLE leasehold_lock; \
         CREATE TABLE leasehold_lock (namespace TEXT NOT NULL, key TEXT NOT NULL, \
           session INTEGER NOT NULL, token INTEGER NOT NULL, since INTEGER NOT NULL, \
           UNIQUE (namespace, key) ON CONFLICT REPLACE); \
         CREATE TRIGGER spoiled BEFORE INSERT ON leasehold_lock BEGIN \
           DELETE FROM leasehold_lock WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("sets the counter of tokens back", "named::tokens_rise", Of::Locks,
        "CREATE TRIGGER spoiled AFTER UPDATE ON leasehold_token BEGIN UPDATE leasehold_token \
           SET value = CASE WHEN NEW.value > 4000000000000000 THEN 0 ELSE 5000000000000000 END; \
         END"),
    // leases
    altered("forgets its leases", "lease::excludes", Of::Leases,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_lease BEGIN \
           DELETE FROM leasehold_lease WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("keeps a lease too long", "expiry::vanished_holder_is_survived", Of::Leases,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_lease BEGIN \
           UPDATE leasehold_lease SET expires = expires + 60000000 \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("lets a lease expire early", "expiry::vanished_holder_is_survived", Of::Leases,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_lease BEGIN \
           UPDATE leasehold_lease SET expires = since + (expires - since) / 4 \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("does not release", "lease::can_be_taken_again_after_release", Of::Leases,
        NOT_RELEASED),
    altered("releases nothing by a token", "by_token::frees_what_a_dead_holder_left", Of::Leases,
        NOT_RELEASED),
    altered("renews nothing and says it did", "lease::heartbeat_outlives_the_ttl", Of::Leases,
        "CREATE TRIGGER spoiled AFTER UPDATE OF expires ON leasehold_lease \
           WHEN NEW.owner = OLD.owner BEGIN UPDATE leasehold_lease SET expires = OLD.expires \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("sets the counter of leases' tokens back", "lease::tokens_rise", Of::Leases,
        "DROP TRIGGER leasehold_token_insert; \
         CREATE TRIGGER spoiled AFTER INSERT ON leasehold_lease BEGIN UPDATE leasehold_token \
           SET value = CASE WHEN NEW.token > 4000000000000000 THEN 0 ELSE 5000000000000000 END; \
         END"),
    // dedupe
    altered("admits duplicates", "dedupe::admits_once", Of::Main,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_dedupe BEGIN \
           DELETE FROM leasehold_dedupe WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("lets an entry be taken over at once", "dedupe::unfinished_is_taken_over", Of::Main,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_dedupe WHEN NOT NEW.done BEGIN \
           UPDATE leasehold_dedupe SET expires_at = since \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("lets nobody take an entry over", "dedupe::unfinished_is_taken_over", Of::Main,
        "CREATE TRIGGER spoiled AFTER INSERT ON leasehold_dedupe WHEN NOT NEW.done BEGIN \
           UPDATE leasehold_dedupe SET expires_at = expires_at + 60000000 \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("forgets what is done early", "dedupe::complete_is_kept_for_retain", Of::Main,
        "CREATE TRIGGER spoiled AFTER UPDATE OF done ON leasehold_dedupe WHEN NEW.done BEGIN \
           UPDATE leasehold_dedupe SET expires_at = since + (expires_at - since) / 9 \
             WHERE namespace = NEW.namespace AND key = NEW.key; END"),
    altered("completes what is abandoned", "dedupe::abandon_makes_it_first_again", Of::Main,
        "CREATE TRIGGER spoiled AFTER DELETE ON leasehold_dedupe WHEN NOT OLD.done BEGIN \
           INSERT INTO leasehold_dedupe VALUES (OLD.namespace, OLD.key, OLD.owner, 1, OLD.since, \
             OLD.expires_at, OLD.holder); END"),
    altered("purges live entries with the dead", "dedupe::housekeeping_spares_the_live", Of::Main,
        "CREATE TRIGGER spoiled AFTER DELETE ON leasehold_dedupe \
           WHEN OLD.expires_at <= CAST(unixepoch('subsec') * 1000000 AS INTEGER) BEGIN \
           DELETE FROM leasehold_dedupe; END"),
    altered("folds the case of an entry", "keys::zoo_within_claims", Of::Main,
        "DROP TABLE leasehold_dedupe; \
         CREATE TABLE leasehold_dedupe (namespace TEXT NOT NULL, \
           key TEXT NOT NULL COLLATE NOCASE, owner BLOB NOT NULL, done INTEGER NOT NULL, \
           since INTEGER NOT NULL, expires_at INTEGER NOT NULL, holder TEXT NOT NULL, \
           PRIMARY KEY (namespace, key)) WITHOUT ROWID"),
];

/// Handles live longer than a case; the files go when all mutants have been seen.
static FOLDERS: Mutex<Vec<TempDir>> = Mutex::new(Vec::new());

fn main() -> ExitCode {
    let code = mutants::run(TABLE, open);
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clear();
    code
}

fn open(alters: Option<&Alters>) -> Result<Altered> {
    let folder = tempfile::tempdir().map_err(failed)?;
    let harness = SqliteHarness::at(&folder.path().join("mutant.db"));
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed)?.block_on(async {
        harness.prepare().await?;
        if let Some((of, statements)) = alters {
            let file = match of {
                Of::Locks => harness.locks().await,
                Of::Leases => harness.leases().await,
                Of::Main => harness.admin().await,
            };
            sqlx::raw_sql(*statements).execute(&mut file?).await.map_err(failed)?;
        }
        Ok(())
    })?;
    Ok(Altered { harness: Arc::new(harness), rewriter: None })
}
