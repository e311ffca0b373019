//! A store with leases, and the driver that the engine is given.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::world::{Fate, World, cut};
use crate::backend::{Freed, LeaseDriver, LeaseLimits, LeaseTry, Owner, Renewal, Wake, WakeSource};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::token::FencingToken;

/// A named lock is handed on so often in a row.
const MAX_HANDOVERS: u32 = 2;

/// A fault that is planted in the store or its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    None,
    /// A lease that somebody else holds is given.
    GrantsTwice,
    /// A renewal is answered with yes, whosever it is, and prolongs nothing.
    RenewsAnything,
    /// A release frees the lease of whoever has it.
    ReleasesAnybodys,
    /// A release is answered and left undone.
    ForgetsReleases,
    /// A release of what is not there is answered with yes.
    FreesNothing,
    /// A release wakes nobody.
    WakesNobody,
    /// Each acquisition has the same token.
    RepeatsTokens,
    /// A lease is over before its ttl has passed.
    ExpiresEarly,
    /// What was handed on has the token of the one before.
    KeepsTokens,
    /// A new token is made, and forgotten by the store.
    ForgetsTokens,
}

#[derive(Clone)]
pub(super) struct Server {
    world: World,
    state: Arc<Mutex<State>>,
}

struct State {
    mutant: Mutant,
    rows: BTreeMap<Key, Row>,
    listeners: Vec<(usize, mpsc::UnboundedSender<Wake>)>,
    last_token: u64,
}

struct Row {
    handle: usize,
    owner: Owner,
    token: FencingToken,
    expires: Instant,
}

impl Server {
    pub(super) fn new(world: &World, mutant: Mutant) -> Self {
        let (rows, listeners) = (BTreeMap::new(), Vec::new());
        let state = State { mutant, rows, listeners, last_token: 0 };
        Self { world: world.clone(), state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn driver(&self, handle: usize) -> Driver {
        Driver { server: self.clone(), handle }
    }

    /// The handle and the token of the lease that lives.
    pub(super) fn holder(&self, key: &Key) -> Option<(usize, FencingToken)> {
        let state = self.lock();
        let row = state.rows.get(key).filter(|row| row.expires > Instant::now())?;
        Some((row.handle, row.token))
    }

    /// What is left when everybody is gone.
    pub(super) fn leftovers(&self) -> Result<(), String> {
        let state = self.lock();
        let live = state.rows.iter().find(|(_, row)| row.expires > Instant::now());
        live.map_or(Ok(()), |(key, row)| {
            Err(format!("left on the store: {key} with token {}", row.token))
        })
    }

    /// News reach each handle when the explorer says so, if they do.
    fn tell(&self, wake: Wake) {
        let listeners = self.lock().listeners.clone();
        for (handle, listener) in listeners {
            let name = format!("news of a release reach handle {handle}");
            self.world.happen(name, &[Fate::Fails], move |fate| {
                if fate == Fate::Done {
                    let _ = listener.send(wake); // gone with its handle
                }
            });
        }
    }
}

impl State {
    fn acquire(&mut self, handle: usize, key: &Key, owner: Owner, ttl: Duration) -> LeaseTry {
        let now = Instant::now();
        let mutant = self.mutant;
        let ttl = if mutant == Mutant::ExpiresEarly { ttl / 2 } else { ttl };
        if let Some(row) = self.rows.get_mut(key).filter(|row| row.expires > now) {
            if row.owner == owner {
                row.expires = now + ttl;
                return LeaseTry::Acquired(row.token);
            }
            if mutant != Mutant::GrantsTwice {
                return LeaseTry::Busy { expires_in: row.expires - now };
            }
        }
        let token = self.next_token();
        self.rows.insert(key.clone(), Row { handle, owner, token, expires: now + ttl });
        LeaseTry::Acquired(token)
    }

    fn next_token(&mut self) -> FencingToken {
        if self.mutant != Mutant::RepeatsTokens || self.last_token == 0 {
            self.last_token += 1;
        }
        FencingToken(self.last_token)
    }

    fn token(&mut self, key: &Key, owner: Owner) -> Option<FencingToken> {
        let token = match self.mutant {
            Mutant::KeepsTokens => self.rows.get(key)?.token,
            _ => self.next_token(),
        };
        if self.mutant == Mutant::ForgetsTokens {
            self.last_token -= 1;
        }
        let row = self.rows.get_mut(key);
        let row = row.filter(|row| row.owner == owner && row.expires > Instant::now())?;
        row.token = token;
        Some(token)
    }

    fn renew(&mut self, renewal: &Renewal) -> bool {
        if self.mutant == Mutant::RenewsAnything {
            return true;
        }
        let now = Instant::now();
        let row = self.rows.get_mut(&renewal.key);
        let row = row.filter(|row| row.owner == renewal.owner && row.expires > now);
        row.map(|row| row.expires = now + renewal.ttl).is_some()
    }

    fn release(&mut self, key: &Key, owner: Owner) -> bool {
        let row = self.rows.get(key);
        let ours =
            row.is_some_and(|row| row.owner == owner || self.mutant == Mutant::ReleasesAnybodys);
        let live = row.is_some_and(|row| row.expires > Instant::now());
        let absent = row.is_none();
        if ours && self.mutant != Mutant::ForgetsReleases {
            self.rows.remove(key);
        }
        (ours && live) || (absent && self.mutant == Mutant::FreesNothing)
    }
}

/// The driver of one handle.
pub(super) struct Driver {
    server: Server,
    handle: usize,
}

impl Driver {
    async fn ask<T: Send + 'static>(
        &self,
        what: String,
        run: impl FnOnce(&Server) -> T + Send + 'static,
    ) -> Result<T> {
        let server = self.server.clone();
        let name = format!("handle {} {what}", self.handle);
        self.server.world.ask(name, move || run(&server)).await
    }
}

#[async_trait]
impl LeaseDriver for Driver {
    fn backend(&self) -> &'static str {
        "model"
    }

