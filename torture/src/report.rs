//! What a run says at its end.

use std::collections::BTreeMap;
use std::fmt;

use crate::check::{Ends, Violation, World, check_all};
use crate::event::{Do, Event, Kind, Micros, Outcome};
use crate::run::Options;

/// Events of a history around a violation.
const SHOWN: usize = 24;
/// Violations that are shown with their history.
const TOLD: usize = 3;

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was run.
    pub options: Options,
    /// How many faults of each sort were made.
    pub made: BTreeMap<&'static str, u64>,
    /// What must never be.
    pub violations: Vec<Violation>,
    /// Everything that was recorded.
    pub events: Vec<Event>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { store, seed, clients, length, .. } = &self.options;
        writeln!(f, "torture {store}: seed {seed}, {clients} clients, {length:?}")?;
        let (counts, begun) = outcomes(&self.events);
        writeln!(f, "  operations: {begun}")?;
        for ((kind, outcome), count) in counts {
            writeln!(f, "    {:<7} {outcome:<24} {count:>8}", kind.to_string())?;
        }
        writeln!(f, "  faults: {}", self.made.values().sum::<u64>())?;
        for (label, count) in &self.made {
            writeln!(f, "    {label:<38} {count:>5}")?;
        }
        let (_, notable) = check_all(*store, &self.events, &Ends::unknown());
        for (kind, (count, longest)) in &notable.overlaps {
            let bound = match kind {
                Kind::Lock => format!("{:?}", store.loss_bound()),
                _ => "by force: its ttl".to_owned(),
            };
            writeln!(
                f,
                "  overlaps of a {kind} within the bound of its loss ({bound}): {count}, \
                 the longest {longest:?}"
            )?;
        }
        for (kind, longest) in &notable.overruns {
            writeln!(f, "  longest time of a call beyond its wait, {kind}: {longest:?}")?;
        }
        writeln!(f, "  violations: {}", self.violations.len())?;
        let world = World::of(&self.events);
        for violation in self.violations.iter().take(TOLD) {
            writeln!(f, "\n  {}: {}", violation.rule, violation.what)?;
            write!(f, "{}", history(&self.events, &world, violation))?;
        }
        Ok(())
    }
}

/// How the calls of each kind ended, and how many there were.
fn outcomes(events: &[Event]) -> (BTreeMap<(Kind, String), u64>, u64) {
    let mut kinds = BTreeMap::new();
    let mut counts: BTreeMap<(Kind, String), u64> = BTreeMap::new();
    let mut begun = 0;
    for event in events {
        let id = (event.client, event.life, event.op);
        if let Do::Begin { kind, .. } = event.what {
            kinds.insert(id, kind);
            begun += 1;
        }
        let Some(kind) = kinds.get(&id) else { continue };
        let of = |outcome: &Outcome| match outcome {
            Outcome::Done => "done".to_owned(),
            Outcome::Lost => "lost".to_owned(),
            Outcome::Unknown => "unknown".to_owned(),
            Outcome::Failed(why) => {
                format!("failed: {}", why.split(':').next().unwrap_or_default())
            }
        };
        let label = match &event.what {
            Do::Got { .. } => "got".to_owned(),
            Do::Busy { done: false } => "busy".to_owned(),
            Do::Busy { done: true } => "was done".to_owned(),
            Do::Failed(why) => format!("failed: {}", why.split(':').next().unwrap_or_default()),
            Do::Cancelled => "cancelled".to_owned(),
            Do::Lost(_) => "loss told".to_owned(),
            Do::Parted(outcome) => format!("end {}", of(outcome)),
            Do::Wrote { outcome: Outcome::Lost, .. } => "stale write rejected".to_owned(),
            Do::Wrote { outcome, .. } => format!("write {}", of(outcome)),
            _ => continue,
        };
        *counts.entry((*kind, label)).or_default() += 1;
    }
    (counts, begun)
}

