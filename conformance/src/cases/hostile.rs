//! Hostile keys: names that would mean something to a store, a script or a shell that took them for
//! more than a name, through every operation of every trait, beside a neighbour that is not touched.

use std::time::Duration;

use leasehold_core::{
    Admission, DedupeOptions, ErrorKind, HoldingQuery, Key, Kind as Held, NameQuery,
};
use rand::seq::IndexedRandom;
use rand::{RngExt, rng};

use super::shared::Kind;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, LONG, PATIENCE, fails, is_waiting, key};
use crate::fault::{Fault, Verdict, ensure};
use crate::harness::Handle;

cases!(Backend in "hostile" {
    locks(Kind::Lock) = "a lock on a hostile key is tried for, waited for, numbered, released and dropped, and nothing else is touched";
    leases(Kind::Lease) = "a lease on a hostile key is tried for, waited for, renewed, verified, released and dropped, and nothing else is touched";
    claims(Kind::Claim) = "a claim of a hostile key is tried for, waited for, written with, committed and rolled back, and nothing else is touched";
    entries = "an entry of a hostile key is admitted, completed, abandoned and first seen in a claim, and nothing else is touched";
    shown_and_forced = "what is held of a hostile key is listed and released by force, and nothing else is touched" [Inspect];
    names_with_a_nul_are_refused = "a hostile name with a NUL or of more than 1,024 bytes is no key";
});

/// What may mean something.
const PIECES: &[&str] = &[
    "'",
    "\"",
    "`",
    "''",
    "\\'",
    "\\",
    "\\\\",
    ";",
    "--",
    ";--",
    "#",
    "/*",
    "*/",
    "(",
    ")",
    "{",
    "}",
    "{}",
    "{a}",
    "[",
    "]",
    "%",
    "%%",
    "%s",
    "%n",
    "%00",
    "_",
    "*",
    "?",
    "$1",
    "$$",
    ":1",
    "?1",
    "@x",
    "\n",
    "\r\n",
    "\t",
    "\u{1b}[2J",
    "\u{8}",
    "\u{7f}",
    "\u{85}",
    "\u{202e}",
    "\u{2066}",
    "\u{200f}",
    "שלום",
    "مرحبا",
    "\u{feff}",
    "\u{2028}",
    "\u{fffd}",
    "\u{ff07}",
    "ʼ",
    "😀",
    " ",
    "NULL",
    "\\0",
    "x'00'",
    "0x27",
    "~",
    "|",
    "&",
    "&&",
    "<",
    ">",
    "^",
    "!",
    "=",
    ",",
    ".",
    "..",
    "/",
    ":",
];

/// Whole ones.
const NAMES: &[&str] = &[
    "' OR '1'='1",
    "\" OR \"1\"=\"1",
    "x'; DROP TABLE leasehold_lease; --",
    "x'); DELETE FROM leasehold.lease; --",
    "x' UNION SELECT 1, 2, 3 --",
    "\\'; SELECT pg_sleep(60); --",
    "'||pg_sleep(60)||'",
    "x' AND SLEEP(60) AND '1'='1",
    "$$; SELECT pg_advisory_unlock_all(); $$",
    "'); SELECT RELEASE_ALL_LOCKS(); --",
    "x\r\n*1\r\n$8\r\nFLUSHALL\r\n",
    "'] redis.call('FLUSHALL') --[[",
    "]]; redis.call('FLUSHALL') --",
    "{x}:lease:{y}",
    "}{",
    "*",
    "a[b-z]?",
    "%' ESCAPE '!",
    "${jndi:ldap://127.0.0.1/x}",
    "$(kill -9 $$)",
    "`kill -9 $$`",
    "{0}{1}{:?}{}",
    "%s%s%s%n",
    "../../etc/passwd",
    "\u{202e}gnp.exe\u{202c}",
    "x\ny",
    "\u{1b}]0;x\u{7}",
];

/// All whole ones, some put together by chance, and one as long as a key may be.
fn names() -> Vec<String> {
    let mut rng = rng();
    let mut names: Vec<String> = NAMES.iter().map(|name| (*name).to_owned()).collect();
    for _ in 0..12 {
        let length = rng.random_range(1..12);
        names.push((0..length).filter_map(|_| PIECES.choose(&mut rng).copied()).collect());
    }
    let mut long = String::new();
    while let Some(piece) = PIECES.choose(&mut rng)
        && long.len() + piece.len() <= 1024
    {
        long.push_str(piece);
    }
    long.push_str(&"'".repeat(1024 - long.len()));
    names.push(long);
    // by chance one may be put together twice
    names.sort_unstable();
    names.dedup();
    names
}

