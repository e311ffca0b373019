//! Where things lie: names of keys and channels, and their slots in a cluster.

use std::fmt::Write;
use std::time::Duration;

use fred::types::Value;
use leasehold_core::backend::Owner;
use leasehold_core::{Error, ErrorKind, Key, Result};

/// How long a last token is kept after the last acquisition in its slot.
pub(crate) const KEEP_LAST: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a request that was given up is refused when it arrives late.
pub(crate) const KEEP_MARK: Duration = Duration::from_secs(5 * 60);
/// Into so many slots the keys of one kind are spread: enough for any cluster, and few enough that
/// the keys of many leases share one, to be renewed by one script.
const SPREAD: u64 = 256;

/// What kind of thing a key names. Kinds never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Lock,
    Lease,
    Claim,
    Dedupe,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Lease => "lease",
            Self::Claim => "claim",
            Self::Dedupe => "dedupe",
        }
    }
}

/// The names of one handle.
///
/// `leasehold:<namespace>:{<tag>}:<kind>:<key>`. The namespace is escaped so that it has neither a
/// colon nor a brace, hence the first braces are ours: what the key has in it neither makes two
/// names equal nor changes the slot.
#[derive(Clone, Debug)]
pub(crate) struct Keyspace {
    prefix: String,
    /// Everything in one slot.
    tag: Option<String>,
    claim_tag: String,
    clustered: bool,
    /// Outside of a cluster, where all keys share them.
    shared: Shared,
}

/// Names that are the same in every request, ready to be sent.
#[derive(Clone, Debug)]
struct Shared {
    last: Value,
    channel: Value,
}

/// The place of one key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    /// The key on the server.
    pub(crate) name: String,
    /// Its hash tag, without the braces.
    pub(crate) tag: String,
    /// What its news are called.
    pub(crate) wake: u64,
}

impl Keyspace {
    pub(crate) fn new(namespace: &str, tag: Option<String>, clustered: bool) -> Result<Self> {
        if namespace.is_empty() || namespace.len() > 128 || namespace.contains('\0') {
            let detail = "a namespace has from 1 to 128 bytes without NUL";
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        if tag.as_ref().is_some_and(|tag| {
            tag.is_empty() || tag.len() > 128 || tag.contains(['{', '}', ':', '\0'])
        }) {
            let detail = "a cluster tag has from 1 to 128 bytes without braces, colon and NUL";
            return Err(Error::new(ErrorKind::InvalidOptions, detail));
        }
        let mut escaped = String::with_capacity(namespace.len());
        for c in namespace.chars() {
            match c {
                '%' | '{' | '}' | ':' => {
                    let _ = write!(escaped, "%{:02x}", u32::from(c)); // a String takes it
                }
                _ => escaped.push(c),
            }
        }
        let none = Shared { last: Value::Null, channel: Value::Null };
        let mut keys = Self {
            prefix: format!("leasehold:{escaped}:"),
            claim_tag: tag.clone().unwrap_or(escaped),
            tag,
            clustered,
            shared: none,
        };
        let tag = &keys.claim_tag;
        keys.shared = Shared {
            last: keys.named(tag, "last", Kind::Lease.name()).into(),
            channel: keys.channel(tag).into(),
        };
        Ok(keys)
    }

    /// Whether slots matter.
    pub(crate) fn clustered(&self) -> bool {
        self.clustered
    }

    /// The tag of claims, without the braces.
    pub(crate) fn claim_tag(&self) -> &str {
        &self.claim_tag
    }

    /// What the news of a key are called; two keys may share it.
    pub(crate) fn wake(&self, kind: Kind, key: &Key) -> u64 {
        let parts = [self.prefix.as_bytes(), kind.name().as_bytes(), b":"];
        hash(parts.into_iter().chain([key.as_str().as_bytes()]))
    }

    pub(crate) fn place(&self, kind: Kind, key: &Key) -> Place {
        let wake = self.wake(kind, key);
        let tag = match (&self.tag, kind) {
            (Some(tag), _) => tag.clone(),
            (None, Kind::Claim) => self.claim_tag.clone(),
            (None, _) => (wake % SPREAD).to_string(),
        };
        let name = self.named(&tag, kind.name(), key.as_str());
        Place { name, tag, wake }
    }

    /// `<prefix>{<tag>}:<what>:<which>`
    fn named(&self, tag: &str, what: &str, which: &str) -> String {
        let length = self.prefix.len() + tag.len() + what.len() + which.len() + 4;
        let mut name = String::with_capacity(length);
        for part in [&self.prefix, "{", tag, "}:", what, ":", which] {
            name.push_str(part);
        }
        name
    }

    /// The key of the last token of the claims or the entries of a slot.
    pub(crate) fn last(&self, kind: Kind, tag: &str) -> Value {
        self.named(tag, "last", kind.name()).into()
    }

    /// The key of the last token of the leases and named locks: of a slot, or of all.
    pub(crate) fn last_lease(&self, tag: &str) -> Value {
        if self.clustered { self.last(Kind::Lease, tag) } else { self.shared.last.clone() }
    }

    /// The key that marks a request as given up.
    pub(crate) fn mark(&self, tag: &str, owner: Owner) -> Value {
        let tag = if self.clustered { tag } else { &self.claim_tag };
        self.named(tag, "gone", &hex(owner)).into()
    }

    /// The channel on which the news of a slot are published.
    pub(crate) fn channel(&self, tag: &str) -> String {
        if self.clustered {
            format!("{}{{{tag}}}:wake", self.prefix)
        } else {
            format!("{}wake", self.prefix)
        }
    }

    /// The same as a word of a request.
    pub(crate) fn channel_word(&self, tag: &str) -> Value {
        if self.clustered { self.channel(tag).into() } else { self.shared.channel.clone() }
    }

    /// The command that publishes news.
    pub(crate) fn publish(&self) -> Value {
        Value::from_static_str(if self.clustered { "SPUBLISH" } else { "PUBLISH" })
    }

    /// What all keys of a kind begin with up to the tag, for events of the keyspace.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The news' name of a key of the server, if it is one of ours.
    pub(crate) fn wake_of(&self, name: &str) -> Option<u64> {
        let rest = name.strip_prefix(&self.prefix)?.strip_prefix('{')?;
        let (_, rest) = rest.split_once("}:")?;
        let (kind, key) = rest.split_once(':')?;
        let kind = [Kind::Lock, Kind::Lease, Kind::Claim]
            .into_iter()
            .find(|known| known.name() == kind)?;
        Some(self.place(kind, &Key::new(key).ok()?).wake)
    }
}

/// FNV-1a, with the finish of `splitmix64` to spread it over all bits: all processes of all
/// versions must agree on it, and nothing hangs on who can make two keys collide.
fn hash<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in parts.flatten() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// An owner as the scripts know it: 32 hex digits.
pub(crate) fn hex(owner: Owner) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(32);
    for byte in owner.0.to_be_bytes() {
        text.extend([byte >> 4, byte & 15].map(|digit| char::from(DIGITS[usize::from(digit)])));
    }
    text
}

