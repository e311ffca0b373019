//! Looks for what is wrong or risky. It asks in plain text, one message a question, so that it
//! works through a pooler and without the tables.

use leasehold_core::{ErrorKind, Finding, Result};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Row};

use super::settings::{NAMES, Settings};
use crate::error::{code, store_error};
use crate::schema::{self, VERSION};
use crate::store::Store;

/// The oldest version that has all that is used, and those that the suite runs on.
const OLDEST: i32 = 14;
const TESTED: std::ops::RangeInclusive<i32> = 15..=18;
/// So many dead or expired rows are worth a word.
const MANY_ROWS: i64 = 10_000;

/// What the service's role must be granted, beside `USAGE` on the schema.
const GRANTS: &str = "('lease', 'SELECT'), ('lease', 'INSERT'), ('lease', 'UPDATE'), \
    ('lease', 'DELETE'), ('dedupe', 'SELECT'), ('dedupe', 'INSERT'), ('dedupe', 'UPDATE'), \
    ('dedupe', 'DELETE'), ('version', 'SELECT'), ('token', 'USAGE')";
/// What everybody may call unless somebody took it away.
const FUNCTIONS: &str = "('pg_try_advisory_lock(bigint)'), ('pg_advisory_lock(bigint)'), \
    ('pg_advisory_unlock(bigint)'), ('pg_try_advisory_lock_shared(bigint)'), \
    ('pg_try_advisory_xact_lock(bigint)'), ('pg_advisory_xact_lock(bigint)'), \
    ('pg_try_advisory_xact_lock_shared(bigint)'), ('pg_terminate_backend(integer, bigint)'), \
    ('pg_notify(text, text)'), ('set_config(text, text, boolean)')";

/// Everything, in the order in which one puts it right.
pub(super) async fn look(store: &Store) -> Result<Vec<Finding>> {
    let mut conn = store.connection().await?;
    let about = About::ask(&mut conn).await.map_err(store_error)?;
    let mut findings = vec![version(about.version), recovery(about.standby)];
    if !about.standby {
        findings.push(pooler(store).await);
    }
    findings.push(tables(store, &about.role).await);
    let mut asked = Asked { store, role: &about.role, conn: &mut conn };
    findings.extend(noted("privileges", asked.privileges().await));
    findings.extend(noted("inspection", asked.inspection().await.map(|found| vec![found])));
    match asked.settings().await {
        Ok(settings) => {
            findings.extend(settings.findings(&about.role));
            let replication = asked.standbys().await;
            let replication = replication.map(|standbys| vec![settings.replication(standbys)]);
            findings.extend(noted("replication", replication));
        }
        failed => findings.extend(noted("settings", failed.map(|_| Vec::new()))),
    }
    findings.extend(noted("lock table", asked.lock_table().await.map(|found| vec![found])));
    findings.extend(noted("connections", asked.connections().await.map(|found| vec![found])));
    findings.extend(noted("long transactions", asked.transactions().await));
    findings.extend(noted("dead rows", asked.dead_rows().await));
    findings.extend(noted("expired rows", asked.expired_rows().await));
    drop(conn.into_inner());
    Ok(findings)
}

/// What could not be asked is a finding.
fn noted(topic: &'static str, asked: sqlx::Result<Vec<Finding>>) -> Vec<Finding> {
    asked.unwrap_or_else(|error| {
        let advice = match code(&error).as_deref() {
            Some("42501") => "grant the role what it lacks: see the crate's grants",
            Some("42P01" | "3F000" | "42703") => "run migrate",
            _ => "look into the server's log",
        };
        vec![Finding::warning(topic, format!("could not be asked: {error}"), advice)]
    })
}

/// What must be known for everything else.
struct About {
    version: i32,
    standby: bool,
    /// Quoted.
    role: String,
}

impl About {
    async fn ask(conn: &mut PgConnection) -> sqlx::Result<Self> {
        let sql = "SELECT current_setting('server_version_num')::int4, pg_is_in_recovery(), \
            quote_ident(current_user)";
        let row = sqlx::raw_sql(sql).fetch_one(conn).await?;
        Ok(Self { version: row.try_get(0)?, standby: row.try_get(1)?, role: row.try_get(2)? })
    }
}

