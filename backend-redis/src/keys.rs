//! Where things lie: names of keys and channels, and their slots in a cluster.

use std::fmt::Write;
use std::time::Duration;

use fred::types::Value;
pub(crate) use leasehold_core::Kind;
use leasehold_core::backend::Owner;
use leasehold_core::{Error, ErrorKind, Key, Result};

/// How long a last token is kept after the last acquisition in its slot.
pub(crate) const KEEP_LAST: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a request that was given up is refused when it arrives late.
pub(crate) const KEEP_MARK: Duration = Duration::from_secs(5 * 60);
/// Into so many slots the keys of one kind are spread: enough for any cluster, and few enough that
/// the keys of many leases share one, to be renewed by one script.
const SPREAD: u64 = 256;

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
    /// By which the holder of an owner is found.
    instance: u32,
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
            instance: 0,
        };
        let tag = &keys.claim_tag;
        keys.shared = Shared {
            last: keys.named(tag, "last", Kind::Lease.as_str()).into(),
            channel: keys.channel(tag).into(),
        };
        Ok(keys)
    }

    /// The same, for the owners of a handle.
    pub(crate) fn of_instance(self, instance: u32) -> Self {
        Self { instance, ..self }
    }

    /// An owner as the scripts know it: 32 hex digits, of which the first 8 are the handle's
    /// instance. The other 96 bits are random.
    pub(crate) fn owner(&self, owner: Owner) -> String {
        hex(Owner((owner.0 & (u128::MAX >> 32)) | (u128::from(self.instance) << 96)))
    }

    /// The key under which a handle's holder is found. They share a slot.
    pub(crate) fn holder(&self, instance: u32) -> Value {
        self.named(&self.claim_tag, "holder", &format!("{instance:08x}")).into()
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
        let parts = [self.prefix.as_bytes(), kind.as_str().as_bytes(), b":"];
        hash(parts.into_iter().chain([key.as_str().as_bytes()]))
    }

    pub(crate) fn place(&self, kind: Kind, key: &Key) -> Place {
        let wake = self.wake(kind, key);
        let tag = match (&self.tag, kind) {
            (Some(tag), _) => tag.clone(),
            (None, Kind::Claim) => self.claim_tag.clone(),
            (None, _) => (wake % SPREAD).to_string(),
        };
        let name = self.named(&tag, kind.as_str(), key.as_str());
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
        self.named(tag, "last", kind.as_str()).into()
    }

    /// The key of the last token of the leases and named locks: of a slot, or of all.
    pub(crate) fn last_lease(&self, tag: &str) -> Value {
        if self.clustered { self.last(Kind::Lease, tag) } else { self.shared.last.clone() }
    }

    /// The key that marks a request as given up.
    pub(crate) fn mark(&self, tag: &str, owner: Owner) -> Value {
        let tag = if self.clustered { tag } else { &self.claim_tag };
        self.named(tag, "gone", &self.owner(owner)).into()
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

    /// A key for questions about permissions.
    pub(crate) fn example(&self) -> String {
        self.named(&self.claim_tag, Kind::Lock.as_str(), "doctor")
    }

    /// The pattern of the channels on which the events of our keys are published.
    pub(crate) fn events(&self, database: u8) -> String {
        format!("__keyspace@{database}__:{}*", glob_escaped(&self.prefix))
    }

    /// The news' name of a key of the server, if it is one of ours.
    pub(crate) fn wake_of(&self, name: &str) -> Option<u64> {
        let (kind, key) = self.parsed(name)?;
        (kind != Kind::Dedupe).then(|| self.wake(kind, &key))
    }

    /// The kind and name of a key of the server, if it is one of ours.
    pub(crate) fn parsed(&self, name: &str) -> Option<(Kind, Key)> {
        let rest = name.strip_prefix(&self.prefix)?.strip_prefix('{')?;
        let (_, rest) = rest.split_once("}:")?;
        let (kind, key) = rest.split_once(':')?;
        let kind = Kind::ALL.into_iter().find(|known| known.as_str() == kind)?;
        Some((kind, Key::new(key).ok()?))
    }

    /// A pattern of the server for the keys of a kind (all kinds without one) whose names begin
    /// with `start`. Others may match too.
    pub(crate) fn pattern(&self, kind: Option<Kind>, start: &str) -> String {
        let tag = match (&self.tag, kind) {
            (Some(tag), _) => glob_escaped(tag),
            (None, Some(Kind::Claim)) => glob_escaped(&self.claim_tag),
            (None, _) => "*".to_owned(),
        };
        let kind = kind.map_or("*", Kind::as_str);
        format!("{}{{{tag}}}:{kind}:{}*", glob_escaped(&self.prefix), glob_escaped(start))
    }
}

