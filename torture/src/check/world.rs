//! The record, put together by operations.

use std::collections::{BTreeMap, HashMap};

use crate::event::{Do, Event, Kind, Micros, Outcome, Part};

/// One operation from its call to its end, as far as it got.
#[derive(Clone, Debug)]
pub struct Op {
    /// Of which client.
    pub client: u32,
    /// In which of its lives.
    pub life: u32,
    /// Its number there.
    pub number: u64,
    /// Of which kind.
    pub kind: Kind,
    /// On which keys.
    pub keys: Vec<String>,
    /// With this wait.
    pub wait: Micros,
    /// A lease's ttl or a dedupe entry's time in progress.
    pub ttl: Option<Micros>,
    /// When it was called.
    pub call: Micros,
    /// When it returned, and what.
    pub ret: Option<(Micros, Return)>,
    /// Its token.
    pub token: Option<u64>,
    /// When it was last believed to be held.
    pub held: Option<Micros>,
    /// How its holder parted with it.
    pub part: Option<(Micros, Part)>,
    /// What that gave.
    pub parted: Option<(Micros, Outcome)>,
    /// Writes in transactions of their own.
    pub writes: Vec<Write>,
    /// Writes in the claim's transaction: the sequence, the place, the token before.
    pub notes: Vec<(String, i64, i64)>,
    /// A slot that was taken in the claim's transaction, and how many were before.
    pub slot: Option<(String, i64)>,
    /// What the claim's transaction saw first, or not.
    pub seen: Option<(String, bool)>,
}

/// What an acquisition returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// It is held.
    Got,
    /// Others have it.
    Busy,
    /// An error.
    Failed,
    /// Its future was dropped.
    Cancelled,
}

/// A guarded write.
#[derive(Clone, Debug)]
pub struct Write {
    /// When it began.
    pub call: Micros,
    /// When it ended, and how.
    pub end: Option<(Micros, Outcome)>,
    /// Its place.
    pub seq: Option<i64>,
    /// The token before.
    pub before: i64,
}

impl Op {
    /// When it was got, if it was.
    pub fn got(&self) -> Option<Micros> {
        match self.ret {
            Some((at, Return::Got)) => Some(at),
            _ => None,
        }
    }

    /// Whether it was parted with as its holder wanted.
    pub fn parted_well(&self) -> bool {
        matches!(self.parted, Some((_, Outcome::Done)))
    }
}

/// Everything that was recorded.
#[derive(Debug, Default)]
pub struct World {
    /// In the order of their calls.
    pub ops: Vec<Op>,
    /// When processes did not run.
    pub stalls: HashMap<(u32, u32), Vec<(Micros, Micros)>>,
    /// What was released by force, and when.
    pub forced: Vec<(Micros, Kind, String)>,
    /// Lives that ended in order.
    pub byes: HashMap<(u32, u32), Micros>,
    /// Lives whose guards were dropped with their runtime.
    pub vanished: HashMap<(u32, u32), Micros>,
}

impl World {
    /// Reads events in the order of time.
    pub fn of(events: &[Event]) -> Self {
        let mut world = Self::default();
        let mut index: BTreeMap<(u32, u32, u64), usize> = BTreeMap::new();
        for event in events {
            let Some(client) = event.client else {
                if let Do::Fault { forced: Some((kind, key)), .. } = &event.what {
                    world.forced.push((event.at, *kind, key.clone()));
                }
                continue;
            };
            let id = (client, event.life, event.op);
            match &event.what {
                Do::Begin { kind, keys, wait, ttl } => {
                    index.insert(id, world.ops.len());
                    world.ops.push(Op {
                        client,
                        life: event.life,
                        number: event.op,
                        kind: *kind,
                        keys: keys.clone(),
                        wait: *wait,
                        ttl: *ttl,
                        call: event.at,
                        ret: None,
                        token: None,
                        held: None,
                        part: None,
                        parted: None,
                        writes: Vec::new(),
                        notes: Vec::new(),
                        slot: None,
                        seen: None,
                    });
                }
                Do::Stall { from, to } => {
                    world.stalls.entry((client, event.life)).or_default().push((*from, *to));
                }
                Do::Bye => drop(world.byes.insert((client, event.life), event.at)),
                Do::Vanish => drop(world.vanished.insert((client, event.life), event.at)),
                what => {
                    if let Some(op) = index.get(&id) {
                        world.ops[*op].apply(event.at, what);
                    }
                }
            }
        }
        world
    }

    /// Whether this was released by force between the times.
    pub fn was_forced(&self, kind: Kind, key: &str, from: Micros, to: Micros) -> bool {
        // where locks belong to a session, all of it is lost with one of them
        let same = |forced: Kind, name: &str| match kind {
            Kind::Lock => forced == Kind::Lock,
            _ => forced == kind && name == key,
        };
        self.forced.iter().any(|(at, forced, name)| (from..=to).contains(at) && same(*forced, name))
    }

    /// How much of this time the process did not run.
    pub fn stalled(&self, client: u32, life: u32, from: Micros, to: Micros) -> Micros {
        let stalls = self.stalls.get(&(client, life)).map_or(&[][..], Vec::as_slice);
        let within = |(a, b): &(Micros, Micros)| (*b).min(to).saturating_sub((*a).max(from));
        stalls.iter().map(within).sum()
    }
}

impl Op {
    fn apply(&mut self, at: Micros, what: &Do) {
        match what {
            Do::Got { token } => {
                self.ret = Some((at, Return::Got));
                self.token = *token;
            }
            Do::Busy { .. } => self.ret = Some((at, Return::Busy)),
            Do::Failed(_) => self.ret = Some((at, Return::Failed)),
            Do::Cancelled => self.ret = Some((at, Return::Cancelled)),
            Do::Token(token) => self.token = Some(*token),
            Do::Held(at) => self.held = Some(*at),
            Do::Part(part) => self.part = Some((at, *part)),
            Do::Parted(outcome) => self.parted = Some((at, outcome.clone())),
            Do::Write => self.writes.push(Write { call: at, end: None, seq: None, before: 0 }),
            Do::Wrote { outcome, seq, before } => {
                if let Some(write) = self.writes.last_mut() {
                    write.end = Some((at, outcome.clone()));
                    (write.seq, write.before) = (*seq, *before);
                }
            }
            Do::Note { name, seq, before } => self.notes.push((name.clone(), *seq, *before)),
            Do::Slot { name, used } => self.slot = Some((name.clone(), *used)),
            Do::Seen { key, first } => self.seen = Some((key.clone(), *first)),
            _ => {}
        }
    }
}
