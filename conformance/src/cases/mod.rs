//! The cases, a file per subject. A new one is a function and a line in its file's table; it
//! reaches every backend by itself.

mod by_token;
mod cancel;
mod claim;
mod commit;
mod dedupe;
mod expiry;
mod faults;
mod hostile;
mod inspect;
mod keys;
mod lease;
mod lifecycle;
mod named;
mod processes;
mod recipes;
mod shared;
mod takeover;

use crate::case::Case;

const PARTS: &[&[Case]] = &[
    named::CASES,
    lease::CASES,
    expiry::CASES,
    claim::CASES,
    commit::CASES,
    dedupe::CASES,
    takeover::CASES,
    keys::CASES,
    hostile::CASES,
    cancel::CASES,
    faults::CASES,
    inspect::CASES,
    by_token::CASES,
    lifecycle::CASES,
    processes::CASES,
    recipes::PARTS[0],
    recipes::PARTS[1],
    recipes::PARTS[2],
    recipes::PARTS[3],
    recipes::PARTS[4],
    recipes::PARTS[5],
    recipes::PARTS[6],
    recipes::PARTS[7],
    recipes::PARTS[8],
];

const COUNT: usize = {
    let (mut count, mut part) = (0, 0);
    while part < PARTS.len() {
        count += PARTS[part].len();
        part += 1;
    }
    count
};

static ALL: [Case; COUNT] = {
    let mut all = [PARTS[0][0]; COUNT];
    let (mut next, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut i = 0;
        while i < PARTS[part].len() {
            all[next] = PARTS[part][i];
            next += 1;
            i += 1;
        }
        part += 1;
    }
    all
};

/// All cases.
pub const CASES: &[Case] = &ALL;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_every_case_says_what_is_promised() {
        let names: BTreeSet<_> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), CASES.len());
        for case in CASES {
            assert!(case.about.len() > 20, "{}: say more", case.name);
            assert!(!case.about.ends_with('.'), "{}", case.name);
        }
    }
}
