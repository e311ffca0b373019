//! TLS, where the crate is built with it.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_conformance::servers::certificates::{self, AUTHORITY, Files};
use leasehold_core::{Backend, Lease, NamedLock};
use leasehold_redis::RedisBackend;
use leasehold_redis::fred::prelude::Config;
use leasehold_redis::fred::types::config::{TlsConfig, TlsConnector};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::lab::{Lab, key, once};

/// A server that also speaks TLS, with this certificate, and its port for that.
fn server(pair: (&str, &str)) -> (Lab, u16, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let files = Files::write(folder.path(), pair).unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let arguments = [
        "--tls-port".to_owned(),
        free.to_string(),
        "--tls-cert-file".to_owned(),
        path(&files.certificate),
        "--tls-key-file".to_owned(),
        path(&files.key),
        "--tls-ca-cert-file".to_owned(),
        path(&files.authority),
        "--tls-auth-clients".to_owned(),
        "no".to_owned(),
    ];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    (Lab::private(&arguments), free, folder)
}

fn url(port: u16) -> String {
    format!("rediss://127.0.0.1:{port}")
}

/// That of somebody who knows the authority.
fn knows_the_authority(url: &str) -> Config {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(AUTHORITY.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider);
    let tls = builder.with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(roots).with_no_client_auth();
    let connector = TlsConnector::from(tls);
    let mut config = Config::from_url(url).unwrap();
    config.tls = Some(TlsConfig::from(connector));
    config
}

fn builder(lab: &Lab) -> leasehold_redis::Builder {
    lab.builder().command_limit(Duration::from_secs(5))
}

/// With the defaults a certificate of an authority that the system does not know is refused, and a
/// server that has none is not spoken to in the clear; one of a known authority is taken.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_unknown_authorities_are_refused() {
    let (lab, port, _folder) = server(certificates::HERE);
    let refused = builder(&lab).connect(&url(port)).await;
    assert!(refused.is_err(), "a certificate of an unknown authority was taken");
    let refused = builder(&lab).connect(&url(lab.server.port())).await;
    assert!(refused.is_err(), "it spoke in the clear, or the server does tls there");
    let backend = builder(&lab).connect_config(knows_the_authority(&url(port))).await.unwrap();
    let lock = backend.lock(&key("x"), leasehold_core::LockOptions::try_once()).await.unwrap();
    let lease = backend.lease(&key("x"), once(30_000)).await.unwrap().expect("it is free");
    lease.release().await.unwrap();
    lock.expect("it is free").release().await.unwrap();
    backend.close().await.unwrap();
}

/// A certificate of a known authority for another host is refused.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_other_hosts_are_refused() {
    let (lab, port, _folder) = server(certificates::ELSEWHERE);
    let refused: Result<RedisBackend, _> =
        builder(&lab).connect_config(knows_the_authority(&url(port))).await;
    assert!(refused.is_err(), "a certificate for another host was taken");
    // the server is there, and it is the name alone
    let plain = builder(&lab).connect(&lab.server.url()).await.unwrap();
    plain.close().await.unwrap();
}
