//! The heartbeat: one task per handle that renews all its leases.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::super::backoff::jittered;
use super::super::limited;
use super::{Insist, Record, free, local_deadline};
use crate::backend::{LeaseDriver, Owner, Renewal};
use crate::error::Result;
use crate::inspect::Kind;
use crate::lost::LossReason;
use crate::observe::{RenewalEnd, TARGET};
use crate::steer::steered;

/// The side of the heartbeat that the rest of the engine holds.
///
/// Leases are put into the table and taken out of it directly: most live shorter than a third of
/// their ttl, and waking the task for each would cost more than all the rest of the engine.
#[derive(Clone, Debug)]
pub(super) struct Heart {
    beats: mpsc::UnboundedSender<Beat>,
    table: Arc<Mutex<Table>>,
}

impl Heart {
    /// Starts the task.
    pub(super) fn start<D: LeaseDriver>(driver: Arc<D>) -> Self {
        let (beats, received) = mpsc::unbounded_channel();
        let table = Arc::new(Mutex::new(Table::default()));
        tokio::spawn(steered(heartbeat(driver, received, table.clone())));
        Self { beats, table }
    }

    /// Looks after a lease; false after the close.
    pub(super) fn add(&self, entry: Entry) -> bool {
        let wakes = {
            let mut table = lock(&self.table);
            if table.closed {
                return false;
            }
            let wakes = table.asleep_until.is_none_or(|until| entry.due < until);
            if wakes {
                table.asleep_until = Some(entry.due);
            }
            table.add(entry);
            wakes
        };
        if wakes {
            drop(self.beats.send(Beat::Look)); // closed meanwhile
        }
        true
    }

