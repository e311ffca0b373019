//! A look into the store, and taking away by force.

use tokio::time::Instant;

use super::{DedupeRow, LeaseRow, Lock, MemoryStore, Name, Namespace, State, wake_id};
use crate::backend::Wake;
use crate::inspect::{HeldName, Holding, HoldingQuery, Kind};
use crate::key::Key;
use crate::token::FencingToken;

impl MemoryStore {
    pub(in crate::memory) fn holdings(
        &self,
        namespace: &Namespace,
        query: &HoldingQuery,
    ) -> Vec<Holding> {
        self.lock().holdings(namespace, query)
    }

    pub(in crate::memory) fn displace(
        &self,
        namespace: &Namespace,
        kind: Kind,
        key: &Key,
    ) -> Option<Holding> {
        let query = HoldingQuery::key(key).kinds([kind]).done(true);
        let mut state = self.lock();
        let displaced = state.holdings(namespace, &query).into_iter().next()?;
        let name = (namespace.clone(), key.clone());
        match kind {
            Kind::Lock => state.end_holder(super::Kind::Named, &name),
            Kind::Claim => state.end_holder(super::Kind::Claim, &name),
            Kind::Lease => {
                state.leases.remove(&name);
                state.tell(Wake::Changed(wake_id(&name)));
            }
            Kind::Dedupe => drop(state.dedupe.remove(&name)),
        }
        Some(displaced)
    }

    /// Frees a lease that is held under this token.
    pub(in crate::memory) fn release_by_token(
        &self,
        namespace: &Namespace,
        key: &Key,
        token: FencingToken,
    ) -> bool {
        let name = (namespace.clone(), key.clone());
        let mut state = self.lock();
        let now = Instant::now();
        let row = state.leases.get_mut(&name);
        let held = |row: &&mut LeaseRow| row.owner.is_some() && row.expires > now;
        let Some(row) = row.filter(|row| row.token == token).filter(held) else {
            return false;
        };
        (row.owner, row.expires) = (None, now);
        state.tell(Wake::Changed(wake_id(&name)));
        state.forget_if_over(&name);
        true
    }
}

impl State {
    fn holdings(&self, namespace: &Namespace, query: &HoldingQuery) -> Vec<Holding> {
        let now = Instant::now();
        let wanted = |name: &Name| name.0 == *namespace && query.matches(&name.1);
        let locks = self.locks.iter().filter(|((_, name), _)| wanted(name));
        let locks = locks.filter_map(|((kind, name), lock)| self.lock_held(*kind, name, lock));
        let leases = self.leases.iter().filter(|(name, _)| wanted(name));
        let leases = leases.filter_map(|(name, row)| lease_held(name, row, now));
        let seen = self.dedupe.iter().filter(|(name, row)| wanted(name) && row.until > now);
        let seen = seen.filter(|(_, row)| query.done || !row.done);
        let seen = seen.map(|(name, row)| entry(name, row, now));
        let all = locks.chain(leases).chain(seen).filter(|holding| query.wants(holding.kind));
        query.arrange(all.collect())
    }

    fn lock_held(&self, kind: super::Kind, name: &Name, lock: &Lock) -> Option<Holding> {
        let kind = match kind {
            super::Kind::Named => Kind::Lock,
            super::Kind::Claim => Kind::Claim,
            super::Kind::Seen => return None, // its claim is listed
        };
        let mut held = Holding::new(kind, HeldName::Key(name.1.clone()));
        let session = self.sessions.get(&lock.holder);
        held.holder = session.map(|session| (*session.holder).clone());
        held.session = Some(lock.holder.to_string());
        held.held_for = Some(lock.since.elapsed());
        held.waiters = Some(lock.queue.len() as u32);
        Some(held)
    }

    fn end_holder(&mut self, kind: super::Kind, name: &Name) {
        if let Some(holder) = self.locks.get(&(kind, name.clone())).map(|lock| lock.holder) {
            self.end_session(holder);
        }
    }
}

fn lease_held(name: &Name, row: &LeaseRow, now: Instant) -> Option<Holding> {
    if row.owner.is_none() || row.expires <= now {
        return None;
    }
    let mut held = Holding::new(Kind::Lease, HeldName::Key(name.1.clone()));
    held.holder = Some((*row.holder).clone());
    held.held_for = Some(now - row.since);
    held.expires_in = Some(row.expires - now);
    held.token = Some(row.token);
    Some(held)
}

fn entry(name: &Name, row: &DedupeRow, now: Instant) -> Holding {
    let mut entry = Holding::new(Kind::Dedupe, HeldName::Key(name.1.clone()));
    entry.holder = Some((*row.holder).clone());
    entry.held_for = Some(now - row.since);
    entry.expires_in = Some(row.until - now);
    entry.token = Some(row.token);
    entry.done = row.done;
    entry
}
