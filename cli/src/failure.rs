//! [`Failure`]: why the command could not do what was asked, and what to do next.

use leasehold::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::exit;

/// The outcome of a subcommand: its exit code.
pub(crate) type Outcome = Result<u8, Failure>;

/// Why a subcommand failed.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    kind: &'static str,
    message: String,
    advice: String,
}

impl Failure {
    /// The command line asks for what cannot be.
    pub(crate) fn usage(message: impl Into<String>, advice: impl Into<String>) -> Self {
        let (message, advice) = (message.into(), advice.into());
        Self { code: exit::USAGE, kind: "usage", message, advice }
    }

    /// This machine refuses.
    pub(crate) fn system(what: &str, error: &std::io::Error) -> Self {
        let (code, message) = (exit::SYSTEM, format!("{what}: {error}"));
        Self { code, kind: "system", message, advice: String::new() }
    }

    /// The job's program cannot be run.
    pub(crate) fn program(program: &str, error: &std::io::Error) -> Self {
        let (code, advice) = match error.kind() {
            std::io::ErrorKind::NotFound => {
                (exit::NOT_FOUND, "is it in PATH? A line of shell needs: -- sh -c 'LINE'")
            }
            _ => (exit::NOT_EXECUTABLE, "is it a program with the right to execute it?"),
        };
        let message = format!("cannot run {program}: {error}");
        Self { code, kind: "program", message, advice: advice.to_owned() }
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// What happened.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What to do next; may be empty.
    pub(crate) fn advice(&self) -> &str {
        &self.advice
    }

    /// For `--output json`.
    pub(crate) fn to_json(&self) -> Value {
        json!({"error": {
            "kind": self.kind, "message": self.message, "advice": self.advice, "code": self.code,
        }})
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::InvalidKey | ErrorKind::InvalidOptions => exit::USAGE,
            ErrorKind::Lost => exit::LOST,
            _ => exit::STORE,
        };
        let advice = advice(error.kind()).to_owned();
        Self { code, kind: kind(error.kind()), message: error.to_string(), advice }
    }
}

/// The stable name of an error's kind.
fn kind(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Lost => "lost",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::InvalidKey => "invalid-key",
        ErrorKind::InvalidOptions => "invalid-options",
        ErrorKind::CommitUnknown => "commit-unknown",
        ErrorKind::Deadlock => "deadlock",
        ErrorKind::Exhausted => "exhausted",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Schema => "schema",
        _ => "store",
    }
}

/// What to do about an error of the store.
pub(crate) fn advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Unavailable => {
            "does the server run, and do host, port, user and password of the store's url hold?"
        }
        ErrorKind::Schema => "run `leasehold migrate` with the rights to create tables",
        ErrorKind::Exhausted => "end holders that are stuck (`leasehold list`), or raise the limit",
        ErrorKind::Unsupported => "`leasehold doctor` shows what the store can do",
        ErrorKind::Backend => "`leasehold doctor` looks for what is wrong with the store",
        ErrorKind::Deadlock => "run it again",
        _ => "",
    }
}
