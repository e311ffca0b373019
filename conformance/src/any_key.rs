//! For backends' properties of names: keys that are easily taken for one another.

use leasehold_core::Key;
use proptest::prelude::*;

/// Two texts that are as alike as can be, or not at all; most are valid keys.
pub fn texts() -> impl Strategy<Value = (String, String)> {
    let text = || {
        prop_oneof![
            "\\PC{1,40}",
            "[a-zA-Z:{}%#' ]{1,80}",
            prop::collection::vec(any::<char>(), 1..300).prop_map(String::from_iter)
        ]
    };
    let alike = (text(), text()).prop_map(|(a, b)| (format!("{a}{b}"), format!("{a} {b}")));
    let cased = text().prop_map(|a| (a.to_lowercase(), a.to_uppercase()));
    prop_oneof![(text(), text()), alike, cased]
}

/// Both as keys, or none if one of them is no valid key.
///
/// # Errors
///
/// If a text was refused that is non-empty, not too long and without NUL.
pub fn keys(one: &str, two: &str) -> Result<Option<(Key, Key)>, TestCaseError> {
    let key = |text: &str| match Key::new(text) {
        Ok(key) => Ok(Some(key)),
        Err(_) if text.is_empty() || text.len() > Key::MAX_BYTES || text.contains('\0') => Ok(None),
        Err(error) => Err(TestCaseError::fail(format!("{text:?} was refused: {error}"))),
    };
    Ok(key(one)?.zip(key(two)?))
}
