//! The checks, checked: each must see what it is for, and nothing else.

use std::time::Duration;

use super::{Ends, Violation, check};
use crate::event::{Do, Event, Kind, Micros, Outcome, Part};
use crate::store::StoreKind;

const MS: Micros = 1000;

/// A record of one operation per client, times in milliseconds.
#[derive(Default)]
struct Record(Vec<Event>);

impl Record {
    fn add(&mut self, client: u32, at: u64, what: Do) -> &mut Self {
        self.0.push(Event { at: at * MS, client: Some(client), life: 1, op: 1, what });
        self
    }

    fn begin(
        &mut self,
        client: u32,
        at: u64,
        kind: Kind,
        key: &str,
        ttl: Option<u64>,
    ) -> &mut Self {
        let (keys, ttl) = (vec![key.to_owned()], ttl.map(|ttl| ttl * MS));
        self.add(client, at, Do::Begin { kind, keys, wait: 0, ttl })
    }

    /// An operation that holds from one time until another.
    fn hold(&mut self, client: u32, kind: Kind, from: u64, to: u64, token: u64) -> &mut Self {
        self.begin(client, from, kind, "a", Some(1000));
        self.add(client, from + 1, Do::Got { token: Some(token) });
        self.add(client, to, Do::Held(to * MS))
    }

    fn part(&mut self, client: u32, at: u64, part: Part, outcome: Outcome) -> &mut Self {
        self.add(client, at, Do::Part(part)).add(client, at + 1, Do::Parted(outcome))
    }

    fn found(&self) -> Vec<&'static str> {
        self.found_with(&Ends::unknown()).iter().map(|violation| violation.rule).collect()
    }

    fn found_with(&self, ends: &Ends) -> Vec<Violation> {
        let mut events = self.0.clone();
        events.sort_by_key(|event| event.at);
        check(StoreKind::Postgres, &events, ends)
    }
}

#[test]
fn one_after_another_is_fine() {
    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 50, 1).part(0, 51, Part::Release, Outcome::Done);
    record.hold(1, Kind::Lease, 60, 90, 2);
    record.hold(2, Kind::Lock, 0, 90, 1);
    assert!(record.found().is_empty());
}

#[test]
fn two_holders_are_found_beyond_the_bound_of_a_loss() {
    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 50, 1).hold(1, Kind::Lease, 40, 45, 2);
    assert_eq!(record.found(), ["two holders"]);

    let bound = StoreKind::Postgres.loss_bound().as_millis() as u64;
    let mut record = Record::default();
    record.hold(0, Kind::Lock, 0, 50 + bound, 1).hold(1, Kind::Lock, 51, 60, 2);
    record.part(0, 60 + bound, Part::Release, Outcome::Lost);
    assert!(record.found().is_empty(), "it was told in time");

    let mut record = Record::default();
    record.hold(0, Kind::Lock, 0, 70 + bound, 1).hold(1, Kind::Lock, 51, 60, 2);
    assert_eq!(record.found(), ["two holders"]);

    let mut record = Record::default();
    record.hold(0, Kind::Lock, 0, 50, 1).hold(1, Kind::Lock, 40, 45, 2);
    record.part(0, 60, Part::Release, Outcome::Done);
    assert_eq!(record.found(), ["two holders"], "the store says that it was held all the time");
}

#[test]
fn one_that_is_lost_may_be_learned_of_after_its_successor() {
    let record = |token: Option<u64>, outcome: Outcome| {
        let mut record = Record::default();
        record.hold(0, Kind::Lock, 20, 60, 2).part(0, 61, Part::Release, Outcome::Done);
        record.begin(1, 0, Kind::Lock, "a", None).add(1, 22, Do::Got { token });
        record.add(1, 40, Do::Held(40 * MS)).part(1, 41, Part::Release, outcome);
        record.found()
    };
    assert!(record(None, Outcome::Lost).is_empty());
    assert!(record(Some(1), Outcome::Lost).is_empty());
    assert_eq!(record(Some(3), Outcome::Lost), ["two holders"], "it was after it");
    assert_eq!(record(None, Outcome::Done), ["two holders"], "it was not lost");
}

#[test]
fn what_was_lost_when_it_was_got_is_held_by_nobody() {
    let mut record = Record::default();
    record.hold(0, Kind::Lock, 20, 50, 2).part(0, 51, Part::Release, Outcome::Done);
    record.begin(1, 0, Kind::Lock, "a", None).add(1, 40, Do::Got { token: None });
    record.add(1, 41, Do::Lost("meanwhile".to_owned()));
    assert!(record.found().is_empty());

    let mut record = Record::default();
    record.begin(0, 0, Kind::Dedupe, "d", Some(1000));
    admitted(&mut record, 1, 1001, 2);
    record.add(0, 1500, Do::Got { token: Some(1) });
    record.add(0, 1501, Do::Lost("meanwhile".to_owned()));
    assert!(record.found().is_empty());
}

#[test]
fn a_release_by_force_is_told_within_the_ttl() {
    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 50, 1).hold(1, Kind::Lease, 40, 45, 2);
    let forced = Some((Kind::Lease, "a".to_owned()));
    let what = Do::Fault { what: String::new(), forced };
    record.0.push(Event { at: 30 * MS, client: None, life: 0, op: 0, what });
    assert!(record.found().is_empty());
}

