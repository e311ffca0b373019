//! Who waits for a lease is woken by the server, and what remains when that fails.
//!
//! The fallback polls so seldom here that it cannot be what woke them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_conformance::{Harness, Link};
use leasehold_core::{Backend, Lease, LeaseGuard, LeaseOptions};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use tokio::task::JoinHandle;

use crate::support::{MySqlHarness, MySqlLink};
use crate::{Verdict, ensure, eventually, key, namespace};

crate::tests!("waiters":
    releases_wake_at_once,
    each_of_many_waiters_is_woken_in_turn,
    leases_of_a_killed_holder_are_taken_when_they_expire,
    lost_sessions_leave_the_fallback,
    listeners_are_few_and_the_rest_is_polled,
    only_who_waits_marks_a_lease,
    nothing_is_left_of_bells_and_listeners,
    dead_idle_connections_fail_no_call,
);

/// How seldom a waiter tries by itself.
const POLL: Duration = Duration::from_secs(30);
/// The look-out's own pauses have grown beyond this after [`GROWTH`].
const SOON: Duration = Duration::from_millis(1_500);
const GROWTH: Duration = Duration::from_secs(3);

type Open = (Arc<MySqlBackend>, MySqlLink);
type Waiter = JoinHandle<leasehold_core::Result<Option<LeaseGuard>>>;

async fn open(harness: &MySqlHarness, namespace: &str) -> leasehold_core::Result<Open> {
    let builder = harness.builder(namespace).max_poll(POLL);
    let (backend, link) = harness.open_with(namespace, builder, 2).await?;
    Ok((Arc::new(backend), link))
}

fn held() -> LeaseOptions {
    LeaseOptions::try_once().ttl(Duration::from_secs(60))
}

fn waiter(backend: &Arc<MySqlBackend>, name: &str) -> Waiter {
    let (backend, name) = (backend.clone(), key(name));
    let opts = LeaseOptions::default().ttl(Duration::from_secs(60)).wait(POLL * 2);
    tokio::spawn(async move { backend.lease(&name, opts).await })
}

async fn listens(harness: &MySqlHarness, link: &MySqlLink) -> Verdict {
    eventually("a listener in the server's queue", || async {
        Ok(!harness.bells(&link.name, "PENDING").await?.is_empty())
    })
    .await
}

/// One holder of four leases, each awaited by another handle.
async fn releases_wake_at_once(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (holder, _link) = open(&harness, &namespace).await?;
    let mut waiting = Vec::new();
    for name in ["a", "b", "c", "d"] {
        let lease = holder.lease(&key(name), held()).await?.ok_or("not free")?;
        let (backend, link) = open(&harness, &namespace).await?;
        let waiter = waiter(&backend, name);
        listens(&harness, &link).await?;
        waiting.push((lease, backend, waiter));
    }
    tokio::time::sleep(GROWTH).await;
    for (lease, _backend, waiter) in waiting {
        ensure!(!waiter.is_finished(), "two have the lease");
        lease.release().await?;
        let released = Instant::now();
        waiter.await??.ok_or("it was not to be had")?.release().await?;
        let took = released.elapsed();
        ensure!(took < SOON, "it was woken {took:?} after the release");
    }
    Ok(())
}

/// The lease goes from handle to handle, and each release wakes those that are left, whoever has
/// taken it in between.
async fn each_of_many_waiters_is_woken_in_turn(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (holder, _link) = open(&harness, &namespace).await?;
    let lease = holder.lease(&key("x"), held()).await?.ok_or("not free")?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (backend, link) = open(&harness, &namespace).await?;
        let waiter = waiter(&backend, "x");
        listens(&harness, &link).await?;
        tasks.spawn(async move {
            let lease = waiter.await??.ok_or("it was not to be had")?;
            // so long that a ring must wake the next
            tokio::time::sleep(Duration::from_millis(300)).await;
            lease.release().await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(backend)
        });
    }
    tokio::time::sleep(GROWTH).await;
    lease.release().await?;
    let released = Instant::now();
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let took = released.elapsed();
    ensure!(took < POLL / 4, "six hand-overs took {took:?}");
    Ok(())
}

/// The holder vanishes with all its connections: the lease is tried for when it expires.
async fn leases_of_a_killed_holder_are_taken_when_they_expire(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    let namespace = namespace();
    let (holder, holder_link) = open(&harness, &namespace).await?;
    let (backend, link) = open(&harness, &namespace).await?;
    let opts = held().ttl(Duration::from_secs(3));
    let lease = holder.lease(&key("x"), opts).await?.ok_or("not free")?;
    let waiter = waiter(&backend, "x");
    listens(&harness, &link).await?;
    holder_link.silence().await?;
    holder_link.end_sessions().await?;
    let killed = Instant::now();
    waiter.await??.ok_or("it was not to be had")?.release().await?;
    let took = killed.elapsed();
    ensure!(took < POLL / 4, "it was had {took:?} after the holder was killed");
    ensure!(!lease.is_held(), "the holder did not give up");
    Ok(())
}

