//! The one subscription of a handle, shared by all its waiters.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::backoff::Backoff;
use super::contained;
use crate::backend::{LeaseDriver, Wake};
use crate::steer::steered;

/// Delivers [`Wake`]s to registered waiters, and changes of held leases to `on_change`.
///
/// A message may be lost: waiters poll as well, and everybody is woken after each (re)subscription.
pub(super) struct WakeHub {
    waiters: Mutex<HashMap<u64, Vec<Arc<Notify>>>>,
    on_change: Box<dyn Fn(Option<u64>) + Send + Sync>,
    listener: OnceLock<AbortHandle>,
}

/// A waiter's registration. Dropping it ends it.
pub(super) struct Registration {
    hub: Arc<WakeHub>,
    id: u64,
    notify: Arc<Notify>,
}

impl WakeHub {
    /// `on_change` is called with the key whose lease may have changed, or with none where any may.
    pub(super) fn new(on_change: impl Fn(Option<u64>) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            waiters: Mutex::new(HashMap::new()),
            on_change: Box::new(on_change),
            listener: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Vec<Arc<Notify>>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the subscription if that has not been done yet.
    pub(super) fn start<D: LeaseDriver>(self: &Arc<Self>, driver: &Arc<D>) {
        self.listener.get_or_init(|| {
            let listener = listen(Arc::downgrade(self), driver.clone());
            tokio::spawn(steered(listener)).abort_handle()
        });
    }

    /// Registers a waiter for `id`.
    pub(super) fn register(self: &Arc<Self>, id: u64) -> Registration {
        let notify = Arc::new(Notify::new());
        self.lock().entry(id).or_default().push(notify.clone());
        Registration { hub: self.clone(), id, notify }
    }

    fn deliver(&self, wake: Wake) {
        match wake {
            Wake::Released(id) => self.wake(id),
            Wake::Changed(id) => {
                (self.on_change)(Some(id));
                self.wake(id);
            }
            Wake::Missed => {
                (self.on_change)(None);
                for waiters in self.lock().values() {
                    waiters.iter().for_each(|waiter| waiter.notify_one());
                }
            }
        }
    }

    fn wake(&self, id: u64) {
        if let Some(waiters) = self.lock().get(&id) {
            waiters.iter().for_each(|waiter| waiter.notify_one());
        }
    }
}

async fn listen<D: LeaseDriver>(hub: Weak<WakeHub>, driver: Arc<D>) {
    let backend = driver.backend();
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        let error = match contained(driver.listen()).await {
            Ok(None) => return,
            Err(error) => error,
            Ok(Some(mut source)) => {
                let mut news = Ok(Wake::Missed);
                loop {
                    match news {
                        Err(error) => break error,
                        Ok(wake) => match hub.upgrade() {
                            Some(hub) => hub.deliver(wake),
                            None => return,
                        },
                    }
                    news = contained(source.next()).await;
                    backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
                }
            }
        };
        tracing::debug!(backend, %error, "the subscription for wake-ups ended, opening it again");
        tokio::time::sleep(backoff.next()).await;
    }
}

impl Registration {
    /// Waits for the next wake-up; one that came since the last call counts.
    pub(super) async fn woken(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut waiters = self.hub.lock();
        if let Some(list) = waiters.get_mut(&self.id) {
            list.retain(|waiter| !Arc::ptr_eq(waiter, &self.notify));
            if list.is_empty() {
                waiters.remove(&self.id);
            }
        }
    }
}

impl Drop for WakeHub {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get() {
            listener.abort();
        }
    }
}

impl Debug for WakeHub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WakeHub").field("keys", &self.lock().len()).finish_non_exhaustive()
    }
}
