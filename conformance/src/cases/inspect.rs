//! Who holds what, and taking it away by force.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold_core::{Admission, DedupeOptions, HeldName, Holding, HoldingQuery, Kind};

use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, eventually, fails, is_lost, key};
use crate::fault::{Verdict, ensure};
use crate::harness::Handle;

cases!(Backend in "inspect" {
    one_key_of_each_kind_is_shown = "what is held is shown by its key, with kind, holder and token, and by another process" [Inspect];
    what_is_free_is_not_shown = "what was released, committed, abandoned or has expired is not shown as held" [Inspect];
    leases_are_listed_by_prefix = "a listing by prefix has just those leases, whatever characters they are made of" [Inspect];
    a_listing_is_limited = "a listing has at most as many as asked for" [Inspect];
    kinds_are_told_apart = "one name held as all four kinds is shown as four, and as one where one kind is asked for" [Inspect];
    namespaces_are_not_shown_to_others = "another namespace's leases and locks are neither shown nor released by force" [Inspect];
    done_entries_are_shown_on_request = "dedupe entries that are done are shown only if asked for" [Inspect];
    a_lease_is_taken_away = "after a forced release another has the lease, its old holder is told and writes no more" [Inspect];
    a_lock_is_taken_away = "after a forced release another has the lock and its old holder is told" [Inspect];
    a_claim_is_taken_away = "after a forced release another has the claim, and the old one commits nothing" [Inspect];
    an_entry_is_forgotten = "a dedupe entry that was released by force is first again, also if it was done" [Inspect];
    nobody_is_displaced_from_what_is_free = "a forced release of what nobody holds displaces nobody" [Inspect];
});

/// What is held of a key, as another process sees it.
async fn seen(handle: &Handle, query: &HoldingQuery) -> Result<Vec<Holding>, crate::fault::Fault> {
    Ok(handle.backend.holdings(query).await?)
}

async fn one(
    handle: &Handle,
    kind: Kind,
    name: &str,
) -> Result<Option<Holding>, crate::fault::Fault> {
    let query = HoldingQuery::key(&key(name)).kinds([kind]);
    let mut seen = seen(handle, &query).await?;
    ensure!(seen.len() <= 1, "expected one holding of {kind} {name:?}, got {seen:?}");
    if let Some(one) = seen.first() {
        let name = HeldName::Key(key(name));
        ensure!(one.kind == kind && one.name == name, "asked for {kind} {name}, got {one:?}");
    }
    Ok(seen.pop())
}

/// The names of a listing of leases.
async fn leases(
    handle: &Handle,
    query: HoldingQuery,
) -> Result<BTreeSet<String>, crate::fault::Fault> {
    let seen = seen(handle, &query.kinds([Kind::Lease])).await?;
    Ok(seen.iter().map(|holding| holding.name.to_string()).collect())
}

async fn one_key_of_each_kind_is_shown(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let lock = a.locked("lock").await?;
    let lease = a.leased("lease", LONG).await?;
    let claim = a.claimed(&["claim"]).await?;
    let entry = a.admitted("entry", DedupeOptions::default()).await?;
    for (kind, name, token) in [
        (Kind::Lock, "lock", lock.token().await?),
        (Kind::Lease, "lease", lease.token()),
        (Kind::Claim, "claim", claim.token()),
        (Kind::Dedupe, "entry", entry.token()),
    ] {
        let held = one(&b, kind, name).await?;
        let Some(held) = held else {
            return Err(crate::fault::Fault::new(format!("expected {kind} {name:?} to be shown")));
        };
        if let Some(holder) = &held.holder {
            ensure!(holder.pid == std::process::id(), "expected our process, got {holder}");
        }
        let must_know = matches!(kind, Kind::Lock | Kind::Lease);
        ensure!(held.holder.is_some() || !must_know, "expected a holder of {kind}: {held:?}");
        if let Some(shown) = held.token {
            ensure!(shown == token, "expected the token {token} of {kind} {name:?}: {held:?}");
        }
        if let (Kind::Lease, Some(left)) = (kind, held.expires_in) {
            ensure!(left <= LONG, "expected at most the ttl to be left, got {left:?}");
        }
    }
    claim.rollback().await?;
    entry.abandon().await?;
    lease.release().await?;
    Ok(lock.release().await?)
}

