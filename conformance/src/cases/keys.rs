//! Keys: any two of them differ, on every backend, in every kind and namespace.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Admission, ErrorKind, Key};
use tokio::sync::Semaphore;

#[allow(clippy::wildcard_imports)] // a kind of what is held, and its guard
use super::shared::*;
use crate::case::cases;
use crate::ctx::{Ctx, HandleExt, eventually, fails, key};
use crate::fault::{Fault, Verdict, ensure};

cases!(Backend in "keys" {
    zoo_of_locks(Kind::Lock) = "locks on strange and similar keys are all distinct, and each excludes (B39, B41, B70)";
    zoo_of_leases(Kind::Lease) = "leases on strange and similar keys are all distinct, and each excludes (B102, B103)";
    zoo_of_claims(Kind::Claim) = "claims of strange and similar keys are all distinct, and each excludes (B41, B103)";
    zoo_of_dedupe = "strange and similar keys are all admitted, and each is remembered (B102, B103)";
    zoo_within_claims = "strange and similar keys are all seen first inside a claim (B103)";
    zoo_in_one_claim = "one claim holds all strange and similar keys together";
    invalid_keys_are_refused = "an empty key, one with a NUL and one that is too long are refused before any I/O (B35)";
    thousands_of_names_do_not_collide = "thousands of locked names are all distinct (B19)";
    kinds_never_meet = "a lock, a lease, a claim and an entry of one key do not exclude one another (B22)";
    namespaces_never_meet = "equal keys of two namespaces, and keys that look like one, do not exclude each other (B22)";
});

/// Keys that differ, and that a store may take for one another.
pub(super) fn zoo() -> Vec<String> {
    let mut zoo: Vec<String> = [
        // case and accents, composed and decomposed
        "Job",
        "job",
        "JOB",
        "jób",
        "jo\u{301}b",
        "i",
        "ı",
        "İ",
        "I",
        "ß",
        "ss",
        "SS",
        "ẞ",
        "ﬀ",
        "ff",
        "Å",
        "A\u{30a}",
        "\u{212b}",
        "ñ",
        "n",
        "Ａ",
        "A",
        "a",
        "ª",
        "Σ",
        "σ",
        "ς",
        // blanks and what cannot be seen
        "x",
        "x ",
        " x",
        "x  ",
        "x\t",
        "x\n",
        "\u{a0}x",
        "x\u{200b}",
        "x\u{200d}",
        "x\u{ad}",
        "\u{feff}x",
        "x\u{301}",
        " ",
        "\u{1}",
        "\u{7f}",
        "\u{202e}x",
        // emoji, which some collations take for one
        "😀",
        "😁",
        "👩\u{200d}🚀",
        "👩🚀",
        "❤",
        "❤\u{fe0f}",
        "𝒙",
        // what has a meaning to some store, shell or language
        ":",
        "a:b",
        "a::b",
        "{}",
        "}{",
        "{a}",
        "a{b}c",
        "{a",
        "a}",
        "%",
        "%s",
        "%25",
        "a%b",
        "_",
        "a_b",
        "'",
        "\"",
        "`",
        "''",
        "\\",
        "\\'",
        "--",
        "; drop table x",
        "/*",
        "*",
        "?",
        "[a]",
        "^a",
        "$1",
        "${x}",
        "../x",
        "/",
        "//",
        "a/b",
        "a\\b",
        "a.b",
        "a,b",
        "a;b",
        "a=b",
        "a&b",
        "<a>",
        "#",
        "@",
        "!",
        "null",
        "NULL",
        "true",
        "0",
        "00",
        "0.0",
        "-0",
        "1",
        "01",
        "1.0",
        "1e0",
        "NaN",
        "-1",
        "9223372036854775807",
        "-9223372036854775808",
        "18446744073709551615",
    ]
    .into_iter()
    .map(ToOwned::to_owned)
    .collect();
    // long ones that share their beginning or their end
    for length in [63, 64, 65, 191, 192, 255, 256, 767, 768, 1023] {
        zoo.push(format!("{}1", "x".repeat(length)));
    }
    for length in [64, 255, 1023] {
        zoo.push(format!("{}2", "x".repeat(length)));
        zoo.push(format!("2{}", "x".repeat(length)));
    }
    zoo.push("x".repeat(1024));
    zoo.push("é".repeat(512));
    zoo.push("😀".repeat(256));
    zoo.push(format!("https://example.org/{}", "a%20b/?q=é&".repeat(35)));
    zoo
}

