//! From errors of fred to those of leasehold.

use fred::error::ErrorKind as FredKind;
use leasehold_core::{Error, ErrorKind};

/// The first words of errors of a server that cannot serve for now.
const FOR_NOW: [&str; 9] = [
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "NOREPLICAS",
    "MISCONF",
    "BUSY",
    "UNBLOCKED",
];

/// What a failed command means to the caller.
pub(crate) fn mapped(error: fred::error::Error) -> Error {
    let details = error.details();
    let is = |word: &str| details.split_whitespace().next() == Some(word);
    let (kind, detail) = if is("OOM") {
        (ErrorKind::Exhausted, "the server has no memory left")
    } else if is("READONLY") {
        (ErrorKind::Unavailable, "the server is a replica: connect to the primary")
    } else if FOR_NOW.iter().any(|word| is(word)) {
        (ErrorKind::Unavailable, "the server cannot serve for now")
    } else if is("NOPERM") {
        let detail = "the user lacks a permission, see the crate's list of commands";
        (ErrorKind::Backend, detail)
    } else if is("CROSSSLOT") {
        (ErrorKind::Unsupported, "in a cluster, all keys of a claim must share a slot")
    } else if is_answer(&error) {
        (ErrorKind::Backend, "the server refused")
    } else {
        (ErrorKind::Unavailable, "the server did not answer")
    };
    Error::new(kind, detail).with_source(error)
}

/// Whether the server answered (with an error), so that nothing was done.
pub(crate) fn is_answer(error: &fred::error::Error) -> bool {
    let first = error.details().split_whitespace().next().unwrap_or_default();
    let shouted = first.len() > 1 && first.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    match error.kind() {
        FredKind::Auth | FredKind::InvalidArgument | FredKind::Parse | FredKind::InvalidCommand => {
            true
        }
        FredKind::Unknown | FredKind::Protocol | FredKind::Config | FredKind::Cluster => shouted,
        _ => false,
    }
}

/// Whether the command was never sent, because there was no connection.
pub(crate) fn was_not_sent(error: &fred::error::Error) -> bool {
    // fred's early answer to a command that must not wait for a connection
    matches!(error.kind(), FredKind::Canceled)
        && error.details() == "Connection closed unexpectedly."
}

/// Whether the server does not know the script.
pub(crate) fn is_noscript(error: &fred::error::Error) -> bool {
    error.details().starts_with("NOSCRIPT")
}

/// An answer that no script of ours gives.
pub(crate) fn strange(answer: &fred::types::Value) -> Error {
    let detail = format!("the server's answer is not understood: {answer:?}");
    Error::new(ErrorKind::Backend, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(kind: FredKind, details: &'static str) -> ErrorKind {
        mapped(fred::error::Error::new(kind, details)).kind()
    }

    /// B71: no memory is an error of its own; a replica and a loading server are not for ever.
    #[test]
    fn errors_are_told_apart() {
        let unknown = FredKind::Unknown;
        let oom = "OOM command not allowed when used memory > 'maxmemory'.";
        assert_eq!(kind_of(unknown.clone(), oom), ErrorKind::Exhausted);
        let readonly = "READONLY You can't write against a read only replica.";
        assert_eq!(kind_of(unknown.clone(), readonly), ErrorKind::Unavailable);
        assert_eq!(kind_of(unknown.clone(), "ERR wrong number"), ErrorKind::Backend);
        assert_eq!(kind_of(FredKind::IO, "Connection closed."), ErrorKind::Unavailable);
        assert_eq!(kind_of(FredKind::Timeout, "Request timed out."), ErrorKind::Unavailable);
        let lost = "Client is not initialized.";
        assert_eq!(kind_of(unknown, lost), ErrorKind::Unavailable);
    }
}
