//! `leasehold doctor` finds planted faults.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::support::{ALL_STORES, Ended, Place, mariadb, mysql, postgres, redis, valkey};
use leasehold_conformance::servers::{Kind, PgBouncer, Server};
use mysql_async::prelude::Queryable;
use serde_json::Value;
use sqlx::{Connection, PgConnection};

/// What it finds.
#[track_caller]
fn examined(place: &Place) -> (Ended, Vec<Value>) {
    let ended = place.ends(&["doctor", "-o", "json"]);
    let report = ended.json();
    let findings = report["findings"].as_array().expect("findings").clone();
    for finding in &findings {
        let is_fine = finding["severity"] == "ok";
        let advice = finding["advice"].as_str().expect("a text");
        assert!(is_fine || advice.len() > 10, "{}: no advice: {finding}", place.name);
    }
    let faults = findings.iter().filter(|finding| finding["severity"] == "fault").count();
    assert_eq!(report["faults"], serde_json::json!(faults));
    assert_eq!(ended.code, i32::from(faults > 0), "{ended:?}");
    (ended, findings)
}

/// How bad the findings of a topic are.
fn of<'a>(findings: &'a [Value], topic: &str) -> Vec<&'a str> {
    let of_topic = findings.iter().filter(|finding| finding["topic"] == topic);
    of_topic.filter_map(|finding| finding["severity"].as_str()).collect()
}

fn sql(url: &str, statements: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let mut conn = PgConnection::connect(url).await.expect("the server answers");
        let run = sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut conn);
        run.await.expect("the server obeys");
    });
}

/// A role that may log in: the store as it sees it.
fn role(place: &Place) -> (String, Place) {
    let role = format!("doctor_{}", rand::random::<u32>());
    sql(&place.url, &format!("CREATE ROLE {role} LOGIN"));
    let url = place.url.replace("//postgres@", &format!("//{role}@"));
    assert_ne!(url, place.url);
    (role, Place::at("postgres", &url))
}

#[test]
fn a_store_that_is_well_has_no_fault() {
    for store in ALL_STORES {
        let place = store();
        place.ends(&["migrate"]).code_is(0);
        let (ended, findings) = examined(&place);
        assert_eq!(ended.code, 0, "{}: {ended:?}", place.name);
        for topic in ["connect", "take a lock", "take a lease", "claim", "dedupe"] {
            assert_eq!(of(&findings, topic), ["ok"], "{}: {topic}", place.name);
        }
        let plain = place.ends(&["doctor", "--read-only"]).code_is(0).out;
        assert!(plain.lines().all(|line| line.split('\t').count() == 4), "{plain}");
        assert!(!plain.contains("take a lock"), "{plain}");
    }
}

#[test]
fn a_server_that_does_not_answer_is_a_fault() {
    let nowhere = Place::at("nowhere", "postgres://me:s3cr3t@127.0.0.1:1/app");
    let (ended, findings) = examined(&nowhere);
    assert_eq!((ended.code, of(&findings, "connect")), (1, vec!["fault"]));
    assert!(!ended.out.contains("s3cr3t"));
    let wrong = Place::at("wrong", "postgres://127.0.0.1:1/app?nonsense=1");
    wrong.ends(&["doctor"]).code_is(2);
}

#[test]
fn missing_tables_and_grants_are_faults() {
    let place = postgres();
    let schema = format!("s{:016x}", rand::random::<u64>());
    let bare = Place::at("postgres", &format!("{}?schema={schema}", place.url));
    let (_, findings) = examined(&bare);
    assert!(of(&findings, "take a lease").contains(&"fault"), "{findings:?}");
    place.ends(&["migrate"]).code_is(0);
    let (_, poor) = role(&place);
    let (ended, findings) = examined(&poor);
    assert_eq!(of(&findings, "take a lease"), ["fault"], "{ended:?}");
    assert!(of(&findings, "privileges").contains(&"fault"), "{findings:?}");
}

#[test]
fn missing_grants_are_faults_on_mysql_and_mariadb() {
    for (kind, place) in [(Kind::MySql, mysql()), (Kind::MariaDb, mariadb())] {
        place.ends(&["migrate"]).code_is(0);
        let user = format!("doctor_{}", rand::random::<u32>());
        let url = place.url.replace("//test:test@", &format!("//{user}:test@"));
        assert_ne!(url, place.url);
        let (_, database) = place.url.rsplit_once('/').expect("a database");
        let admin = Server::shared(kind).expect("the server starts").admin_url();
        let statements = format!(
            "CREATE USER '{user}'@'%' IDENTIFIED BY 'test'; \
             GRANT SELECT ON {database}.* TO '{user}'@'%'"
        );
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let mut conn = mysql_async::Conn::from_url(admin).await.expect("the server answers");
            for statement in statements.split("; ") {
                conn.query_drop(statement).await.expect("the server obeys");
            }
            conn.disconnect().await.expect("the server answers");
        });
        let (ended, findings) = examined(&Place::at("mysql", &url));
        assert_eq!(of(&findings, "take a lease"), ["fault"], "{kind:?}: {ended:?}");
        assert!(of(&findings, "privileges").contains(&"fault"), "{kind:?}: {findings:?}");
    }
}