async fn what_is_free_is_not_shown(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    a.locked("lock").await?.release().await?;
    a.leased("lease", LONG).await?.release().await?;
    a.claimed(&["claim"]).await?.commit().await?;
    a.admitted("entry", DedupeOptions::default()).await?.abandon().await?;
    for (kind, name) in [
        (Kind::Lock, "lock"),
        (Kind::Lease, "lease"),
        (Kind::Claim, "claim"),
        (Kind::Dedupe, "entry"),
    ] {
        let held = one(&b, kind, name).await?;
        ensure!(held.is_none(), "expected nothing of {kind} {name:?} to be shown: {held:?}");
    }
    let short = a.leased_once("short", Duration::from_millis(300)).await?;
    is_lost(PATIENCE, "a lease without renewals", &short.lost()).await?;
    eventually("an expired lease not to be shown any more", async || {
        Ok(one(&b, Kind::Lease, "short").await?.is_none())
    })
    .await
}

async fn leases_are_listed_by_prefix(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let names = [
        "job/1",
        "job/2",
        "job",
        "Job/1",
        "job%",
        "job_1",
        "job*",
        "job?",
        "job[1]",
        "job\\1",
        "jöb/1",
        "other",
        "job'--",
        "job/\u{1F512}",
    ];
    let mut held = Vec::new();
    for name in names {
        held.push(a.leased(name, LONG).await?);
    }
    for prefix in [
        "",
        "job/",
        "job%",
        "job_",
        "job*",
        "job?",
        "job[",
        "job\\",
        "J",
        "jö",
        "job'",
        "none",
        "job/\u{1F512}",
    ] {
        let expected = names.iter().filter(|name| name.starts_with(prefix));
        let expected: BTreeSet<_> = expected.map(|name| (*name).to_owned()).collect();
        let listed = leases(&b, HoldingQuery::prefix(prefix)).await?;
        ensure!(listed == expected, "prefix {prefix:?}: expected {expected:?}, got {listed:?}");
    }
    for guard in held {
        guard.release().await?;
    }
    Ok(())
}

async fn a_listing_is_limited(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut held = Vec::new();
    for n in 0..5 {
        held.push(a.leased(&format!("x{n}"), LONG).await?);
    }
    for limit in [0, 1, 3, 5, 100] {
        let listed = leases(&a, HoldingQuery::prefix("x").limit(limit)).await?;
        ensure!(listed.len() == limit.min(5), "expected at most {limit}, got {listed:?}");
    }
    drop(held);
    Ok(())
}

async fn kinds_are_told_apart(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let lock = a.locked("x").await?;
    let lease = a.leased("x", LONG).await?;
    let claim = a.claimed(&["x"]).await?;
    let entry = a.admitted("x", DedupeOptions::default()).await?;
    let all = seen(&b, &HoldingQuery::key(&key("x"))).await?;
    let kinds: Vec<_> = all.iter().map(|holding| holding.kind).collect();
    ensure!(kinds == Kind::ALL, "expected each kind once, in order, got {kinds:?}");
    for kind in Kind::ALL {
        let held = one(&b, kind, "x").await?;
        ensure!(held.is_some(), "expected {kind} to be shown alone");
    }
    lease.release().await?;
    let lease = one(&b, Kind::Lease, "x").await?;
    ensure!(lease.is_none(), "expected the released lease not to be shown: {lease:?}");
    claim.rollback().await?;
    entry.abandon().await?;
    Ok(lock.release().await?)
}

async fn namespaces_are_not_shown_to_others(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let other = ctx.harness().open(&format!("{}-other", ctx.namespace())).await?;
    let lock = a.locked("x").await?;
    let lease = a.leased("x", LONG).await?;
    let shown = seen(&other, &HoldingQuery::key(&key("x"))).await?;
    ensure!(shown.is_empty(), "expected nothing of another namespace, got {shown:?}");
    let listed = leases(&other, HoldingQuery::default()).await?;
    ensure!(listed.is_empty(), "expected no lease of another namespace, got {listed:?}");
    for kind in Kind::ALL {
        let displaced = other.backend.force_release(kind, &key("x")).await?;
        ensure!(displaced.is_none(), "another namespace's {kind} was released: {displaced:?}");
    }
    lease.release().await?;
    lock.release().await?;
    Ok(other.backend.close().await?)
}

