//! `sqlite:` the default file; `sqlite:path` another one.

use std::sync::Arc;

use leasehold_core::{Backend, Result};
use leasehold_sqlite::SqliteBackend;

use crate::url::StoreUrl;

pub(super) const OURS: &[&str] = &["prefix", "writer_wait"];

pub(super) async fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    url.check(OURS, &[])?;
    let mut builder = SqliteBackend::builder().holder(url.holder());
    if let Some(namespace) = url.text("namespace") {
        builder = builder.namespace(namespace);
    }
    if let Some(prefix) = url.text("prefix") {
        builder = builder.prefix(prefix);
    }
    if let Some(wait) = url.duration("writer_wait")? {
        builder = builder.writer_wait(wait);
    }
    Ok(Arc::new(builder.connect(&url.for_driver("sqlite", &[])).await?))
}
