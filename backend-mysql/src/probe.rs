//! Whether user-level locks are locks here. Servers and poolers that speak the protocol may let two
//! sessions have one, or keep it when its session has ended.

use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};

use crate::error::mapped;

/// Seconds in which the server must notice the end of a connection on the same network.
const NOTICE: u32 = 5;
/// What an answer may take beyond it.
const GRACE: Duration = Duration::from_secs(5);

/// Takes a lock on a connection that is then cut off like that of a killed process.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if `conn` got the lock before that, or not after it.
pub(crate) async fn check(conn: &mut Conn, opts: Opts) -> Result<()> {
    let name = format!("lh:probe:{:032x}", rand::random::<u128>());
    let mut holder = Conn::new(opts).await.map_err(mapped)?;
    let try_once = format!("SELECT GET_LOCK('{name}', 0)");
    if get(&mut holder, &try_once).await? != Some(1) {
        return unsupported("the server did not give a user-level lock that nobody can have");
    }
    if get(conn, &try_once).await? != Some(0) {
        return unsupported("two sessions have one user-level lock here");
    }
    // where there is no runtime, the driver cannot say good-bye
    std::thread::spawn(move || drop(holder));
    let wait = format!("SELECT GET_LOCK('{name}', {NOTICE})");
    if get(conn, &wait).await? != Some(1) {
        return unsupported("a user-level lock outlives its session here");
    }
    Ok(())
}

fn unsupported(why: &str) -> Result<()> {
    let detail = format!("{why}: build the handle without user locks");
    Err(Error::new(ErrorKind::Unsupported, detail))
}

async fn get(conn: &mut Conn, text: &str) -> Result<Option<u8>> {
    let answer = conn.query_first::<Option<u8>, _>(text);
    let limit = Duration::from_secs(NOTICE.into()) + GRACE;
    let answer = tokio::time::timeout(limit, answer).await;
    let late = |_| Error::new(ErrorKind::Unavailable, "the server did not answer");
    Ok(answer.map_err(late)?.map_err(mapped)?.flatten())
}