async fn zoo_of(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let names = zoo();
    let mut held = Vec::new();
    for name in &names {
        let taken = kind.tries(&a, name).await?;
        held.push(taken.ok_or_else(|| {
            Fault::new(format!("expected {} to be free: it is taken for another key", shown(name)))
        })?);
    }
    for name in &names {
        let taken = kind.tries(&b, name).await?;
        ensure!(taken.is_none(), "expected {} to exclude another handle", shown(name));
    }
    for (name, held) in names.iter().zip(held) {
        held.release().await.map_err(|fault| fault.during(shown(name)))?;
    }
    Ok(())
}

fn shown(name: &str) -> String {
    let start: String = name.chars().take(40).collect();
    format!("{start:?} ({} bytes)", name.len())
}

async fn zoo_of_locks(ctx: Ctx, kind: Kind) -> Verdict {
    zoo_of(ctx, kind).await
}

async fn zoo_of_leases(ctx: Ctx, kind: Kind) -> Verdict {
    zoo_of(ctx, kind).await
}

/// An open claim may keep a connection of a pool, so it is not one claim per key: the zoo is parted
/// in two by each bit of the keys' numbers, and any two keys are once on different sides.
async fn zoo_of_claims(ctx: Ctx, kind: Kind) -> Verdict {
    let (a, b) = ctx.two().await?;
    let names = zoo();
    for bit in 0..=names.len().ilog2() {
        let side = |side: usize| -> Vec<&str> {
            let of_side =
                names.iter().enumerate().filter(|(number, _)| (number >> bit) & 1 == side);
            of_side.map(|(_, name)| name.as_str()).collect()
        };
        let first = a.claimed(&side(0)).await?;
        let second = b.try_claim(&side(1)).await?;
        let second = second.ok_or_else(|| {
            Fault::new(format!(
                "expected two sets of distinct keys to be claimed, one key is taken for another: {:?} and {:?}",
                side(0),
                side(1)
            ))
        })?;
        for name in [side(0)[0], side(1)[0], side(0)[side(0).len() - 1], side(1)[side(1).len() - 1]]
        {
            for handle in [&a, &b] {
                let taken = kind.tries(handle, name).await?;
                ensure!(taken.is_none(), "expected {} to exclude", shown(name));
            }
        }
        first.rollback().await?;
        second.rollback().await?;
    }
    Ok(())
}

async fn zoo_in_one_claim(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let names = zoo();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let claim = a.claimed(&all).await?;
    ensure!(claim.keys().len() == names.len(), "expected {} distinct keys", names.len());
    for name in [&names[0], &names[names.len() / 2], &names[names.len() - 1]] {
        ensure!(b.try_claim(&[name]).await?.is_none(), "expected {} to be claimed", shown(name));
    }
    claim.commit().await?;
    b.claimed(&all).await?.rollback().await?;
    Ok(())
}

async fn zoo_of_dedupe(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let names = zoo();
    let mut guards = Vec::new();
    for name in &names {
        let first = a.admission(name).await?.first();
        guards.push(first.ok_or_else(|| {
            Fault::new(format!("expected {} to be first: it is taken for another key", shown(name)))
        })?);
    }
    for (name, guard) in names.iter().zip(guards) {
        let next = b.admission(name).await?;
        let known = matches!(next, Admission::InProgress { .. });
        ensure!(known, "expected {} to be in progress, it is {next:?}", shown(name));
        guard.complete().await?;
        let next = b.admission(name).await?;
        let known = matches!(next, Admission::Done { .. });
        ensure!(known, "expected {} to be done, it is {next:?}", shown(name));
    }
    Ok(())
}

