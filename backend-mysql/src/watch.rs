//! Tells at once when the server has ended a session.
//!
//! The driver does not read from an idle connection, so a session that the server has closed (a
//! `KILL`, a restart, a time-out) would be noticed only at its next statement. A second connection
//! waits on the server for a lock that the session has held since its start: it is granted the
//! moment the session ends.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::session::wait_statement;
use crate::store::Store;

/// The length of one wait: short enough for a statement, long enough to be no load.
const SLICE: Duration = Duration::from_secs(20);
/// What a slow server may take beyond it.
const GRACE: Duration = Duration::from_secs(10);

/// Watches one session. Dropping it closes the second connection.
#[derive(Debug)]
pub(crate) struct Watch {
    ended: watch::Receiver<bool>,
    task: AbortHandle,
}

impl Watch {
    /// Watches the session that holds `marker`.
    pub(crate) fn start(store: Arc<Store>, marker: String) -> Self {
        let (tell, ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            until_free(&store, &marker).await;
            tell.send_replace(true);
            // the receiver would take the end of the task for news
            std::future::pending::<()>().await;
        });
        Self { ended, task: task.abort_handle() }
    }

    /// Ends when the session has ended. Cancel safe.
    pub(crate) async fn ended(&mut self) -> Error {
        if self.ended.wait_for(|ended| *ended).await.is_err() {
            // the runtime is ending
            std::future::pending::<()>().await;
        }
        Error::new(ErrorKind::Unavailable, "the server has ended the session")
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Trouble of the watching connection says nothing about the session: it is opened again.
async fn until_free(store: &Store, marker: &str) {
    let mut pause = Duration::from_millis(50);
    loop {
        if let Ok(mut conn) = store.connect().await {
            while let Some(free) = is_free(store, &mut conn, marker).await {
                pause = Duration::from_millis(50);
                if free {
                    return;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// Whether the marker was free within the slice; none if the server did not say.
async fn is_free(store: &Store, conn: &mut Conn, marker: &str) -> Option<bool> {
    let statement = wait_statement(store.is_maria(), marker, SLICE);
    let answer = conn.query_first::<Option<u8>, _>(statement);
    match tokio::time::timeout(SLICE + GRACE, answer).await {
        Ok(Ok(granted)) => Some(granted.flatten() == Some(1)),
        // its statement's limit, or a KILL QUERY
        Ok(Err(error)) if crate::error::is_interrupted(&error) => Some(false),
        Ok(Err(error)) => {
            tracing::debug!(%error, "the connection that watches a lock session failed");
            None
        }
        Err(_) => None,
    }
}
