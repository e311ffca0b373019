//! [`FencingToken`].

use std::fmt;

/// A number that orders the holders of one key.
///
/// Strictly greater for each later acquisition of the same key and kind, across release, expiry,
/// purge, restart and failover of the store; unchanged by a renewal. It is issued by the store.
///
/// A lock alone cannot stop a holder that was paused past its loss from writing. Store the token
/// with what you write, and refuse a write whose token is smaller than the stored one (Kleppmann,
/// *How to do distributed locking*, 2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(pub u64);

impl FencingToken {
    /// The number.
    pub fn value(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
