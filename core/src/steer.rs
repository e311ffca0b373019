//! Where the tasks of the engine begin, and what it draws by lot.
//!
//! In the unit tests of this crate the model checker (`model`) decides which task goes on, and
//! draws the same lots each time; everywhere else these are what they look like.

#[cfg(not(test))]
mod free {
    /// A task as it is.
    #[inline]
    pub(crate) fn steered<F: Future>(work: F) -> F {
        work
    }

    pub(crate) fn random_u128() -> u128 {
        rand::random()
    }

    /// Between a half and the whole.
    pub(crate) fn random_part() -> f64 {
        rand::random_range(0.5..=1.0)
    }
}

#[cfg(not(test))]
pub(crate) use self::free::{random_part, random_u128, steered};

#[cfg(test)]
pub(crate) use crate::model::{random_part, random_u128, steered};