/// The newest events of the key of all processes, in one time line.
fn history(events: &[Event], world: &World, violation: &Violation) -> String {
    let start = events.first().map_or(0, |event| event.at);
    let involved: Vec<_> = violation
        .ops
        .iter()
        .map(|op| &world.ops[*op])
        .map(|op| (Some(op.client), op.life, op.number))
        .collect();
    let mut of_key: BTreeMap<(Option<u32>, u32, u64), (Kind, String)> = BTreeMap::new();
    for event in events {
        if let Do::Begin { kind, keys, .. } = &event.what {
            let wanted = match &violation.subject {
                Some((of, key)) => of == kind && keys.contains(key),
                None => false,
            };
            let id = (event.client, event.life, event.op);
            if wanted || involved.contains(&id) {
                of_key.insert(id, (*kind, keys.join(", ")));
            }
        }
    }
    let concerns = |event: &&Event| {
        let id = (event.client, event.life, event.op);
        of_key.contains_key(&id) || matches!(event.what, Do::Fault { .. } | Do::Hello)
    };
    let until = violation.at + 200_000;
    let before: Vec<_> = events.iter().take_while(|e| e.at <= until).filter(concerns).collect();
    let shown = &before[before.len().saturating_sub(SHOWN)..];
    let from = shown.first().map_or(0, |event| event.at);
    // those in question, too, however long ago they began
    let older = before.iter().filter(|event| {
        event.at < from && involved.contains(&(event.client, event.life, event.op))
    });
    let older: Vec<_> = older.collect();
    let mut text = String::new();
    for event in
        older.iter().rev().take(SHOWN).rev().map(|event| **event).chain(shown.iter().copied())
    {
        let id = (event.client, event.life, event.op);
        let mark = if involved.contains(&id) { '>' } else { ' ' };
        text.push_str(&line(start, mark, event, of_key.get(&id)));
    }
    text
}

fn line(start: Micros, mark: char, event: &Event, of: Option<&(Kind, String)>) -> String {
    let at = (event.at - start) as f64 / 1e6;
    let who = match event.client {
        Some(client) => format!("c{client}.{} #{}", event.life, event.op),
        None => "controller".to_owned(),
    };
    let of = of.map_or_else(String::new, |(kind, key)| format!("{kind} {key}: "));
    let ms = |time: Micros| format!("{} ms", time / 1000);
    let what = match &event.what {
        Do::Begin { wait, ttl: Some(ttl), .. } => {
            format!("call, wait {}, ttl {}", ms(*wait), ms(*ttl))
        }
        Do::Begin { wait, .. } => format!("call, wait {}", ms(*wait)),
        Do::Got { token: Some(token) } => format!("got, token {token}"),
        Do::Got { token: None } => "got".to_owned(),
        Do::Busy { done } => if *done { "was done" } else { "busy" }.to_owned(),
        Do::Failed(why) => format!("failed: {why}"),
        Do::Cancelled => "cancelled".to_owned(),
        Do::Token(token) => format!("fetched token {token}"),
        Do::Held(at) => format!("held at {:.6}", (at.saturating_sub(start)) as f64 / 1e6),
        Do::Lost(why) => format!("loss told: {why}"),
        Do::Part(part) => format!("{part:?}"),
        Do::Parted(outcome) => format!("that is {outcome}"),
        Do::Write => "guarded write".to_owned(),
        Do::Wrote { outcome, seq, before } => {
            let place = seq.map_or_else(|| "none".to_owned(), |seq| seq.to_string());
            format!("write {outcome}, place {place}, token before {before}")
        }
        Do::Note { name, seq, before } => format!("writes {name} at {seq}, token before {before}"),
        Do::Slot { name, used } => format!("takes a slot of {name}, {used} were taken"),
        Do::Seen { key, first } => format!("{key} first seen: {first}"),
        Do::Stall { from, to } => format!("did not run for {}", ms(to - from)),
        Do::Hello => "begins".to_owned(),
        Do::Bye => "ends".to_owned(),
        Do::Vanish => "vanishes".to_owned(),
        Do::Fault { what, .. } => what.clone(),
    };
    format!("  {mark} {at:>11.6} {who:<12} {of}{what}\n")
}
