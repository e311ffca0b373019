//! The store that the command line names.

use std::time::Duration;

use leasehold::{Error, ErrorKind, Store};
use serde_json::json;

use crate::cli::Globals;
use crate::failure::Failure;
use crate::ui::Ui;

/// The store where none is named.
const DEFAULT: Option<&str> = if cfg!(feature = "sqlite") { Some("sqlite:") } else { None };
/// Closing a handle takes at most so long.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// The URL, with the options that the command line gives apart from it. `app` is what a holder is
/// called where nobody says otherwise.
pub(crate) fn url(globals: &Globals, app: Option<&str>) -> Result<String, Failure> {
    let url = globals.store.as_deref().or(DEFAULT).ok_or_else(|| {
        Failure::usage(
            "no store is named",
            "name one: --store URL or LEASEHOLD_URL, e.g. postgres://user@host/database",
        )
    })?;
    let mut url = url.to_owned();
    if let Some(namespace) = &globals.namespace {
        url = with_option(&url, "namespace", namespace);
    }
    match (&globals.app, app) {
        (Some(app), _) => url = with_option(&url, "app", app),
        (None, Some(app)) if !has_option(&url, "app") => url = with_option(&url, "app", app),
        _ => {}
    }
    Ok(url)
}

/// Connects to it.
pub(crate) async fn open(globals: &Globals) -> Result<Store, Failure> {
    open_as(globals, None).await
}

/// The same, as this app unless the command line or the URL says otherwise.
pub(crate) async fn open_as(globals: &Globals, app: Option<&str>) -> Result<Store, Failure> {
    Ok(leasehold::connect(&url(globals, app)?).await?)
}

/// Closes the handle, for at most a few seconds: what it held is released.
pub(crate) async fn close(store: &Store) {
    if let Ok(Err(error)) = tokio::time::timeout(CLOSE_LIMIT, store.close()).await {
        tracing::debug!(%error, "closing the handle failed");
    }
}

/// Makes the tables where an error says that they are missing; true: try again.
pub(crate) async fn made_tables(ui: Ui, store: &Store, error: &Error) -> Result<bool, Failure> {
    if error.kind() != ErrorKind::Schema {
        return Ok(false);
    }
    store.migrate().await?;
    let place = store.url().split('?').next().unwrap_or_default();
    ui.news("migrated", json!({"store": place}), &format!("made the tables on {place}"));
    Ok(true)
}

/// Whether the URL has this option.
pub(crate) fn has_option(url: &str, name: &str) -> bool {
    option(url, name).is_some()
}

/// The value of an option of the URL.
pub(crate) fn option(url: &str, name: &str) -> Option<String> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs.find(|(known, _)| known == name).map(|(_, value)| value.into_owned())
}

/// The URL with this option, in place of the one it may have.
pub(crate) fn with_option(url: &str, name: &str, value: &str) -> String {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let others = query.split('&').filter(|pair| {
        let key = form_urlencoded::parse(pair.as_bytes()).next().map(|(key, _)| key.into_owned());
        !pair.is_empty() && key.as_deref() != Some(name)
    });
    let own: String = form_urlencoded::Serializer::new(String::new())
        .append_pair(name, value)
        .finish()
        // what a `+` means depends on the reader
        .replace('+', "%20");
    let pairs: Vec<&str> = others.chain([own.as_str()]).collect();
    format!("{base}?{}", pairs.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_added_or_replaced() {
        for (url, with) in [
            ("memory:", "memory:?app=a%20%26b"),
            ("memory:?app=x&namespace=n", "memory:?namespace=n&app=a%20%26b"),
            ("pg://u:p@h/d?sslmode=off", "pg://u:p@h/d?sslmode=off&app=a%20%26b"),
        ] {
            assert_eq!(with_option(url, "app", "a &b"), with);
        }
        assert!(has_option("memory:?x=1&app=y", "app") && !has_option("memory:?x=app", "app"));
    }
}