    async fn acquire(&self, key: &Key, owner: Owner, ttl: Duration) -> Result<LeaseTry> {
        let key = key.clone();
        let (name, handle) = (format!("tries {key}"), self.handle);
        self.ask(name, move |server| server.lock().acquire(handle, &key, owner, ttl)).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>> {
        let renewals = renewals.to_vec();
        let name = format!("renews {}", renewals.len());
        let renew = move |server: &Server| {
            let mut state = server.lock();
            renewals.iter().map(|renewal| state.renew(renewal)).collect()
        };
        self.ask(name, renew).await
    }

    async fn release(&self, key: &Key, owner: Owner) -> Result<bool> {
        let key = key.clone();
        let id = self.wake_id(&key);
        let release = move |server: &Server| {
            let freed = server.lock().release(&key, owner);
            if freed && server.lock().mutant != Mutant::WakesNobody {
                server.tell(Wake::Released(id));
            }
            freed
        };
        self.ask("releases".to_owned(), release).await
    }

    async fn hand_back(&self, key: &Key, owner: Owner) -> Result<Freed> {
        Ok(Freed { ours: self.release(key, owner).await?, awaited: true })
    }

    async fn token(&self, key: &Key, owner: Owner) -> Result<Option<FencingToken>> {
        let key = key.clone();
        let name = format!("asks for a token of {key}");
        self.ask(name, move |server| server.lock().token(&key, owner)).await
    }

    async fn verify(&self, _: &Key, _: Owner, _: &mut (dyn Any + Send)) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "the model has no transactions"))
    }

    fn wake_id(&self, key: &Key) -> u64 {
        key.as_str().bytes().map(u64::from).sum()
    }

    async fn listen(&self) -> Result<Option<Box<dyn WakeSource>>> {
        let handle = self.handle;
        let listen = move |server: &Server| {
            let (tell, told) = mpsc::unbounded_channel();
            server.lock().listeners.push((handle, tell));
            told
        };
        let news = self.ask("listens".to_owned(), listen).await?;
        Ok(Some(Box::new(News(news))))
    }

    fn limits(&self) -> LeaseLimits {
        LeaseLimits { max_handovers: MAX_HANDOVERS, ..LeaseLimits::default() }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver of handle {}", self.handle)
    }
}

#[derive(Debug)]
struct News(mpsc::UnboundedReceiver<Wake>);

#[async_trait]
impl WakeSource for News {
    async fn next(&mut self) -> Result<Wake> {
        self.0.recv().await.ok_or_else(cut)
    }
}
