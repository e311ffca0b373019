//! The one subscription of a handle: `LISTEN` on a connection of its own.

use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{Wake, WakeSource};
use leasehold_core::{Error, ErrorKind, Result};
use sha2::{Digest, Sha256};
use sqlx::postgres::PgListener;
use tokio::sync::watch;

use crate::dial::dial;
use crate::error::store_error;
use crate::sever::Severed;
use crate::store::Store;

/// A silent subscription is tried after so long: a network may have forgotten it.
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(5);

/// What a notification of a lease that was taken from its holder begins with.
pub(crate) const CHANGED: &str = "changed ";

/// The channel of a schema and namespace: of a fixed length, whatever their names are.
pub(crate) fn channel(store: &Store) -> String {
    let mut hash = Sha256::new();
    hash.update(store.names.schema().as_bytes());
    hash.update([0]);
    hash.update(store.keys.namespace().as_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    digest[..12].iter().fold("leasehold_".to_owned(), |name, byte| format!("{name}{byte:02x}"))
}

#[derive(Debug)]
pub(super) struct PgWakes {
    link: Severed<PgListener>,
    closed: watch::Receiver<bool>,
}

impl PgWakes {
    /// None once the handle is closed.
    pub(super) async fn open(store: &Store, channel: &str) -> Result<Option<Self>> {
        let closed = store.closed.subscribe();
        if *closed.borrow() {
            return Ok(None);
        }
        let mut link = dial(&store.session_options()).await?;
        link.listen(channel).await.map_err(store_error)?;
        Ok(Some(Self { link, closed }))
    }
}

#[async_trait]
impl WakeSource for PgWakes {
    async fn next(&mut self) -> Result<Wake> {
        loop {
            let news = tokio::select! {
                news = self.link.try_recv() => news.map_err(store_error)?,
                () = tokio::time::sleep(SIGN_OF_LIFE) => {
                    let asked = sqlx::raw_sql("SELECT 1").execute(&mut *self.link);
                    match tokio::time::timeout(ANSWER, asked).await {
                        Ok(Ok(_)) => continue,
                        Ok(Err(error)) => return Err(store_error(error)),
                        Err(_) => return Err(ended("the subscription's connection is silent")),
                    }
                }
                () = ends(&mut self.closed) => {
                    return Err(ended("the handle is closed"));
                }
            };
            let Some(news) = news else {
                return Err(ended("the server ended the subscription's session"));
            };
            let payload = news.payload();
            if let Ok(id) = payload.parse() {
                return Ok(Wake::Released(id));
            }
            if let Some(Ok(id)) = payload.strip_prefix(CHANGED).map(str::parse) {
                return Ok(Wake::Changed(id));
            }
            tracing::debug!("not a notification of ours");
        }
    }
}

async fn ends(closed: &mut watch::Receiver<bool>) {
    drop(closed.wait_for(|closed| *closed).await);
}

fn ended(detail: &str) -> Error {
    Error::new(ErrorKind::Unavailable, detail)
}
