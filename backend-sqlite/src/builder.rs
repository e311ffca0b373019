//! [`SqliteBuilder`]: the settings of a handle.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::backend::{LeaseLimits, SessionLimits};
use leasehold_core::{Error, ErrorKind, Holder, Result};

use crate::backend::SqliteBackend;
use crate::error::NAME;
use crate::file::Files;
use crate::place::Place;
use crate::store::Store;

/// How long a claim's first statement waits for other claims where nothing is set.
pub const DEFAULT_WRITER_WAIT: Duration = Duration::from_secs(60);
const NAMESPACE_BYTES: usize = 255;
const PREFIX_BYTES: usize = 63;

/// The settings of a [`SqliteBackend`].
#[derive(Clone, Debug)]
pub struct SqliteBuilder {
    namespace: String,
    prefix: String,
    holder: Holder,
    writer_wait: Duration,
    session_limits: SessionLimits,
    lease_limits: LeaseLimits,
}

impl SqliteBuilder {
    pub(crate) fn new() -> Self {
        let mut session_limits = SessionLimits::default();
        session_limits.keepalive = Duration::from_secs(1);
        // the file answers as soon as others have written: a session is not lost by that
        session_limits.answer = Duration::from_secs(10);
        let mut lease_limits = LeaseLimits::default();
        lease_limits.max_poll = Duration::from_millis(15);
        Self {
            namespace: String::new(),
            prefix: "leasehold".to_owned(),
            holder: Holder::this_process(),
            writer_wait: DEFAULT_WRITER_WAIT,
            session_limits,
            lease_limits,
        }
    }

    /// The namespace: keys of different ones never meet. Default: empty; at most 255 bytes.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// What the names of the tables begin with, and the name of the folder of the locks ends with;
    /// default `leasehold`. Handles of different prefixes have nothing to do with each other.
    /// Letters, digits and underscores, not beginning with a digit, at most 63 bytes.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Whom others are told as the holder; default [`Holder::this_process`].
    #[must_use]
    pub fn holder(mut self, holder: Holder) -> Self {
        self.holder = holder;
        self
    }

    /// How long a claim's first statement waits for other claims' transactions; default
    /// [`DEFAULT_WRITER_WAIT`], 60 s. After that the statement fails as SQLite has it: `database
    /// is locked`.
    #[must_use]
    pub fn writer_wait(mut self, wait: Duration) -> Self {
        self.writer_wait = wait;
        self
    }

    /// The limits of named locks; by default a session looks each second whether it was ended, and
    /// has 10 s for an answer.
    #[must_use]
    pub fn session_limits(mut self, limits: SessionLimits) -> Self {
        self.session_limits = limits;
        self
    }

    /// The limits of leases; by default a waiter looks each 15 ms at the latest.
    #[must_use]
    pub fn lease_limits(mut self, limits: LeaseLimits) -> Self {
        self.lease_limits = limits;
        self
    }

    /// A handle on the file that the URL names: `sqlite:/path/to/file.db`, `sqlite:file.db`, or
    /// `sqlite:` alone for `$XDG_STATE_HOME/leasehold/leasehold.db`, which without that variable is
    /// `~/.local/state/leasehold/leasehold.db`. File, folders (with mode 0700) and tables are made
    /// where they are missing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a setting or URL that is none, [`ErrorKind::Unavailable`]
    /// if the file or its folder cannot be made or opened, [`ErrorKind::Backend`] if the file is no
    /// database or cannot be written, [`ErrorKind::Schema`] if its tables are of another version,
    /// [`ErrorKind::Unsupported`] where the file system has no shared memory, as networks have not.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn connect(self, url: &str) -> Result<SqliteBackend> {
        self.open(url).await.map_err(|error| error.at(NAME, "connect"))
    }

    async fn open(self, url: &str) -> Result<SqliteBackend> {
        self.check()?;
        let place = Place::prepare(url, &self.prefix)?;
        let files = Files { place, prefix: self.prefix };
        let store = Store::new(files, self.namespace, self.holder.to_string(), self.writer_wait);
        store.open().await?;
        Ok(SqliteBackend::assemble(Arc::new(store), self.session_limits, self.lease_limits))
    }

    fn check(&self) -> Result<()> {
        let letters =
            |text: &str| text.chars().all(|char| char.is_ascii_alphanumeric() || char == '_');
        let fault = if self.namespace.len() > NAMESPACE_BYTES {
            format!("a namespace has at most {NAMESPACE_BYTES} bytes")
        } else if self.namespace.contains('\0') {
            "a namespace must not contain a NUL character".to_owned()
        } else if self.prefix.is_empty() || self.prefix.len() > PREFIX_BYTES {
            format!("a prefix has from 1 to {PREFIX_BYTES} bytes")
        } else if !letters(&self.prefix) || self.prefix.starts_with(|char: char| char.is_numeric())
        {
            "a prefix has letters, digits and underscores, and does not begin with a digit"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidOptions, fault))
    }
}
