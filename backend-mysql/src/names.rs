//! How keys are called on the server.
//!
//! A user-level lock's name has at most 64 characters, is one per *server* (not per database), and
//! both servers fold its case, each in its own way. So:
//!
//! - `lh:l:NAMESPACE:KEY` (for claims `lh:c:…`) where that has at most 64 characters, the namespace
//!   has no colon, and both are plain: lower-case letters, digits and ``!#$%&()*+,-./:;<=>@[]^_{|}~``.
//! - `lh:l#PREFIX#HASH` otherwise: the key's first characters, with what is not plain replaced, to
//!   be readable in `performance_schema.metadata_locks`; and 160 bits of a SHA-256 in base 32.
//!
//! Rows are found by the whole SHA-256. Both hash the kind, the namespace and the key, each with
//! its length, so that no two of them meet.

use leasehold_core::Key;
use sha2::{Digest, Sha256};

/// The longest name of a lock on MySQL.
const MAX_NAME: usize = 64;
/// The longest namespace, in bytes.
pub(crate) const MAX_NAMESPACE: usize = 200;
const HASH_CHARS: usize = 32;

/// What a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Lock,
    Claim,
    Lease,
    Dedupe,
    /// A named lock that is a lease, where there are no user-level locks.
    LeasedLock,
}

impl Kind {
    fn letter(self) -> char {
        match self {
            Self::Lock => 'l',
            Self::Claim => 'c',
            Self::Lease => 'e',
            Self::Dedupe => 'd',
            Self::LeasedLock => 'n',
        }
    }
}

/// The key of a row.
pub(crate) type RowId = [u8; 32];