/// B38, B73: neither the listener's nor the bell's session is needed: a release that falls into the
/// gap is found all the same.
async fn lost_sessions_leave_the_fallback(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (holder, holder_link) = open(&harness, &namespace).await?;
    let (backend, link) = open(&harness, &namespace).await?;
    for (of, status) in [(&link, "PENDING"), (&holder_link, "GRANTED")] {
        let lease = holder.lease(&key("x"), held()).await?.ok_or("not free")?;
        let waiter = waiter(&backend, "x");
        listens(&harness, &link).await?;
        tokio::time::sleep(GROWTH).await;
        let sessions = harness.bells(&of.name, status).await?;
        ensure!(!sessions.is_empty(), "no session is {status}");
        for session in sessions {
            harness.admin().await?.query_drop(format!("KILL {session}")).await?;
        }
        lease.release().await?;
        let released = Instant::now();
        waiter.await??.ok_or("it was not to be had")?.release().await?;
        let took = released.elapsed();
        ensure!(took < SOON, "{status}: it was had {took:?} after the release");
        // both come back
        let lease = holder.lease(&key("x"), held()).await?.ok_or("not free")?;
        let waiter = self::waiter(&backend, "x");
        listens(&harness, &link).await?;
        lease.release().await?;
        waiter.await??.ok_or("it was not to be had")?.release().await?;
    }
    Ok(())
}

/// B74: a handle that waits for leases of many holders has four listeners, and polls for the rest.
async fn listeners_are_few_and_the_rest_is_polled(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (backend, link) = open(&harness, &namespace).await?;
    let mut waiting = Vec::new();
    for n in 0..7 {
        let (holder, _link) = open(&harness, &namespace).await?;
        let name = format!("k{n}");
        let lease = holder.lease(&key(&name), held()).await?.ok_or("not free")?;
        waiting.push((holder, lease, waiter(&backend, &name)));
    }
    eventually("four listeners", || async {
        let listeners = harness.bells(&link.name, "PENDING").await?.len();
        ensure_few(listeners)?;
        Ok(listeners == 4)
    })
    .await?;
    tokio::time::sleep(GROWTH).await;
    ensure_few(harness.bells(&link.name, "PENDING").await?.len())?;
    for (_holder, lease, waiter) in waiting {
        lease.release().await?;
        let released = Instant::now();
        waiter.await??.ok_or("it was not to be had")?.release().await?;
        let took = released.elapsed();
        ensure!(took < SOON, "it was woken {took:?} after the release");
    }
    Ok(())
}

fn ensure_few(listeners: usize) -> Verdict {
    ensure!(listeners <= 4, "{listeners} listeners");
    Ok(())
}

/// A mere try costs the holder no ring, nor the one who tries a connection.
async fn only_who_waits_marks_a_lease(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    let (holder, _link) = open(&harness, &namespace).await?;
    let (backend, link) = open(&harness, &namespace).await?;
    let awaited = || async {
        let text = format!("SELECT awaited FROM leasehold_lease WHERE scope = '{namespace}'");
        let awaited: Option<u8> = harness.conn().await?.query_first(text).await?;
        awaited.ok_or_else(|| Box::<dyn std::error::Error + Send + Sync>::from("no row"))
    };
    let lease = holder.lease(&key("x"), held()).await?.ok_or("not free")?;
    for _ in 0..3 {
        ensure!(backend.lease(&key("x"), held()).await?.is_none(), "two have the lease");
    }
    ensure!(awaited().await? == 0, "a try marked the lease");
    ensure!(harness.bells(&link.name, "PENDING").await?.is_empty(), "a try listens");
    let waiter = waiter(&backend, "x");
    eventually("the mark", || async { Ok(awaited().await? == 1) }).await?;
    lease.release().await?;
    let lease = waiter.await??.ok_or("it was not to be had")?;
    ensure!(awaited().await? == 0, "the mark outlives the release");
    Ok(lease.release().await?)
}

/// B74, B85: neither after a close nor after a drop, of the holder and of the waiter.
async fn nothing_is_left_of_bells_and_listeners(harness: Arc<MySqlHarness>) -> Verdict {
    for closes in [true, false] {
        let namespace = namespace();
        let (holder, holder_link) = open(&harness, &namespace).await?;
        let (backend, link) = open(&harness, &namespace).await?;
        let lease = holder.lease(&key("x"), held()).await?.ok_or("not free")?;
        let waiter = waiter(&backend, "x");
        listens(&harness, &link).await?;
        if closes {
            backend.close().await?;
            ensure!(waiter.await?.is_err(), "the wait outlived the close");
            holder.close().await?;
            ensure!(!lease.is_held(), "the lease outlived the close");
        } else {
            waiter.abort();
            drop(waiter.await);
            drop(lease);
            drop((backend, holder));
        }
        for link in [&holder_link, &link] {
            link.pool.clone().disconnect().await?;
            eventually("the end of all its connections", || async {
                Ok(harness.sessions(&link.name).await?.is_empty())
            })
            .await?;
        }
        ensure!(harness.leftovers(&namespace).await?.is_empty(), "something is left behind");
    }
    Ok(())
}

/// The server ends all connections of a handle, as by a restart: neither the release nor the next
/// acquisition fails for those that were idle in the pool.
async fn dead_idle_connections_fail_no_call(harness: Arc<MySqlHarness>) -> Verdict {
    let namespace = namespace();
    for connections in [1, 8] {
        let builder = harness.builder(&namespace).own_connections(connections);
        let (backend, link) = harness.open_with(&namespace, builder, 2).await?;
        let backend = Arc::new(backend);
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..32 {
            let backend = backend.clone();
            tasks.spawn(async move { backend.lease(&key(&format!("k{n}")), held()).await });
        }
        let mut leases = Vec::new();
        while let Some(done) = tasks.join_next().await {
            leases.push(done??.ok_or("not free")?);
        }
        for lease in leases.drain(..2) {
            link.end_sessions().await?;
            lease.release().await?;
        }
        link.end_sessions().await?;
        drop(backend.lease(&key("more"), held()).await?.ok_or("not free")?);
        for lease in leases {
            lease.release().await?;
        }
        backend.close().await?;
    }
    Ok(())
}
