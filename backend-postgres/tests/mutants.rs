//! PostgreSQL, spoiled: the suite must see what is missing. Each mutant has a database of its own,
//! and a wire on which the statements of its clients are altered.

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold_conformance::mutants::{self, Altered, Mutant, Rewriter};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::Result;
use sqlx::AssertSqlSafe;
use support::{PgHarness, connect, failed};

/// What is altered.
#[derive(Debug)]
struct Alters {
    /// Texts in what the clients send, and what is sent instead.
    sent: &'static [(&'static str, &'static str)],
    /// Statements that are run on the database before.
    database: &'static str,
}

const fn sent(
    name: &'static str,
    case: &'static str,
    sent: &'static [(&'static str, &'static str)],
) -> Mutant<Alters> {
    Mutant { name, case, alters: Alters { sent, database: "" } }
}

const fn database(
    name: &'static str,
    case: &'static str,
    database: &'static str,
) -> Mutant<Alters> {
    Mutant { name, case, alters: Alters { sent: &[], database } }
}

const NEXT_TOKEN: &str = "nextval('\"leasehold\".token'::regclass)";
#[rustfmt::skip] // a table
const TABLE: &[Mutant<Alters>] = &[
    // named locks
    sent("shares its locks", "named::excludes", &[(
        "CASE WHEN pg_try_advisory_lock($1) THEN nextval('\"leasehold\".token'::regclass) END",
        "CASE WHEN pg_try_advisory_lock_shared($1) THEN nextval('leasehold.token') END",
    )]),
    sent("takes one lock for all keys", "named::different_keys_are_independent", &[
        ("CASE WHEN pg_try_advisory_lock($1) THEN", "CASE WHEN pg_try_advisory_lock(1) THEN"),
        ("pg_backend_pid(), pg_advisory_unlock($1)", "pg_backend_pid(), pg_advisory_unlock(1)"),
    ]),
    sent("does not unlock", "named::can_be_taken_again_after_release",
        &[("pg_backend_pid(), pg_advisory_unlock($1)", "pg_backend_pid(), $1::int8 IS NOT NULL")]),
    sent("waits for no lock", "named::wait_bounds_everything",
        &[("true), pg_advisory_lock($2)", "true), $2::int8")]),
    sent("gives all locks one token", "named::tokens_rise", &[(NEXT_TOKEN, "7::int8")]),
    database("lets each session cache tokens", "named::tokens_rise",
        "ALTER SEQUENCE leasehold.token CACHE 100"),
    database("counts tokens down", "lease::tokens_rise",
        "ALTER SEQUENCE leasehold.token INCREMENT -1 MINVALUE 1 MAXVALUE 1000000 \
         RESTART 1000000 START 1000000"),
    // leases
    sent("takes leases that others hold", "lease::excludes", &[
        (" AND h.owner <> $5 AND h.expires_at > clock_timestamp())", " AND false)"),
        ("WHERE l.expires_at <= clock_timestamp() OR l.owner = excluded.owner", "WHERE true"),
    ]),
    sent("keeps a lease for ever", "expiry::vanished_holder_is_survived",
        &[("$6 * interval '1 microsecond'", "$6 * interval '1 second'")]),
    sent("lets a lease expire early", "expiry::vanished_holder_is_survived",
        &[("$6 * interval '1 microsecond'", "$6 * interval '1 us' / 4")]),
    sent("gives a lease the token that it had", "expiry::reclaim_follows_every_expiry",
        &[(", token = excluded.token WHERE", " WHERE")]),
    sent("releases without comparing the owner", "expiry::stale_release_spares_the_successor",
        &[("l.id = $2 AND l.owner = $3 RETURNING 1)", "l.id = $2 AND $3 <> l.key RETURNING 1)")]),
    sent("does not release", "lease::drop_frees",
        &[("l.id = $2 AND l.owner = $3 RETURNING 1)", "l.id = $2 AND $3 < '' RETURNING 1)")]),
    sent("renews nothing and says it did", "lease::heartbeat_outlives_the_ttl", &[(
        "SET expires_at = clock_timestamp() + h.ttl * interval '1 microsecond'",
        "SET expires_at = l.expires_at",
    )]),
    sent("verifies nothing", "expiry::late_write_after_deletion_is_rejected", &[(
        "FROM \"leasehold\".lease WHERE id = $1 AND owner = $2 \
         AND expires_at > clock_timestamp() FOR KEY SHARE",
        "WHERE $1 <> $2",
    )]),
    sent("verifies without a lock on the row", "expiry::takeover_waits_for_an_open_transaction",
        &[(" FOR KEY SHARE", "")]),
    sent("tells nobody of a release", "lease::waiters_are_woken",
        &[("SELECT pg_notify($4, $5) FROM freed", "SELECT $4 || $5 FROM freed")]),
    sent("purges live leases", "expiry::housekeeping_spares_the_live",
        &[("WHERE expires_at <= clock_timestamp() LIMIT", "WHERE expires_at IS NOT NULL LIMIT")]),
    sent("releases what has another token", "by_token::a_successor_is_spared",
        &[("t.id = $2 AND t.token = $5", "t.id = $2 AND $5 < t.token")]),
    sent("tells nobody of a release by a token", "by_token::waiters_are_woken",
        &[("pg_notify($3, $4) FROM gone", "$3 || $4 FROM gone")]),
    // claims
    sent("claims without locks", "claim::excludes", &[
        ("pg_advisory_xact_lock(", "abs("),
        ("pg_try_advisory_xact_lock(", "true OR 0 < abs("),
    ]),
    sent("reads in a claim what was there before it", "claim::waiter_reads_what_was_committed", &[(
        "BEGIN ISOLATION LEVEL READ COMMITTED; ",
        "BEGIN ISOLATION LEVEL REPEATABLE READ;",
    )]),
    sent("commits what it should roll back", "commit::rollback_and_drop_write_nothing",
        &[("ROLLBACK", "COMMIT")]),
    sent("rolls back what it should commit", "commit::writes_appear_at_the_commit",
        &[("SHOW transaction_isolation; COMMIT", "SHOW transaction_isolation; ABORT")]),
    sent("sees a key first in every claim", "commit::first_seen_is_remembered_by_the_commit", &[
        ("WHERE h.id = $1 AND h.expires_at > clock_timestamp())", "WHERE h.id = $1 AND false)"),
        ("WHERE d.expires_at <= clock_timestamp() RETURNING 1", "RETURNING 1"),
    ]),
    // dedupe
    sent("admits duplicates", "dedupe::admits_once", &[
        (" AND h.owner <> w.owner AND h.expires_at > clock_timestamp())", " AND false)"),
        ("WHERE d.expires_at <= clock_timestamp() OR d.owner = excluded.owner", "WHERE true"),
    ]),
    sent("completes for a stale owner", "dedupe::stale_owner_cannot_complete",
        &[("AND d.owner = $3 RETURNING 1", "AND $3 <> d.key RETURNING 1")]),
    sent("abandons for a stale owner", "dedupe::stale_owner_cannot_abandon",
        &[("AND d.owner = $3 AND NOT d.done", "AND $3 <> d.key AND NOT d.done")]),
    sent("forgets what is done early", "dedupe::complete_is_kept_for_retain",
        &[("+ $4 * interval '1 microsecond'", "+ $4 * interval '1 us' / 9")]),
    sent("lets an entry be taken over at once", "dedupe::unfinished_is_taken_over",
        &[("+ w.keep * interval '1 microsecond'", "+ w.keep * interval '0'")]),
    sent("lets nobody take an entry over", "dedupe::unfinished_is_taken_over",
        &[("+ w.keep * interval '1 microsecond'", "+ w.keep * interval '1 ms'")]),
    sent("purges live entries", "dedupe::housekeeping_spares_the_live",
        &[("WHERE expires_at <= clock_timestamp() LIMIT", "WHERE expires_at IS NOT NULL LIMIT")]),
];

