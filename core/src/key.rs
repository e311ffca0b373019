//! What is locked: [`Key`] and the set [`Keys`].

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// The name of what is locked, leased, claimed or admitted.
///
/// Non-empty UTF-8 of up to [`Key::MAX_BYTES`] bytes without NUL; anything else is allowed. Two
/// different keys are never the same lock on any backend: case, accents, trailing spaces and long
/// common prefixes all count.
///
/// Cloning is cheap (a reference count).
///
/// ```
/// use leasehold_core::Key;
/// let key = Key::new("invoices/2026-11")?;
/// assert_eq!(key.as_str(), "invoices/2026-11");
/// assert!(Key::new("").is_err());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// The longest key, in bytes of UTF-8.
    pub const MAX_BYTES: usize = 1024;

    /// Checks and makes a key.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidKey`] if it is empty, longer than [`Key::MAX_BYTES`] or has a NUL.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        let fault = if name.is_empty() {
            "a key must not be empty".to_owned()
        } else if name.len() > Self::MAX_BYTES {
            format!(
                "a key has at most {} bytes, this one has {}: hash its long part",
                Self::MAX_BYTES,
                name.len()
            )
        } else if name.contains('\0') {
            "a key must not contain a NUL character".to_owned()
        } else {
            return Ok(Self(name.into()));
        };
        Err(Error::new(ErrorKind::InvalidKey, fault))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl FromStr for Key {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<&str> for Key {
    type Error = Error;
    fn try_from(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for Key {
    type Error = Error;
    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

/// A set of keys that are claimed together: sorted, duplicates collapsed.
///
/// ```
/// use leasehold_core::Keys;
/// let keys = Keys::new(["b", "a", "b"])?;
/// assert_eq!(keys.iter().map(|key| key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Keys(Vec<Key>);

impl Keys {
    /// Checks, sorts and collapses the names.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidKey`] for the first name that is not a [`Key`].
    pub fn new<N: AsRef<str>>(names: impl IntoIterator<Item = N>) -> Result<Self> {
        let keys = names.into_iter().map(Key::new).collect::<Result<Vec<_>>>()?;
        Ok(keys.into_iter().collect())
    }

    /// The empty set: a claim on it is a plain transaction.
    pub fn none() -> Self {
        Self::default()
    }

    /// The keys in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Key> {
        self.0.iter()
    }

    /// How many distinct keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (i, key) in self.0.iter().enumerate() {
            write!(f, "{}{key}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("}")
    }
}

impl FromIterator<Key> for Keys {
    fn from_iter<I: IntoIterator<Item = Key>>(keys: I) -> Self {
        let mut keys: Vec<Key> = keys.into_iter().collect();
        keys.sort_unstable();
        keys.dedup();
        Self(keys)
    }
}

impl From<Key> for Keys {
    fn from(key: Key) -> Self {
        Self(vec![key])
    }
}

impl<'a> IntoIterator for &'a Keys {
    type Item = &'a Key;
    type IntoIter = std::slice::Iter<'a, Key>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_non_empty_bounded_and_free_of_nul() {
        assert!(Key::new("x".repeat(Key::MAX_BYTES)).is_ok());
        for bad in ["", "a\0b", "\0", &"x".repeat(Key::MAX_BYTES + 1)] {
            assert_eq!(Key::new(bad).unwrap_err().kind(), ErrorKind::InvalidKey);
        }
    }

    #[test]
    fn keys_are_sorted_and_collapsed() {
        let keys = Keys::new(["b", "a", "b", "A"]).unwrap();
        assert_eq!(keys.to_string(), "{A, a, b}");
        assert!(Keys::new(["a", ""]).is_err());
        assert!(Keys::none().is_empty());
    }
}
