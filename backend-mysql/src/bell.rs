//! The holder's side of waking those who wait for a lease: a user-level lock that is let go for a
//! moment. The waiters' side is in [`crate::listen`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::error::is_interrupted;
use crate::store::Store;

/// An idle bell's connection is used so often, lest the server closes it.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Seconds after which the server closes the one of a vanished host.
const SILENCE: u32 = 20;
/// Seconds to get the bell back from those who were woken, who pass it on within the server.
const BACK: u32 = 5;
/// What an answer may take beyond it.
const GRACE: Duration = Duration::from_secs(5);

/// The user-level lock of a bell.
pub(crate) fn bell_name(number: u64) -> String {
    format!("lh:bell:{number:016x}")
}

/// The bell of one handle, or none. Dropping it closes its connection.
#[derive(Debug)]
pub(crate) struct Bell {
    store: Option<Arc<Store>>,
    number: u64,
    rings: Arc<Notify>,
    keeper: Mutex<Keeper>,
}

#[derive(Debug)]
enum Keeper {
    None,
    Task(AbortHandle),
    Ended,
}

impl Bell {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        // zero is none
        let number = rand::random_range(1..=u64::MAX);
        Self { store: Some(store), number, rings: Arc::default(), keeper: Mutex::new(Keeper::None) }
    }

    /// Where there are no user-level locks.
    pub(crate) fn none() -> Self {
        let keeper = Mutex::new(Keeper::Ended);
        Self { store: None, number: 0, rings: Arc::default(), keeper }
    }

    /// What rows call it; zero if it is none.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Opens its connection if that has not been done yet.
    pub(crate) fn hang(&self) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Keeper::None, Some(store)) = (&*keeper, &self.store) {
            let task = keep(store.clone(), bell_name(self.number), self.rings.clone());
            *keeper = Keeper::Task(tokio::spawn(task).abort_handle());
        }
    }

    /// Wakes all who listen to it. Rings that come together are one.
    pub(crate) fn ring(&self) {
        self.rings.notify_one();
    }

    /// Closes it, which is a last ring.
    pub(crate) fn end(&self) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if let Keeper::Task(task) = std::mem::replace(&mut *keeper, Keeper::Ended) {
            task.abort();
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.end();
    }
}

/// Has the bell, rings it when told to, and gets it again when its session is lost.
async fn keep(store: Arc<Store>, name: String, rings: Arc<Notify>) {
    let mut pause = Duration::from_millis(50);
    loop {
        if let Ok(mut conn) = store.connect().await {
            let limit = statement_limit(&store);
            let setup = format!("SET SESSION wait_timeout = {SILENCE}, {limit} = 0");
            let take = format!("{setup}; SELECT GET_LOCK('{name}', {BACK})");
            let ring = format!("DO RELEASE_LOCK('{name}'); SELECT GET_LOCK('{name}', {BACK})");
            let mut has = answer(&mut conn, &take).await;
            while has {
                pause = Duration::from_millis(50);
                has = tokio::select! {
                    () = rings.notified() => answer(&mut conn, &ring).await,
                    () = tokio::time::sleep(KEEPALIVE) => answer(&mut conn, "SELECT 1").await,
                };
            }
            tracing::debug!("the bell that wakes waiters for leases is lost, hanging it again");
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// The variable by which an administrator may limit statements.
pub(crate) fn statement_limit(store: &Store) -> &'static str {
    if store.is_maria() { "max_statement_time" } else { "max_execution_time" }
}

/// Whether the last statement of a text gives 1. One that was cut is not repeated: what it did is
/// not known, and a new session is.
async fn answer(conn: &mut Conn, text: &str) -> bool {
    let limit = Duration::from_secs(BACK.into()) + GRACE;
    let asked = async {
        let mut result = conn.query_iter(text).await?;
        let mut last = None;
        while !result.is_empty() {
            last = result.collect::<Option<u8>>().await?.pop().flatten();
        }
        result.drop_result().await?;
        Ok(last)
    };
    match tokio::time::timeout(limit, asked).await {
        Ok(Ok(one)) => one == Some(1),
        Ok(Err::<_, mysql_async::Error>(error)) => {
            let cut = is_interrupted(&error);
            tracing::debug!(%error, cut, "the bell's connection failed");
            false
        }
        Err(_) => false,
    }
}
