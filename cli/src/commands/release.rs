//! `leasehold release --force`.

use clap::Args;
use leasehold::{Key, Kind};
use serde_json::json;

use super::holding::{self, KindArg};
use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::table::printable;
use crate::ui::Ui;
use crate::{exit, store};

/// Takes a name away from whoever holds it, by force
///
/// The holder is told that it lost it: a session's end at once, a lease at its next renewal. Where
/// a lock or claim belongs to a session with the store, that session is ended, and all that it
/// holds is lost with it. A dedupe entry is forgotten: the next one is first again.
///
/// Exits with 0 if it was taken away and with 1 if nobody held it.
#[derive(Debug, Args)]
pub(crate) struct Release {
    /// The name
    #[arg(value_name = "NAME")]
    name: String,

    /// What is taken away
    #[arg(long, short, value_name = "KIND", required = true)]
    kind: KindArg,

    /// Says that you know what you do: the holder may be at work
    #[arg(long, short)]
    force: bool,
}

pub(crate) async fn release(ui: Ui, globals: &Globals, args: &Release) -> Outcome {
    let key = Key::new(&args.name)?;
    let kind = Kind::from(args.kind);
    if !args.force {
        return Err(Failure::usage(
            "its holder may be at work, and would lose it",
            format!("look with `leasehold show {key}`; --force takes it away"),
        ));
    }
    let store = store::open(globals).await?;
    let released = store.force_release(kind, &key).await?;
    store::close(&store).await;
    if ui.is_json() {
        ui.print_json(&json!({"released": released.as_ref().map(holding::to_json)}));
    } else {
        let name = printable(key.as_str());
        ui.remark(&match &released {
            Some(held) => format!("took {kind} {name} from {}", holding::holder_text(held)),
            None => format!("nobody held {kind} {name}"),
        });
    }
    Ok(if released.is_some() { exit::OK } else { exit::NO })
}