fn named(name: &str, fault: Fault) -> Fault {
    fault.during(format!("key {name:?}"))
}

/// What others hold meanwhile, of each kind, and what must be as it was.
struct Neighbour {
    lock: leasehold_core::LockGuard,
    lease: leasehold_core::LeaseGuard,
    entry: leasehold_core::DedupeGuard,
}

impl Neighbour {
    async fn of(ctx: &Ctx) -> Result<(Self, Handle), Fault> {
        let handle = ctx.open().await?;
        let lock = handle.locked("neighbour").await?;
        let lease = handle.leased("neighbour", LONG).await?;
        let entry = handle.admitted("neighbour", DedupeOptions::default()).await?;
        ctx.guarded_write(&handle, &lease, "neighbour", 1).await?;
        Ok((Self { lock, lease, entry }, handle))
    }

    /// It is still held, and can be parted with.
    async fn part(self, ctx: &Ctx, handle: &Handle, other: &Handle) -> Verdict {
        ensure!(self.lock.is_held() && self.lease.is_held(), "expected the neighbour to be held");
        ensure!(other.try_lock("neighbour").await?.is_none(), "expected the neighbour's lock");
        ensure!(other.try_lease("neighbour").await?.is_none(), "expected the neighbour's lease");
        let entry = other.admission("neighbour").await?;
        let known = matches!(entry, Admission::InProgress { .. });
        ensure!(known, "expected the neighbour's entry to be in progress: {entry:?}");
        let written = ctx.committed("neighbour").await?;
        ensure!(written == 1, "expected the neighbour's number, got {written}");
        ctx.guarded_write(handle, &self.lease, "neighbour", 2).await?;
        self.entry.complete().await?;
        self.lease.release().await?;
        Ok(self.lock.release().await?)
    }
}

async fn locks(ctx: Ctx, kind: Kind) -> Verdict {
    held(ctx, kind).await
}

async fn leases(ctx: Ctx, kind: Kind) -> Verdict {
    held(ctx, kind).await
}

async fn claims(ctx: Ctx, kind: Kind) -> Verdict {
    held(ctx, kind).await
}

async fn held(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (neighbour, handle) = Neighbour::of(&ctx).await?;
    for name in names() {
        one(&ctx, kind, &a, &b, &name).await.map_err(|fault| named(&name, fault))?;
    }
    neighbour.part(&ctx, &handle, &b).await
}

async fn one(ctx: &Ctx, kind: Kind, a: &Handle, b: &Handle, name: &str) -> Verdict {
    let mut first = kind.takes(a, name).await?;
    let token = first.token().await?;
    ensure!(kind.tries(b, name).await?.is_none(), "expected another handle to be excluded");
    // waits on the store, and in its own process behind that
    let mut waiting = Box::pin(kind.waits(b, name, PATIENCE));
    ensure!(is_waiting(&mut waiting).await, "expected another handle to wait");
    first.release().await?;
    let second = waiting.await?;
    let mut second = second.ok_or_else(|| Fault::new("expected the waiter to have it"))?;
    ensure!(second.token().await? > token, "expected tokens to rise");
    drop(second);
    match kind {
        Kind::Lock => {}
        Kind::Lease => {
            let lease = a.lease_within(name, PATIENCE).await?;
            let lease = lease.ok_or_else(|| Fault::new("expected it to be free"))?;
            lease.renew().await?;
            ctx.guarded_write(a, &lease, "hostile", 1).await?;
            lease.release().await?;
            let once = a.leased_once(name, Duration::from_secs(60)).await?;
            once.renew().await?;
            once.release().await?;
        }
        Kind::Claim => {
            let claim = a.claim_within(&[name, "beside"], PATIENCE).await?;
            let mut claim = claim.ok_or_else(|| Fault::new("expected it to be free"))?;
            ctx.write(&mut claim, "hostile", 1).await?;
            claim.rollback().await?;
        }
    }
    // what was dropped is free soon, in each handle
    for handle in [a, b] {
        kind.takes(handle, name).await?.release().await?;
    }
    Ok(())
}

