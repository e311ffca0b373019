//! A [`Holding`] on the screen and as JSON.

use std::time::Duration;

use clap::ValueEnum;
use leasehold::{HeldName, Holding, Kind};
use serde_json::{Value, json};

use crate::duration;
use crate::style;
use crate::table::{Cell, Table};

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
