//! `leasehold watch`.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use leasehold::{HeldName, Holding, HoldingQuery, Kind};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::holding;
use super::list::Filter;
use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::table::printable;
use crate::ui::Ui;
use crate::{duration, exit, store, style};

/// Shows live who holds what, until Ctrl-C
///
/// On a terminal a table that changes; in a pipe, and as JSON, a line for each change: `held` or
/// `free`. The store is asked again and again: what comes and goes between two looks is not seen.
#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Only names that begin with this
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    /// The time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::parse)]
    interval: Duration,

    #[command(flatten)]
    filter: Filter,
}

/// What makes a holding another one: held anew it has another token, holder or session.
type Hold = (Kind, HeldName, Option<u64>, Option<String>, Option<String>, bool);

pub(crate) async fn watch(ui: Ui, globals: &Globals, args: &Watch) -> Outcome {
    let store = store::open(globals).await?;
    let query = args.filter.apply(HoldingQuery::prefix(&args.prefix));
    // kept, so that a Ctrl-C in the middle of a look counts too
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::system("cannot take signals", &error))?;
    let mut before = BTreeMap::new();
    let mut told = false;
    loop {
        let (holdings, refused) = holding::shown(&store, &query).await?;
        if let (Some(error), false) = (refused, told) {
            holding::tell_refused(ui, &error);
            told = true;
        }
        if ui.is_terminal() {
            paint(ui, &store, &holdings);
        } else {
            before = tell_changes(ui, &before, &holdings);
        }
        tokio::select! {
            () = tokio::time::sleep(args.interval.max(Duration::from_millis(50))) => {}
            _ = interrupts.recv() => {
                store::close(&store).await;
                return Ok(exit::OK);
            }
        }
    }
}

/// Paints the table anew from the top of the screen.
fn paint(ui: Ui, store: &leasehold::Store, holdings: &[Holding]) {
    let dim = style::DIM;
    let count = holdings.len();
    let body = holding::table(holdings).aligned();
    // line by line over the old picture, so that it does not flicker
    let body = body.replace('\n', "\x1b[K\n");
    ui.print(&format!(
        "\x1b[H{dim}{store}: {count} held, Ctrl-C ends{dim:#}\x1b[K\n\x1b[K\n{body}\x1b[J"
    ));
}

/// Tells what is held now and was not, and the other way round.
fn tell_changes(
    ui: Ui,
    before: &BTreeMap<Hold, Holding>,
    holdings: &[Holding],
) -> BTreeMap<Hold, Holding> {
    let now: BTreeMap<Hold, Holding> =
        holdings.iter().map(|held| (hold(held), held.clone())).collect();
    for (hold, held) in before {
        if !now.contains_key(hold) {
            tell(ui, "free", held);
        }
    }
    for (hold, held) in &now {
        if !before.contains_key(hold) {
            tell(ui, "held", held);
        }
    }
    now
}

fn hold(held: &Holding) -> Hold {
    let holder = held.holder.as_ref().map(ToString::to_string);
    let token = held.token.map(leasehold::FencingToken::value);
    (held.kind, held.name.clone(), token, holder, held.session.clone(), held.done)
}

fn tell(ui: Ui, event: &str, held: &Holding) {
    if ui.is_json() {
        let mut line: Value = holding::to_json(held);
        line["event"] = json!(event);
        ui.print(&format!("{line}\n"));
        return;
    }
    let name = printable(&held.name.to_string());
    ui.print(&format!("{event}\t{}\t{name}\t{}\n", held.kind, holding::holder_text(held)));
}