async fn done_entries_are_shown_on_request(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    a.admitted("x", DedupeOptions::default()).await?.complete().await?;
    let query = HoldingQuery::key(&key("x")).kinds([Kind::Dedupe]);
    let shown = seen(&b, &query).await?;
    ensure!(shown.is_empty(), "expected a done entry not to be shown, got {shown:?}");
    let shown = seen(&b, &query.done(true)).await?;
    let done: Vec<_> = shown.iter().map(|entry| entry.done).collect();
    ensure!(done == [true], "expected the done entry, got {shown:?}");
    Ok(())
}

async fn a_lease_is_taken_away(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let old = a.leased("x", Duration::from_secs(2)).await?;
    ctx.guarded_write(&a, &old, "x", 1).await?;
    let displaced = b.backend.force_release(Kind::Lease, &key("x")).await?;
    ensure!(displaced.is_some(), "expected the holder to be displaced");
    let new = b.leased("x", LONG).await?;
    ensure!(new.token() > old.token(), "expected tokens to rise across a forced release");
    is_lost(PATIENCE, "a lease that was taken away", &old.lost()).await?;
    let late = ctx.guarded_write(&a, &old, "x", 2).await;
    fails("a guarded write of a displaced holder", leasehold_core::ErrorKind::Lost, late)?;
    drop(old);
    ensure!(new.is_held(), "expected the new holder to be spared by the old one's drop");
    ctx.guarded_write(&b, &new, "x", 3).await?;
    ensure!(ctx.committed("x").await? == 3, "expected the new holder's write");
    Ok(new.release().await?)
}

async fn a_lock_is_taken_away(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let old = a.locked("x").await?;
    let token = old.token().await?;
    let displaced = b.backend.force_release(Kind::Lock, &key("x")).await?;
    ensure!(displaced.is_some(), "expected the holder to be displaced");
    let new = b.locked("x").await?;
    ensure!(new.token().await? > token, "expected tokens to rise across a forced release");
    is_lost(PATIENCE, "a lock that was taken away", &old.lost()).await?;
    drop(old);
    ensure!(a.try_lock("x").await?.is_none(), "expected the new holder to be spared");
    ensure!(new.is_held(), "expected the new holder to be spared by the old one's drop");
    new.release().await?;
    Ok(a.locked("x").await?.release().await?)
}

async fn a_claim_is_taken_away(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let mut old = a.claimed(&["x"]).await?;
    ctx.write(&mut old, "x", 1).await?;
    let displaced = b.backend.force_release(Kind::Claim, &key("x")).await?;
    ensure!(displaced.is_some(), "expected the claim to be displaced");
    let mut new = b.claimed(&["x"]).await?;
    ensure!(old.commit().await.is_err(), "expected a displaced claim not to commit");
    let read = ctx.read(&mut new, "x").await?;
    ensure!(read == 0, "expected nothing of the displaced claim, got {read}");
    ctx.write(&mut new, "x", 2).await?;
    new.commit().await?;
    ensure!(ctx.committed("x").await? == 2, "expected the new claim's write");
    Ok(())
}

async fn an_entry_is_forgotten(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let old = a.admitted("x", DedupeOptions::default()).await?;
    let displaced = b.backend.force_release(Kind::Dedupe, &key("x")).await?;
    ensure!(displaced.is_some_and(|entry| !entry.done), "expected an entry in progress");
    let new = b.admitted("x", DedupeOptions::default()).await?;
    let stale = old.complete().await;
    fails("a displaced owner's completion", leasehold_core::ErrorKind::Lost, stale)?;
    new.complete().await?;
    let displaced = a.backend.force_release(Kind::Dedupe, &key("x")).await?;
    ensure!(displaced.is_some_and(|entry| entry.done), "expected an entry that is done");
    let again = a.admission("x").await?;
    ensure!(matches!(again, Admission::First(_)), "expected to be first again, got {again:?}");
    Ok(())
}

async fn nobody_is_displaced_from_what_is_free(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let lock = a.locked("other").await?;
    for kind in Kind::ALL {
        let displaced = a.backend.force_release(kind, &key("x")).await?;
        ensure!(displaced.is_none(), "expected nobody to be displaced, got {displaced:?}");
    }
    ensure!(lock.is_held(), "expected other locks to be spared");
    Ok(lock.release().await?)
}
