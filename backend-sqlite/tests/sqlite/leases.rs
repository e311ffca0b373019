//! Leases: their clock, their tokens, and writes that they guard.

use std::time::Duration;

use leasehold_core::{Backend, ErrorKind, Lease, LeaseOptions};

use crate::lab::{LONG, Lab, key, soon};
use crate::support::{Tx, connect, write};

fn opts(ttl: Duration) -> LeaseOptions {
    LeaseOptions::default().ttl(ttl).wait(LONG)
}

/// A guarded write keeps its lease from being taken over until its transaction ends, however long
/// after the expiry that is.
#[tokio::test(flavor = "multi_thread")]
async fn verify_keeps_the_lease_until_the_transaction_ends() {
    let lab = Lab::new().await;
    let (a, b) = (lab.open().await, lab.open().await);
    let ttl = Duration::from_millis(700);
    let lease = a.lease(&key("x"), opts(ttl).manual_renewal()).await.unwrap().unwrap();
    let mut tx = a.pool().begin().await.unwrap();
    lease.verify(&mut tx).await.unwrap();
    let next = tokio::spawn(async move { b.lease(&key("x"), opts(LONG)).await });
    tokio::time::sleep(ttl * 3).await;
    assert!(!next.is_finished(), "expected nobody to take the lease from an open guarded write");
    write(&mut tx, "n", 1).await.unwrap();
    tx.commit().await.unwrap();
    let next = soon("the successor", next).await.unwrap().unwrap().unwrap();
    assert!(next.token() > lease.token());
    let mut tx: Tx = a.pool().begin().await.unwrap();
    let late = lease.verify(&mut tx).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Lost);
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_refuses_a_connection_that_does_not_see_the_leases() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let lease = store.lease(&key("x"), opts(LONG)).await.unwrap().unwrap();
    let mut foreign = connect(&lab.main()).await.unwrap();
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut foreign).await.unwrap();
    let refused = lease.verify(&mut foreign).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("pool()"), "{refused}");
    let refused = lease.verify(&mut String::new()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WrongBackend);
}

/// B81: whatever becomes of rows, handles and files, tokens rise.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_across_release_purge_reopening_and_loss_of_the_files() {
    let lab = Lab::new().await;
    let mut last = 0;
    for round in 0..6 {
        let store = lab.open().await;
        let lease =
            store.lease(&key("x"), opts(Duration::from_millis(300))).await.unwrap().unwrap();
        let token = lease.token().value();
        assert!(token > last, "expected a token over {last} in round {round}, got {token}");
        last = token;
        if round % 2 == 0 {
            lease.release().await.unwrap();
        }
        store.housekeep().await.unwrap();
        store.close().await.unwrap();
        if round == 3 {
            std::fs::remove_dir_all(lab.harness.folder()).unwrap();
        }
    }
}

/// A restart of the machine: the leases of its former life are over, whatever they say.
#[tokio::test(flavor = "multi_thread")]
async fn leases_of_a_former_life_of_the_machine_are_over() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let lease = store.lease(&key("x"), opts(LONG).manual_renewal()).await.unwrap().unwrap();
    let mut leases = lab.harness.leases().await.unwrap();
    let sql = "UPDATE leasehold_lease SET boot = 'before'";
    sqlx::raw_sql(sql).execute(&mut leases).await.unwrap();
    assert_eq!(lease.renew().await.unwrap_err().kind(), ErrorKind::Lost);
    let other = lab.open().await;
    let next = other.lease(&key("x"), opts(LONG).wait(Duration::ZERO)).await.unwrap().unwrap();
    assert!(next.token() > lease.token());
    sqlx::raw_sql(sql).execute(&mut leases).await.unwrap();
    assert_eq!(other.housekeep().await.unwrap().leases, 1);
}

/// A renewal takes as long as its leases are many, and no longer: one that read its list anew for
/// each lease of the namespace lost them all.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_leases_are_renewed_in_time() {
    let lab = Lab::new().await;
    let store = lab.open().await;
    let ttl = Duration::from_secs(8);
    let mut held = Vec::new();
    for number in 0..6_000 {
        let lease = store.lease(&key(&format!("x{number}")), opts(ttl)).await.unwrap();
        held.push(lease.unwrap());
    }
    tokio::time::sleep(ttl * 3 / 2).await;
    let lost = held.iter().filter(|lease| !lease.is_held()).count();
    assert_eq!(lost, 0, "of {} leases", held.len());
}
