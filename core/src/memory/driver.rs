//! [`MemoryDriver`]: the four drivers over a [`MemoryStore`].

use std::any::{Any, TypeId};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use super::link::{MemoryLink, cut};
use super::store::{Asked, Kind, MemoryStore, Name, Namespace, wake_id};
use super::tx::{MemoryClaim, MemoryTx};
use crate::backend::{
    Admit, AdmitAnswer, Batch, BatchAnswer, ClaimDriver, DedupeDriver, LeaseDriver, LeaseLimits,
    LeaseTry, Owner, Renewal, Session, SessionDriver, SessionId, SessionLimits, Try, Wake,
    WakeSource,
};
use crate::claim::ClaimTx;
use crate::error::{Error, ErrorKind, Result};
use crate::holder::Holder;
use crate::key::Key;
use crate::options::Deadline;
use crate::token::FencingToken;

pub(super) const NAME: &str = "memory";

/// All four drivers on one store, for [`MemoryBackend`](super::MemoryBackend) and for backends
/// that change some of its answers.
#[derive(Clone, Debug)]
pub struct MemoryDriver {
    store: MemoryStore,
    namespace: Namespace,
    link: MemoryLink,
    session_limits: SessionLimits,
    lease_limits: LeaseLimits,
}

impl MemoryDriver {
    pub(super) fn new(
        store: MemoryStore,
        namespace: &str,
        holder: Holder,
        session_limits: SessionLimits,
        mut lease_limits: LeaseLimits,
    ) -> Self {
        lease_limits.watch_held = true;
        let link = MemoryLink::new(store.clone(), holder);
        Self { store, namespace: namespace.into(), link, session_limits, lease_limits }
    }

    /// The store.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// The way to the store, to put faults on it.
    pub fn link(&self) -> &MemoryLink {
        &self.link
    }

    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    fn name(&self, key: &Key) -> Name {
        (self.namespace.clone(), key.clone())
    }

    async fn open_session(&self) -> Result<MemorySession> {
        let (store, link) = (self.store.clone(), self.link.id());
        let holder = self.link.holder().clone();
        let opened = move || {
            let (id, alive) = store.open_session(link, holder);
            Guarded { store, id, alive: Some(alive) }
        };
        let mut opened = self.link.call(opened).await?;
        let alive = opened.alive.take().ok_or_else(cut)?;
        Ok(MemorySession {
            store: self.store.clone(),
            link: self.link.clone(),
            namespace: self.namespace.clone(),
            id: opened.id,
            alive,
        })
    }
}

/// A session on its way to the client: ends if it never arrives.
struct Guarded {
    store: MemoryStore,
    id: SessionId,
    alive: Option<watch::Receiver<bool>>,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if self.alive.is_some() {
            self.store.end_session(self.id);
        }
    }
}

// --- named locks ---------------------------------------------------------------------------

#[async_trait]
impl SessionDriver for MemoryDriver {
    type Id = Key;
    type Session = MemorySession;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn open(&self) -> Result<MemorySession> {
        self.open_session().await
    }

    fn limits(&self) -> SessionLimits {
        self.session_limits
    }
}

/// A session with the store. Dropping it is closing its connection.
#[derive(Debug)]
pub struct MemorySession {
    store: MemoryStore,
    link: MemoryLink,
    namespace: Namespace,
    id: SessionId,
    alive: watch::Receiver<bool>,
}

impl MemorySession {
    pub(super) fn id(&self) -> SessionId {
        self.id
    }

    /// Waits for a lock on the store; false if the deadline passed.
    pub(super) async fn lock(&self, kind: Kind, name: &Name, deadline: Deadline) -> Result<bool> {
        let granted = match self.store.ask(kind, name, self.id) {
            Asked::Granted => return Ok(true),
            Asked::Ended => return Err(cut()),
            Asked::Queued(granted) => granted,
        };
        let mut alive = self.alive.clone();
        tokio::select! {
            biased;
            granted = granted => granted.map(|()| true).map_err(|_| cut()),
            _ = alive.wait_for(|alive| !alive) => Err(cut()),
            () = deadline.passed() => Ok(self.store.leave(kind, name, self.id)),
        }
    }
}

impl Drop for MemorySession {
    fn drop(&mut self) {
        if self.link.is_silent() {
            self.store.vanish(self.id);
        } else {
            self.store.end_session(self.id);
        }
    }
}

#[async_trait]
impl Session for MemorySession {
    type Id = Key;

    fn id(&self) -> SessionId {
        self.id
    }

    async fn exchange(&mut self, batch: &Batch<Key>) -> Result<BatchAnswer> {
        let (store, namespace, id) = (self.store.clone(), self.namespace.clone(), self.id);
        let (batch, alive) = (batch.clone(), self.alive.clone());
        let name = move |key: &Key| (namespace.clone(), key.clone());
        let answer = self.link.call(move || {
            batch.kill.iter().for_each(|session| store.end_session(*session));
            let release = |key| store.unlock(Kind::Named, &name(key), id);
            let released = batch.release.iter().map(release).collect();
            let attempt = |key| match store.try_lock(Kind::Named, &name(key), id) {
                Some(true) => Try::Granted(None),
                Some(false) | None => Try::Busy,
            };
            let tries = batch.tries.iter().map(attempt).collect();
            let tokens = batch.tokens.iter().map(|_| store.next_token()).collect();
            let answer = BatchAnswer { released, tries, tokens };
            alive.borrow().then_some(answer)
        });
        answer.await?.ok_or_else(cut)
    }

