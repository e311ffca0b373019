//! The server's clock: what jumps, and what stands still while a statement waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::{Backend, Dedupe, DedupeOptions, ErrorKind, Lease, LeaseOptions};
use mysql_async::TxOpts;
use mysql_async::prelude::Queryable;

use crate::support::MySqlHarness;
use crate::{Failure, PATIENCE, Verdict, ensure, key, namespace, with_setup, within};

crate::tests!("clocks":
    jumps_of_the_clock_make_no_second_holder,
    jumps_seen_from_the_row_are_told_by_the_next_renewal,
    local_deadlines_are_before_the_stored_expiry,
);

/// Sessions for which the server's clock is off by so many seconds.
fn jump(seconds: i64) -> String {
    format!("SET timestamp = UNIX_TIMESTAMP() + {seconds}")
}

/// The one row of a namespace: found without a lock, since a scan would lock those of other tests.
async fn row_id(harness: &MySqlHarness, namespace: &str) -> Result<Vec<u8>, Failure> {
    let find = format!("SELECT id FROM leasehold_lease WHERE scope = '{namespace}'");
    Ok(harness.conn().await?.query_first(find).await?.ok_or("no row")?)
}

/// B76: the server's clock jumps forwards, then back. An early successor's token is greater, the
/// old holder hears of it at the next renewal, and nothing that it does hits the successor.
async fn jumps_of_the_clock_make_no_second_holder(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let now = harness.builder(&namespace).connect(harness.url()).await?;
    let ahead = with_setup(&harness, &namespace, &jump(120)).await?;
    let behind = with_setup(&harness, &namespace, &jump(-600)).await?;
    let ttl = Duration::from_secs(60);
    let opts = LeaseOptions::try_once().ttl(ttl);
    let first = now.lease(&key("x"), opts).await?.ok_or("not free")?;
    ensure!(behind.lease(&key("x"), opts).await?.is_none(), "a clock set back freed the lease");
    let second = ahead.lease(&key("x"), opts).await?.ok_or("it did not expire by the new clock")?;
    let error = first.renew().await.err().ok_or("a lease that was taken over was renewed")?;
    ensure!(error.kind() == ErrorKind::Lost, "it said {error}");
    ensure!(!first.is_held() && first.lost().is_set(), "the first holder believes in its lease");
    ensure!(second.token() > first.token(), "{} after {}", second.token(), first.token());
    let error = first.release().await.err().ok_or("a lost lease was released")?;
    ensure!(error.kind() == ErrorKind::Lost, "it said {error}");
    // set back: it stays the second's, who believes in it for a ttl and no longer
    ensure!(now.lease(&key("x"), opts).await?.is_none(), "a stale release hit the next holder");
    ensure!(second.is_held() && second.remaining() <= ttl, "it has {:?}", second.remaining());
    second.release().await?;
    let third = behind.lease(&key("x"), opts).await?.ok_or("not free")?;
    ensure!(third.remaining() <= ttl, "a clock set back makes it {:?}", third.remaining());
    // forwards again: expired at once
    let last = now.lease(&key("x"), opts).await?.ok_or("it did not expire by the new clock")?;
    ensure!(last.token() > third.token(), "{} after {}", last.token(), third.token());
    let error = third.renew().await.err().ok_or("a lease that was taken over was renewed")?;
    ensure!(error.kind() == ErrorKind::Lost, "it said {error}");
    last.release().await?;

    let opts = DedupeOptions::default().in_progress(ttl);
    let first = now.admit(&key("x"), opts).await?.first().ok_or("not the first")?;
    ensure!(behind.admit(&key("x"), opts).await?.first().is_none(), "two are at it");
    let second = ahead.admit(&key("x"), opts).await?.first().ok_or("it was not taken over")?;
    ensure!(second.token() > first.token(), "{} after {}", second.token(), first.token());
    let error = first.complete().await.err().ok_or("two completed it")?;
    ensure!(error.kind() == ErrorKind::Lost, "it said {error}");
    second.complete().await?;
    ensure!(!now.admit(&key("x"), opts).await?.is_first(), "it was done");
    for backend in [now, ahead, behind] {
        backend.close().await?;
    }
    Ok(())
}

