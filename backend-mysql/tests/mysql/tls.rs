//! TLS, where the crate is built with it.

use std::path::Path;
use std::sync::Arc;

use leasehold_conformance::servers::certificates::{self, Files};
use leasehold_conformance::servers::{Kind, Server};
use leasehold_core::{Backend, Lease, LeaseOptions};
use leasehold_mysql::MySqlBackend;
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, OptsBuilder, Pool, SslOpts};

use crate::support::MySqlHarness;
use crate::{Verdict, ensure, key, locked, namespace};

crate::tests!("tls":
    certificates_are_checked_and_every_connection_is_secure,
    the_right_certificate_is_taken_and_that_of_another_host_is_not,
);

/// With the defaults, a certificate of an unknown authority, or one that does not name the host, is
/// refused, and a server without TLS is never spoken to in the clear. All connections of a handle
/// are secure: a user who may not come otherwise does everything.
async fn certificates_are_checked_and_every_connection_is_secure(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    let mut admin = harness.admin().await?;
    let user = format!("secure{:08x}", rand::random::<u32>());
    admin.query_drop(format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'x' REQUIRE SSL")).await?;
    admin.query_drop(format!("GRANT ALL ON test.* TO '{user}'@'%'")).await?;
    let opts = || -> Result<OptsBuilder, mysql_async::UrlError> {
        let opts = OptsBuilder::from_opts(Opts::from_url(harness.url())?);
        Ok(opts.user(Some(&user)).pass(Some("x")).prefer_socket(false))
    };
    let builder = harness.builder(&namespace());
    let connect = |opts: OptsBuilder| builder.clone().from_pool(Pool::new(opts));
    ensure!(connect(opts()?).await.is_err(), "the server let somebody in without tls");
    let refused = connect(opts()?.ssl_opts(SslOpts::default())).await;
    ensure!(refused.is_err(), "a certificate of an unknown authority was taken");
    let directory: Option<String> = admin.query_first("SELECT @@datadir").await?;
    let authority = Path::new(&directory.ok_or("no data directory")?).join("ca.pem");
    if !authority.exists() {
        // MariaDB before 11.4 makes no certificates, and a server elsewhere does not show them
        ensure!(harness.kind() != Kind::MySql || harness.is_given(), "{authority:?} is missing");
        return Ok(());
    }
    // the server's own certificate names no host
    let known = SslOpts::default().with_root_certs(vec![authority.into()]);
    let refused = connect(opts()?.ssl_opts(known)).await;
    ensure!(refused.is_err(), "a certificate for another host was taken");
    let tls = SslOpts::default().with_danger_accept_invalid_certs(true);
    let backend = connect(opts()?.ssl_opts(tls)).await?;
    let lock = locked(&backend, "x").await?;
    lock.token().await?;
    let lease = backend.lease(&key("x"), LeaseOptions::try_once()).await?.ok_or("not free")?;
    lease.release().await?;
    lock.release().await?;
    backend.close().await?;
    Ok(admin.query_drop(format!("DROP USER '{user}'@'%'")).await?)
}

/// Of an authority that is known, the certificate of this host is taken, and one of another host is
/// refused, as both are where the authority is unknown.
async fn the_right_certificate_is_taken_and_that_of_another_host_is_not(
    harness: Arc<MySqlHarness>,
) -> Verdict {
    for (pair, is_right) in [(certificates::HERE, true), (certificates::ELSEWHERE, false)] {
        let folder = tempfile::tempdir()?;
        let files = Files::write(folder.path(), pair)?;
        let argument = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let arguments = [
            argument("ssl-ca", &files.authority),
            argument("ssl-cert", &files.certificate),
            argument("ssl-key", &files.key),
        ];
        let kind = harness.kind();
        let start = move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            Server::start_with(kind, &arguments)
        };
        let server = tokio::task::spawn_blocking(start).await??;
        let connect = async |ssl: Option<SslOpts>| {
            let opts = OptsBuilder::from_opts(Opts::from_url(&server.url())?);
            let opts = opts.prefer_socket(false).ssl_opts(ssl);
            let backend = MySqlBackend::builder().from_pool(Pool::new(opts)).await;
            Ok::<_, mysql_async::UrlError>(backend)
        };
        let known = || SslOpts::default().with_root_certs(vec![files.authority.clone().into()]);
        let refused = connect(Some(SslOpts::default())).await?;
        ensure!(refused.is_err(), "a certificate of an unknown authority was taken");
        let taken = connect(Some(known())).await?;
        ensure!(taken.is_ok() == is_right, "for this host: {is_right}, and it gave {taken:?}");
        if let Ok(backend) = taken {
            backend.migrate().await?;
            let lock = locked(&backend, "x").await?;
            let lease = backend.lease(&key("x"), LeaseOptions::try_once()).await?;
            lease.ok_or("not free")?.release().await?;
            lock.release().await?;
            backend.close().await?;
        }
        // the server is there, and it is the certificate alone
        connect(None).await??.close().await?;
    }
    Ok(())
}
