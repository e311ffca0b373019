//! Each key is admitted once, except for a takeover of one that was not completed.

use std::collections::BTreeMap;

use super::{Op, Violation, World};
use crate::event::{Kind, Micros, Part};

pub(super) fn check(world: &World, violations: &mut Vec<Violation>) {
    let mut keys: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, op) in world.ops.iter().enumerate() {
        if op.kind == Kind::Dedupe && op.got().is_some() {
            keys.entry(op.keys[0].as_str()).or_default().push(index);
        }
    }
    for (key, mut admitted) in keys {
        admitted.sort_by_key(|index| world.ops[*index].got());
        for (place, later) in admitted.iter().enumerate() {
            for earlier in &admitted[..place] {
                let (a, b) = (&world.ops[*earlier], &world.ops[*later]);
                if let Some(what) = wrong(key, world, a, b) {
                    violations.push(Violation {
                        rule: "dedupe",
                        what,
                        subject: Some((Kind::Dedupe, key.to_owned())),
                        at: b.got().unwrap_or_default(),
                        ops: vec![*earlier, *later],
                    });
                }
            }
        }
    }
}

/// What is wrong with admitting `b` after `a`.
fn wrong(key: &str, world: &World, a: &Op, b: &Op) -> Option<String> {
    let got = b.got()?;
    let Some(in_progress) = a.ttl else {
        return Some(format!("{key} was admitted twice, and was done at once"));
    };
    if let (Some((done, _)), true) = (&a.parted, completed(a)) {
        if *done < b.call {
            return Some(format!("{key} was admitted again after it was done"));
        }
        if completed(b) {
            return Some(format!("{key} was completed twice"));
        }
    }
    // it was taken over by the time at which its process learned of it, or was told
    b.held?;
    let freed = freed(world, a).unwrap_or(Micros::MAX);
    if got < freed.min(a.call + in_progress) {
        return Some(format!("{key} was admitted again while it was in progress"));
    }
    let taken_over = freed > got;
    if taken_over && a.got()? < b.call && a.token >= b.token {
        let (first, second) = (a.token?, b.token?);
        return Some(format!("{key} was taken over with token {second} after {first}"));
    }
    None
}

fn completed(op: &Op) -> bool {
    op.part.is_some_and(|(_, part)| part == Part::Complete) && op.parted_well()
}

/// From when on its holder may have freed it.
fn freed(world: &World, op: &Op) -> Option<Micros> {
    let vanished = world.vanished.get(&(op.client, op.life)).copied();
    op.part.filter(|(_, part)| *part != Part::Complete).map(|(at, _)| at).or(vanished)
}