#[test]
fn missing_permissions_are_faults_on_redis_and_valkey() {
    for place in [redis(), valkey()] {
        let user = format!("doctor_{}", rand::random::<u32>());
        let (_, address) = place.url.split_once("//").expect("an address");
        let (address, database) = address.split_once('/').expect("a database");
        let mut server = TcpStream::connect(address).expect("the server answers");
        let command = format!("ACL SETUSER {user} on >secret ~* &* +@all -set -publish\r\n");
        server.write_all(command.as_bytes()).expect("the server hears");
        let mut answer = [0; 5];
        server.read_exact(&mut answer).expect("the server answers");
        assert_eq!(&answer, b"+OK\r\n");
        let url = format!("redis://{user}:secret@{address}/{database}");
        let (ended, findings) = examined(&Place::at(place.name, &url));
        assert_eq!(of(&findings, "take a lease"), ["fault"], "{}: {ended:?}", place.name);
        assert!(of(&findings, "privileges").contains(&"fault"), "{}: {findings:?}", place.name);
        assert!(!ended.out.contains("secret"), "{ended:?}");
    }
}

#[test]
fn a_standby_is_a_fault() {
    let server = Server::start(Kind::Postgres15).expect("the server starts");
    let place = Place::at("postgres", &server.url());
    place.ends(&["migrate"]).code_is(0);
    assert!(!format!("{:?}", examined(&place)).contains("standby,"));
    let folder = server.data_dir().expect("it is ours");
    std::fs::write(folder.join("standby.signal"), "").expect("it is ours");
    server.restart().expect("it starts again");
    let (ended, findings) = examined(&place);
    assert_eq!(ended.code, 1);
    let told = findings.iter().find(|finding| {
        let says = |field: &str, part| finding[field].as_str().is_some_and(|it| it.contains(part));
        finding["severity"] == "fault" && says("found", "standby")
    });
    let told = told.unwrap_or_else(|| panic!("it is not found: {findings:?}"));
    assert!(told.to_string().contains("primary"), "what to do is not told: {told}");
}

#[test]
fn an_idle_session_timeout_is_found() {
    let place = postgres();
    place.ends(&["migrate"]).code_is(0);
    let (role, place) = role(&place);
    let grants = "GRANT USAGE ON SCHEMA leasehold TO {r}; GRANT USAGE ON ALL SEQUENCES IN SCHEMA \
        leasehold TO {r}; GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO {r}; \
        ALTER ROLE {r} SET idle_session_timeout = '3s'";
    sql(&postgres().url, &grants.replace("{r}", &role));
    let (_, findings) = examined(&place);
    let found = of(&findings, "idle_session_timeout");
    assert!(!found.is_empty() && !found.contains(&"ok"), "{findings:?}");
}

#[test]
fn a_tiny_wait_timeout_is_found() {
    for kind in [Kind::MySql, Kind::MariaDb] {
        let server = Server::start_with(kind, &["--wait-timeout=2"]).expect("the server starts");
        let place = Place::at("mysql", &server.url());
        place.ends(&["migrate"]).code_is(0);
        let (_, findings) = examined(&place);
        let found = of(&findings, "wait_timeout");
        assert!(!found.is_empty() && !found.contains(&"ok"), "{kind:?}: {findings:?}");
    }
}

#[test]
fn a_pooler_in_transaction_mode_is_a_fault() {
    let server = Server::shared(Kind::Postgres15).expect("the server starts");
    postgres().ends(&["migrate"]).code_is(0);
    let pooler = PgBouncer::start(&server).expect("the pooler starts");
    let (_, findings) = examined(&Place::at("pgbouncer", &pooler.url()));
    assert!(of(&findings, "pooler").contains(&"fault"), "{findings:?}");
}

#[test]
fn an_evicting_server_and_a_replica_are_faults() {
    let evicting = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let server = Server::start_with(Kind::Redis7, &evicting).expect("the server starts");
    let (ended, findings) = examined(&Place::at("redis", &server.url()));
    assert_eq!(ended.code, 1);
    let said = format!("{findings:?}");
    assert!(said.contains("maxmemory-policy") || said.contains("evict"), "{said}");
    let primary = Server::start(Kind::Redis7).expect("the server starts");
    let of = ["--replicaof", "127.0.0.1", &primary.port().to_string()];
    let replica = Server::start_with(Kind::Redis7, &of).expect("the server starts");
    let (ended, findings) = examined(&Place::at("redis", &replica.url()));
    assert_eq!(ended.code, 1);
    assert!(format!("{findings:?}").contains("replica"), "{findings:?}");
}

#[test]
fn a_read_only_server_is_a_fault() {
    for (kind, tables) in [(Kind::MariaDb, mariadb as fn() -> Place), (Kind::MySql, mysql)] {
        tables().ends(&["migrate"]).code_is(0);
        let server = Server::start_with(kind, &["--read-only=ON"]).expect("the server starts");
        let (ended, findings) = examined(&Place::at("mysql", &server.url()));
        assert_eq!(ended.code, 1);
        assert!(format!("{findings:?}").contains("read"), "{findings:?}");
    }
}
