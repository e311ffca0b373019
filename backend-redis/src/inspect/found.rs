//! What the values on the server say.

use std::time::Duration;

use leasehold_core::{FencingToken, HeldName, Holding, Key, Kind};

/// A value with the time that it has left.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) value: &'a str,
    /// In ms; below 0 without a ttl.
    pub(super) left: i64,
    /// The server's clock in µs since 1970.
    pub(super) now: u64,
}

/// What is held, and the instance of whose it is.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) holding: Holding,
    pub(super) instance: Option<u32>,
}

impl Seen<'_> {
    /// None for an entry that nobody has in progress any more.
    pub(super) fn read(&self, kind: Kind, key: Key) -> Option<Found> {
        let mut holding = Holding::new(kind, HeldName::Key(key));
        holding.expires_in = u64::try_from(self.left).ok().map(Duration::from_millis);
        let mut found = Found { holding, instance: None };
        let known = match kind {
            Kind::Dedupe => self.entry(&mut found)?,
            Kind::Lock | Kind::Lease | Kind::Claim => self.lock(&mut found).is_some(),
        };
        if !known {
            found.holding.session = Some("not leasehold's".to_owned());
        }
        Some(found)
    }

    /// `<owner>:<token>`, and `!` if somebody has wanted it.
    fn lock(&self, found: &mut Found) -> Option<()> {
        let (owner, token) = self.value.trim_end_matches('!').split_once(':')?;
        let token = token.parse().ok()?;
        found.instance = Some(instance(owner)?);
        found.holding.token = Some(FencingToken(token));
        found.holding.held_for = self.since(token);
        Some(())
    }

    /// `<state>:<owner>:<token>:<since µs>:<until µs>`. Whether it is one, if it is held.
    fn entry(&self, found: &mut Found) -> Option<bool> {
        let mut parts = self.value.split(':');
        let mut part = || parts.next().unwrap_or_default();
        let (state, owner, token, since, till) = (part(), part(), part(), part(), part());
        let (Some(instance), Ok(token), Ok(since), Ok(till)) =
            (instance(owner), token.parse(), since.parse(), till.parse::<u64>())
        else {
            return Some(false);
        };
        found.holding.done = state == "d";
        if !found.holding.done {
            let left = till.checked_sub(self.now).filter(|left| *left > 0)?;
            found.holding.expires_in = Some(Duration::from_micros(left));
        }
        found.instance = Some(instance);
        found.holding.token = Some(FencingToken(token));
        found.holding.held_for = self.since(since);
        Some(true)
    }

    /// A token is the server's clock in µs, unless tokens are ahead of it.
    fn since(&self, micros: u64) -> Option<Duration> {
        self.now.checked_sub(micros).map(Duration::from_micros)
    }
}

/// The first digits of an owner.
fn instance(owner: &str) -> Option<u32> {
    let is_owner = owner.len() == 32 && owner.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_owner.then(|| u32::from_str_radix(&owner[..8], 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: &str = "9f31c0aa0123456789abcdef01234567";

    fn read(kind: Kind, value: &str, left: i64, now: u64) -> Option<Found> {
        Seen { value, left, now }.read(kind, Key::new("x").unwrap())
    }

    #[test]
    fn a_lock_tells_its_token_and_since_when() {
        for end in ["", "!"] {
            let found = read(Kind::Lease, &format!("{OWNER}:5000000{end}"), 1_500, 7_000_000);
            let Found { holding, instance } = found.unwrap();
            assert_eq!(instance, Some(0x9f31_c0aa));
            assert_eq!(holding.token, Some(FencingToken(5_000_000)));
            assert_eq!(holding.held_for, Some(Duration::from_secs(2)));
            assert_eq!(holding.expires_in, Some(Duration::from_millis(1_500)));
            assert_eq!(holding.session, None);
        }
        // a token ahead of the clock tells no time
        let ahead = read(Kind::Claim, &format!("{OWNER}:9000000"), -1, 7_000_000).unwrap();
        assert_eq!((ahead.holding.held_for, ahead.holding.expires_in), (None, None));
    }

    #[test]
    fn what_somebody_else_wrote_is_shown_as_such() {
        for value in ["", "x", "a:1", "é:1", "9f31c0aa:5", "zzzzzzzz0123456789abcdef01234567:5"] {
            for kind in Kind::ALL {
                let found = read(kind, value, -1, 5).unwrap();
                assert_eq!(found.instance, None, "{value}");
                assert!(found.holding.session.is_some(), "{value}");
            }
        }
    }

    #[test]
    fn an_entry_is_in_progress_or_done_or_nobodys() {
        let at = |state: &str, till: u64| {
            read(Kind::Dedupe, &format!("{state}:{OWNER}:7:5000000:{till}"), 9_000, 7_000_000)
        };
        for state in ["p", "c"] {
            let entry = at(state, 8_000_000).unwrap().holding;
            assert!(!entry.done);
            assert_eq!(entry.expires_in, Some(Duration::from_secs(1)));
            assert_eq!(entry.held_for, Some(Duration::from_secs(2)));
            assert_eq!(entry.token, Some(FencingToken(7)));
            assert!(at(state, 7_000_000).is_none());
        }
        let entry = at("d", 0).unwrap().holding;
        assert!(entry.done);
        assert_eq!(entry.expires_in, Some(Duration::from_secs(9)));
    }
}
