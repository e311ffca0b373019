//! [`Exclusion`]: a named lock or a lease, for recipes that work over either.

use std::sync::Arc;
use std::time::Duration;

use crate::{
    FencingToken, Key, Lease, LeaseGuard, LeaseOptions, LockGuard, LockOptions, Lost, NamedLock,
    Result,
};

#[derive(Clone, Debug)]
pub(super) enum Exclusion {
    Locks(Arc<dyn NamedLock>),
    Leases(Arc<dyn Lease>, Duration),
}

impl Exclusion {
    /// Waits for `key` at most `wait`.
    pub(super) async fn take(&self, key: &Key, wait: Duration) -> Result<Option<Hold>> {
        match self {
            Self::Locks(locks) => {
                let taken = locks.lock(key, LockOptions::default().wait(wait)).await?;
                Ok(taken.map(Hold::Lock))
            }
            Self::Leases(leases, ttl) => {
                let opts = LeaseOptions::default().ttl(*ttl).wait(wait);
                Ok(leases.lease(key, opts).await?.map(Hold::Lease))
            }
        }
    }
}

/// What was taken; dropping it releases in the background.
#[derive(Debug)]
pub(super) enum Hold {
    Lock(LockGuard),
    Lease(LeaseGuard),
}

impl Hold {
    pub(super) async fn token(&self) -> Result<FencingToken> {
        match self {
            Self::Lock(guard) => guard.token().await,
            Self::Lease(guard) => Ok(guard.token()),
        }
    }

    pub(super) fn lost(&self) -> Lost {
        match self {
            Self::Lock(guard) => guard.lost(),
            Self::Lease(guard) => guard.lost(),
        }
    }

    pub(super) fn is_held(&self) -> bool {
        match self {
            Self::Lock(guard) => guard.is_held(),
            Self::Lease(guard) => guard.is_held(),
        }
    }

    pub(super) fn key(&self) -> &Key {
        match self {
            Self::Lock(guard) => guard.key(),
            Self::Lease(guard) => guard.key(),
        }
    }

    pub(super) async fn release(self) -> Result<()> {
        match self {
            Self::Lock(guard) => guard.release().await,
            Self::Lease(guard) => guard.release().await,
        }
    }
}
