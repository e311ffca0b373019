//! The Lua scripts: each runs on the server as one atomic step.

use std::sync::LazyLock;

/// A script and the name by which the server caches it.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: &'static str,
    pub(crate) sha: String,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $file:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) static $name: LazyLock<Script> = LazyLock::new(|| {
            let text = include_str!(concat!("scripts/", $file));
            Script { text, sha: fred::util::sha1_hash(text) }
        });
    )*};
}

scripts! {
    /// Takes locks, each for itself.
    ACQUIRE = "acquire.lua";
    /// Takes all locks of a claim, or none.
    CLAIM = "claim.lua";
    /// Renews what is still held.
    RENEW = "renew.lua";
    /// Makes a new token for a lock that is held.
    TOKEN = "token.lua";
    /// Frees locks.
    RELEASE = "release.lua";
    /// Admits keys.
    ADMIT = "admit.lua";
    /// Completes or abandons an admitted key.
    SETTLE = "settle.lua";
    /// Gives a lock the token that the majority agreed on.
    RAISE = "raise.lua";
    /// Applies a claim's writes and frees its locks.
    COMMIT = "commit.lua";
    /// Reads what is held.
    LOOK = "look.lua";
    /// Takes away, by force or by the token.
    DISPLACE = "displace.lua";
    /// Which commands the user may not run.
    RIGHTS = "rights.lua";
}
