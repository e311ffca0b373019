//! Who is waited for.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use leasehold::{Holding, HoldingQuery, Key, Kind, Store};
use serde_json::{Value, json};

use crate::commands::holding;
use crate::duration;
use crate::ui::Ui;

/// After so long a wait is worth a word.
const FIRST: Duration = Duration::from_secs(1);
/// The holder is looked up so often, in case it changes.
const AGAIN: Duration = Duration::from_secs(10);
/// A look takes at most so long.
const LOOK_LIMIT: Duration = Duration::from_secs(3);

/// Waits for `taken`, and tells meanwhile who holds it.
pub(super) async fn told<T>(
    ui: Ui,
    store: &Store,
    kind: Kind,
    key: &Key,
    taken: impl Future<Output = T>,
) -> T {
    tokio::select! {
        biased;
        taken = taken => taken,
        never = tell_on(ui, store, kind, key) => match never {},
    }
}

/// Tells it again whenever it is another one.
async fn tell_on(ui: Ui, store: &Store, kind: Kind, key: &Key) -> Infallible {
    let mut known = None;
    tokio::time::sleep(FIRST).await;
    loop {
        let holding = look(store, kind, key).await;
        let holder = who(holding.as_ref());
        if known.as_ref() != Some(&holder) {
            tell(ui, "waiting", "waiting for", kind, key, holding.as_ref());
            known = Some(holder);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Tells that it was not to be had, and who holds it.
pub(super) async fn busy(ui: Ui, store: &Store, kind: Kind, key: &Key) {
    let holding = look(store, kind, key).await;
    tell(ui, "busy", "busy:", kind, key, holding.as_ref());
}

async fn look(store: &Store, kind: Kind, key: &Key) -> Option<Holding> {
    let query = HoldingQuery::key(key).kinds([kind]);
    match tokio::time::timeout(LOOK_LIMIT, store.holdings(&query)).await {
        Ok(Ok(holdings)) => holdings.into_iter().next(),
        Ok(Err(error)) => {
            tracing::debug!(%error, "who holds it cannot be told");
            None
        }
        Err(_) => None,
    }
}

/// What makes a holder another one.
fn who(holding: Option<&Holding>) -> Option<(Option<String>, Option<String>)> {
    holding.map(|held| (held.holder.as_ref().map(ToString::to_string), held.session.clone()))
}

fn tell(ui: Ui, event: &str, verb: &str, kind: Kind, key: &Key, holding: Option<&Holding>) {
    let held = holding.map_or(Value::Null, holding::to_json);
    let since = holding.and_then(|held| held.held_for);
    let since = since.map(|time| format!(" for {}", duration::human(time))).unwrap_or_default();
    let holder = match holding {
        Some(held) => format!("held by {}{since}", holding::holder_text(held)),
        None => "held by somebody whom the store cannot name".to_owned(),
    };
    let text = format!("{verb} {kind} {}, {holder}", crate::table::printable(key.as_str()));
    let fields = json!({"kind": kind.as_str(), "key": key.as_str(), "holding": held});
    ui.news(event, fields, &text);
}
