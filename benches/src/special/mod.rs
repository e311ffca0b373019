//! What is about one kind of store, or about more than taking and releasing a lock.

mod admin;
mod claims;
mod cold;
mod dedupe;
mod growth;
mod held;
mod loss;
mod recovery;
mod usage;

use std::time::Duration;

use crate::record::{Record, Role};
use crate::scene::Scenario;

pub use self::held::{Holding, hold};

/// All, in the order of the report.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "claim",
        about: "a claim and its commit, and one that counts before it takes a slot",
        play: |scene| Box::pin(claims::play(scene)),
    },
    Scenario {
        name: "dedupe",
        about: "events that are new or known, one by one and a thousand at once",
        play: |scene| Box::pin(dedupe::play(scene)),
    },
    Scenario {
        name: "held",
        about: "10,000 held locks and leases: connections, memory, what renewing them costs",
        play: |scene| Box::pin(held::play(scene)),
    },
    Scenario {
        name: "growth",
        about: "a lease and an event next to 100 up to 1,000,000 others",
        play: |scene| Box::pin(growth::play(scene)),
    },
    Scenario {
        name: "cold",
        about: "connects and takes the first lock",
        play: |scene| Box::pin(cold::play(scene)),
    },
    Scenario {
        name: "loss",
        about: "from the server's ending the session to the holder's being told",
        play: |scene| Box::pin(loss::play(scene)),
    },
    Scenario {
        name: "recovery",
        about: "from a killed server's being back to the next lock",
        play: |scene| Box::pin(recovery::play(scene)),
    },
];

/// leasehold, where a scenario uses more of it than its locks.
const OURS: &str = concat!("leasehold ", env!("CARGO_PKG_VERSION"));

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Adds a number of a round that is not one to warm up.
fn add(record: &mut Record, round: usize, role: Role, contender: &str, number: f64) {
    if round > 0 {
        record.add(role, contender, number);
    }
}