fn version(number: i32) -> Finding {
    const TOPIC: &str = "version";
    let major = number / 10_000;
    let found = format!("PostgreSQL {major}.{}", number % 10_000);
    if major < OLDEST {
        let advice = format!("upgrade the server to {} or later", TESTED.start());
        return Finding::fault(TOPIC, found, advice);
    }
    if !TESTED.contains(&major) {
        let tested = format!("tested are {} to {}", TESTED.start(), TESTED.end());
        let advice = format!("{tested}: run the conformance suite against it");
        return Finding::warning(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, found)
}

fn recovery(standby: bool) -> Finding {
    const TOPIC: &str = "role of the server";
    if standby {
        let found = "a standby, whose locks exclude nobody elsewhere and which takes no writes";
        let advice = "connect to the primary, e.g. with target_session_attrs at the proxy, or \
            promote it: SELECT pg_promote()";
        return Finding::fault(TOPIC, found, advice);
    }
    Finding::fine(TOPIC, "a primary")
}

async fn pooler(store: &Store) -> Finding {
    const TOPIC: &str = "pooler";
    let pooled = match store.server().await {
        Ok(server) => server.pooled,
        Err(error) => {
            let advice = "see that the pool's options lead to the server, and that it has \
                connections to spare";
            return Finding::fault(TOPIC, error.to_string(), advice);
        }
    };
    match store.session_server().await {
        Ok(_) if pooled => Finding::fine(
            TOPIC,
            "the pool leads through one in transaction mode, sessions of named locks past it",
        ),
        Ok(_) => Finding::fine(TOPIC, "none that mixes sessions"),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let found = "connections lead through a pooler in transaction mode: named locks are \
                refused, and waiting for a lease polls";
            let advice = "give the builder session_options that lead to the server itself or to a \
                pooler in session mode (PgBouncer: pool_mode = session for that database)";
            Finding::fault(TOPIC, found, advice)
        }
        Err(error) => {
            let advice = "see that the builder's session_options lead to the server";
            Finding::fault(TOPIC, format!("sessions of named locks: {error}"), advice)
        }
    }
}

async fn tables(store: &Store, role: &str) -> Finding {
    const TOPIC: &str = "tables";
    match schema::version(store).await {
        Ok(Some(VERSION)) => Finding::fine(TOPIC, format!("version {VERSION}")),
        Ok(found) => {
            let found = found.map_or("missing".to_owned(), |found| format!("version {found}"));
            let advice = format!(
                "this program works with version {VERSION}: run migrate, under a role that may \
                 create them, or upgrade the program"
            );
            Finding::fault(TOPIC, found, advice)
        }
        Err(error) => {
            let schema = store.names.schema();
            let advice = format!(
                "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {schema}.version TO \
                 {role}"
            );
            Finding::fault(TOPIC, format!("could not be asked: {error}"), advice)
        }
    }
}

/// The questions on one connection.
struct Asked<'a> {
    store: &'a Store,
    role: &'a str,
    conn: &'a mut PgConnection,
}

