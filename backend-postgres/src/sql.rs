//! Statements: prepared where the connection is the server's own, plain text behind a pooler.

use std::fmt::Write;
use std::sync::Arc;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

/// The schema's objects, quoted.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    schema: String,
}

impl Names {
    pub(crate) fn new(schema: &str) -> Self {
        Self { schema: format!("\"{}\"", schema.replace('"', "\"\"")) }
    }

    /// The quoted schema.
    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    /// An object of the schema as a literal of text.
    pub(crate) fn literal(&self, object: &str) -> String {
        text_literal(&format!("{}.{object}", self.schema))
    }

    /// A statement, with `{lease}`, `{dedupe}` and `{next_token}` filled in.
    pub(crate) fn statement(&self, template: &str) -> Statement {
        let text = template
            .replace("{lease}", &format!("{}.lease", self.schema))
            .replace("{dedupe}", &format!("{}.dedupe", self.schema))
            .replace("{next_token}", &format!("nextval({}::regclass)", self.literal("token")));
        Statement(AssertSqlSafe(Arc::<str>::from(text)).into_sql_str())
    }
}

/// How statements are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As prepared statements, which belong to a session.
    Prepared,
    /// As text with literals, in one message: a pooler in transaction mode may send the next
    /// message to another session, which knows no such statement, or another one of its name.
    Plain,
}

/// A parameter.
#[derive(Clone, Debug)]
pub(crate) enum Arg<'a> {
    Int(i64),
    Ints(Vec<i64>),
    Bytes(&'a [u8]),
    ByteLists(Vec<Vec<u8>>),
    Text(String),
}

/// A statement with parameters `$1` to `$9`.
#[derive(Clone, Debug)]
pub(crate) struct Statement(SqlStr);

impl Statement {
    pub(crate) fn sql(&self) -> SqlStr {
        self.0.clone()
    }

    pub(crate) async fn run(
        &self,
        conn: &mut PgConnection,
        mode: Mode,
        args: Vec<Arg<'_>>,
    ) -> sqlx::Result<Vec<PgRow>> {
        if mode == Mode::Plain {
            let text = self.plain(&args);
            return sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(conn).await;
        }
        let mut query = sqlx::query(self.sql());
        for arg in args {
            query = match arg {
                Arg::Int(value) => query.bind(value),
                Arg::Ints(values) => query.bind(values),
                Arg::Bytes(value) => query.bind(value.to_vec()),
                Arg::ByteLists(values) => query.bind(values),
                Arg::Text(value) => query.bind(value),
            };
        }
        query.fetch_all(conn).await
    }

    fn plain(&self, args: &[Arg<'_>]) -> String {
        let mut parts = self.0.as_str().split('$');
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let place = part.chars().next().and_then(|digit| digit.to_digit(10));
            let arg = place.and_then(|place| args.get((place as usize).checked_sub(1)?));
            if let Some(arg) = arg {
                arg.append_to(&mut text);
                text.push_str(&part[1..]);
            } else {
                text.push('$');
                text.push_str(part);
            }
        }
        text
    }
}

impl Arg<'_> {
    fn append_to(&self, text: &mut String) {
        match self {
            Self::Int(value) => append(text, format_args!("'{value}'::int8")),
            Self::Ints(values) => {
                text.push_str("'{");
                for (i, value) in values.iter().enumerate() {
                    append(text, format_args!("{}{value}", if i == 0 { "" } else { "," }));
                }
                text.push_str("}'::int8[]");
            }
            Self::Bytes(value) => append_bytes(text, value),
            Self::ByteLists(values) => {
                text.push_str("ARRAY[");
                for (i, value) in values.iter().enumerate() {
                    text.push_str(if i == 0 { "" } else { "," });
                    append_bytes(text, value);
                }
                text.push_str("]::bytea[]");
            }
            Self::Text(value) => {
                text.push_str(&text_literal(value));
                text.push_str("::text");
            }
        }
    }
}

fn append(text: &mut String, what: std::fmt::Arguments<'_>) {
    text.write_fmt(what).expect("a string takes everything");
}

fn append_bytes(text: &mut String, bytes: &[u8]) {
    text.push_str("decode('");
    for byte in bytes {
        append(text, format_args!("{byte:02x}"));
    }
    text.push_str("','hex')");
}

/// A literal, whatever `standard_conforming_strings` says.
pub(crate) fn text_literal(value: &str) -> String {
    let quoted = value.replace('\'', "''");
    match quoted.contains('\\') {
        true => format!(" E'{}'", quoted.replace('\\', "\\\\")),
        false => format!("'{quoted}'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_statement_has_its_parameters_as_literals() {
        let statement = Names::new("a\"b").statement("SELECT $1, $2, $3 FROM {lease} -- $9 $1");
        let args =
            [Arg::Int(-7), Arg::Bytes(b"\x00'$1"), Arg::Text("it's \\ $1 {lease}".to_owned())];
        assert_eq!(
            statement.plain(&args),
            "SELECT '-7'::int8, decode('00272431','hex'),  E'it''s \\\\ $1 {lease}'::text FROM \
             \"a\"\"b\".lease -- $9 '-7'::int8"
        );
        let lists = [Arg::Ints(vec![1, -2]), Arg::ByteLists(vec![vec![1], vec![]])];
        assert_eq!(
            Names::new("s").statement("$1 $2").plain(&lists),
            "'{1,-2}'::int8[] ARRAY[decode('01','hex'),decode('','hex')]::bytea[]"
        );
    }

    #[test]
    fn names_are_quoted() {
        let names = Names::new("it's");
        assert_eq!(names.literal("token"), "'\"it''s\".token'");
        assert_eq!(names.statement("{next_token}").sql().as_str(), {
            "nextval('\"it''s\".token'::regclass)"
        });
    }
}
