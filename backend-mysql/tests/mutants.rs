//! MySQL (or MariaDB, if it is meant), spoiled: the suite must see what is missing. Each mutant has
//! a database of its own, and a wire on which the statements of its clients are altered.

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_conformance::mutants::{self, Altered, Mutant, Rewriter};
use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Error, ErrorKind, Result};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use support::MySqlHarness;

/// Texts in what the clients send, and what is sent instead.
type Alters = &'static [(&'static str, &'static str)];

const fn sent(name: &'static str, case: &'static str, alters: Alters) -> Mutant<Alters> {
    Mutant { name, case, alters }
}

/// Who waits for a lease is woken, or is late.
const SELDOM: Duration = Duration::from_secs(30);

/// The server's clock, as the statements read it.
macro_rules! now {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    };
}
/// The same, with room for more.
macro_rules! short {
    () => {
        "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',UTC_TIMESTAMP(6))"
    };
}

#[rustfmt::skip] // a table
const TABLE: &[Mutant<Alters>] = &[
    // named locks
    sent("gives a lock to all", "named::excludes",
        &[("SELECT GET_LOCK(?, 0)", "SELECT ? IS NOT NULL")]),
    sent("does not unlock", "named::can_be_taken_again_after_release",
        &[("SELECT RELEASE_LOCK(?)", "SELECT ? IS NOT NULL")]),
    // leases
    sent("takes leases that others hold", "lease::excludes",
        &[(concat!("IF(`leasehold_lease`.expires <= ", now!(), ","), "IF(1,")]),
    sent("gives a lease the token that it had", "lease::tokens_rise",
        &[("`leasehold_lease`.token + 1", "`leasehold_lease`.token + 0")]),
    sent("keeps a lease too long", "expiry::vanished_holder_is_survived",
        &[(concat!(now!(), " + ?"), concat!(short!(), "+?*99"))]),
    sent("lets a lease expire early", "expiry::vanished_holder_is_survived",
        &[(concat!(now!(), " + ?"), concat!(short!(), "+?/4"))]),
    sent("releases without comparing the owner", "expiry::stale_release_spares_the_successor",
        &[("LAST_INSERT_ID(awaited) WHERE id = ? AND owner = ?", // MariaDB
           "LAST_INSERT_ID(awaited) WHERE id = ? AND ? <> ''"),
          ("WHERE id = ? AND owner = ? LIMIT 1 FOR UPDATE NOWAIT",
           "WHERE id = ? AND ? <> '' LIMIT 1 FOR UPDATE NOWAIT")]),
    sent("does not release", "lease::drop_frees",
        &[("LAST_INSERT_ID(awaited) WHERE id = ? AND owner = ?", // MariaDB
           "LAST_INSERT_ID(awaited) WHERE id = ? AND ? = ''"),
          ("WHERE id = ? AND owner = ? LIMIT 1 FOR UPDATE NOWAIT",
           "WHERE id = ? AND ? = '' LIMIT 1 FOR UPDATE NOWAIT")]),
    sent("tells nobody of a release", "lease::waiters_are_woken",
        &[("awaited = 0 * LAST_INSERT_ID(awaited)", "awaited = 0")]),
    sent("renews nothing and says it did", "lease::heartbeat_outlives_the_ttl",
        &[(concat!(now!(), " + ttl"), "expires")]),
    sent("verifies nothing", "expiry::late_write_after_deletion_is_rejected", &[(
        concat!("SELECT expires > ", now!(), " FROM `leasehold_lease` WHERE id = ? AND owner = ?"),
        "SELECT 1 FROM `leasehold_meta` WHERE ? <> ?",
    )]),
    sent("verifies without a lock on the row", "expiry::takeover_waits_for_an_open_transaction",
        &[("WHERE id = ? AND owner = ? LOCK IN SHARE MODE", "WHERE id = ? AND owner = ?")]),
    sent("purges live leases", "expiry::housekeeping_spares_the_live", &[
        (concat!("SELECT ", now!(), ", MAX(token)"), "SELECT 9000000000000000000, MAX(token)"),
        (concat!(" FROM `leasehold_lease` WHERE expires <= ", now!()),
         " FROM `leasehold_lease` WHERE 1"),
    ]),
    sent("releases what has another token", "by_token::a_successor_is_spared",
        &[(" AND token = ", " AND 0 < ")]),
    // claims
    sent("claims without locks", "claim::excludes", &[
        (",IFNULL(GET_LOCK('lh:c", ",IFNULL(INTERVAL('lh:c"), // which is 1
        ("')=CONNECTION_ID()", "') IS NULL"),
    ]),
    sent("commits what it should roll back", "commit::rollback_and_drop_write_nothing",
        &[("ROLLBACK", "COMMIT")]),
    sent("sees a key first in every claim", "commit::first_seen_is_remembered_by_the_commit", &[
        (concat!("SELECT expires > ", now!(), " FROM `leasehold_dedupe`"),
         "SELECT 0 FROM `leasehold_dedupe`"),
        (concat!("WHERE id = ? AND expires <= ", now!()), "WHERE id = ?"),
    ]),
    // dedupe
    sent("admits duplicates", "dedupe::admits_once",
        &[(concat!("IF(`leasehold_dedupe`.expires <= ", now!(), ","), "IF(1,")]),
    sent("completes for a stale owner", "dedupe::stale_owner_cannot_complete",
        &[("done = 1 WHERE id = ? AND owner = ?", "done = 1 WHERE id = ? AND ? <> ''")]),
    sent("abandons for a stale owner", "dedupe::stale_owner_cannot_abandon",
        &[("WHERE id = ? AND owner = ? AND NOT done", "WHERE id = ? AND ? <> '' AND NOT done")]),
    sent("forgets what is done early", "dedupe::complete_is_kept_for_retain",
        &[(concat!(now!(), " + ?, done = 1"), concat!(short!(), "+?/9, done = 1"))]),
    sent("lets an entry be taken over early", "dedupe::unfinished_is_taken_over",
        &[(concat!(now!(), " + ?"), concat!(short!(), "+?/9"))]),
    sent("lets nobody take an entry over", "dedupe::unfinished_is_taken_over",
        &[(concat!(now!(), " + ?"), concat!(short!(), "+?*99"))]),
    sent("purges live entries", "dedupe::housekeeping_spares_the_live", &[
        (concat!("SELECT ", now!(), ", MAX(token)"), "SELECT 9000000000000000000, MAX(token)"),
        (concat!(" FROM `leasehold_dedupe` WHERE expires <= ", now!()),
         " FROM `leasehold_dedupe` WHERE 1"),
    ]),
];