/// A time in whole milliseconds, rounded up: never zero, never shorter than asked for.
pub(crate) fn millis(time: Duration) -> Value {
    let millis = time.as_nanos().div_ceil(1_000_000).max(1);
    Value::Integer(i64::try_from(millis).unwrap_or(i64::MAX / 2_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fred::util::redis_keyslot;

    fn slot(name: &str) -> u16 {
        redis_keyslot(name.as_bytes())
    }

    /// B70: names with braces share the slot of their helper keys and never change it.
    #[test]
    fn helper_keys_share_the_slot_for_any_name() {
        let keys = Keyspace::new("a{b}:c", None, true).unwrap();
        for name in ["a", "{a}", "a{b}c", "{}", "}{", "{a", "{}{x}", "}:{", "%7b"] {
            let place = keys.place(Kind::Lease, &Key::new(name).unwrap());
            let wanted = slot(&place.name);
            assert_eq!(wanted, slot(&format!("{{{}}}", place.tag)), "{name}");
            let owner = Owner::fresh();
            let mark = keys.mark(&place.tag, owner).into_string().unwrap();
            let last = keys.last_lease(&place.tag).into_string().unwrap();
            let made = last.replace("last:lease", &format!("gone:{}", hex(owner)));
            assert_eq!(mark, made, "the scripts put it together like this");
            let others = keys.last(Kind::Dedupe, &place.tag).into_string().unwrap();
            for helper in [mark, last, others] {
                assert_eq!(slot(&helper), wanted, "{helper}");
            }
            assert_eq!(slot(&keys.channel(&place.tag)), wanted);
            assert_eq!(keys.wake_of(&place.name), Some(place.wake));
        }
    }

    #[test]
    fn kinds_and_namespaces_never_meet() {
        let mut seen = std::collections::HashSet::new();
        for namespace in ["a", "a:b", "a%3ab", "a{", "a%7b", "A", "a "] {
            let keys = Keyspace::new(namespace, Some("t".into()), false).unwrap();
            for kind in [Kind::Lock, Kind::Lease, Kind::Claim, Kind::Dedupe] {
                for key in ["a", "b:a", "lease:a", "{t}:lock:a", "a:"] {
                    let place = keys.place(kind, &Key::new(key).unwrap());
                    assert!(seen.insert(place.name.clone()), "{}", place.name);
                }
            }
        }
        assert!(Keyspace::new("", None, false).is_err());
        assert!(Keyspace::new("a", Some("{}".into()), false).is_err());
    }

    /// Processes of all versions must agree on where a key lies.
    #[test]
    fn places_never_change() {
        let keys = Keyspace::new("orders", None, true).unwrap();
        let place = keys.place(Kind::Lease, &Key::new("invoices/7").unwrap());
        assert_eq!(place.wake, keys.wake(Kind::Lease, &Key::new("invoices/7").unwrap()));
        assert_eq!(
            (place.name.as_str(), place.wake),
            ("leasehold:orders:{124}:lease:invoices/7", 1_271_707_394_371_746_940)
        );
        assert_eq!(hex(Owner(0xab)), format!("{:032x}", 0xab));
        let tags: std::collections::HashSet<String> = (0..5_000)
            .map(|n| keys.place(Kind::Lease, &Key::new(n.to_string()).unwrap()).tag)
            .collect();
        assert_eq!(tags.len() as u64, SPREAD, "the keys are not spread");
    }

    #[test]
    fn claims_share_one_slot() {
        let keys = Keyspace::new("orders", None, true).unwrap();
        let place = |key| keys.place(Kind::Claim, &Key::new(key).unwrap());
        assert_eq!(slot(&place("a").name), slot(&place("{b}").name));
        assert_eq!(slot(&place("a").name), slot("{orders}:count"));
    }

    /// B25: no time is cut to zero.
    #[test]
    fn times_are_rounded_up() {
        assert_eq!(millis(Duration::from_nanos(1)), Value::Integer(1));
        assert_eq!(millis(Duration::from_micros(1_001)), Value::Integer(2));
        assert_eq!(millis(Duration::from_millis(7)), Value::Integer(7));
        assert!(millis(Duration::MAX).as_i64().unwrap() > 0);
    }
}
