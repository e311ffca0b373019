//! What every way to lock names can play.

mod contended;
mod distinct;
mod hand_off;
mod processes;
mod uncontended;

use leasehold_conformance::servers::Kind;
use leasehold_peers::Outcome;

use crate::contenders;
use crate::scene::{Entrant, Scenario, Scene};

pub use processes::{Job, client};

/// All, in the order of the report.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "uncontended",
        about: "takes and releases a lock that nobody else wants",
        play: |scene| Box::pin(uncontended::play(scene)),
    },
    Scenario {
        name: "distinct",
        about: "1, 8, 64 and 512 tasks of one process with a key each",
        play: |scene| Box::pin(distinct::play(scene)),
    },
    Scenario {
        name: "contended",
        about: "64 tasks of one process want one key",
        play: |scene| Box::pin(contended::play(scene)),
    },
    Scenario {
        name: "processes",
        about: "8 processes want one key, with 8 tasks each and with one each; who gets how much",
        play: |scene| Box::pin(processes::play(scene)),
    },
    Scenario {
        name: "hand-off",
        about: "from a release to the next holder in another process, with 1 and 50 waiting",
        play: |scene| Box::pin(hand_off::play(scene)),
    },
];

/// Whether a server speaks SQL, for targets that differ.
fn is_sql(kind: Kind) -> bool {
    !matches!(kind, Kind::Redis7 | Kind::Redis8 | Kind::Valkey)
}

fn is_postgres(kind: Kind) -> bool {
    matches!(kind, Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18)
}

fn entrants(scene: &Scene) -> Outcome<Vec<Entrant>> {
    contenders::of(scene.kind(), &scene.server.url())
}

/// A name that no other run has used, short enough for every store.
fn name(what: &str) -> String {
    format!("bench-{what}-{:08x}", rand::random::<u32>())
}
