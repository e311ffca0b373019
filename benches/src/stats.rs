//! The numbers that a report is made of.

use serde::{Deserialize, Serialize};

/// The middle of some numbers, and how far the middle half of them reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// A quarter of the numbers is below.
    pub low: f64,
    /// The median.
    pub median: f64,
    /// A quarter of the numbers is above.
    pub high: f64,
}

impl Spread {
    /// Of these numbers; none of no numbers.
    pub fn of(numbers: &[f64]) -> Option<Self> {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        // between two numbers by their weights, so that few rounds have a middle too
        let at = |share: f64| {
            let place = last as f64 * share;
            let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            if low >= high { low } else { low + (high - low) * place.fract() }
        };
        Some(Self { low: at(0.25), median: at(0.5), high: at(0.75) })
    }

    /// Of the ratios of the numbers of the same rounds; none if they have no round in common.
    pub fn of_ratios(above: &[f64], below: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> =
            above.iter().zip(below).map(|(above, below)| above / below).collect();
        Self::of(&ratios)
    }

    /// Whether the middle halves of both have something in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.low <= other.high && other.low <= self.high
    }

    /// Whether this is within the middle half.
    pub fn contains(&self, number: f64) -> bool {
        self.low <= number && number <= self.high
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // these are exact
mod tests {
    use super::*;

    #[test]
    fn the_quartiles_are_those_of_the_sorted_numbers() {
        let spread = Spread::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!(spread, Spread { low: 2.0, median: 3.0, high: 4.0 });
        let even = Spread::of(&[4.0, 1.0, 2.0, 3.0]).unwrap();
        assert_eq!(even, Spread { low: 1.75, median: 2.5, high: 3.25 });
        let one = Spread::of(&[7.0]).unwrap();
        assert_eq!(one, Spread { low: 7.0, median: 7.0, high: 7.0 });
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn infinite_numbers_do_not_become_nan() {
        let spread = Spread::of(&[f64::INFINITY, f64::INFINITY, 1.0]).unwrap();
        assert_eq!(spread.median, f64::INFINITY);
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        // a machine that gets slower by half keeps the ratio
        let spread = Spread::of_ratios(&[2.0, 4.0, 8.0], &[1.0, 2.0, 4.0]).unwrap();
        assert_eq!(spread, Spread { low: 2.0, median: 2.0, high: 2.0 });
        // who sits out later rounds is compared in those that it played
        assert_eq!(Spread::of_ratios(&[2.0, 4.0, 9.0], &[1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(Spread::of_ratios(&[1.0], &[]), None);
    }

    #[test]
    fn spreads_meet_or_not() {
        let of = |low, high| Spread { low, median: low, high };
        assert!(of(1.0, 2.0).overlaps(&of(2.0, 3.0)) && of(2.0, 3.0).overlaps(&of(1.0, 2.0)));
        assert!(!of(1.0, 2.0).overlaps(&of(2.1, 3.0)));
        assert!(of(1.0, 2.0).contains(1.5) && !of(1.0, 2.0).contains(2.5));
    }
}