/// The key of a row.
pub(crate) fn row_id(kind: Kind, namespace: &str, key: &Key) -> RowId {
    let mut hash = Sha256::new();
    for part in [kind.letter().to_string().as_str(), namespace, key.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// As [`row_id`], in SQL, of the key in the column `name`.
pub(crate) fn row_id_of_column(kind: Kind, namespace: &str) -> String {
    let mut start = Vec::new();
    for part in [kind.letter().to_string().as_str(), namespace] {
        start.extend((part.len() as u64).to_be_bytes());
        start.extend(part.as_bytes());
    }
    format!(
        "UNHEX(SHA2(CONCAT({}, UNHEX(LPAD(HEX(LENGTH(name)), 16, '0')), name), 256))",
        hex(&start)
    )
}

/// The name of a user-level lock. It needs no quoting in a literal.
pub(crate) fn lock_name(kind: Kind, namespace: &str, key: &Key) -> String {
    let letter = kind.letter();
    let plain = format!("lh:{letter}:{namespace}:{key}");
    if plain.len() <= MAX_NAME && !namespace.contains(':') && plain.bytes().all(is_plain) {
        return plain;
    }
    let hash = base32(&row_id(kind, namespace, key)[..20]);
    let start = format!("lh:{letter}#");
    let room = MAX_NAME - start.len() - 1 - HASH_CHARS;
    let prefix: String = key
        .as_str()
        .chars()
        .take(room)
        .map(|c| c.to_ascii_lowercase())
        .map(|c| match u8::try_from(c) {
            Ok(byte) if is_plain(byte) => c,
            _ => '_',
        })
        .collect();
    format!("{start}{prefix}#{hash}")
}

/// Printable, the same in lower case, and harmless between single quotes in any SQL mode.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic()
        && !byte.is_ascii_uppercase()
        && !matches!(byte, b'\'' | b'"' | b'\\' | b'`' | b'?')
}

fn base32(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let (mut text, mut bits, mut count) = (String::new(), 0_u32, 0);
    for byte in bytes {
        bits = (bits << 8) | u32::from(*byte);
        count += 8;
        while count >= 5 {
            count -= 5;
            text.push(char::from(DIGITS[(bits >> count & 31) as usize]));
        }
    }
    text
}

/// A literal of SQL.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2 + 3);
    text.push_str("x'");
    for byte in bytes {
        // writing to a string cannot fail
        let _ = write!(text, "{byte:02x}");
    }
    text.push('\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn name(namespace: &str, key: &str) -> String {
        lock_name(Kind::Lock, namespace, &Key::new(key).unwrap())
    }

    /// These must never change: processes of different versions meet on them.
    #[test]
    fn golden_vectors() {
        for (namespace, key, golden) in GOLDEN {
            assert_eq!(name(namespace, key), *golden, "{namespace:?} {key:?}");
        }
        let id = row_id(Kind::Lease, "app", &Key::new("Ä").unwrap());
        assert_eq!(hex(&id), GOLDEN_ROW);
    }

    const GOLDEN: &[(&str, &str, &str)] = &[
        ("", "poller", "lh:l::poller"),
        ("app", "jobs/7:retry", "lh:l:app:jobs/7:retry"),
        ("app", "Jobs", "lh:l#jobs#g6jpqv7d4m27ngle7657opgbwgl2xndp"),
        ("App", "jobs", "lh:l#jobs#2gerqpnbkl5h7jmqeoaigt4ucakyiqzp"),
        ("a:b", "c", "lh:l#c#dzvre3lxiou3ckbv7ohs22cgpnilq6it"),
        ("app", "it's", "lh:l#it_s#5ago2dpatbzsfo7vizvdsdyqfwi3rdm3"),
        ("app", "caf\u{e9} ", "lh:l#caf__#nt7svbjk4j72ekob3frvdnqpnqgqmyzg"),
        (
            "app",
            "0123456789012345678901234567890123456789012345678901234",
            "lh:l:app:0123456789012345678901234567890123456789012345678901234",
        ),
        (
            "app",
            "01234567890123456789012345678901234567890123456789012345",
            "lh:l#01234567890123456789012345#aujanlneoszevve65bjbdmbvmrt3g3tw",
        ),
    ];
    const GOLDEN_ROW: &str = "x'7aad3c178fa7fa01ac588688527498d746912fb452ecb87bdb6c70f9797f602d'";

    /// B39, B41, B103: neither length, case, accents nor padding merge two keys.
    #[test]
    fn names_are_short_and_distinct_for_a_server_that_folds() {
        let long = "x".repeat(Key::MAX_BYTES - 1);
        let mut keys: Vec<String> = [
            "job",
            "Job",
            "JOB",
            "caf\u{e9}",
            "cafe\u{301}",
            "cafe",
            "CAF\u{c9}",
            "\u{df}",
            "ss",
            "a",
            "a ",
            " a",
            "a\u{ad}",
            "\u{1f600}",
            "\u{1f601}",
            "lh:l:n:job",
            "n:job",
            "?",
            "_",
            "#",
        ]
        .map(str::to_owned)
        .into();
        keys.extend((0..4).map(|i| format!("{long}{i}")));
        keys.extend((60..70).map(|n| "y".repeat(n)));
        let mut seen = HashSet::new();
        for namespace in ["", "n", "N", "n:m", "lh"] {
            for key in &keys {
                for kind in [Kind::Lock, Kind::Claim] {
                    let name = lock_name(kind, namespace, &Key::new(key).unwrap());
                    assert!(name.len() <= MAX_NAME && name.bytes().all(is_plain), "{name}");
                    assert!(seen.insert(name.clone()), "{namespace:?} {key:?} {name}");
                }
            }
        }
    }

    /// B19: no collision among many.
    #[test]
    fn hashed_names_do_not_collide() {
        let names: HashSet<String> = (0..200_000).map(|i| name("app", &format!("K{i}"))).collect();
        assert_eq!(names.len(), 200_000);
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
            for kind in [Kind::Lock, Kind::Claim] {
                let (first, second) = (lock_name(kind, &namespace, &a), lock_name(kind, &namespace, &b));
                prop_assert!(first.len() <= MAX_NAME && first.bytes().all(is_plain), "{}", first);
                prop_assert_eq!(first == second, one == two);
            }
            let (first, second) = (row_id(Kind::Lease, &namespace, &a), row_id(Kind::Lease, &namespace, &b));
            prop_assert_eq!(first == second, one == two);
            prop_assert_ne!(first, row_id(Kind::Dedupe, &namespace, &a));
            prop_assert_ne!(first, row_id(Kind::Lease, &format!("{namespace}x"), &a));
        }
    }
}