    async fn wait(&mut self, key: &Key, wait: Duration) -> Result<Try> {
        self.link.pass().await;
        let name = (self.namespace.clone(), key.clone());
        let granted = self.lock(Kind::Named, &name, Deadline::after(wait)).await?;
        self.link.pass().await;
        Ok(if granted { Try::Granted(None) } else { Try::Busy })
    }

    async fn closed(&mut self) -> Error {
        // an end that the sender's drop tells is one as well
        drop(self.alive.wait_for(|alive| !alive).await);
        self.link.pass().await;
        cut()
    }

    async fn close(self) {
        let (store, id) = (self.store.clone(), self.id);
        drop(self.link.call(move || store.end_session(id)).await); // silence: dropping vanishes
    }
}

// --- leases --------------------------------------------------------------------------------

#[async_trait]
impl LeaseDriver for MemoryDriver {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        let (store, name) = (self.store.clone(), self.name(key));
        let holder = self.link.holder().clone();
        self.link.call(move || store.acquire(&holder, &name, owner, ttl)).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let (store, namespace) = (self.store.clone(), self.namespace.clone());
        let renewals = renewals.to_vec();
        self.link.call(move || store.renew(&namespace, &renewals)).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let (store, name) = (self.store.clone(), self.name(key));
        self.link.call(move || store.release(&name, owner)).await
    }

    async fn token(&self, key: &Key, owner: Owner) -> Result<Option<FencingToken>> {
        let (store, name) = (self.store.clone(), self.name(key));
        self.link.call(move || store.retoken(&name, owner)).await
    }

    async fn verify(&self, key: &Key, owner: Owner, tx: &mut (dyn Any + Send)) -> Result<()> {
        let tx = tx.downcast_mut::<MemoryTx>().ok_or_else(|| {
            Error::new(ErrorKind::WrongBackend, "the transaction is not a MemoryTx")
        })?;
        tx.verify(self.name(key), owner)
    }

    fn wake_id(&self, key: &Key) -> u64 {
        wake_id(&self.name(key))
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        let store = self.store.clone();
        let news = self.link.call(move || store.listen()).await?;
        Ok(Some(Box::new(News { news, link: self.link.clone() })))
    }

    fn limits(&self) -> LeaseLimits {
        self.lease_limits
    }
}

/// The subscription: news that comes while the network is silent is lost.
#[derive(Debug)]
struct News {
    news: mpsc::UnboundedReceiver<Wake>,
    link: MemoryLink,
}

#[async_trait]
impl WakeSource for News {
    async fn next(&mut self) -> Result<Wake> {
        loop {
            let wake = self.news.recv().await.ok_or_else(cut)?;
            if !self.link.is_silent() {
                return Ok(wake);
            }
        }
    }
}

// --- claims and dedupe ---------------------------------------------------------------------

#[async_trait]
impl ClaimDriver for MemoryDriver {
    type Id = Key;

    fn backend(&self) -> &'static str {
        NAME
    }

    fn tx_type(&self) -> TypeId {
        TypeId::of::<MemoryTx>()
    }

    fn id(&self, key: &Key) -> Key {
        key.clone()
    }

    async fn begin(&self, ids: &[Key], deadline: Deadline) -> Result<Option<Box<dyn ClaimTx>>> {
        let session = self.open_session().await?;
        for key in ids {
            if !session.lock(Kind::Claim, &self.name(key), deadline).await? {
                return Ok(None);
            }
        }
        Ok(Some(Box::new(MemoryClaim {
            token: self.store.next_token(),
            session,
            link: self.link.clone(),
            namespace: self.namespace.clone(),
            tx: MemoryTx::new(self.store.clone()),
            seen: Vec::new(),
        })))
    }
}

#[async_trait]
impl DedupeDriver for MemoryDriver {
    fn backend(&self) -> &'static str {
        NAME
    }

    async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
        let (store, namespace, items) =
            (self.store.clone(), self.namespace.clone(), items.to_vec());
        let holder = self.link.holder().clone();
        let admit = move |item: &Admit| store.admit(&holder, &namespace, item);
        self.link.call(move || items.iter().map(admit).collect()).await
    }

    async fn complete(&self, key: &Key, owner: Owner, retain: Duration) -> Result<bool> {
        let (store, name) = (self.store.clone(), self.name(key));
        self.link.call(move || store.complete(&name, owner, retain)).await
    }

    async fn abandon(&self, key: &Key, owner: Owner) -> Result<bool> {
        let (store, name) = (self.store.clone(), self.name(key));
        self.link.call(move || store.abandon(&name, owner)).await
    }
}
