//! Leases, and named locks on top of them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::backend::{
    Freed, LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, WakeSource,
};
use leasehold_core::{Error, ErrorKind, FencingToken, Key, Result};

use crate::conn::{Conn, NAME};
use crate::keys::{Kind, Place};
use crate::tx::RedisTx;
use crate::wake::Wakes;

/// A named lock is handed on within the process so often in a row; as many as on the other stores.
const MAX_HANDOVERS: u32 = 16;

/// The statements of leases, or of named locks.
#[derive(Debug)]
pub(crate) struct Leases {
    conn: Arc<Conn>,
    wakes: Arc<Wakes>,
    kind: Kind,
}

impl Leases {
    pub(crate) fn new(conn: Arc<Conn>, wakes: Arc<Wakes>, kind: Kind) -> Self {
        Self { conn, wakes, kind }
    }

    fn place(&self, key: &Key) -> Place {
        self.conn.keys.place(self.kind, key)
    }
}

#[async_trait]
impl LeaseDriver for Leases {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        self.conn.told.keep_for(ttl);
        let place = self.place(key);
        let tag = place.tag.clone();
        let taken = self.conn.acquire(place, owner, ttl).await?;
        if matches!(taken, LeaseTry::Busy { .. }) {
            self.wakes.want(&tag);
        }
        Ok(taken)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let places: Vec<Place> = renewals.iter().map(|renewal| self.place(&renewal.key)).collect();
        let shortest = renewals.iter().map(|renewal| renewal.ttl).min();
        // just under the engine's own limit, so that the client gives up first
        let limit = self
            .conn
            .settings
            .command_limit
            .min(shortest.unwrap_or_default() * 9 / 40)
            .max(Duration::from_millis(20));
        let renewals: Vec<_> = places
            .iter()
            .zip(renewals)
            .map(|(place, renewal)| (place, renewal.owner, renewal.ttl))
            .collect();
        self.conn.renew(&renewals, limit).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        Ok(self.hand_back(key, owner).await?.ours)
    }

    async fn hand_back(&self, key: &Key, owner: Owner) -> Result<Freed> {
        self.conn.release(self.place(key), owner).await
    }

    async fn token(&self, key: &Key, owner: Owner) -> Result<Option<FencingToken>> {
        self.conn.token(&self.place(key), owner).await
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        let Some(tx) = tx.downcast_mut::<RedisTx>() else {
            let detail = "a lease on Redis is verified in a RedisTx";
            return Err(Error::new(ErrorKind::WrongBackend, detail));
        };
        tx.verify(self.place(key), owner).await
    }

    fn wake_id(&self, key: &Key) -> u64 {
        self.conn.keys.wake(self.kind, key)
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        self.wakes.listen().await.map(Some)
    }

    fn limits(&self) -> LeaseLimits {
        let mut limits = LeaseLimits::default();
        limits.answer = self.conn.answer_limit();
        limits.watch_held = self.conn.settings.keyspace_events;
        limits.max_handovers = MAX_HANDOVERS;
        limits
    }
}