    /// Puts another record in the place of an owner's, in one step with the end of the old one's
    /// hold: what is under way for the owner, such as a renewal, is the new one's from then on.
    pub(super) fn replace<T>(
        &self,
        owner: Owner,
        next: impl FnOnce(&Record) -> Option<(Arc<Record>, T)>,
    ) -> Option<T> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&owner)?;
        let (record, given) = next(&entry.record)?;
        entry.record = record;
        Some(given)
    }

    /// Stops looking after a lease.
    pub(super) fn remove(&self, owner: Owner) {
        drop(lock(&self.table).remove(owner));
    }

    /// Says more; false after the close.
    pub(super) fn tell(&self, beat: Beat) -> bool {
        self.beats.send(beat).is_ok()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.beats.is_closed()
    }

    /// Waits for the close.
    pub(super) async fn closed(&self) {
        self.beats.closed().await;
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the heartbeat is told.
#[derive(Debug)]
pub(super) enum Beat {
    /// Something is due sooner than it knew.
    Look,
    /// The lease of this wake id, or any, may have changed: ask the store now.
    Check(Option<u64>),
    /// Lose and free everything, then end.
    Close(oneshot::Sender<Result<()>>),
}

/// A lease that the heartbeat looks after.
#[derive(Debug)]
pub(super) struct Entry {
    record: Arc<Record>,
    wake_id: u64,
    /// When to look at it next: to renew it, or to see that it is over.
    due: Instant,
    /// No automatic renewal after this.
    renew_until: Option<Instant>,
    in_flight: bool,
    /// News came while it was in flight: it may have been answered before them.
    check_again: bool,
}

impl Entry {
    pub(super) fn new(
        record: Arc<Record>,
        sent: Instant,
        renew_until: Option<Instant>,
        wake_id: u64,
    ) -> Self {
        let due = sent + record.ttl / 3;
        let mut entry =
            Self { record, wake_id, due, renew_until, in_flight: false, check_again: false };
        entry.set_due(due);
        entry
    }

    /// Never later than the deadline, at which the entry is over.
    fn set_due(&mut self, due: Instant) {
        let deadline = self.deadline();
        self.due = if self.renews_at(due) { due.min(deadline) } else { deadline };
    }

    fn deadline(&self) -> Instant {
        self.record.signal.deadline().unwrap_or(self.due)
    }

    fn renews_at(&self, due: Instant) -> bool {
        self.renew_until.is_none_or(|until| due < until)
    }
}

/// The leases and the order in which they are due.
#[derive(Debug, Default)]
struct Table {
    /// When the task looks by itself, or will once it has heard of it; none: never.
    asleep_until: Option<Instant>,
    closed: bool,
    entries: HashMap<Owner, Entry>,
    due: BTreeSet<(Instant, Owner)>,
    by_wake_id: BTreeSet<(u64, Owner)>,
}

impl Table {
    fn add(&mut self, entry: Entry) {
        let owner = entry.record.owner;
        self.due.insert((entry.due, owner));
        self.by_wake_id.insert((entry.wake_id, owner));
        self.entries.insert(owner, entry);
    }

    /// The record that has the place of this one by now.
    fn current(&self, record: &Arc<Record>) -> Arc<Record> {
        self.entries.get(&record.owner).map_or(record, |entry| &entry.record).clone()
    }

    fn remove(&mut self, owner: Owner) -> Option<Entry> {
        let entry = self.entries.remove(&owner)?;
        self.due.remove(&(entry.due, owner));
        self.by_wake_id.remove(&(entry.wake_id, owner));
        Some(entry)
    }

    /// When the task should look next: when the first is due, or when one was that is gone. Without
    /// the latter, who holds leases so briefly that the task finds none would wake it for each.
    fn next_look(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let asked = self.asleep_until.filter(|until| *until > now);
        let first = self.due.first().map(|(due, _)| *due);
        self.asleep_until = first.into_iter().chain(asked).min();
        self.asleep_until
    }

    /// Reschedules an entry, whose renewal (if one was under way) has ended.
    fn reschedule(&mut self, owner: Owner, due: Instant) {
        let Some(entry) = self.entries.get_mut(&owner) else {
            return;
        };
        self.due.remove(&(entry.due, owner));
        entry.in_flight = false;
        let check_again = std::mem::take(&mut entry.check_again);
        entry.set_due(if check_again { Instant::now() } else { due });
        self.due.insert((entry.due, owner));
    }

    /// Makes entries due now: the one of a wake id, or all.
    fn check(&mut self, wake_id: Option<u64>) {
        let owners: Vec<Owner> = match wake_id {
            Some(id) => self
                .by_wake_id
                .range((id, Owner(0))..=(id, Owner(u128::MAX)))
                .map(|(_, owner)| *owner)
                .collect(),
            None => self.entries.keys().copied().collect(),
        };
        for owner in owners {
            match self.entries.get_mut(&owner) {
                Some(entry) if entry.in_flight => entry.check_again = true,
                _ => self.reschedule(owner, Instant::now()),
            }
        }
    }

    /// Takes what is due, and what is nearly due, so that leases of one ttl get into step.
    fn take_due(&mut self) -> Due {
        let now = Instant::now();
        let mut taken = Due::default();
        let horizon = now + Duration::from_secs(60);
        let nearly = self.due.range(..(horizon, Owner(0))).map(|(_, owner)| *owner);
        let (mut renew, mut over) = (Vec::new(), Vec::new());
        for owner in nearly {
            let Some(entry) = self.entries.get(&owner) else {
                continue;
            };
            let record = &entry.record;
            if entry.due <= now && !record.signal.is_held() {
                over.push(owner);
            } else if entry.renews_at(now) && !entry.in_flight && entry.due <= now + record.ttl / 12
            {
                renew.push(owner);
            } else if entry.due <= now {
                taken.later.push(owner);
            }
        }
        for owner in over {
            // one that is not lost is being released by its guard: a second release would make
            // the guard's look like that of a stranger
            let lost = |entry: &Entry| entry.record.signal.reason().is_some();
            taken.over.extend(self.remove(owner).filter(lost));
        }
        for owner in renew {
            let Some(entry) = self.entries.get_mut(&owner) else {
                continue;
            };
            taken.renew.push(entry.record.clone());
            // the deadline stays due, whatever becomes of the renewal
            self.due.remove(&(entry.due, owner));
            entry.in_flight = true;
            entry.due = entry.deadline();
            self.due.insert((entry.due, owner));
        }
        taken
    }
}

#[derive(Default)]
struct Due {
    renew: Vec<Arc<Record>>,
    /// Their deadline has passed.
    over: Vec<Entry>,
    /// Due by an old deadline that was moved meanwhile.
    later: Vec<Owner>,
}

/// A finished renewal.
struct Answer {
    records: Vec<Arc<Record>>,
    sent: Instant,
    answer: Result<Vec<Result<bool>>>,
}

/// However the heartbeat ends (also with its runtime), nothing that it looked after is forgotten.
struct Attended(Arc<Mutex<Table>>);

impl Drop for Attended {
    fn drop(&mut self) {
        let table = lock(&self.0);
        let left: Vec<_> = table.entries.values().map(|entry| entry.record.clone()).collect();
        drop(table);
        for record in left {
            record.signal.is_unattended();
        }
    }
}

/// Renews until every sender is gone or it is closed.
async fn heartbeat<D: LeaseDriver>(
    driver: Arc<D>,
    mut beats: mpsc::UnboundedReceiver<Beat>,
    shared: Arc<Mutex<Table>>,
) {
    let _attended = Attended(shared.clone());
    let mut renewals: JoinSet<Answer> = JoinSet::new();
    loop {
        let next = lock(&shared).next_look();
        tokio::select! {
            biased;
            beat = beats.recv() => match beat {
                Some(Beat::Look) => {}
                Some(Beat::Check(wake_id)) => lock(&shared).check(wake_id),
                Some(Beat::Close(reply)) => {
                    beats.close();
                    let table = {
                        let mut table = lock(&shared);
                        std::mem::replace(&mut *table, Table { closed: true, ..Table::default() })
                    };
                    drop(reply.send(close(&driver, table).await)); // nobody waits for it any more
                    return;
                }
                None => return,
            },
            Some(done) = renewals.join_next(), if !renewals.is_empty() => {
                if let Ok(done) = done {
                    settle(&driver, &mut lock(&shared), done);
                }
            }
            () = until(next) => {
                let due = {
                    let mut table = lock(&shared);
                    let due = table.take_due();
                    for owner in &due.later {
                        let at = table.entries.get(owner).map(Entry::deadline);
                        if let Some(at) = at {
                            table.reschedule(*owner, at);
                        }
                    }
                    due
                };
                for entry in due.over {
                    expire(&driver, &entry.record);
                }
                for records in due.renew.chunks(driver.limits().max_batch) {
                    renewals.spawn(steered(renew(driver.clone(), records.to_vec())));
                }
            }
        }
    }
}

async fn until(next: Option<Instant>) {
    match next {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn renew<D: LeaseDriver>(driver: Arc<D>, records: Vec<Arc<Record>>) -> Answer {
    let renewals: Vec<Renewal> = records
        .iter()
        .map(|record| Renewal { key: record.key.clone(), owner: record.owner, ttl: record.ttl })
        .collect();
    // a renewal that hangs leaves time for another one before the deadline
    let shortest = records.iter().map(|record| record.ttl).min().unwrap_or_default();
    let limit = (shortest / 4).min(driver.limits().answer);
    let sent = Instant::now();
    let answer = limited(limit, driver.renew_each(&renewals)).await;
    Answer { records, sent, answer }
}

fn settle<D: LeaseDriver>(driver: &Arc<D>, table: &mut Table, done: Answer) {
    let (backend, kind) = (driver.backend(), Kind::Lease.as_str());
    let answers = match done.answer {
        Ok(answers) => answers,
        Err(error) => {
            let leases = done.records.len();
            tracing::warn!(target: TARGET, backend, kind, leases, %error, "renewal failed");
            for record in &done.records {
                let record = table.current(record);
                record.signal.renewed(RenewalEnd::Error);
                again(table, &record);
            }
            return;
        }
    };
    for (record, answer) in done.records.iter().zip(answers) {
        let record = &table.current(record);
        let key = &record.key;
        match answer {
            Err(error) => {
                tracing::warn!(target: TARGET, backend, kind, %key, %error, "renewal failed");
                record.signal.renewed(RenewalEnd::Error);
                again(table, record);
            }
            Ok(false) => {
                record.signal.renewed(RenewalEnd::Lost);
                if table.remove(record.owner).is_some() {
                    record.signal.lose(LossReason::Taken);
                }
                drop(record.take_permit());
            }
            Ok(true) => {
                record.signal.renewed(RenewalEnd::Renewed);
                if record.signal.extend(local_deadline(done.sent, record.ttl)) {
                    table.reschedule(record.owner, done.sent + record.ttl / 3);
                }
                // else it is over: its deadline is due
            }
        }
    }
}

fn again(table: &mut Table, record: &Record) {
    let pause = (record.ttl / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
    table.reschedule(record.owner, Instant::now() + jittered(pause));
}

/// The deadline has passed: the local queue goes on, and the store forgets the rest.
fn expire<D: LeaseDriver>(driver: &Arc<D>, record: &Arc<Record>) {
    record.signal.lose(LossReason::Expired);
    drop(record.take_permit());
    let until = Instant::now() + record.ttl;
    let (driver, key) = (driver.clone(), record.key.clone());
    tokio::spawn(steered(free(driver, key, record.owner, until, Insist::UntilFreed)));
}

async fn close<D: LeaseDriver>(driver: &Arc<D>, table: Table) -> Result<()> {
    let mut releases = JoinSet::new();
    for (_, entry) in table.entries {
        let record = entry.record;
        record.signal.lose(LossReason::Closed);
        let driver = driver.clone();
        releases.spawn(steered(async move {
            let answer = driver.limits().answer;
            let released = limited(answer, driver.release(&record.key, record.owner)).await;
            drop(record.take_permit());
            released.map(|_| ())
        }));
    }
    let mut outcome = Ok(());
    while let Some(released) = releases.join_next().await {
        outcome = outcome.and(released.unwrap_or_else(|_| Err(super::closed())));
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lost::LossSignal;
    use std::sync::Mutex;

    fn due_now(signal: &LossSignal) -> Entry {
        let record = Record {
            key: crate::Key::new("a").unwrap(),
            owner: Owner::fresh(),
            ttl: Duration::from_secs(30),
            signal: signal.clone(),
            permit: Mutex::new(None),
            run: None,
        };
        let mut entry = Entry::new(Arc::new(record), Instant::now(), None, 0);
        entry.due = Instant::now();
        entry
    }

    #[tokio::test(start_paused = true)]
    async fn leases_that_are_held_briefly_do_not_wake_the_task_each() {
        let later = || LossSignal::until(Instant::now() + Duration::from_secs(30));
        let (beats, mut received) = mpsc::unbounded_channel();
        let heart = Heart { beats, table: Arc::default() };
        let mut looks = 0;
        for _ in 0..100 {
            let mut entry = due_now(&later());
            entry.due += Duration::from_secs(10);
            let owner = entry.record.owner;
            heart.add(entry);
            heart.remove(owner);
            // the task comes to it when the lease is gone
            while received.try_recv().is_ok() {
                looks += 1;
            }
            assert!(lock(&heart.table).next_look().is_some());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(looks, 1);
        let mut sooner = due_now(&later());
        sooner.due += Duration::from_secs(5);
        let due = sooner.due;
        heart.add(sooner);
        assert!(received.try_recv().is_ok(), "one that is due sooner must wake it");
        assert_eq!(lock(&heart.table).next_look(), Some(due));
        tokio::time::advance(Duration::from_secs(11)).await;
        assert_eq!(lock(&heart.table).next_look(), Some(due), "it is due, and still there");
        assert_eq!(lock(&heart.table).take_due().renew.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_its_guard_is_just_releasing_is_left_to_it() {
        let later = Instant::now() + Duration::from_secs(30);
        let (settled, lost) = (LossSignal::until(later), LossSignal::until(later));
        settled.settle();
        lost.lose(LossReason::Taken);
        let mut table = Table::default();
        table.add(due_now(&settled));
        table.add(due_now(&lost));
        let due = table.take_due();
        assert_eq!(due.over.len(), 1, "the heartbeat would release it a second time");
        assert!(due.over[0].record.signal.reason().is_some());
        assert!(table.entries.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn news_that_come_during_a_renewal_are_looked_into_after_it() {
        let mut table = Table::default();
        for wake_id in [Some(0), None] {
            let entry = due_now(&LossSignal::until(Instant::now() + Duration::from_secs(30)));
            let owner = entry.record.owner;
            table.add(entry);
            assert_eq!(table.take_due().renew.len(), 1);
            // the store may have answered it before what the news are about
            table.check(wake_id);
            assert_eq!(table.take_due().renew.len(), 0, "one is under way");
            table.reschedule(owner, Instant::now() + Duration::from_secs(10));
            assert_eq!(table.take_due().renew.len(), 1, "the news were forgotten");
            table.reschedule(owner, Instant::now() + Duration::from_secs(10));
            assert_eq!(table.take_due().renew.len(), 0, "once is enough");
            table.remove(owner);
        }
    }
}
