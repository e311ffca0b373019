//! [`Fault`]: why a case failed, and the macro that states what a case expects.

use std::fmt;

use leasehold_core::Error;

/// The outcome of a case.
pub type Verdict = Result<(), Fault>;

/// Why a case failed: what was expected and what happened instead, in words.
#[derive(Clone, PartialEq, Eq)]
pub struct Fault {
    message: String,
    ignored: bool,
}

impl Fault {
    /// A fault with this message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), ignored: false }
    }

    /// Not a fault: the case cannot be run here, for this reason, and is printed as ignored.
    pub fn ignored(reason: impl Into<String>) -> Self {
        Self { message: reason.into(), ignored: true }
    }

    /// Whether the case was not run.
    pub fn is_ignored(&self) -> bool {
        self.ignored
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Says in front of the message what was being done.
    #[must_use]
    pub fn during(mut self, what: impl fmt::Display) -> Self {
        if !self.ignored {
            self.message = format!("{what}: {}", self.message);
        }
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::new(format!("unexpected error: {error}"))
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::new(format!("unexpected error: {error}"))
    }
}

impl From<tokio::task::JoinError> for Fault {
    fn from(error: tokio::task::JoinError) -> Self {
        match error.try_into_panic() {
            Ok(panic) => Self::new(format!("a task panicked: {}", panic_message(&*panic))),
            Err(error) => Self::new(format!("a task ended early: {error}")),
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "no message".to_owned())
}

/// Returns a [`Fault`] unless the condition holds; the message says what was expected.
macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err($crate::fault::Fault::new(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;
