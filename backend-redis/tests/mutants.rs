//! Redis, spoiled: the suite must see what is missing. Each mutant has a wire on which one of the
//! scripts is altered, and with it the name by which the server knows it.

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use fred::util::sha1_hash;
use leasehold_conformance::mutants::{self, Altered, Mutant, Rewriter};
use leasehold_conformance::servers::Server;
use leasehold_core::{Error, ErrorKind, Result};

const ACQUIRE: &str = include_str!("../src/scripts/acquire.lua");
const ADMIT: &str = include_str!("../src/scripts/admit.lua");
const CLAIM: &str = include_str!("../src/scripts/claim.lua");
const COMMIT: &str = include_str!("../src/scripts/commit.lua");
const DISPLACE: &str = include_str!("../src/scripts/displace.lua");
const RELEASE: &str = include_str!("../src/scripts/release.lua");
const RENEW: &str = include_str!("../src/scripts/renew.lua");
const TOKEN: &str = include_str!("../src/scripts/token.lua");
const SETTLE: &str = include_str!("../src/scripts/settle.lua");

/// A script, the part of it that is replaced, and by what.
type Alters = (&'static str, &'static str, &'static str);

const fn altered(name: &'static str, case: &'static str, alters: Alters) -> Mutant<Alters> {
    Mutant { name, case, alters }
}

const TAKE: &str = "owner .. ':' .. token, 'NX', 'GET', 'PX', ttl)";

#[rustfmt::skip] // a table
const TABLE: &[Mutant<Alters>] = &[
    // named locks and leases
    altered("sets a lock without looking", "named::excludes",
        (ACQUIRE, "'NX', 'GET', 'PX', ttl)", "'PX', ttl)")),
    altered("takes leases that others hold", "lease::excludes",
        (ACQUIRE, "'NX', 'GET', 'PX', ttl)", "'PX', ttl)")),
    altered("gives all the same token", "lease::tokens_rise",
        (ACQUIRE, "local token, gone = now,", "local token, gone = '1',")),
    altered("gives what was handed on the token before it", "named::tokens_rise_along_the_queue",
        (TOKEN, "math.max(now, last + 1, string.match(held, ':(%d+)', 33) + 1)",
            "string.match(held, ':(%d+)', 33)")),
    altered("keeps a lease too long", "expiry::vanished_holder_is_survived",
        (ACQUIRE, TAKE, "owner..':'..token,'NX','GET','PX',ttl * 99)")),
    altered("lets a lease expire early", "expiry::vanished_holder_is_survived",
        (ACQUIRE, TAKE, "owner..':'..token,'NX','GET','PX',ttl-400)")),
    altered("makes a lease eternal once somebody wants it", "expiry::vanished_holder_is_survived",
        (ACQUIRE, "held .. '!', 'KEEPTTL')", "held .. '!')")),
    altered("does not note that somebody waits", "lease::waiters_are_woken",
        (ACQUIRE, "if sub(held, -1) ~= '!' then", "if false then")),
    altered("tells nobody of a release", "lease::waiters_are_woken",
        (RELEASE, "call(ARGV[2], ARGV[3], ARGV[2 * n + 1])", "")),
    altered("releases without comparing the owner", "expiry::stale_release_spares_the_successor",
        (RELEASE, "and sub(held, 1, 32) == owner then", "then")),
    altered("does not release", "lease::can_be_taken_again_after_release",
        (RELEASE, "call('DEL', lock)", "")),
    altered("does not unlock", "named::can_be_taken_again_after_release",
        (RELEASE, "call('DEL', lock)", "")),
    altered("renews nothing and says it did", "lease::heartbeat_outlives_the_ttl",
        (RENEW, "redis.call('PEXPIRE', KEYS[i], ttl)", "1")),
    altered("releases whatever token it has", "by_token::a_successor_is_spared",
        (DISPLACE, "'^%x+:(%d+)!?$') ~= ARGV[4] then", "'^%x+:(%d+)!?$') == nil then")),
    altered("releases nothing by a token", "by_token::frees_what_a_dead_holder_left",
        (DISPLACE, "redis.call('DEL', KEYS[1])", "")),
    altered("tells nobody of a release by a token", "by_token::waiters_are_woken",
        (DISPLACE, "redis.call(ARGV[1], ARGV[2], ARGV[3])", "")),
    // claims
    altered("claims what others hold", "claim::excludes",
        (CLAIM, "if wait then return {0, wait} end", "")),
    altered("claims the last key only", "claim::sets_are_all_or_nothing",
        (CLAIM, "local left = redis.call('PTTL', KEYS[i])", "local left = i == #KEYS and 9")),
    altered("does not end a claim with its commit", "claim::can_be_taken_again_after_release",
        (COMMIT, "redis.call('DEL', KEYS[i])\n", "\n")),
    altered("commits without the writes", "commit::writes_appear_at_the_commit",
        (COMMIT, "redis.pcall(unpack(writes[i]))", "true")),
    altered("forgets what a claim saw", "commit::first_seen_is_remembered_by_the_commit",
        (COMMIT, "kept[i][1], 'PX', kept[i][2])", "kept[i][1], 'PX', 1)")),
    // dedupe
    altered("admits duplicates", "dedupe::admits_once",
        (ADMIT, "elseif state and tonumber(till) > now then", "elseif false then")),
    altered("lets nobody take an entry over", "dedupe::unfinished_is_taken_over",
        (ADMIT, "elseif state and tonumber(till) > now then", "elseif state then")),
    altered("lets an entry be taken over at once", "dedupe::unfinished_is_taken_over",
        (ADMIT, "now + within * 1000)", "now + within)")),
    altered("completes for a stale owner", "dedupe::stale_owner_cannot_complete",
        (SETTLE, "if by ~= ARGV[1] then return 0 end", "")),
    altered("abandons for a stale owner", "dedupe::stale_owner_cannot_abandon",
        (SETTLE, "if by == ARGV[1] and state ~= 'd' then", "if by and state ~= 'd' then")),
    altered("does not abandon", "dedupe::abandon_makes_it_first_again",
        (SETTLE, "return redis.call('DEL', KEYS[1])", "return 1")),
    altered("forgets what is done early", "dedupe::complete_is_kept_for_retain",
        (SETTLE, "':0', 'PX', ARGV[2])", "':0', 'PX', 50)")),
];

fn main() -> ExitCode {
    mutants::run(TABLE, open)
}

fn open(alters: Option<&Alters>) -> Result<Altered> {
    let server = Server::shared(support::kind()).map_err(failed)?;
    let mut rewrites = Vec::new();
    if let Some((script, from, to)) = alters {
        if script.matches(from).count() != 1 {
            return Err(failed(format!("not once in its script: {from}")));
        }
        let padded = format!("{to}{}", " ".repeat(from.len().saturating_sub(to.len())));
        rewrites.push(((*from).to_owned(), padded.clone()));
        rewrites.push((sha1_hash(script), sha1_hash(&script.replace(from, &padded))));
    }
    let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
    let rewriter = Rewriter::start(upstream, &rewrites).map_err(failed)?;
    let address = format!("redis://{}/0 {}", rewriter.addr(), server.port());
    let harness = support::RedisHarness::join(&address)?;
    Ok(Altered { harness, rewriter: Some(rewriter) })
}

#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
fn failed(error: impl ToString) -> Error {
    Error::new(ErrorKind::Backend, error.to_string())
}
