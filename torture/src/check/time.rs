//! No operation outlives its wait by more than a bound, and every one ends.

use std::time::Duration;

use super::{Notable, Op, Violation, World};
use crate::event::{Micros, Part};

/// The store's limit for an answer, and time for a busy machine.
const BEYOND: Duration = Duration::from_secs(10);
/// As [`BEYOND`], of what commits.
const COMMIT: Duration = leasehold::COMMIT_LIMIT.saturating_add(Duration::from_secs(5));
/// A guarded write: its claim's wait and answer, five statements and the commit.
const WRITE: Duration = Duration::from_secs(13 + 25 + 35);

pub(super) fn check(world: &World, violations: &mut Vec<Violation>, notable: &mut Notable) {
    for (index, op) in world.ops.iter().enumerate() {
        let mut late = |what: &str, from: Micros, to: Option<Micros>, bound: Duration| {
            let bye = world.byes.get(&(op.client, op.life));
            let Some(to) = to else {
                if let Some(bye) = bye {
                    violations.push(late(op, index, format!("{what} never ended"), *bye));
                }
                return Duration::ZERO;
            };
            let stalled = world.stalled(op.client, op.life, from, to);
            let took = Duration::from_micros((to - from).saturating_sub(stalled));
            if took > bound {
                let what = format!("{what} took {took:?}, the bound is {bound:?}");
                violations.push(late(op, index, what, to));
            }
            took
        };
        let wait = Duration::from_micros(op.wait);
        let what = format!("the call of {} {}", op.kind, op.keys.join(", "));
        let took = late(&what, op.call, op.ret.map(|(at, _)| at), wait + BEYOND);
        let beyond = notable.overruns.entry(op.kind).or_default();
        *beyond = took.saturating_sub(wait).max(*beyond);
        if let Some((at, part)) = op.part
            && part != Part::Drop
        {
            let bound = match part {
                Part::Commit | Part::Rollback => COMMIT,
                _ => BEYOND,
            };
            let what = format!("{part:?} of {} {}", op.kind, op.keys.join(", "));
            late(&what, at, op.parted.as_ref().map(|(at, _)| *at), bound);
        }
        for write in &op.writes {
            let what = format!("a guarded write under {} {}", op.kind, op.keys.join(", "));
            late(&what, write.call, write.end.as_ref().map(|(at, _)| *at), WRITE);
        }
    }
}

fn late(op: &Op, index: usize, what: String, at: Micros) -> Violation {
    let subject = Some((op.kind, op.keys[0].clone()));
    Violation { rule: "bounds", what, subject, at, ops: vec![index] }
}
