//! [`Error`]: what went wrong, where, and on which key.

use std::fmt;
use std::sync::Arc;

use crate::key::Key;

/// The result of every fallible call here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure an [`Error`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// What the guard held is held no longer: acquire it anew.
    Lost,
    /// The store cannot be reached, or did not answer in time.
    Unavailable,
    /// The key is not one: see [`Key`].
    InvalidKey,
    /// An option is out of its range.
    InvalidOptions,
    /// A transaction type of another backend was asked for.
    WrongBackend,
    /// The commit was sent and its answer was lost: it may or may not have happened.
    CommitUnknown,
    /// The store chose this call to break a deadlock.
    Deadlock,
    /// A stated limit of the handle or the store is reached.
    Exhausted,
    /// This store, or the way it is reached, cannot do what was asked.
    Unsupported,
    /// The tables are missing or of another version: run `migrate`.
    Schema,
    /// The store refused for a reason of its own: see the source.
    Backend,
}

impl ErrorKind {
    fn phrase(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Unavailable => "store unavailable",
            Self::InvalidKey => "invalid key",
            Self::InvalidOptions => "invalid options",
            Self::WrongBackend => "wrong backend",
            Self::CommitUnknown => "commit outcome unknown",
            Self::Deadlock => "deadlock",
            Self::Exhausted => "limit reached",
            Self::Unsupported => "unsupported",
            Self::Schema => "schema not ready",
            Self::Backend => "store error",
        }
    }
}

/// A failure: its kind, and the backend, operation and key that it concerns.
///
/// Contention is not a failure: it is `Ok(None)`. An error means that we do not know or cannot.
/// Messages never hold a password.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    detail: String,
    backend: Option<&'static str>,
    operation: Option<&'static str>,
    key: Option<String>,
    source: Option<Arc<dyn std::error::Error + Send + Sync + 'static>>,
}

impl Error {
    /// A new error; `detail` says what happened and what to do, lowercase without a final stop.
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            detail: detail.into(),
            backend: None,
            operation: None,
            key: None,
            source: None,
        }))
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
    ) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Adds where it happened; what is already known is kept.
    #[must_use]
    pub fn at(mut self, backend: &'static str, operation: &'static str) -> Self {
        self.0.backend.get_or_insert(backend);
        self.0.operation.get_or_insert(operation);
        self
    }

    /// Adds the key that it concerns; what is already known is kept.
    #[must_use]
    pub fn on(mut self, key: &(impl fmt::Display + ?Sized)) -> Self {
        self.0.key.get_or_insert_with(|| key.to_string());
        self
    }

    /// What kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What happened, without the context.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// The backend, e.g. `postgres`.
    pub fn backend(&self) -> Option<&'static str> {
        self.0.backend
    }

    /// The operation, e.g. `lock`.
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// The key, or the set of keys, as text.
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// Whether the same call may succeed if it is simply made again.
    ///
    /// False for [`ErrorKind::Lost`] (acquire anew, and look at what was half done) and for
    /// [`ErrorKind::CommitUnknown`] (look first whether it happened).
    pub fn is_retryable(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unavailable | ErrorKind::Deadlock | ErrorKind::Exhausted)
    }

    pub(crate) fn on_key(self, key: &Key) -> Self {
        self.on(key)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        if let Some(backend) = inner.backend {
            write!(f, "{backend}: ")?;
        }
        if let Some(operation) = inner.operation {
            write!(f, "{operation} ")?;
        }
        if let Some(key) = &inner.key {
            write!(f, "{key:?} ")?;
        }
        if inner.operation.is_some() || inner.key.is_some() {
            f.write_str("failed: ")?;
        }
        write!(f, "{}: {}", inner.kind.phrase(), inner.detail)?;
        if let Some(source) = &inner.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("message", &self.to_string())
            .finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_backend_operation_and_key() {
        let error = Error::new(ErrorKind::Unavailable, "no answer within 5s")
            .at("memory", "lock")
            .on("a \"b\"")
            .with_source(std::io::Error::other("cut"));
        assert_eq!(
            error.to_string(),
            "memory: lock \"a \\\"b\\\"\" failed: store unavailable: no answer within 5s: cut"
        );
        assert!(error.is_retryable());
        assert!(std::error::Error::source(&error).is_some());
        assert_eq!(error.clone().at("other", "other").backend(), Some("memory"));
    }

    #[test]
    fn an_error_is_one_word() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }
}
