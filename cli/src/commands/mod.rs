//! The subcommands but `run`; a file each.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod dedupe;
pub(crate) mod doctor;
pub(crate) mod holding;
pub(crate) mod list;
pub(crate) mod release;
pub(crate) mod show;
pub(crate) mod upkeep;
pub(crate) mod watch;