impl Asked<'_> {
    async fn rows(&mut self, sql: String) -> sqlx::Result<Vec<PgRow>> {
        sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *self.conn).await
    }

    async fn row(&mut self, sql: String) -> sqlx::Result<PgRow> {
        sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(&mut *self.conn).await
    }

    /// The schema, as a literal of its quoted name; null where it is missing.
    fn namespace(&self) -> String {
        let schema = crate::sql::text_literal(self.store.names.schema());
        format!("to_regnamespace({schema})")
    }

    async fn privileges(&mut self) -> sqlx::Result<Vec<Finding>> {
        const TOPIC: &str = "privileges";
        let (namespace, role, schema) = (self.namespace(), self.role, self.store.names.schema());
        let sql = format!(
            "SELECT 'USAGE', 'SCHEMA ', NULL FROM pg_namespace n WHERE n.oid = {namespace} \
               AND NOT has_schema_privilege(n.oid, 'USAGE') \
             UNION ALL SELECT p.privilege, CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE '' END, \
               p.object \
             FROM (VALUES {GRANTS}) p (object, privilege) JOIN pg_class c ON c.relname = p.object \
             WHERE c.relnamespace = {namespace} AND NOT CASE c.relkind WHEN 'S' \
               THEN has_sequence_privilege(c.oid, p.privilege) \
               ELSE has_table_privilege(c.oid, p.privilege) END \
             UNION ALL SELECT 'EXECUTE', 'FUNCTION ', p.signature \
             FROM (VALUES {FUNCTIONS}) p (signature) \
             WHERE NOT has_function_privilege(p.signature, 'EXECUTE')"
        );
        let mut missing = Vec::new();
        for row in self.rows(sql).await? {
            let (privilege, of): (String, String) = (row.try_get(0)?, row.try_get(1)?);
            let name = match row.try_get::<Option<String>, _>(2)? {
                None => schema.to_owned(),
                Some(function) if of == "FUNCTION " => function,
                Some(object) => format!("{schema}.{object}"),
            };
            let found = format!("{role} lacks {privilege} on {name}");
            let advice = format!("GRANT {privilege} ON {of}{name} TO {role}");
            missing.push(Finding::fault(TOPIC, found, advice));
        }
        if missing.is_empty() {
            missing.push(Finding::fine(TOPIC, format!("{role} has all that it needs")));
        }
        Ok(missing)
    }

    async fn inspection(&mut self) -> sqlx::Result<Finding> {
        let sql = "SELECT pg_has_role('pg_read_all_stats', 'USAGE'), \
            pg_has_role('pg_signal_backend', 'USAGE')";
        let row = self.row(sql.to_owned()).await?;
        let of = |all| if all { "of all roles" } else { "of its own role only" };
        let found = format!(
            "addresses and times are shown {}, and locks released by force {}",
            of(row.try_get(0)?),
            of(row.try_get(1)?)
        );
        Ok(Finding::fine("inspection", found))
    }

    async fn settings(&mut self) -> sqlx::Result<Settings> {
        let names: Vec<_> = NAMES.iter().map(|name| format!("'{name}'")).collect();
        let names = names.join(", ");
        let sql = format!("SELECT name, setting FROM pg_settings WHERE name IN ({names})");
        let rows = self.rows(sql).await?;
        let settings: sqlx::Result<_> =
            rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect();
        settings.map(Settings)
    }

    async fn standbys(&mut self) -> sqlx::Result<i64> {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE application_name <> \
            'pg_basebackup'";
        self.row(sql.to_owned()).await?.try_get(0)
    }

    async fn lock_table(&mut self) -> sqlx::Result<Finding> {
        const TOPIC: &str = "lock table";
        // what is on a fast path takes no place
        let sql = "SELECT (SELECT count(*) FROM pg_locks WHERE NOT fastpath), \
            current_setting('max_locks_per_transaction')::int8 * \
            (current_setting('max_connections')::int8 \
            + current_setting('max_prepared_transactions')::int8)";
        let row = self.row(sql.to_owned()).await?;
        let (held, room): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let found = format!("{held} locks are held or awaited, of the {room} that have room");
        if held < room / 2 {
            return Ok(Finding::fine(TOPIC, found));
        }
        let advice = "hold fewer locks at a time, or ALTER SYSTEM SET max_locks_per_transaction = \
            256, and restart the server: when the table is full, statements of everybody fail";
        Ok(if held < room / 10 * 9 {
            Finding::warning(TOPIC, found, advice)
        } else {
            Finding::fault(TOPIC, found, advice)
        })
    }

    async fn connections(&mut self) -> sqlx::Result<Finding> {
        const TOPIC: &str = "connections";
        let sql = "SELECT (SELECT sum(numbackends)::int8 FROM pg_stat_database), \
            current_setting('max_connections')::int8 \
            - current_setting('superuser_reserved_connections')::int8";
        let row = self.row(sql.to_owned()).await?;
        let (used, most): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let found = format!("{used} of {most} are in use");
        let own = i64::from(self.store.pool.options().get_max_connections());
        if most - used > (most / 10).max(2) {
            return Ok(Finding::fine(TOPIC, found));
        }
        let advice = format!(
            "each handle opens up to {own} for its pool and 10 beside it: lower the sizes of the \
             pools, put a pooler in front of them, or ALTER SYSTEM SET max_connections = {}, and \
             restart the server",
            most * 2
        );
        Ok(Finding::warning(TOPIC, found, advice))
    }

    async fn transactions(&mut self) -> sqlx::Result<Vec<Finding>> {
        const TOPIC: &str = "long transactions";
        let sql = "SELECT 'session ' || pid || ' (' || coalesce(application_name, '') || ')', \
              extract(epoch FROM clock_timestamp() - xact_start)::int8, \
              'SELECT pg_terminate_backend(' || pid || ')' FROM pg_stat_activity \
              WHERE xact_start < clock_timestamp() - interval '10 minutes' \
              AND datname = current_database() \
            UNION ALL SELECT 'prepared transaction ' || gid, \
              extract(epoch FROM clock_timestamp() - prepared)::int8, \
              'ROLLBACK PREPARED ' || quote_literal(gid) FROM pg_prepared_xacts \
              WHERE prepared < clock_timestamp() - interval '10 minutes' \
              AND database = current_database() ORDER BY 2 DESC LIMIT 5";
        let mut long = Vec::new();
        for row in self.rows(sql.to_owned()).await? {
            let (who, seconds): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
            let end: String = row.try_get(2)?;
            let found = format!("{who} has been in one for {seconds} s: it holds back vacuum");
            let advice = format!("end it if nobody needs it: {end}");
            long.push(Finding::warning(TOPIC, found, advice));
        }
        if long.is_empty() {
            long.push(Finding::fine(TOPIC, "none above 10 minutes in this database"));
        }
        Ok(long)
    }

    async fn dead_rows(&mut self) -> sqlx::Result<Vec<Finding>> {
        const TOPIC: &str = "dead rows";
        let sql = format!(
            "SELECT c.relname::text, pg_stat_get_dead_tuples(c.oid), pg_stat_get_live_tuples(c.oid) \
             FROM pg_class c WHERE c.relnamespace = {} AND c.relname IN ('lease', 'dedupe') \
             ORDER BY 1 DESC",
            self.namespace()
        );
        let schema = self.store.names.schema();
        let mut findings = Vec::new();
        for row in self.rows(sql).await? {
            let (table, dead, live): (String, i64, i64) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            let found = format!("{table}: {dead} dead, {live} live");
            findings.push(if dead > MANY_ROWS && dead > live {
                let advice = format!(
                    "VACUUM {schema}.{table}; if that does not help, something holds it back: a \
                     long transaction, or a replication slot"
                );
                Finding::warning(TOPIC, found, advice)
            } else {
                Finding::fine(TOPIC, found)
            });
        }
        Ok(findings)
    }

    async fn expired_rows(&mut self) -> sqlx::Result<Vec<Finding>> {
        const TOPIC: &str = "expired rows";
        let schema = self.store.names.schema();
        let sql = format!(
            "SELECT count(*) FROM (SELECT 1 FROM {schema}.dedupe \
             WHERE expires_at <= clock_timestamp() LIMIT {}) expired",
            MANY_ROWS + 1
        );
        let expired: i64 = self.row(sql).await?.try_get(0)?;
        if expired > MANY_ROWS {
            let found = format!("more than {MANY_ROWS} dedupe entries that have expired");
            let advice = "call housekeep now and then, e.g. hourly";
            return Ok(vec![Finding::warning(TOPIC, found, advice)]);
        }
        Ok(vec![Finding::fine(TOPIC, format!("{expired} dedupe entries"))])
    }
}
