//! One holder at a time: a hold lasts from when its acquisition returned until it was last
//! believed in.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Notable, Violation, World};
use crate::event::{Kind, Micros};
use crate::store::{LOCK_TTL, StoreKind};

pub(super) fn check(
    store: StoreKind,
    world: &World,
    violations: &mut Vec<Violation>,
    notable: &mut Notable,
) {
    let mut holds: BTreeMap<(Kind, &str), Vec<(Micros, usize)>> = BTreeMap::new();
    for (index, op) in world.ops.iter().enumerate() {
        // one that was lost by the time at which it was got was never believed in: its process did
        // not run meanwhile
        let believed = op.held.is_some();
        if let (Kind::Lock | Kind::Lease, Some(got), true) = (op.kind, op.got(), believed) {
            holds.entry((op.kind, op.keys[0].as_str())).or_default().push((got, index));
        }
    }
    for ((kind, key), mut holds) in holds {
        holds.sort_unstable();
        let mut open: Vec<usize> = Vec::new();
        for (got, later) in holds {
            open.retain(|earlier| world.ops[*earlier].held.is_some_and(|held| held > got));
            for earlier in &open {
                let held = world.ops[*earlier].held.unwrap_or(got);
                let overlap = Duration::from_micros(held - got);
                let bound = bound(store, world, kind, *earlier, got);
                if overlap <= bound || was_before(store, world, kind, later, *earlier) {
                    let (count, longest) = notable.overlaps.entry(kind).or_default();
                    *count += 1;
                    *longest = overlap.max(*longest);
                    continue;
                }
                violations.push(Violation {
                    rule: "two holders",
                    what: format!(
                        "two held the {kind} {key} at once for {overlap:?}, the bound is {bound:?}"
                    ),
                    subject: Some((kind, key.to_owned())),
                    at: held,
                    ops: vec![*earlier, later],
                });
            }
            open.push(later);
        }
    }
}

/// Whether the one that was learned of later may have been on the store before the other, and was
/// lost within its bound.
fn was_before(store: StoreKind, world: &World, kind: Kind, later: usize, earlier: usize) -> bool {
    let (a, b) = (&world.ops[later], &world.ops[earlier]);
    let (Some(held), Some(got)) = (a.held, b.got()) else { return false };
    let in_order = matches!((a.token, b.token), (Some(a), Some(b)) if a > b);
    // it must have been asked for by then
    !in_order
        && a.call < got
        && Duration::from_micros(held.saturating_sub(got)) <= bound(store, world, kind, later, got)
}

/// How long a hold may be believed in after another has it: not at all, unless it was lost in a way
/// that its holder is told of later, as is stated.
fn bound(store: StoreKind, world: &World, kind: Kind, earlier: usize, got: Micros) -> Duration {
    let op = &world.ops[earlier];
    let forced = world.was_forced(kind, &op.keys[0], op.call, got);
    match kind {
        // the store itself said that it was held until then
        Kind::Lock if op.parted_well() => Duration::ZERO,
        Kind::Lock if forced => store.loss_bound().max(LOCK_TTL),
        Kind::Lock => store.loss_bound(),
        // told by the next renewal, by the deadline at the latest
        Kind::Lease if forced => Duration::from_micros(op.ttl.unwrap_or_default()),
        _ => Duration::ZERO,
    }
}
