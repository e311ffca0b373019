//! What the clients of a scenario believe to hold, and what that is compared with.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::Key;
use crate::lost::Lost;
use crate::token::FencingToken;

/// One guard that somebody has.
#[derive(Clone)]
pub(super) struct Belief {
    pub(super) who: String,
    /// Of which handle.
    pub(super) handle: usize,
    pub(super) key: Key,
    pub(super) token: Option<FencingToken>,
    pub(super) lost: Lost,
    /// Since when the store says otherwise.
    unbacked: Option<Instant>,
}

/// All guards that somebody has.
#[derive(Clone, Default)]
pub(super) struct Beliefs(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    believed: BTreeMap<u64, Belief>,
    last: u64,
    /// The highest token of each key that anybody was given.
    tokens: BTreeMap<Key, FencingToken>,
}

/// A guard is believed in until this is dropped.
pub(super) struct Ticket {
    beliefs: Beliefs,
    id: u64,
}

impl Beliefs {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(
        &self,
        who: &str,
        handle: usize,
        key: &Key,
        token: Option<FencingToken>,
        lost: Lost,
    ) -> Ticket {
        let mut state = self.lock();
        state.last += 1;
        let (id, who, key) = (state.last, who.to_owned(), key.clone());
        state.believed.insert(id, Belief { who, handle, key, token, lost, unbacked: None });
        Ticket { beliefs: self.clone(), id }
    }

    /// The highest token that anybody has been given.
    pub(super) fn floor(&self, key: &Key) -> Option<FencingToken> {
        self.lock().tokens.get(key).copied()
    }

    /// A token must be greater than all that were given before its lock was taken.
    pub(super) fn token(
        &self,
        key: &Key,
        floor: Option<FencingToken>,
        token: FencingToken,
    ) -> Result<(), String> {
        let mut state = self.lock();
        if floor.is_some_and(|floor| token <= floor) {
            return Err(format!("token {token} of {key} after token {}", floor.unwrap_or(token)));
        }
        let highest = state.tokens.entry(key.clone()).or_insert(token);
        *highest = token.max(*highest);
        Ok(())
    }

    /// That no two guards `meet`, and that each is backed by the store, or not believed in for
    /// longer than `grace` afterwards; no time at all if the store did nothing to `excuse` it.
    pub(super) fn check(
        &self,
        meet: impl Fn(&Belief, &Belief) -> bool,
        backed: impl Fn(&Belief) -> bool,
        excuse: impl Fn(&Belief) -> bool,
        grace: Duration,
    ) -> Result<(), String> {
        let mut state = self.lock();
        state.believed.retain(|_, belief| !belief.lost.is_set());
        for belief in state.believed.values_mut() {
            if backed(belief) {
                belief.unbacked = None;
                continue;
            }
            if !excuse(belief) {
                return Err(format!("{belief:?}, and the store says otherwise"));
            }
            let since = belief.unbacked.get_or_insert_with(Instant::now).elapsed();
            if since > grace {
                return Err(format!("{belief:?}, and the store says otherwise for {since:?}"));
            }
        }
        for (one, first) in &state.believed {
            for (two, second) in &state.believed {
                if one < two && first.key == second.key && meet(first, second) {
                    return Err(format!("two holders: {first:?}; {second:?}"));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.beliefs.lock().believed.remove(&self.id);
    }
}

impl fmt::Debug for Belief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of handle {} believes to hold {}", self.who, self.handle, self.key)?;
        self.token.map_or(Ok(()), |token| write!(f, " with token {token}"))
    }
}
