//! `leasehold list`.

use clap::Args;
use leasehold::{HoldingQuery, Kind};
use serde_json::{Value, json};

use super::holding::{self, KindArg};
use crate::cli::Globals;
use crate::failure::Outcome;
use crate::ui::Ui;
use crate::{exit, store};

/// Lists who holds what on the store
///
/// On a terminal a table; in a pipe a line each, tab-separated, without a head: kind, name, holder,
/// time held, time until it expires, token, waiters. Where the store keeps only the hash of a lock's
/// name, that is shown; `leasehold show NAME` finds it by its name.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only names that begin with this
    #[arg(value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,

    #[command(flatten)]
    filter: Filter,
}

/// Which holdings.
#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// Only of this kind; may be repeated
    #[arg(long, short, value_name = "KIND")]
    kind: Vec<KindArg>,

    /// Also dedupe entries that are done
    #[arg(long)]
    done: bool,

    /// At most so many
    #[arg(long, value_name = "COUNT", default_value = "1000")]
    limit: usize,
}

impl Filter {
    pub(crate) fn apply(&self, query: HoldingQuery) -> HoldingQuery {
        let kinds: Vec<Kind> = match self.kind.is_empty() {
            true => Kind::ALL.to_vec(),
            false => self.kind.iter().map(|kind| Kind::from(*kind)).collect(),
        };
        query.kinds(kinds).done(self.done).limit(self.limit)
    }
}

pub(crate) async fn list(ui: Ui, globals: &Globals, args: &List) -> Outcome {
    let store = store::open(globals).await?;
    let query = args.filter.apply(HoldingQuery::prefix(&args.prefix));
    let (holdings, refused) = holding::shown(&store, &query).await?;
    if let Some(error) = refused {
        holding::tell_refused(ui, &error);
    }
    if ui.is_json() {
        let rows: Vec<Value> = holdings.iter().map(holding::to_json).collect();
        ui.print_json(&json!(rows));
    } else if holdings.is_empty() {
        ui.remark(&format!("nothing is held on {store}"));
    } else {
        ui.print_table(&holding::table(&holdings));
    }
    store::close(&store).await;
    Ok(exit::OK)
}
