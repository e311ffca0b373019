//! The operations of the model, and the sequences of them.

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::Index;

use super::{CLIENTS, KEYS};

/// One operation of one client. Operations on guards name one of those that are there.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs)] // each is the call of its name
pub enum Operation {
    Lock { client: usize, key: usize },
    ReleaseLock(Index),
    DropLock(Index),
    Lease { client: usize, key: usize, seconds: u64, auto_renew: bool },
    Renew(Index),
    ReleaseLease(Index),
    DropLease(Index),
    Claim { client: usize, keys: Vec<usize> },
    Write { claim: Index, value: i64 },
    Commit(Index),
    Rollback(Index),
    DropClaim(Index),
    Admit { client: usize, key: usize, in_progress: u64, retain: u64 },
    Complete(Index),
    Abandon(Index),
    DropEntry(Index),
    EndSessions { client: usize },
    Housekeep { client: usize },
    Sleep { seconds: u64 },
}

/// Sequences of up to `length` operations.
pub fn operations(length: usize) -> impl Strategy<Value = Vec<Operation>> {
    use Operation as O;
    let (client, key) = (0..CLIENTS, 0..KEYS.len());
    let guard = any::<Index>;
    let locks = prop_oneof![
        4 => (client.clone(), key.clone()).prop_map(|(client, key)| O::Lock { client, key }),
        2 => guard().prop_map(O::ReleaseLock),
        1 => guard().prop_map(O::DropLock),
        1 => client.clone().prop_map(|client| O::EndSessions { client }),
    ];
    let leases = prop_oneof![
        4 => (client.clone(), key.clone(), 1..4_u64, any::<bool>()).prop_map(
            |(client, key, seconds, auto_renew)| O::Lease { client, key, seconds, auto_renew }
        ),
        2 => guard().prop_map(O::Renew),
        2 => guard().prop_map(O::ReleaseLease),
        1 => guard().prop_map(O::DropLease),
    ];
    let claims = prop_oneof![
        3 => (client.clone(), vec(key.clone(), 1..3))
            .prop_map(|(client, keys)| O::Claim { client, keys }),
        3 => (guard(), 1..100_i64).prop_map(|(claim, value)| O::Write { claim, value }),
        2 => guard().prop_map(O::Commit),
        1 => guard().prop_map(O::Rollback),
        1 => guard().prop_map(O::DropClaim),
    ];
    let dedupe = prop_oneof![
        4 => (client.clone(), key, 1..4_u64, 1..4_u64).prop_map(
            |(client, key, in_progress, retain)| O::Admit { client, key, in_progress, retain }
        ),
        2 => guard().prop_map(O::Complete),
        1 => guard().prop_map(O::Abandon),
        1 => guard().prop_map(O::DropEntry),
    ];
    let time = prop_oneof![
        3 => (1..4_u64).prop_map(|seconds| O::Sleep { seconds }),
        1 => client.prop_map(|client| O::Housekeep { client }),
        1 => Just(O::Sleep { seconds: 10 }),
    ];
    let any_of = prop_oneof![3 => locks, 4 => leases, 3 => claims, 4 => dedupe, 3 => time];
    vec(any_of, 1..length)
}
