//! `postgres://user:password@host:port/database`.

use std::sync::Arc;

use leasehold_core::{Backend, Result};
use leasehold_postgres::PostgresBackend;

use crate::url::StoreUrl;

pub(super) const OURS: &[&str] = &["schema", "lock_table_share"];
/// Those of sqlx.
const DRIVERS: &[&str] = &[
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];

pub(super) async fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    url.check(OURS, DRIVERS)?;
    let mut builder = PostgresBackend::builder();
    if let Some(namespace) = url.text("namespace") {
        builder = builder.namespace(namespace);
    }
    if url.text("app").is_some() {
        builder = builder.holder(url.holder());
    }
    if let Some(schema) = url.text("schema") {
        builder = builder.schema(schema);
    }
    if let Some(share) = url.value("lock_table_share", "a number")? {
        builder = builder.lock_table_share(share);
    }
    Ok(Arc::new(builder.connect(&url.for_driver("postgres", DRIVERS)).await?))
}
