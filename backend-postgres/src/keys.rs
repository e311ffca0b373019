//! How a [`Key`] becomes an advisory lock's number and a row's id.

use std::fmt;
use std::sync::Arc;

use leasehold_core::Key;
use sha2::{Digest, Sha256};

/// What an advisory lock is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LockKind {
    /// A named lock, on a session.
    Session,
    /// A claim, on a transaction.
    Claim,
}

/// What a key stands for; the byte goes into its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Use {
    Session = b'S',
    Claim = b'C',
    Lease = b'L',
    Dedupe = b'D',
    SessionMark = b's',
    ClaimMark = b'c',
}

/// A mapping of the caller's own.
pub(crate) type Custom = Arc<dyn Fn(LockKind, &Key) -> i64 + Send + Sync>;

/// The mapping of one namespace.
#[derive(Clone)]
pub(crate) struct KeyMap {
    namespace: Arc<str>,
    custom: Option<Custom>,
}

impl KeyMap {
    pub(crate) fn new(namespace: &str, custom: Option<Custom>) -> Self {
        Self { namespace: namespace.into(), custom }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The number of an advisory lock.
    pub(crate) fn advisory(&self, kind: LockKind, key: &Key) -> i64 {
        match (&self.custom, kind) {
            (Some(custom), _) => custom(kind, key),
            (None, LockKind::Session) => first64(&self.digest(Use::Session, key)),
            (None, LockKind::Claim) => first64(&self.digest(Use::Claim, key)),
        }
    }

    /// The number of the shared lock by which sessions that hold locks of this kind and namespace
    /// are known; whatever maps the keys, and never a key's own.
    pub(crate) fn mark(&self, kind: LockKind) -> i64 {
        let of = match kind {
            LockKind::Session => Use::SessionMark,
            LockKind::Claim => Use::ClaimMark,
        };
        first64(&self.digest_of(of, b""))
    }

    /// The id of a row.
    pub(crate) fn row(&self, of: Use, key: &Key) -> Vec<u8> {
        self.digest(of, key).to_vec()
    }

    /// The number of the lock that is held while a lease is taken: the tokens of those who take
    /// it one after the other are then drawn in that order.
    pub(crate) fn gate(&self, key: &Key) -> i64 {
        first64(&self.digest(Use::Lease, key))
    }

    /// The number by which a notification names a lease.
    pub(crate) fn wake_id(&self, key: &Key) -> u64 {
        self.gate(key).cast_unsigned()
    }

    /// SHA-256 of a prefix, the use, the length of the namespace, the namespace and the key: no
    /// two different triples give the same bytes.
    fn digest(&self, of: Use, key: &Key) -> [u8; 32] {
        self.digest_of(of, key.as_str().as_bytes())
    }

    fn digest_of(&self, of: Use, key: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(b"leasehold");
        hash.update([of as u8]);
        hash.update((self.namespace.len() as u32).to_be_bytes());
        hash.update(self.namespace.as_bytes());
        hash.update(key);
        hash.finalize().into()
    }
}

/// The first eight bytes as a signed number, bit by bit: the server's type is a signed one.
fn first64(digest: &[u8; 32]) -> i64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(first)
}

impl fmt::Debug for KeyMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyMap")
            .field("namespace", &self.namespace)
            .field("custom", &self.custom.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    /// The mapping must never change: other programs, and other versions of this one, go by it.
    #[test]
    fn golden_vectors() {
        for (namespace, name, session, claim) in [
            ("", "a", 3_611_265_667_200_731_348, -8_579_998_493_142_717_167),
            ("app", "invoices/2026-11", -2_498_417_468_344_670_072, -8_951_540_295_656_237_479),
            ("", "größe", 8_915_545_768_562_290_806, 723_337_971_780_417_769),
        ] {
            let map = KeyMap::new(namespace, None);
            assert_eq!(map.advisory(LockKind::Session, &key(name)), session, "{name}");
            assert_eq!(map.advisory(LockKind::Claim, &key(name)), claim, "{name}");
        }
        let row = KeyMap::new("app", None).row(Use::Lease, &key("x"));
        assert_eq!(row[..4], [0x8e, 0xd1, 0xc7, 0x96]);
        assert_eq!(row.len(), 32);
    }

    /// CASES B19: 64 bits of a strong hash do not collide in practice.
    #[test]
    fn two_hundred_thousand_keys_do_not_collide() {
        let map = KeyMap::new("tenant", None);
        let ids: HashSet<i64> = (0..200_000)
            .map(|n| map.advisory(LockKind::Session, &key(&format!("job-{n}"))))
            .collect();
        assert_eq!(ids.len(), 200_000);
        assert!(ids.iter().any(|id| *id < 0), "the sign bit is used as well (CASES B21)");
    }

    #[test]
    fn namespaces_and_kinds_never_meet() {
        let ids: HashSet<Vec<u8>> = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "abc")]
            .into_iter()
            .flat_map(|(namespace, name)| {
                let map = KeyMap::new(namespace, None);
                [Use::Session, Use::Claim, Use::Lease, Use::Dedupe]
                    .map(|of| map.row(of, &key(name)))
            })
            .collect();
        assert_eq!(ids.len(), 16);
    }
}

#[cfg(test)]
mod any_key {
    use leasehold_conformance::any_key::{keys, texts};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn different_keys_are_different_locks_and_rows((one, two) in texts(), namespace in "\\PC{0,20}") {
            let Some((a, b)) = keys(&one, &two)? else { return Ok(()) };
            let map = KeyMap::new(&namespace, None);
            for kind in [LockKind::Session, LockKind::Claim] {
                prop_assert_eq!(map.advisory(kind, &a) == map.advisory(kind, &b), one == two);
            }
            for of in [Use::Lease, Use::Dedupe] {
                let (first, second) = (map.row(of, &a), map.row(of, &b));
                prop_assert_eq!(first.len(), 32);
                prop_assert_eq!(first == second, one == two);
            }
            prop_assert_ne!(map.row(Use::Lease, &a), map.row(Use::Dedupe, &a));
            let other = KeyMap::new(&format!("{namespace}x"), None);
            prop_assert_ne!(map.row(Use::Lease, &a), other.row(Use::Lease, &a));
        }
    }
}
