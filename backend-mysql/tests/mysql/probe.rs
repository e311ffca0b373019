//! What is tried when a handle is made.

use std::sync::Arc;

use leasehold_core::{Backend, ErrorKind};
use leasehold_mysql::MySqlBackend;
use mysql_async::{Opts, OptsBuilder, Pool};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::support::MySqlHarness;
use crate::{Verdict, ensure, namespace};

crate::tests!("probe":
    locks_that_outlive_their_session_are_refused,
);

/// B109: behind a pooler that keeps a session when its client has gone, as on a server that does
/// not free user-level locks, no handle is to be had but one without user-level locks.
async fn locks_that_outlive_their_session_are_refused(harness: Arc<MySqlHarness>) -> Verdict {
    let opts = Opts::from_url(harness.url())?;
    let server = format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let pooler = keep_sessions(listener, server);
    let opts = OptsBuilder::from_opts(opts).tcp_port(port).prefer_socket(false);
    let pool = Pool::new(opts);
    let builder = || MySqlBackend::builder().namespace(namespace());
    let error = builder().from_pool(pool.clone()).await.err().ok_or("a handle was made")?;
    ensure!(error.kind() == ErrorKind::Unsupported, "it said {error}");
    ensure!(error.to_string().contains("without user locks"), "it said {error}");
    ensure!(error.to_string().contains("outlives its session"), "it said {error}");
    builder().without_user_locks().from_pool(pool).await?.close().await?;
    pooler.abort();
    Ok(())
}

/// Forwards connections, and keeps those to the server for as long as it runs.
fn keep_sessions(listener: TcpListener, server: String) -> JoinHandle<std::io::Result<()>> {
    tokio::spawn(async move {
        let mut kept = tokio::task::JoinSet::new();
        loop {
            let (client, _) = listener.accept().await?;
            let upstream = TcpStream::connect(&server).await?;
            kept.spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = upstream.into_split();
                let up = async {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                        if to_server.write_all(&bytes[..count]).await.is_err() {
                            break;
                        }
                    }
                };
                let down = async {
                    // the client's end of it may be gone
                    drop(tokio::io::copy(&mut from_server, &mut to_client).await);
                };
                tokio::join!(up, down);
            });
        }
    })
}
