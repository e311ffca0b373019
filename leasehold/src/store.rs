//! [`Store`]: a backend that was chosen by a URL.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use leasehold_core::{Backend, ClaimLock, Dedupe, Inspect, Lease, NamedLock, Result};

use crate::backends;
use crate::url::{StoreUrl, redacted};

/// Connects to the store that `url` names; its scheme chooses the backend. See the
/// [crate's page](crate#urls) for schemes and options.
///
/// The tables of a server may be missing yet: [`Backend::migrate`] makes them.
///
/// ```
/// use leasehold::{Key, LockOptions};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold::Result<()> {
/// let store = leasehold::connect("memory:").await?;
/// let key = Key::new("nightly-report")?;
/// if let Some(guard) = store.lock(&key, LockOptions::try_once()).await? {
///     // one copy of the service gets here
///     guard.release().await?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ErrorKind::InvalidOptions`](crate::ErrorKind::InvalidOptions) for a URL that is none, an
/// unknown scheme or option (the known ones are listed) or a value out of its range;
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the backend's feature is not
/// enabled, or the server cannot do what is promised;
/// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if it does not answer. None of them
/// shows a password.
///
/// # Cancel safety
/// Safe: nothing stays open.
pub async fn connect(url: &str) -> Result<Store> {
    Store::connect(url).await
}

/// A backend that was chosen by a URL: all four traits, directly (it derefs to [`Backend`]) and as
/// `Arc<dyn …>` of their own. Cloning gives another reference to the same handle.
#[derive(Clone)]
pub struct Store {
    backend: Arc<dyn Backend>,
    url: Arc<str>,
}

impl Store {
    /// As [`connect`].
    ///
    /// # Errors
    /// Those of [`connect`].
    ///
    /// # Cancel safety
    /// Safe: nothing stays open.
    pub async fn connect(url: &str) -> Result<Self> {
        let parsed = StoreUrl::parse(url)?;
        Ok(Self { backend: backends::open(&parsed).await?, url: redacted(url).into() })
    }

    /// A backend that was opened otherwise, e.g. over the service's own pool.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        let url = format!("{}:", backend.name()).into();
        Self { backend, url }
    }

    /// Where it is, without a password.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The backend.
    pub fn backend(&self) -> Arc<dyn Backend> {
        self.backend.clone()
    }

    /// Its named locks.
    pub fn locks(&self) -> Arc<dyn NamedLock> {
        self.backend.clone()
    }

    /// Its leases.
    pub fn leases(&self) -> Arc<dyn Lease> {
        self.backend.clone()
    }

    /// Its claims.
    pub fn claims(&self) -> Arc<dyn ClaimLock> {
        self.backend.clone()
    }

    /// Its dedupe entries.
    pub fn deduper(&self) -> Arc<dyn Dedupe> {
        self.backend.clone()
    }

    /// The look into it.
    pub fn inspector(&self) -> Arc<dyn Inspect> {
        self.backend.clone()
    }
}

impl Deref for Store {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        &*self.backend
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("url", &self.url).finish_non_exhaustive()
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}
