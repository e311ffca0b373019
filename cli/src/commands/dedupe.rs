//! `leasehold dedupe`.

use std::time::Duration;

use clap::Args;
use leasehold::{Admission, DedupeOptions, Key, Store};
use serde_json::json;

use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::table::printable;
use crate::ui::Ui;
use crate::{duration, exit, store};

/// Says whether a name is seen for the first time, and remembers it
///
/// Exits with 0 the first time and with 1 if it was seen before; any other code is an error, and
/// then nothing is known:
///
///   if leasehold dedupe "delivery-$ID"; then handle "$ID"; fi
///
/// The name is remembered at once. Where a crash while handling must lead to another try, use the
/// library's dedupe, which tells in progress from done.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Dedupe {
    /// The name
    #[arg(value_name = "NAME")]
    name: String,

    /// How long it is remembered
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = duration::parse)]
    retain: Duration,
}

pub(crate) async fn dedupe(ui: Ui, globals: &Globals, args: &Dedupe) -> Outcome {
    let key = Key::new(&args.name)?;
    let opts = DedupeOptions::default().retain(args.retain).done_at_once();
    let store = store::open(globals).await?;
    let admission = admitted(ui, &store, &key, opts).await?;
    let (first, seen) = match admission {
        Admission::First(guard) => {
            guard.complete().await?;
            (true, None)
        }
        Admission::InProgress { since } => (false, Some(since)),
        Admission::Done { at } => (false, Some(at)),
    };
    store::close(&store).await;
    let seen = seen.map(|seen| humantime::format_rfc3339_seconds(seen).to_string());
    if ui.is_json() {
        ui.print_json(&json!({"key": key.as_str(), "first": first, "seen_at": seen}));
    } else {
        let name = printable(key.as_str());
        ui.remark(&match seen {
            None => format!("{name} is first"),
            Some(at) => format!("{name} was seen at {at}"),
        });
    }
    Ok(if first { exit::OK } else { exit::NO })
}

async fn admitted(
    ui: Ui,
    store: &Store,
    key: &Key,
    opts: DedupeOptions,
) -> Result<Admission, Failure> {
    match store.admit(key, opts).await {
        Ok(admission) => Ok(admission),
        Err(error) if store::made_tables(ui, store, &error).await? => {
            Ok(store.admit(key, opts).await?)
        }
        Err(error) => Err(error.into()),
    }
}