/// Takes the meaning from what would be a wildcard.
pub(crate) fn glob_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
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

fn hex(owner: Owner) -> String {
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
        let keys = Keyspace::new("a{b}:c", None, true).unwrap().of_instance(7);
        for name in ["a", "{a}", "a{b}c", "{}", "}{", "{a", "{}{x}", "}:{", "%7b"] {
            let place = keys.place(Kind::Lease, &Key::new(name).unwrap());
            let wanted = slot(&place.name);
            assert_eq!(wanted, slot(&format!("{{{}}}", place.tag)), "{name}");
            let owner = Owner::fresh();
            let mark = keys.mark(&place.tag, owner).into_string().unwrap();
            let last = keys.last_lease(&place.tag).into_string().unwrap();
            let made = last.replace("last:lease", &format!("gone:{}", keys.owner(owner)));
            assert_eq!(mark, made, "the scripts put it together like this");
            let others = keys.last(Kind::Dedupe, &place.tag).into_string().unwrap();
            for helper in [mark, last, others] {
                assert_eq!(slot(&helper), wanted, "{helper}");
            }
            assert_eq!(slot(&keys.channel(&place.tag)), wanted);
            assert_eq!(keys.wake_of(&place.name), Some(place.wake));
            let parsed = keys.parsed(&place.name).unwrap();
            assert_eq!(parsed, (Kind::Lease, Key::new(name).unwrap()));
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

    /// The instance is told by the first digits, and the rest differs for each acquisition.
    #[test]
    fn an_owner_tells_its_instance() {
        let keys = Keyspace::new("orders", None, false).unwrap().of_instance(0x9f31_c0aa);
        assert_eq!(keys.owner(Owner(u128::MAX)), format!("9f31c0aa{}", "f".repeat(24)));
        assert_eq!(keys.owner(Owner(5)), format!("9f31c0aa{:024x}", 5));
        let holder = keys.holder(0xaa).into_string().unwrap();
        assert_eq!(holder, "leasehold:orders:{orders}:holder:000000aa");
    }

    #[test]
    fn patterns_take_no_name_for_a_wildcard() {
        let keys = Keyspace::new("a*b", None, true).unwrap();
        let pattern = keys.pattern(Some(Kind::Lease), "job[1]?");
        assert_eq!(pattern, r"leasehold:a\*b:{*}:lease:job\[1\]\?*");
        let pattern = keys.pattern(Some(Kind::Claim), "");
        assert_eq!(pattern, r"leasehold:a\*b:{a\*b}:claim:*");
        let tagged = Keyspace::new("a", Some("t\\".into()), true).unwrap();
        assert_eq!(tagged.pattern(None, "x"), r"leasehold:a:{t\\}:*:x*");
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

#[cfg(test)]
mod any_key {
    use leasehold_conformance::any_key::{keys, texts};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn different_keys_lie_at_different_places((one, two) in texts(), namespace in "\\PC{1,20}", clustered: bool) {
            let Some((a, b)) = keys(&one, &two)? else { return Ok(()) };
            let keyspace = |namespace: &str| Keyspace::new(namespace, None, clustered).ok();
            let (Some(map), Some(other)) = (keyspace(&namespace), keyspace(&format!("{namespace}x"))) else {
                return Ok(()); // too long
            };
            for kind in [Kind::Lock, Kind::Claim, Kind::Lease, Kind::Dedupe] {
                let (first, second) = (map.place(kind, &a), map.place(kind, &b));
                prop_assert_eq!(first.name == second.name, one == two);
                prop_assert_ne!(&first.name, &other.place(kind, &a).name);
                // the first braces are ours, whatever a key has in it
                let open = first.name.find('{').map(|at| &first.name[at + 1..]);
                let tag = open.and_then(|rest| rest.split('}').next());
                prop_assert_eq!(tag, Some(first.tag.as_str()));
            }
            prop_assert_ne!(map.place(Kind::Lock, &a).name, map.place(Kind::Lease, &a).name);
        }
    }
}
