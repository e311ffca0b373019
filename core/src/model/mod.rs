//! Model checking of the engines: the production code, run under every schedule up to a bound.
//!
//! See `docs/adr/0010-model-checking.md`. A scenario is a few tasks on engines over a scripted
//! store ([`locks`], [`leases`], [`claims`], [`dedupe`]). The [`explorer`] decides at each step
//! which task is polled next, which request reaches the store next and what becomes of it, when a
//! session is cut and when a caller drops its call; [`world`] is what it decides about.

/// A scenario as the [`explorer`] plays it, with what is planted in its scene.
macro_rules! scenario {
    ($name:ident) => {
        scenario!($name, Mutant::None)
    };
    ($name:ident, $($planted:expr),+) => {
        |world: World| -> Task { Box::pin($name(Scene::new(world, $($planted),+))) }
    };
}

mod beliefs;
mod claims;
mod dedupe;
mod explorer;
mod leases;
mod locks;
mod world;

use std::future::Future;

use rand::RngExt;

use self::world::World;
pub(crate) use self::world::steered;
use crate::key::Key;

/// The same numbers in each run of a schedule.
pub(crate) fn random_u128() -> u128 {
    World::current().map_or_else(|| rand::rng().random(), |world| world.number())
}

pub(crate) fn random_part() -> f64 {
    World::current().map_or_else(|| rand::rng().random_range(0.5..=1.0), |_| 1.0)
}

fn key(name: &str) -> Key {
    Key::new(name).expect("a valid key")
}

/// A future that the explorer may have dropped at any moment; none if it was.
async fn droppable<T: Send + 'static>(
    world: &World,
    name: &str,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    world::Droppable::new(world, name, work).await
}
