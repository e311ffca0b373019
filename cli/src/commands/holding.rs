//! A [`Holding`] on the screen and as JSON.

use std::time::Duration;

use clap::ValueEnum;
use leasehold::{Error, ErrorKind, HeldName, Holding, HoldingQuery, Kind, Result, Store};
use serde_json::{Value, json};

use crate::duration;
use crate::style;
use crate::table::{Cell, Table};
use crate::ui::Ui;

/// What the store shows; where it refuses to show some kinds, the others, and why not those.
pub(crate) async fn shown(
    store: &Store,
    query: &HoldingQuery,
) -> Result<(Vec<Holding>, Option<Error>)> {
    let refuses =
        |error: &Error| matches!(error.kind(), ErrorKind::Backend | ErrorKind::Unsupported);
    let refused = match store.holdings(query).await {
        Ok(holdings) => return Ok((holdings, None)),
        Err(error) if refuses(&error) => error,
        Err(error) => return Err(error),
    };
    let mut some = None;
    for kind in &query.kinds {
        match store.holdings(&query.clone().kinds([*kind])).await {
            Ok(holdings) => some.get_or_insert_with(Vec::new).extend(holdings),
            Err(error) if refuses(&error) => {}
            Err(error) => return Err(error),
        }
    }
    match some {
        Some(holdings) => Ok((query.arrange(holdings), Some(refused))),
        None => Err(refused),
    }
}

/// Says that not all kinds are shown.
pub(crate) fn tell_refused(ui: Ui, error: &Error) {
    let why = error.to_string();
    ui.news("not shown", json!({ "reason": why }), &format!("not all kinds are shown: {why}"));
}

/// What `--kind` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KindArg {
    /// Named locks.
    Lock,
    /// Leases.
    Lease,
    /// Keys of claims, i.e. of open transactions.
    Claim,
    /// Entries of dedupe.
    Dedupe,
}

impl From<KindArg> for Kind {
    fn from(kind: KindArg) -> Self {
        match kind {
            KindArg::Lock => Self::Lock,
            KindArg::Lease => Self::Lease,
            KindArg::Claim => Self::Claim,
            KindArg::Dedupe => Self::Dedupe,
        }
    }
}

/// The stable fields; times in seconds, what is not known is null.
pub(crate) fn to_json(held: &Holding) -> Value {
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let (key, hash) = match &held.name {
        HeldName::Key(key) => (Some(key.as_str()), None),
        HeldName::Hashed(hash) => (None, Some(hash)),
    };
    let holder = held.holder.as_ref().map(|holder| {
        json!({
            "app": holder.app, "host": holder.host, "pid": holder.pid,
            "instance": format!("{:08x}", holder.instance),
        })
    });
    json!({
        "kind": held.kind.as_str(), "key": key, "hash": hash, "holder": holder,
        "session": held.session, "held_for_s": seconds(held.held_for),
        "expires_in_s": seconds(held.expires_in), "token": held.token.map(leasehold::FencingToken::value),
        "waiters": held.waiters, "done": held.done,
    })
}

/// Whose it is, as far as that is known.
pub(crate) fn holder_text(held: &Holding) -> String {
    match (&held.holder, &held.session) {
        (Some(holder), _) => format!("{}@{}:{}", holder.app, holder.host, holder.pid),
        (None, Some(session)) => format!("session {session}"),
        (None, None) => "unknown".to_owned(),
    }
}

/// A table of holdings.
pub(crate) fn table<'a>(holdings: impl IntoIterator<Item = &'a Holding>) -> Table {
    let mut table = Table::new(&["KIND", "NAME", "HOLDER", "HELD", "EXPIRES", "TOKEN", "WAITING"]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for held in holdings {
        let name = match &held.name {
            HeldName::Key(key) => Cell::styled(key.as_str(), style::NAME),
            HeldName::Hashed(_) => Cell::styled(held.name.to_string(), style::DIM),
        };
        let holder = match held.done {
            true => "(done)".to_owned(),
            false => holder_text(held),
        };
        table.row(vec![
            held.kind.as_str().into(),
            name,
            holder.into(),
            or_dash(held.held_for.map(duration::human)).into(),
            or_dash(held.expires_in.map(duration::human)).into(),
            or_dash(held.token.map(|token| token.to_string())).into(),
            or_dash(held.waiters.map(|count| count.to_string())).into(),
        ]);
    }
    table
}
