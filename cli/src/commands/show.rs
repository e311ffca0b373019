//! `leasehold show`.

use std::fmt::Write;

use clap::Args;
use leasehold::{Holding, HoldingQuery, Key, Kind};
use serde_json::{Value, json};

use super::holding::{self, KindArg};
use crate::cli::Globals;
use crate::failure::Outcome;
use crate::table::printable;
use crate::ui::Ui;
use crate::{duration, exit, store, style};

/// Shows who holds one name, of every kind
///
/// Exits with 0 if somebody holds it and with 1 if nobody does.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The name
    #[arg(value_name = "NAME")]
    name: String,

    /// Only of this kind; may be repeated
    #[arg(long, short, value_name = "KIND")]
    kind: Vec<KindArg>,
}

pub(crate) async fn show(ui: Ui, globals: &Globals, args: &Show) -> Outcome {
    let key = Key::new(&args.name)?;
    let store = store::open(globals).await?;
    let mut query = HoldingQuery::key(&key).done(true);
    if !args.kind.is_empty() {
        query = query.kinds(args.kind.iter().map(|kind| Kind::from(*kind)).collect::<Vec<_>>());
    }
    let holdings = store.holdings(&query).await?;
    if ui.is_json() {
        let rows: Vec<Value> = holdings.iter().map(holding::to_json).collect();
        ui.print_json(&json!(rows));
    } else if holdings.is_empty() {
        ui.remark(&format!("nobody holds {}", printable(key.as_str())));
    } else {
        let texts: Vec<String> = holdings.iter().map(described).collect();
        ui.print(&texts.join("\n"));
    }
    store::close(&store).await;
    Ok(if holdings.is_empty() { exit::NO } else { exit::OK })
}

/// All that is known, a line each.
fn described(held: &Holding) -> String {
    let name = style::NAME;
    let mut text = format!("{} {name}{}{name:#}\n", held.kind, printable(&held.name.to_string()));
    let mut line = |title: &str, value: Option<String>| {
        let dim = style::DIM;
        if let Some(value) = value {
            let _ = writeln!(text, "  {dim}{title:<8}{dim:#} {}", printable(&value));
        }
    };
    let holder = held.holder.as_ref();
    if held.done {
        line("state", Some("done".to_owned()));
    }
    line("app", holder.map(|holder| holder.app.clone()));
    line("host", holder.map(|holder| holder.host.clone()));
    line("pid", holder.map(|holder| holder.pid.to_string()));
    line("instance", holder.map(|holder| format!("{:08x}", holder.instance)));
    line("session", held.session.clone());
    line("held", held.held_for.map(duration::human));
    line("expires", held.expires_in.map(|time| format!("in {}", duration::human(time))));
    line("token", held.token.map(|token| token.to_string()));
    line("waiting", held.waiters.map(|waiters| waiters.to_string()));
    text
}
