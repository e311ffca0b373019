//! Connections of our own, outside of the pool.

use std::time::Duration;

use leasehold_core::{Error, Result};
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPoolOptions};

use crate::error::store_error;
use crate::sever::Severed;

/// A connection that is slow to come about is looked into after so long.
const SLOW: Duration = Duration::from_millis(100);

/// Opens a connection that notices its end while it is idle.
///
/// Only [`PgListener`] reads without having asked. It opens its connection again by itself, but
/// only in the call after the one that reported the end, which is never made here.
pub(crate) async fn dial(options: &PgConnectOptions) -> Result<Severed<PgListener>> {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .test_before_acquire(false)
        .connect_lazy_with(options.clone());
    let listener = tokio::select! {
        biased;
        listener = PgListener::connect_with(&pool) => listener.map_err(store_error)?,
        error = why_not(options) => return Err(error),
    };
    let mut listener = Severed::new(listener);
    listener.ignore_pool_close_event(true);
    listener.eager_reconnect(false);
    Ok(listener)
}

/// A pool tries on when a connection is refused and does not say why: this does.
async fn why_not(options: &PgConnectOptions) -> Error {
    tokio::time::sleep(SLOW).await;
    match connect(options).await {
        Err(error) => error,
        Ok(_) => std::future::pending().await,
    }
}

/// Opens a plain connection; dropping it closes it.
pub(crate) async fn connect(options: &PgConnectOptions) -> Result<PgConnection> {
    options.connect().await.map_err(store_error)
}
