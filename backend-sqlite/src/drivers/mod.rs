//! The drivers behind the engines of core.

mod claim;
mod dead;
mod dedupe;
mod keys;
mod lease;
mod session;

pub(crate) use claim::Claims;
pub(crate) use dead::{clear_dead, end, is_over};
pub(crate) use dedupe::Deduper;
pub(crate) use keys::{path as claim_file, prefix as claim_prefix};
pub(crate) use lease::Leases;
pub(crate) use session::Sessions;

use std::time::Duration;

use leasehold_core::backend::Owner;
use leasehold_core::{Error, ErrorKind};

/// A duration in the unit of the tables.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

fn bytes(owner: Owner) -> Vec<u8> {
    owner.0.to_be_bytes().to_vec()
}

/// An owner in a list that a statement gets as JSON.
fn hex(owner: Owner) -> String {
    format!("{:032x}", owner.0)
}

fn wrong_answer() -> Error {
    Error::new(ErrorKind::Backend, "the database gave another answer than was asked for")
}