async fn zoo_within_claims(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let retain = Duration::from_secs(600);
    for (handle, expected) in [(&a, true), (&b, false)] {
        let mut claim = handle.claimed(&["x"]).await?;
        for name in zoo() {
            let first = claim.first_seen(&key(&name), retain).await?;
            ensure!(first == expected, "expected first_seen of {} to be {expected}", shown(&name));
        }
        claim.commit().await?;
    }
    Ok(())
}

async fn invalid_keys_are_refused(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    for name in ["", "\0", "a\0b", &"x".repeat(1025), &"é".repeat(513)] {
        fails(&shown(name), ErrorKind::InvalidKey, Key::new(name))?;
    }
    a.locked(&"x".repeat(1024)).await?.release().await?;
    Ok(())
}

async fn thousands_of_names_do_not_collide(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    let mut tasks = tokio::task::JoinSet::new();
    let at_once = Arc::new(Semaphore::new(100)); // a pool is not what is tested here
    for number in 0..2000 {
        let (a, at_once) = (a.clone(), at_once.clone());
        tasks.spawn(async move {
            let _turn = at_once.acquire().await;
            let name = format!("job/{number}");
            let taken = a.try_lock(&name).await?;
            taken.ok_or_else(|| {
                Fault::new(format!("expected {name:?} to be free: it is taken for another key"))
            })
        });
    }
    let mut guards = Vec::new();
    while let Some(guard) = tasks.join_next().await {
        guards.push(guard??);
    }
    drop(guards);
    Ok(())
}

async fn kinds_never_meet(ctx: Ctx) -> Verdict {
    let (a, b) = ctx.two().await?;
    let entry = a.admission("x").await?.first();
    let entry = entry.ok_or_else(|| Fault::new("expected the key to be admitted"))?;
    let mut held = Vec::new();
    for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
        let taken = kind.tries(&b, "x").await?;
        held.push(taken.ok_or_else(|| {
            Fault::new(format!("expected a {kind:?} not to meet the other kinds of its key"))
        })?);
    }
    for (kind, held) in [Kind::Lock, Kind::Lease, Kind::Claim].into_iter().zip(held) {
        ensure!(
            kind.tries(&a, "x").await?.is_none(),
            "expected the {kind:?} to exclude its own kind"
        );
        held.release().await?;
        let again = kind.tries(&a, "x").await?;
        let again = again.ok_or_else(|| Fault::new(format!("expected the {kind:?} to be free")))?;
        again.release().await?;
    }
    entry.complete().await?;
    let next = b.admission("x").await?;
    ensure!(matches!(next, Admission::Done { .. }), "expected the entry to stay, it is {next:?}");
    Ok(())
}

async fn namespaces_never_meet(ctx: Ctx) -> Verdict {
    let a = ctx.open().await?;
    // put one after the other, namespace and key read the same in the first two pairs
    for (suffix, own, other) in [("1", "1x", "x"), ("-", "-x", "x"), ("2", "x", "x")] {
        let namespace = format!("{}{suffix}", ctx.namespace());
        let foreign = ctx.harness().open(&namespace).await?;
        for kind in [Kind::Lock, Kind::Lease, Kind::Claim] {
            let held = kind.takes(&a, own).await?;
            let taken = kind.tries(&foreign, other).await?;
            let taken = taken.ok_or_else(|| {
                Fault::new(format!(
                    "expected the {kind:?} of another namespace not to be in the way"
                ))
            })?;
            taken.release().await?;
            held.release().await?;
        }
        let entry = a.admission(own).await?;
        let next = foreign.admission(other).await?;
        ensure!(next.is_first(), "expected another namespace to have entries of its own: {next:?}");
        drop((entry, next));
        eventually("nothing to be left in the other namespace", || async {
            Ok(ctx.harness().leftovers(&namespace).await?.is_empty())
        })
        .await?;
        foreign.backend.close().await?;
    }
    Ok(())
}
