//! URLs and options of any sort: no panic, and no password in what is shown.

use std::time::Duration;

use leasehold::redacted;
use proptest::prelude::*;

/// Parts of the password, told from everything else.
const SECRET: [&str; 2] = ["Xq7uzpart", "Wk9yhpart"];

fn shows_a_secret(text: &str) -> bool {
    SECRET.iter().any(|part| text.contains(part))
}

fn scheme() -> impl Strategy<Value = String> {
    let known = [
        "postgres",
        "postgresql",
        "mysql",
        "mariadb",
        "redis",
        "valkey",
        "rediss",
        "redis-cluster",
        "redis-sentinel",
        "redis-quorum",
        "sqlite",
        "memory",
        "POSTGRES",
        "http",
        "",
    ];
    prop_oneof![prop::sample::select(known.to_vec()).prop_map(str::to_owned), "[a-z]{1,6}"]
}

/// A password with characters between its parts that mean something in a URL.
fn password() -> impl Strategy<Value = String> {
    let between = prop_oneof!["[/?#@:&=%+ ;]{0,3}", "%[0-9a-f]{2}", "\\PC{0,2}"];
    between.prop_map(|between| format!("{}{between}{}", SECRET[0], SECRET[1]))
}

/// A name that means `password`, as it may be written.
fn option() -> impl Strategy<Value = String> {
    let names =
        ["password", "PASSWORD", "p%61ssword", "sslpassword", "%70assword", "sentinelPassword"];
    prop::sample::select(names.to_vec()).prop_map(str::to_owned)
}

/// A URL with a password, at one of the places where one can be.
fn url() -> impl Strategy<Value = String> {
    let host =
        prop_oneof![Just("127.0.0.1:1".to_owned()), "[a-z]{0,3}", Just("[::1]:1".to_owned())];
    let tail = prop_oneof![Just(String::new()), "/[a-z0-9]{0,4}", "/\\PC{0,4}"];
    let parts = (scheme(), "[a-z]{0,3}", password(), host, tail, option(), any::<bool>());
    parts.prop_map(|(scheme, user, password, host, tail, option, in_userinfo)| {
        if in_userinfo {
            return format!("{scheme}://{user}:{password}@{host}{tail}");
        }
        // among the options an ampersand ends it: the rest would be another option
        let password = password.replace(['&', '#'], "%26");
        format!("{scheme}://{host}{tail}?{option}={password}")
    })
}

fn everything(error: &leasehold::Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let causes: Vec<_> = causes.map(|cause| format!("{cause} {cause:?}")).collect();
    format!("{error} {error:?} {error:#?} {}", causes.join(" "))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_redacted_url_shows_no_password(url in url()) {
        let shown = redacted(&url);
        prop_assert!(!shows_a_secret(&shown), "{url} is shown as {shown}");
        prop_assert_eq!(redacted(&shown), shown, "hiding twice hides more");
    }

    #[test]
    fn any_text_can_be_redacted(text in "\\PC{0,60}", bytes in prop::collection::vec(any::<char>(), 0..40)) {
        drop(redacted(&text));
        drop(redacted(&bytes.into_iter().collect::<String>()));
    }

    #[test]
    fn a_url_without_a_password_is_shown_as_it_is(
        scheme in "[a-z]{1,8}", host in "[a-z0-9.]{1,12}", port in 1_u16..,
        path in "(/[a-z0-9]{0,8})?", value in "[a-z0-9]{0,8}",
    ) {
        let url = format!("{scheme}://{host}:{port}{path}?namespace={value}");
        prop_assert_eq!(redacted(&url), url);
    }
}

/// What cannot be opened says why, without the password; nothing panics, nothing hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_connecting_show_no_password() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut tried = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let url = url().new_tree(&mut runner).expect("a url").current();
        // that one opens a file by its name
        if url.to_lowercase().starts_with("sqlite") {
            continue;
        }
        tried.spawn(async move {
            let limit = Duration::from_secs(2);
            let opened = tokio::time::timeout(limit, leasehold::Store::connect(&url)).await;
            let said = match opened {
                Ok(Err(error)) => everything(&error),
                Ok(Ok(store)) => format!("{} {store:?}", store.url()),
                Err(_) => String::new(), // it tries on, as it should where a server may come yet
            };
            assert!(!shows_a_secret(&said), "{url} shows its password: {said}");
        });
    }
    let mut count = 0;
    while let Some(done) = tried.join_next().await {
        done.expect("no panic and no password");
        count += 1;
    }
    assert!(count > 200);
}

/// Values of any sort where an option is expected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_of_any_sort_are_taken_or_refused() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let values = prop_oneof![
        Just("0".to_owned()),
        Just("0s".to_owned()),
        Just("1ns".to_owned()),
        Just("18446744073709551615".to_owned()),
        Just("99999999999999999999y".to_owned()),
        Just("584942417355y".to_owned()),
        Just("-1".to_owned()),
        Just(String::new()),
        "\\PC{0,12}",
        "[0-9]{1,30}(ns|s|h|y)?",
    ];
    let names = [
        "namespace",
        "app",
        "keepalive",
        "answer",
        "lock_ttl",
        "claim_ttl",
        "ttl",
        "max_held",
        "pool_max",
        "command_limit",
        "busy_timeout",
        "table",
        "schema",
    ];
    let options = (prop::sample::select(names.to_vec()), values);
    let schemes =
        ["memory:", "postgres://127.0.0.1:1/a", "mysql://127.0.0.1:1/a", "redis://127.0.0.1:1"];
    let mut tried = tokio::task::JoinSet::new();
    for n in 0..400 {
        let (name, value) = options.new_tree(&mut runner).expect("an option").current();
        let url = format!("{}?{name}={value}", schemes[n % schemes.len()]);
        tried.spawn(async move {
            let limit = Duration::from_secs(2);
            drop(tokio::time::timeout(limit, leasehold::Store::connect(&url)).await);
        });
    }
    while let Some(done) = tried.join_next().await {
        done.expect("no panic");
    }
}
