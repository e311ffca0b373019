//! Scenarios of a server rather than of whoever locks.

use crate::scene::Scenario;

/// All, in the order of the report.
pub const ALL: &[Scenario] = &[];
