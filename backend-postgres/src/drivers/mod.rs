//! The drivers of the four engines.

mod claim;
mod claim_sql;
mod dedupe;
mod exchange;
mod lease;
mod listen;
mod session;

pub(crate) use claim::{Claims, claim_in};
pub(crate) use dedupe::{Deduper, first_seen_statement};
pub(crate) use lease::{CONFIG, Leases, millis};
pub(crate) use listen::{CHANGED, channel};
pub(crate) use session::Sessions;
