//! [`Held`]: a lock or a lease, with its token.

use std::time::Duration;

use leasehold::{
    FencingToken, Key, LeaseGuard, LeaseOptions, LockGuard, LockOptions, Lost, Result, Store,
};

use super::RunKind;

/// Freeing takes at most so long: the store frees it by itself when the process ends, or soon.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// What a job runs under.
#[derive(Debug)]
pub(super) enum Held {
    Lock(LockGuard, FencingToken),
    Lease(LeaseGuard),
}

impl Held {
    /// Takes it; none if somebody else held it for the whole wait.
    pub(super) async fn take(
        store: &Store,
        key: &Key,
        kind: RunKind,
        ttl: Option<Duration>,
        wait: Duration,
    ) -> Result<Option<Self>> {
        match kind {
            RunKind::Lock => {
                let opts = LockOptions::default().wait(wait);
                let Some(guard) = store.lock(key, opts).await? else { return Ok(None) };
                let token = guard.token().await?;
                Ok(Some(Self::Lock(guard, token)))
            }
            RunKind::Lease => {
                let mut opts = LeaseOptions::default().wait(wait);
                if let Some(ttl) = ttl {
                    opts = opts.ttl(ttl);
                }
                Ok(store.lease(key, opts).await?.map(Self::Lease))
            }
        }
    }

    pub(super) fn token(&self) -> FencingToken {
        match self {
            Self::Lock(_, token) => *token,
            Self::Lease(guard) => guard.token(),
        }
    }

    pub(super) fn lost(&self) -> Lost {
        match self {
            Self::Lock(guard, _) => guard.lost(),
            Self::Lease(guard) => guard.lost(),
        }
    }

    /// Frees it.
    pub(super) async fn release(self) -> Result<()> {
        let released = async {
            match self {
                Self::Lock(guard, _) => guard.release().await,
                Self::Lease(guard) => guard.release().await,
            }
        };
        tokio::time::timeout(RELEASE_LIMIT, released).await.unwrap_or_else(|_| {
            let detail = format!("no answer within {RELEASE_LIMIT:?}");
            Err(leasehold::Error::new(leasehold::ErrorKind::Unavailable, detail))
        })
    }
}
