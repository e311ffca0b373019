//! TLS, where the crate is built with it.

use std::path::Path;
use std::sync::Arc;

use leasehold_conformance::servers::Kind;
use leasehold_core::{Backend, Lease, LeaseOptions};
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, OptsBuilder, Pool, SslOpts};

use crate::support::MySqlHarness;
use crate::{Verdict, ensure, key, locked, namespace};

crate::tests!("tls":
    certificates_are_checked_and_every_connection_is_secure,
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
