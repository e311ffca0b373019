//! Bars: what each contender's median is, with the middle half of its rounds.

use std::fmt::Write;

use super::document::escaped;
use crate::record::{Better, Record, Role};
use crate::report::number;
use crate::stats::Spread;

const ROW: f64 = 26.0;
const LABEL: f64 = 250.0;
const BAR: f64 = 400.0;
const VALUE: f64 = 110.0;
const TOP: f64 = 24.0;
/// Shorter bars than this share of the longest can't be told apart: then by powers of ten.
const NARROW: f64 = 1.0 / 40.0;

/// A picture of a record; none if nobody has numbers.
pub(super) fn bars(record: &Record) -> Option<String> {
    let bars: Vec<(&str, Role, Spread)> = record
        .series
        .iter()
        .filter_map(|series| {
            Some((series.contender.as_str(), series.role, Spread::of(&series.rounds)?))
        })
        .collect();
    let highest = bars.iter().map(|bar| bar.2.high).fold(0.0, f64::max);
    let positive = bars.iter().map(|bar| bar.2.median).filter(|&median| median > 0.0);
    let lowest = positive.fold(f64::INFINITY, f64::min);
    if bars.is_empty() || highest <= 0.0 || !lowest.is_finite() {
        return None;
    }
    let logarithmic = lowest < highest * NARROW;
    let begin = (lowest.log10() - 0.2).floor();
    let x = |value: f64| {
        let share = if logarithmic {
            (value.max(1e-12).log10() - begin) / (highest.log10() - begin)
        } else {
            value / highest
        };
        LABEL + BAR * share.clamp(0.0, 1.0)
    };
    let (width, height) = (LABEL + BAR + VALUE, TOP + ROW * bars.len() as f64 + 4.0);
    let better = match record.better {
        Better::Lower => "shorter is better",
        Better::Higher => "longer is better",
    };
    let scale = if logarithmic { ", by powers of ten" } else { "" };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{}\">\
         <style>.t{{font:13px system-ui,sans-serif;fill:#24292f}}.s{{fill:#6e7781}}\
         .w{{stroke:#24292f;stroke-width:1.5}}\
         @media(prefers-color-scheme:dark){{.t{{fill:#d6dce3}}.s{{fill:#9aa4af}}\
         .w{{stroke:#d6dce3}}}}</style>\
         <text class=\"t s\" x=\"{LABEL}\" y=\"14\">{} ({better}{scale})</text>",
        escaped(&record.title),
        match record.unit.symbol() {
            "" => "number",
            symbol => symbol,
        },
    );
    for (at, (name, role, spread)) in bars.into_iter().enumerate() {
        let y = TOP + ROW * at as f64;
        let (text, middle) = (y + 17.0, y + 12.5);
        let (low, end, high) = (x(spread.low), x(spread.median), x(spread.high));
        // a String takes everything
        let _ = write!(
            svg,
            "<text class=\"t\" x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABEL}\" y=\"{:.1}\" width=\"{:.1}\" height=\"17\" rx=\"2\" fill=\"{}\"/>\
             <path class=\"w\" d=\"M{low:.1} {middle:.1}H{high:.1}\"/>\
             <text class=\"t\" x=\"{:.1}\" y=\"{text:.1}\">{}</text>",
            LABEL - 8.0,
            escaped(name),
            y + 4.0,
            (end - LABEL).max(1.0),
            colour(role),
            high.max(end) + 8.0,
            number(spread.median),
        );
    }
    svg.push_str("</svg>");
    Some(svg)
}

fn colour(role: Role) -> &'static str {
    match role {
        Role::Floor => "#9aa4af",
        Role::Leasehold => "#2a9d6f",
        Role::Peer => "#d08a3e",
        Role::Other => "#7189c4",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Unit;

    fn svg(numbers: &[(&str, &[f64])]) -> Option<String> {
        let mut record = Record::new("x", "a & b", Unit::Micros, Better::Lower);
        for (name, numbers) in numbers {
            for number in *numbers {
                record.add(Role::Peer, name, *number);
            }
        }
        bars(&record)
    }

    #[test]
    fn every_contender_with_numbers_has_a_bar() {
        let svg = svg(&[("one", &[1.0, 2.0, 3.0]), ("two <2>", &[4.0])]).unwrap();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains("two &lt;2&gt;") && svg.contains("a &amp; b"), "{svg}");
        assert!(svg.contains("width=\"400.0\"") && svg.contains("width=\"200.0\""), "{svg}");
        assert!(!svg.contains("powers of ten"), "{svg}");
    }

    #[test]
    fn far_apart_numbers_are_shown_by_powers_of_ten() {
        let svg = svg(&[("one", &[1.0]), ("two", &[100_000.0])]).unwrap();
        assert!(svg.contains("powers of ten") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn nothing_is_shown_of_nothing() {
        assert_eq!(svg(&[]), None);
        assert_eq!(svg(&[("one", &[0.0])]), None);
    }
}
