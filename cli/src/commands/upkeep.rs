//! `leasehold migrate` and `leasehold housekeep`.

use clap::Args;
use serde_json::json;

use crate::cli::Globals;
use crate::failure::Outcome;
use crate::ui::Ui;
use crate::{exit, store};

/// Makes or upgrades the tables of the store
///
/// Safe to run again, and from many machines at once. It needs the right to create tables; what
/// runs later does not.
#[derive(Debug, Args)]
pub(crate) struct Migrate;

/// Deletes what has expired, in batches
///
/// Nothing depends on it but the size of the tables. Run it now and then, e.g. once a day from
/// cron.
#[derive(Debug, Args)]
pub(crate) struct Housekeep;

pub(crate) async fn migrate(ui: Ui, globals: &Globals) -> Outcome {
    let store = store::open(globals).await?;
    store.migrate().await?;
    store::close(&store).await;
    if ui.is_json() {
        ui.print_json(&json!({"migrated": store.url()}));
    }
    ui.remark(&format!("the tables are ready on {store}"));
    Ok(exit::OK)
}

pub(crate) async fn housekeep(ui: Ui, globals: &Globals) -> Outcome {
    let store = store::open(globals).await?;
    let deleted = store.housekeep().await?;
    store::close(&store).await;
    if ui.is_json() {
        ui.print_json(&json!({
            "deleted": {"leases": deleted.leases, "dedupe": deleted.dedupe},
        }));
    }
    let (leases, dedupe) = (deleted.leases, deleted.dedupe);
    ui.remark(&format!("deleted {leases} expired leases and {dedupe} expired dedupe entries"));
    Ok(exit::OK)
}