fn main() -> ExitCode {
    let code = mutants::run(TABLE, open);
    // the server ends with its last handle
    drop(SERVER.lock().unwrap_or_else(PoisonError::into_inner).take());
    code
}

/// That of all mutants.
static SERVER: Mutex<Option<MySqlHarness>> = Mutex::new(None);

fn server() -> Result<MySqlHarness> {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = &*server {
        return Ok(server.clone());
    }
    let kind = if support::is_meant(Kind::MySql) { Kind::MySql } else { Kind::MariaDb };
    Ok(server.insert(MySqlHarness::start(kind)?).clone())
}

fn open(alters: Option<&Alters>) -> Result<Altered> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let server = server()?;
    let name =
        format!("test_mutant{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let own = |port: u16| -> Result<String> {
        let (base, _) = server.url().rsplit_once('/').ok_or_else(|| failed("no database"))?;
        let (base, _) = base.rsplit_once(':').ok_or_else(|| failed("no port"))?;
        Ok(format!("{base}:{port}/{name}"))
    };
    let port = server.server().port();
    let url = own(port)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let admin_url = runtime.map_err(failed)?.block_on(async {
        let mut admin = server.admin().await?;
        for statement in [
            format!("CREATE DATABASE {name}"),
            format!(
                "CREATE TABLE {name}.numbers \
                 (name VARBINARY(100) PRIMARY KEY, value BIGINT NOT NULL)"
            ),
        ] {
            admin.query_drop(statement).await.map_err(failed)?;
        }
        let backend = MySqlBackend::connect(&url).await?;
        backend.migrate().await?;
        backend.close().await?;
        Ok::<_, Error>(server.server().admin_url())
    })?;
    let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let rewriter = Rewriter::start(upstream, alters.copied().unwrap_or_default());
    let rewriter = rewriter.map_err(failed)?;
    let url = own(rewriter.addr().port())?;
    let harness = MySqlHarness::at(&format!("{} true {url} {admin_url}", server.kind()))?;
    let harness = harness.with_max_poll(SELDOM);
    Ok(Altered { harness: Arc::new(harness), rewriter: Some(rewriter) })
}

fn failed(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorKind::Backend, cause.into().to_string())
}