#[test]
fn tokens_that_repeat_or_fall_are_found() {
    for token in [1, 2] {
        let mut record = Record::default();
        record.hold(0, Kind::Claim, 0, 10, 2).hold(1, Kind::Claim, 20, 30, token);
        assert_eq!(record.found(), ["tokens"]);
    }
    let mut record = Record::default();
    // asked for at the same time: nothing says which was first
    record.hold(0, Kind::Claim, 0, 10, 2).hold(1, Kind::Claim, 1, 3, 1);
    assert!(record.found().is_empty());
}

fn write(record: &mut Record, client: u32, at: u64, seq: i64, before: i64) {
    let outcome = Outcome::Done;
    record.add(client, at, Do::Write);
    record.add(client, at + 1, Do::Wrote { outcome, seq: Some(seq), before });
}

#[test]
fn guarded_writes_out_of_order_are_found() {
    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 10, 1).hold(1, Kind::Lease, 20, 30, 2);
    write(&mut record, 1, 25, 1, 0);
    write(&mut record, 0, 40, 2, 2);
    // over a greater token, and in the wrong order
    assert_eq!(record.found(), ["guarded writes"; 2]);

    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 10, 1).hold(1, Kind::Lease, 20, 30, 2);
    write(&mut record, 0, 5, 1, 0);
    write(&mut record, 1, 25, 1, 0);
    assert_eq!(record.found(), ["guarded writes"], "one was lost");
}

#[test]
fn a_lost_or_phantom_write_is_found_at_the_end() {
    let mut record = Record::default();
    record.hold(0, Kind::Lease, 0, 10, 1);
    write(&mut record, 0, 5, 1, 0);
    for (last, violations) in [(0, 1), (1, 0), (2, 1)] {
        let last = Some([("lease:a".to_owned(), last)].into());
        let found = record.found_with(&Ends { last, wrong: Vec::new() });
        assert_eq!(found.len(), violations, "{found:?}");
    }
    // one of which nobody knows
    record.add(0, 20, Do::Write);
    for (last, violations) in [(0, 1), (1, 0), (2, 0), (3, 1)] {
        let last = Some([("lease:a".to_owned(), last)].into());
        let found = record.found_with(&Ends { last, wrong: Vec::new() });
        assert_eq!(found.len(), violations, "{found:?}");
    }
}

#[test]
fn too_many_slots_and_two_first_sights_are_found() {
    let mut record = Record::default();
    for client in 0..5 {
        let at = u64::from(client) * 100;
        record.hold(client, Kind::Claim, at, at + 10, at + 1);
        let name = "slots:1".to_owned();
        record.add(client, at + 11, Do::Slot { name, used: i64::from(client) });
        record.add(client, at + 12, Do::Seen { key: "k".into(), first: client % 4 == 0 });
        record.part(client, at + 20, Part::Commit, Outcome::Done);
    }
    assert_eq!(record.found(), ["count and claim", "count and claim", "first seen"]);
}

fn admitted(record: &mut Record, client: u32, at: u64, token: u64) {
    record.begin(client, at, Kind::Dedupe, "d", Some(1000));
    record.add(client, at + 1, Do::Got { token: Some(token) });
    record.add(client, at + 2, Do::Held((at + 2) * MS));
}

#[test]
fn dedupe_admits_once_except_for_a_takeover() {
    let mut record = Record::default();
    admitted(&mut record, 0, 0, 1);
    admitted(&mut record, 1, 500, 2);
    assert_eq!(record.found(), ["dedupe"], "it was in progress");

    let mut record = Record::default();
    admitted(&mut record, 0, 0, 1);
    admitted(&mut record, 1, 1001, 2);
    record.part(0, 1100, Part::Complete, Outcome::Lost);
    record.part(1, 1200, Part::Complete, Outcome::Done);
    assert!(record.found().is_empty(), "a takeover");
    admitted(&mut record, 2, 3000, 3);
    assert_eq!(record.found(), ["dedupe"], "it was done");

    let mut record = Record::default();
    admitted(&mut record, 0, 0, 1);
    record.part(0, 10, Part::Abandon, Outcome::Done);
    admitted(&mut record, 1, 20, 2);
    assert!(record.found().is_empty(), "it was abandoned");

    let mut record = Record::default();
    admitted(&mut record, 0, 0, 2);
    admitted(&mut record, 1, 1001, 1);
    assert_eq!(record.found(), ["dedupe"], "the token of the takeover fell");
}

#[test]
fn a_call_without_end_and_one_that_is_late_are_found() {
    let mut record = Record::default();
    record.begin(0, 0, Kind::Lock, "a", None).add(0, 50_000, Do::Bye);
    assert_eq!(record.found(), ["bounds"]);

    let mut record = Record::default();
    record.begin(0, 0, Kind::Lock, "a", None).add(0, 50_000, Do::Busy { done: false });
    assert_eq!(record.found(), ["bounds"]);
    // the process was stopped
    record.add(0, 49_000, Do::Stall { from: MS, to: 48_000 * MS });
    assert!(record.found().is_empty());

    let ends = Ends { last: None, wrong: vec!["left".to_owned()] };
    let found = record.found_with(&ends);
    assert_eq!((found.len(), found[0].rule), (1, "the end"));
    assert!(StoreKind::Redis.loss_bound() < Duration::from_millis(1));
}
