//! `leasehold verify`: a part of the suite, on each store.

use super::support::{ALL_STORES, Place, postgres};
use serde_json::json;

#[test]
fn a_part_passes_on_every_store() {
    for store in ALL_STORES {
        let place = at_large(&store());
        let part = ["verify", "-o", "json", "named::excludes", "claim::", "processes::"];
        let ended = place.leasehold(&part);
        let report = without_namespace(ended).code_is(0);
        let report = report.json();
        assert_eq!(report["failed"], json!(0), "{}: {report}", place.name);
        assert!(report["passed"].as_u64() > Some(10), "{}: {report}", place.name);
        let cases = report["cases"].as_array().expect("cases");
        let ran = |name: &str, outcome: &str| {
            cases.iter().any(|case| case["name"] == name && case["outcome"] == outcome)
        };
        assert!(ran("named::excludes", "passed"), "{}: {report}", place.name);
    }
}

#[test]
fn it_leaves_no_table_and_no_number() {
    let place = at_large(&postgres());
    without_namespace(place.leasehold(&["verify", "commit::"])).code_is(0);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let left: Option<String> = runtime.expect("a runtime").block_on(async {
        use sqlx::{Connection, PgConnection};
        let mut conn = PgConnection::connect(&place.url).await.expect("the server answers");
        let table = sqlx::query_scalar("SELECT to_regclass('leasehold_verify_number')::text");
        table.fetch_one(&mut conn).await.expect("the server answers")
    });
    assert_eq!(left, None);
}

#[test]
fn it_refuses_a_namespace_that_others_use() {
    let place = postgres();
    let refused = place.ends(&["verify", "named::excludes"]).code_is(2);
    assert!(refused.err.contains("leaves others alone"), "{}", refused.err);
    without_namespace(place.leasehold(&["verify", "no-such-case"])).code_is(2);
    let listed = place.ends(&["verify", "--list", "-o", "json", "named::"]).code_is(0).json();
    assert!(listed.as_array().is_some_and(|cases| cases.len() > 5), "{listed}");
}

/// A database of its own on the server, so that no other test's table is in the way.
fn at_large(place: &Place) -> Place {
    if place.name != "postgres" {
        return place.clone();
    }
    let name = format!("verify_{:08x}", rand::random::<u32>());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        use sqlx::{Connection, PgConnection};
        let mut conn = PgConnection::connect(&place.url).await.expect("the server answers");
        let create = format!("CREATE DATABASE {name}");
        let create = sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut conn);
        create.await.expect("the server obeys");
    });
    let (base, _) = place.url.rsplit_once('/').expect("a database");
    Place::at("postgres", &format!("{base}/{name}"))
}

fn without_namespace(mut command: std::process::Command) -> super::support::Ended {
    super::support::ended(command.env_remove("LEASEHOLD_NAMESPACE"))
}