async fn entries(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (neighbour, handle) = Neighbour::of(&ctx).await?;
    for name in names() {
        entry(&a, &b, &name).await.map_err(|fault| named(&name, fault))?;
    }
    neighbour.part(&ctx, &handle, &b).await
}

async fn entry(a: &Handle, b: &Handle, name: &str) -> Verdict {
    let retain = Duration::from_secs(600);
    let first = a.admitted(name, DedupeOptions::default()).await?;
    let next = b.admission(name).await?;
    ensure!(matches!(next, Admission::InProgress { .. }), "expected it in progress: {next:?}");
    first.abandon().await?;
    let second = b.admitted(name, DedupeOptions::default()).await?;
    second.complete().await?;
    let next = a.admission(name).await?;
    ensure!(matches!(next, Admission::Done { .. }), "expected it to be done: {next:?}");
    // in a transaction, and rolled back with it
    let seen = format!("{}-", &name[..name.floor_char_boundary(1000)]);
    for (expected, commits) in [(true, false), (true, true), (false, true)] {
        let mut claim = a.claimed(&["x"]).await?;
        let first = claim.first_seen(&key(&seen), retain).await?;
        ensure!(first == expected, "expected first_seen to be {expected}");
        ensure!(!claim.first_seen(&key(&seen), retain).await?, "expected it to have been seen");
        match commits {
            true => claim.commit().await?,
            false => claim.rollback().await?,
        }
    }
    Ok(())
}

async fn shown_and_forced(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let (neighbour, handle) = Neighbour::of(&ctx).await?;
    for name in names() {
        forced(&a, &b, &name).await.map_err(|fault| named(&name, fault))?;
    }
    a.backend.diagnose().await?;
    neighbour.part(&ctx, &handle, &b).await
}

async fn forced(a: &Handle, b: &Handle, name: &str) -> Verdict {
    let lease = a.leased(name, LONG).await?;
    let entry = a.admitted(name, DedupeOptions::default()).await?;
    for kind in [Held::Lease, Held::Dedupe] {
        for query in [HoldingQuery::key(&key(name)), HoldingQuery::prefix(name)] {
            let seen = b.backend.holdings(&query.clone().kinds([kind])).await?;
            let names: Vec<_> = seen.iter().map(|held| held.name.to_string()).collect();
            let way = if matches!(query.names, NameQuery::Prefix(_)) { "prefix" } else { "key" };
            ensure!(names == [name], "expected the {kind} alone by its {way}, got {names:?}");
        }
    }
    let token = lease.token();
    let other = leasehold_core::FencingToken(token.value() + 1);
    let released = b.backend.release_by_token(Held::Lease, &key(name), other).await?;
    ensure!(!released, "expected another token to release nothing");
    ensure!(
        b.backend.release_by_token(Held::Lease, &key(name), token).await?,
        "expected a release"
    );
    drop(lease);
    let displaced = b.backend.force_release(Held::Dedupe, &key(name)).await?;
    ensure!(displaced.is_some(), "expected the entry to be forgotten");
    let stale = entry.complete().await;
    fails("a displaced owner's completion", ErrorKind::Lost, stale)?;
    let again = a.leased(name, LONG).await?;
    let displaced = b.backend.force_release(Held::Lease, &key(name)).await?;
    ensure!(displaced.is_some(), "expected the lease to be taken away");
    drop(again);
    for kind in [Held::Lock, Held::Claim] {
        let displaced = b.backend.force_release(kind, &key(name)).await?;
        ensure!(displaced.is_none(), "expected no {kind} to be there: {displaced:?}");
        let seen = b.backend.holdings(&HoldingQuery::key(&key(name)).kinds([kind])).await?;
        ensure!(seen.is_empty(), "expected no {kind} to be shown: {seen:?}");
    }
    Ok(())
}

async fn names_with_a_nul_are_refused(_: Ctx) -> Verdict {
    for name in NAMES {
        for (before, after) in [("\0", ""), ("", "\0"), ("x\0", "y")] {
            let name = format!("{before}{name}{after}");
            fails(&format!("{name:?}"), ErrorKind::InvalidKey, Key::new(&name))?;
        }
        let long = name.repeat(1024 / name.len() + 1);
        fails(&format!("{long:?}"), ErrorKind::InvalidKey, Key::new(&long))?;
    }
    Ok(())
}