/// B76, seen from the other side: the expiry moves. Backwards, the lease is over at once, and its
/// holder hears that from the heartbeat; forwards, nobody believes in it longer than the local
/// deadline says.
async fn jumps_seen_from_the_row_are_told_by_the_next_renewal(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    let namespace = namespace();
    let one = harness.builder(&namespace).connect(harness.url()).await?;
    let two = harness.builder(&namespace).connect(harness.url()).await?;
    let mut conn = harness.conn().await?;
    let ttl = Duration::from_secs(3);
    let opts = LeaseOptions::try_once().ttl(ttl);
    let held = one.lease(&key("x"), opts).await?.ok_or("not free")?;
    let id = row_id(&harness, &namespace).await?;
    let mut moved = async |seconds: i64| {
        let text = format!(
            "UPDATE leasehold_lease SET expires = expires + {seconds} * 1000000 WHERE id = ?"
        );
        conn.exec_drop(text, (&id,)).await
    };
    moved(600).await?;
    ensure!(two.lease(&key("x"), opts).await?.is_none(), "two have the lease");
    ensure!(held.is_held() && held.remaining() <= ttl, "it has {:?}", held.remaining());
    moved(-1_200).await?;
    // whether a renewal came in between or not, it is not to be renewed any more after this
    let next = two.lease(&key("x"), opts.wait(PATIENCE)).await?.ok_or("not to be had")?;
    within(PATIENCE, "the loss", held.lost().wait()).await?;
    ensure!(!held.is_held(), "it is lost and held");
    ensure!(next.token() > held.token(), "{} after {}", next.token(), held.token());
    let error = held.release().await.err().ok_or("a lost lease was released")?;
    ensure!(error.kind() == ErrorKind::Lost, "it said {error}");
    ensure!(one.lease(&key("x"), opts).await?.is_none(), "a stale release hit the next holder");
    Ok(next.release().await?)
}

/// B27: the clock of a statement is that of its start, also if it then waits for a row. The stored
/// expiry is all the same not before the holder's own deadline.
async fn local_deadlines_are_before_the_stored_expiry(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let backend = Arc::new(harness.builder(&namespace).connect(harness.url()).await?);
    let opts = LeaseOptions::try_once().ttl(Duration::from_secs(5)).manual_renewal();
    let lease = backend.lease(&key("x"), opts).await?.ok_or("not free")?;
    let id = row_id(&harness, &namespace).await?;
    lease.release().await?;
    let mut conn = harness.conn().await?;
    for renews in [false, true] {
        let before = if renews { backend.lease(&key("x"), opts).await? } else { None };
        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        let row = "SELECT id FROM leasehold_lease WHERE id = ? FOR UPDATE";
        while tx.exec_first::<Vec<u8>, _, _>(row, (&id,)).await?.is_none() {
            ensure!(!renews, "the row of a held lease is gone");
            // a purge of another test has deleted that of the released one
            tx.rollback().await?;
            backend.lease(&key("x"), opts).await?.ok_or("not free")?.release().await?;
            tx = conn.start_transaction(TxOpts::default()).await?;
        }
        let waits = tokio::spawn({
            let backend = backend.clone();
            async move {
                match before {
                    Some(lease) => lease.renew().await.map(|()| Some(lease)),
                    None => backend.lease(&key("x"), opts.wait(PATIENCE)).await,
                }
            }
        });
        // less than the time after which the server gives up
        tokio::time::sleep(Duration::from_millis(700)).await;
        tx.rollback().await?;
        let lease = match within(PATIENCE, "the lease", waits).await?? {
            Ok(lease) => lease.ok_or("not to be had")?,
            // a renewal never waits for a row
            Err(error) if renews => {
                ensure!(error.kind() != ErrorKind::Lost, "it said {error}");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let local = Instant::now() + lease.remaining();
        let left = "SELECT expires - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) \
                    FROM leasehold_lease WHERE id = ?";
        let left: Option<i64> = harness.conn().await?.exec_first(left, (&id,)).await?;
        let left = Duration::from_micros(u64::try_from(left.ok_or("no row")?)?);
        ensure!(local <= Instant::now() + left, "the holder believes in it too long");
        lease.release().await?;
    }
    Ok(())
}
