//! What the tests share: the harness, and a raw connection to look behind the backend's back.
#![allow(dead_code, unreachable_pub, unused_imports)] // each test uses a part

mod harness;
mod raw;

pub use harness::RedisHarness;
pub use raw::{Raw, Reply};

use leasehold_conformance::servers::Kind;

/// The server that `LEASEHOLD_TEST_ONLY` names; Redis 7 otherwise.
pub fn kind() -> Kind {
    match only().as_deref() {
        Some("redis8") => Kind::Redis8,
        Some("valkey") => Kind::Valkey,
        _ => Kind::Redis7,
    }
}

/// Whether the tests of this server are wanted.
pub fn wanted(kind: Kind) -> bool {
    only().is_none_or(|only| only == kind.name())
}

fn only() -> Option<String> {
    std::env::var("LEASEHOLD_TEST_ONLY").ok().filter(|only| !only.is_empty())
}
