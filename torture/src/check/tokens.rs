//! Tokens rise strictly, per key and kind.

use std::collections::{BTreeMap, HashMap};

use super::{Violation, World};
use crate::event::Kind;

pub(super) fn check(world: &World, violations: &mut Vec<Violation>) {
    let mut keys: BTreeMap<(Kind, &str), Vec<usize>> = BTreeMap::new();
    for (index, op) in world.ops.iter().enumerate() {
        if op.kind != Kind::Dedupe && op.token.is_some() {
            for key in &op.keys {
                keys.entry((op.kind, key.as_str())).or_default().push(index);
            }
        }
    }
    for ((kind, key), by_call) in keys {
        let token = |index: usize| world.ops[index].token.unwrap_or_default();
        let mut broken = |what: String, a: usize, b: usize| {
            violations.push(Violation {
                rule: "tokens",
                what,
                subject: Some((kind, key.to_owned())),
                at: world.ops[b].got().unwrap_or_default(),
                ops: vec![a, b],
            });
        };
        let mut seen: HashMap<u64, usize> = HashMap::new();
        for index in &by_call {
            if let Some(other) = seen.insert(token(*index), *index) {
                let what = format!("the {kind} {key} was given token {} twice", token(*index));
                broken(what, other, *index);
            }
        }
        // only what had been got before the other was asked for is ordered
        let mut by_return = by_call.clone();
        by_return.sort_by_key(|index| world.ops[*index].got());
        let (mut returned, mut highest) = (by_return.into_iter().peekable(), None);
        for index in by_call {
            let op = &world.ops[index];
            while let Some(earlier) =
                returned.next_if(|earlier| world.ops[*earlier].got() < Some(op.call))
            {
                if highest.is_none_or(|highest| token(highest) < token(earlier)) {
                    highest = Some(earlier);
                }
            }
            if let Some(earlier) = highest.filter(|earlier| token(*earlier) > token(index)) {
                let (first, second) = (token(earlier), token(index));
                let what = format!("the {kind} {key} had token {first}, and later {second}");
                broken(what, earlier, index);
            }
        }
    }
}
