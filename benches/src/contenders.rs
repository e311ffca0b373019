//! placeholder
use leasehold_conformance::servers::Kind; use leasehold_peers::Outcome; use crate::scene::Entrant;
/// Who.
pub fn of(_: Kind, _: &str) -> Outcome<Vec<Entrant>> { Ok(Vec::new()) }
