//! Guarded writes land in the order of tokens, one at a time and none is lost; slots and first
//! sights are given once.

use std::collections::{BTreeMap, HashMap};

use super::{Op, Violation, World};
use crate::client::SLOTS;
use crate::event::{Kind, Micros, Outcome, Part};

/// A write to a sequence that landed, or perhaps did.
struct Entry {
    op: usize,
    begin: Micros,
    end: Micros,
    /// Known if it landed for certain.
    seq: i64,
    before: i64,
    token: i64,
}

#[derive(Default)]
struct Sequence {
    landed: Vec<Entry>,
    /// Those that perhaps did.
    unknown: u64,
}

pub(super) fn check(
    world: &World,
    last: Option<&BTreeMap<String, i64>>,
    violations: &mut Vec<Violation>,
) {
    let mut sequences: BTreeMap<String, Sequence> = BTreeMap::new();
    for (index, op) in world.ops.iter().enumerate() {
        collect(index, op, &mut sequences);
    }
    for (name, sequence) in &mut sequences {
        sequence.landed.sort_by_key(|entry| entry.seq);
        order(name, &sequence.landed, violations);
        if let Some(last) = last.and_then(|last| last.get(name)) {
            count(name, sequence, *last, violations);
        }
    }
    slots(world, violations);
}

fn collect(index: usize, op: &Op, sequences: &mut BTreeMap<String, Sequence>) {
    let token = op.token.unwrap_or_default().cast_signed();
    for write in &op.writes {
        let sequence = sequences.entry(format!("{}:{}", op.kind, op.keys[0])).or_default();
        match (&write.end, write.seq) {
            (Some((end, Outcome::Done)), Some(seq)) => sequence.landed.push(Entry {
                op: index,
                begin: write.call,
                end: *end,
                seq,
                before: write.before,
                token,
            }),
            (Some((_, Outcome::Unknown)) | None, _) => sequence.unknown += 1,
            _ => {}
        }
    }
    for (name, seq, before) in &op.notes {
        let Some((begin, Part::Commit)) = op.part else { continue };
        let sequence = sequences.entry(name.clone()).or_default();
        match &op.parted {
            Some((end, Outcome::Done)) => sequence.landed.push(Entry {
                op: index,
                begin,
                end: *end,
                seq: *seq,
                before: *before,
                token,
            }),
            Some((_, Outcome::Unknown)) | None => sequence.unknown += 1,
            _ => {}
        }
    }
}

fn subject(name: &str) -> Option<(Kind, String)> {
    let (kind, key) = name.split_once(':')?;
    let kinds = [Kind::Lock, Kind::Lease, Kind::Claim];
    let kind = kinds.into_iter().find(|known| known.to_string() == kind)?;
    Some((kind, key.to_owned()))
}

fn order(name: &str, landed: &[Entry], violations: &mut Vec<Violation>) {
    let mut broken = |what: String, entries: &[&Entry]| {
        violations.push(Violation {
            rule: "guarded writes",
            what,
            subject: subject(name),
            at: entries.iter().map(|entry| entry.end).max().unwrap_or_default(),
            ops: entries.iter().map(|entry| entry.op).collect(),
        });
    };
    for entry in landed {
        if entry.before > entry.token {
            let (token, before) = (entry.token, entry.before);
            broken(format!("a write to {name} with token {token} landed over {before}"), &[entry]);
        }
    }
    for pair in landed.windows(2) {
        let [a, b] = pair else { continue };
        if a.seq == b.seq {
            let what = format!("two writes to {name} landed at place {}", a.seq);
            broken(what, &[a, b]);
        } else if a.token > b.token {
            let (first, second) = (a.token, b.token);
            let what = format!("writes to {name} landed with token {first} before {second}");
            broken(what, &[a, b]);
        } else if a.seq + 1 == b.seq && a.token != b.before {
            let (wrote, saw) = (a.token, b.before);
            let what = format!("a write to {name} saw token {saw}, the one before wrote {wrote}");
            broken(what, &[a, b]);
        } else if b.end < a.begin {
            let what =
                format!("a write to {name} landed before one that had ended before it began");
            broken(what, &[b, a]);
        }
    }
}

fn count(name: &str, sequence: &Sequence, last: i64, violations: &mut Vec<Violation>) {
    let known = sequence.landed.len().cast_signed() as i64;
    let most = known + sequence.unknown.cast_signed();
    if (known..=most).contains(&last) {
        return;
    }
    let what = format!(
        "the last place of {name} is {last}, but {known} writes landed and at most {most} could"
    );
    let newest = sequence.landed.last();
    violations.push(Violation {
        rule: "guarded writes",
        what,
        subject: subject(name),
        at: newest.map_or(0, |entry| entry.end),
        ops: newest.map(|entry| entry.op).into_iter().collect(),
    });
}

fn slots(world: &World, violations: &mut Vec<Violation>) {
    let mut taken: HashMap<&str, Vec<(i64, usize)>> = HashMap::new();
    let mut first: HashMap<&str, usize> = HashMap::new();
    for (index, op) in world.ops.iter().enumerate() {
        let committed = op.part.is_some_and(|(_, part)| part == Part::Commit) && op.parted_well();
        if !committed {
            continue;
        }
        let at = op.parted.as_ref().map_or(op.call, |(at, _)| *at);
        let subject = Some((Kind::Claim, op.keys[0].clone()));
        if let Some((name, used)) = &op.slot {
            let taken = taken.entry(name).or_default();
            let same = taken.iter().find(|(other, _)| other == used);
            let what = match same {
                Some(_) => format!("two took place {used} of {name}"),
                None if taken.len() >= SLOTS.cast_unsigned() as usize => {
                    format!("more than {SLOTS} were taken of {name}")
                }
                None => String::new(),
            };
            if !what.is_empty() {
                let mut ops: Vec<usize> = taken.iter().map(|(_, op)| *op).collect();
                ops.push(index);
                violations.push(Violation {
                    rule: "count and claim",
                    what,
                    subject: subject.clone(),
                    at,
                    ops,
                });
            }
            taken.push((*used, index));
        }
        if let Some((key, true)) = &op.seen
            && let Some(other) = first.insert(key, index)
        {
            let what = format!("{key} was first seen twice");
            violations.push(Violation {
                rule: "first seen",
                what,
                subject,
                at,
                ops: vec![other, index],
            });
        }
    }
}
