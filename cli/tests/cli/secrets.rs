//! No password is ever shown.

use super::support::{ended, leasehold, mariadb, mysql, postgres, redis, valkey};

const SECRET: &str = "s3cr3t-w0rd";

/// Where nobody listens.
const NOWHERE: [&str; 3] = [
    "postgres://me:s3cr3t-w0rd@127.0.0.1:1/app?sslmode=disable",
    "mysql://me:s3cr3t-w0rd@127.0.0.1:1/app",
    "redis://me:s3cr3t-w0rd@127.0.0.1:1/0?command_limit=300ms",
];

#[test]
fn not_of_a_store_that_does_not_answer() {
    for url in NOWHERE {
        for args in [
            &["run", "x", "--", "true"][..],
            &["list"],
            &["show", "x"],
            &["release", "--force", "--kind", "lock", "x"],
            &["migrate"],
            &["housekeep"],
            &["doctor"],
            &["dedupe", "x"],
            &["verify", "lease::excludes"],
            &["bench"],
        ] {
            for format in ["human", "json"] {
                let args = [args_before(args), &["-vvv", "-o", format], args_after(args)].concat();
                let ended = ended(leasehold(&args).env("LEASEHOLD_URL", url));
                assert_ne!(ended.code, 0, "{args:?}: {ended:?}");
                let said = format!("{}{}", ended.out, ended.err);
                assert!(!said.contains(SECRET), "{args:?} on {url}: {said}");
                assert!(!said.is_empty(), "{args:?} says nothing");
            }
        }
    }
}

/// The subcommand, after which options may stand.
fn args_before<'a>(args: &'a [&'a str]) -> &'a [&'a str] {
    &args[..1]
}

fn args_after<'a>(args: &'a [&'a str]) -> &'a [&'a str] {
    &args[1..]
}

#[test]
fn not_by_help_nor_by_what_is_said_about_a_wrong_command_line() {
    let url = NOWHERE[0];
    for args in [
        &["--help"][..],
        &["run", "--help"],
        &["man"],
        &["completions", "bash"],
        &["--stroe", url, "list"],
        &["--stroe=postgres://me:s3cr3t-w0rd@db/app", "list"],
        &[url],
        &["list", "--limit", url],
        &["list", "-s", "oracle://me:s3cr3t-w0rd@db/app"],
        &["list", "-s", "postgres://me:s3cr3t-w0rd@db/app?no_such_option=1"],
        &["list", "-s", "postgres://me:s3cr3t-w0rd/@db:x/app"],
    ] {
        let ended = ended(leasehold(args).env("LEASEHOLD_URL", url));
        let said = format!("{}{}", ended.out, ended.err);
        assert!(!said.contains(SECRET), "{args:?}: {said}");
    }
}

#[test]
fn not_where_all_is_well() {
    // a role that needs its password is not there: the server trusts everyone, and is told one
    let place = postgres();
    let url = place.url.replace("postgres@", "postgres:s3cr3t-w0rd@");
    assert!(url.contains(SECRET), "{url}");
    for args in [
        &["run", "x", "-vvv", "--", "echo", "ran"][..],
        &["list", "-vvv"],
        &["doctor", "-vvv", "-o", "json"],
        &["migrate", "-vvv", "-o", "json"],
        &["dedupe", "x", "-vvv"],
    ] {
        let ended = ended(place.leasehold(args).env("LEASEHOLD_URL", &url)).code_is(0);
        let said = format!("{}{}", ended.out, ended.err);
        assert!(!said.contains(SECRET), "{args:?}: {said}");
    }
}

#[test]
fn not_where_the_password_is_wrong() {
    for place in [mysql(), mariadb(), redis(), valkey()] {
        let (scheme, rest) = place.url.split_once("://").expect("a url");
        let address = rest.split_once('@').map_or(rest, |(_, address)| address);
        let url = format!("{scheme}://me:{SECRET}@{address}");
        for args in [
            &["run", "x", "-vvv", "--", "true"][..],
            &["list", "-vvv"],
            &["watch", "-vvv"],
            &["doctor", "-vvv", "-o", "json"],
            &["verify", "-vvv", "lease::excludes"],
        ] {
            let ended = ended(place.leasehold(args).env("LEASEHOLD_URL", &url));
            assert_ne!(ended.code, 0, "{args:?} on {}: {ended:?}", place.name);
            let said = format!("{}{}", ended.out, ended.err);
            assert!(!said.contains(SECRET), "{args:?} on {}: {said}", place.name);
            assert!(!said.is_empty(), "{args:?} on {} says nothing", place.name);
        }
    }
}
