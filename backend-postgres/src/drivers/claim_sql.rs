//! What a claim's statements are.

use std::fmt::Write;
use std::time::Duration;

use leasehold_core::FencingToken;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Row};

use super::first_seen_statement;
use super::session::lock_timeout;
use crate::error::ended_the_wait;
use crate::sql::{Arg, Mode, Names, Statement};

/// READ COMMITTED: each statement sees what was committed before it, so that what follows the lock
/// sees what its former holder wrote. A snapshot for the whole transaction would be older than the
/// lock.
pub(super) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
/// The statements of a claim.
///
/// `lock` takes the locks in their order, each with what is then left of the wait as its limit,
/// puts back the caller's own limit, and draws the token. A transaction that was claimed is
/// committed as durably as its hooks believe. It first takes the shared lock by which others see
/// what its session's locks are (see [`KeyMap::mark`](crate::keys::KeyMap::mark)).
#[derive(Debug)]
pub(crate) struct Statements {
    lock: Statement,
    try_lock: Statement,
    pub(super) first_seen: Statement,
    /// How the next token is drawn.
    next_token: String,
    /// How the session is marked.
    mark: String,
}

impl Statements {
    pub(crate) fn new(names: &Names, mark: i64) -> Self {
        const DURABLE: &str = "set_config('synchronous_commit', \
             CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
             ELSE current_setting('synchronous_commit') END, true)";
        let mark = format!("pg_try_advisory_xact_lock_shared({mark})");
        let lock = format!(
            "WITH start AS MATERIALIZED (SELECT {mark}, current_setting('lock_timeout') AS lock_timeout, \
               clock_timestamp() + $2 * interval '1 millisecond' AS ends), \
             locks AS MATERIALIZED (SELECT set_config('lock_timeout', greatest(1, \
               ceil(extract(epoch FROM ends - clock_timestamp()) * 1000))::int8::text, true), \
               pg_advisory_xact_lock(id) FROM start, unnest($1::int8[]) AS id), \
             taken AS MATERIALIZED (SELECT count(*) AS locks FROM locks) \
             SELECT set_config('lock_timeout', lock_timeout, true), {DURABLE}, {{next_token}} \
             FROM start, taken WHERE locks >= 0"
        );
        let try_lock = format!(
            "WITH start AS MATERIALIZED (SELECT {mark}), \
             locks AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(id) AS ours \
               FROM start, unnest($1::int8[]) AS id), \
             taken AS MATERIALIZED (SELECT coalesce(bool_and(ours), true) AS ours FROM locks) \
             SELECT {DURABLE}, CASE WHEN ours THEN {{next_token}} END FROM taken"
        );
        Self {
            lock: names.statement(&lock),
            try_lock: names.statement(&try_lock),
            first_seen: first_seen_statement(names),
            next_token: names.statement("{next_token}").sql().as_str().to_owned(),
            mark,
        }
    }

    /// Takes all locks in the transaction; `None`, after which it can only roll back, if others
    /// had one of them for the whole wait.
    pub(super) async fn take(
        &self,
        tx: &mut PgConnection,
        mode: Mode,
        ids: &[i64],
        wait: Duration,
    ) -> sqlx::Result<Option<FencingToken>> {
        let ids = Arg::Ints(ids.to_vec());
        let rows = if wait.is_zero() {
            self.try_lock.run(tx, mode, vec![ids]).await
        } else {
            let millis = lock_timeout(wait).parse().unwrap_or(i64::from(i32::MAX));
            self.lock.run(tx, mode, vec![ids, Arg::Int(millis)]).await
        };
        taken(rows, wait)
    }

    /// Begins and takes all locks by one message; as [`take`](Self::take).
    pub(super) async fn begin_and_take(
        &self,
        conn: &mut PgConnection,
        ids: &[i64],
        wait: Duration,
    ) -> sqlx::Result<Option<FencingToken>> {
        let text = AssertSqlSafe(self.one_message(ids, wait));
        taken(sqlx::raw_sql(text).fetch_all(conn).await, wait)
    }

    /// The columns are evaluated from left to right, the token last. Each lock gets what is then
    /// left of the wait, by the server's clock since the message came in.
    fn one_message(&self, ids: &[i64], wait: Duration) -> String {
        let (next_token, mark) = (&self.next_token, &self.mark);
        let mut text = format!("{BEGIN}; SELECT {mark}, ");
        if wait.is_zero() {
            text.push_str("CASE WHEN true");
            for id in ids {
                append(&mut text, format_args!(" AND pg_try_advisory_xact_lock({id})"));
            }
            append(&mut text, format_args!(" THEN {next_token} END"));
            return text;
        }
        let millis = lock_timeout(wait);
        text.push_str(
            "set_config('leasehold.lock_timeout', current_setting('lock_timeout'), true), ",
        );
        for (n, id) in ids.iter().enumerate() {
            let limit = match n {
                0 => format!("'{millis}'"),
                _ => format!(
                    "greatest(1, ceil({millis} - extract(epoch FROM clock_timestamp() \
                     - statement_timestamp()) * 1000))::int8::text"
                ),
            };
            append(
                &mut text,
                format_args!(
                    "set_config('lock_timeout', {limit}, true), pg_advisory_xact_lock({id}), "
                ),
            );
        }
        text.push_str(
            "set_config('lock_timeout', current_setting('leasehold.lock_timeout'), true), ",
        );
        text.push_str(next_token);
        text
    }
}

/// What the statement that takes the locks has answered.
fn taken(rows: sqlx::Result<Vec<PgRow>>, wait: Duration) -> sqlx::Result<Option<FencingToken>> {
    let rows = match rows {
        Err(error) if !wait.is_zero() && ended_the_wait(&error) => return Ok(None),
        rows => rows?,
    };
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let token: Option<i64> = row.try_get(row.len() - 1)?;
    Ok(token.map(|token| FencingToken(token.cast_unsigned())))
}

fn append(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_takes_the_locks_in_their_order_and_then_the_token() {
        let statements = Statements::new(&Names::new("s"), 5);
        let tried = statements.one_message(&[-3, 7], Duration::ZERO);
        assert_eq!(
            tried,
            "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_try_advisory_xact_lock_shared(5), CASE WHEN true \
             AND pg_try_advisory_xact_lock(-3) AND pg_try_advisory_xact_lock(7) \
             THEN nextval('\"s\".token'::regclass) END"
        );
        let waited = statements.one_message(&[-3, 7], Duration::from_millis(1500));
        let place = |what: &str| waited.find(what).expect(what);
        let order = [
            place("pg_try_advisory_xact_lock_shared(5)"),
            place("'leasehold.lock_timeout', current_setting('lock_timeout')"),
            place("set_config('lock_timeout', '1500', true)"),
            place("pg_advisory_xact_lock(-3)"),
            place("greatest(1, ceil(1500 - "),
            place("pg_advisory_xact_lock(7)"),
            place("set_config('lock_timeout', current_setting('leasehold.lock_timeout'), true)"),
            place("nextval("),
        ];
        assert!(order.is_sorted(), "{waited}");
    }
}