fn main() -> ExitCode {
    mutants::run(TABLE, open)
}

fn open(alters: Option<&Alters>) -> Result<Altered> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let server = Server::shared(Kind::Postgres15).map_err(failed)?;
    let name = format!("mutant{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let url = |port: u16| -> Result<String> {
        // with a wire of its own, and a database
        let url = server.url();
        let (base, _) = url.rsplit_once('/').ok_or_else(|| failed("no database in the URL"))?;
        Ok(format!("{}/{name}", base.replace(&format!(":{}", server.port()), &format!(":{port}"))))
    };
    let harness = PgHarness::join(&url(server.port())?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed)?.block_on(async {
        let create = format!("CREATE DATABASE {name} TEMPLATE template0");
        let mut admin = connect(&server.url()).await?;
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut admin).await.map_err(failed)?;
        PgHarness::at(&url(server.port())?).prepare().await?;
        let mut own = connect(&url(server.port())?).await?;
        let alter = sqlx::raw_sql(alters.map_or("", |alters| alters.database));
        alter.execute(&mut own).await.map_err(failed)
    })?;
    let sent = alters.map_or(&[][..], |alters| alters.sent);
    if sent.is_empty() && alters.is_some() {
        return Ok(Altered { harness, rewriter: None });
    }
    let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
    let rewriter = Rewriter::start(upstream, sent).map_err(failed)?;
    let harness = PgHarness::join(&url(rewriter.addr().port())?)?;
    Ok(Altered { harness, rewriter: Some(rewriter) })
}
