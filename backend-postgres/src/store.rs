//! [`Store`]: what the drivers share: the pool, the names, and how to run a statement.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::PgPool;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgRow, Postgres};
use tokio::sync::{OnceCell, watch};

use crate::error::{is_broken, is_conflict, store_error};
use crate::keys::KeyMap;
use crate::lanes::{Lane, Lanes};
use crate::server::Server;
use crate::sever::Severed;
use crate::sql::{Arg, Mode, Names, Statement};

/// How often a statement that lost against a concurrent one is repeated.
const REPEATS: u32 = 5;
/// A connection that was used less long ago is used again as it is. Where it was cut meanwhile, the
/// call fails like one that is cut on its way, which the engine repeats.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) pool: PgPool,
    /// Whether the pool is the handle's own, so that nobody else has hooks on it.
    pub(crate) own_pool: bool,
    /// Connections of the handle's own pool that were used a moment ago.
    ready: Arc<Lanes<PoolConnection<Postgres>>>,
    pub(crate) keys: KeyMap,
    pub(crate) names: Names,
    /// That of connections of our own.
    pub(crate) application_name: String,
    /// The label of the handle's holder, as rows keep it.
    holder: String,
    /// Where sessions go; by default where the pool goes.
    pub(crate) sessions: Option<SessionOptions>,
    /// Closed when its sender says so.
    pub(crate) closed: watch::Sender<bool>,
    server: OnceCell<Server>,
    session_server: OnceCell<Server>,
}

/// Connect options that do not show their password.
#[derive(Clone)]
pub(crate) struct SessionOptions(pub(crate) PgConnectOptions);

impl std::fmt::Debug for SessionOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionOptions")
            .field("host", &self.0.get_host())
            .field("port", &self.0.get_port())
            .finish_non_exhaustive()
    }
}

impl Store {
    pub(crate) fn new(
        pool: PgPool,
        own_pool: bool,
        sessions: Option<PgConnectOptions>,
        keys: KeyMap,
        names: Names,
        application_name: String,
        holder: String,
    ) -> Self {
        Self {
            ready: Lanes::new(pool.clone(), FRESH, |conn| drop(conn.into_inner())),
            pool,
            own_pool,
            keys,
            names,
            application_name,
            holder,
            sessions: sessions.map(SessionOptions),
            closed: watch::Sender::new(false),
            server: OnceCell::new(),
            session_server: OnceCell::new(),
        }
    }

    /// What rows say about who holds them.
    pub(crate) fn holder_bytes(&self) -> &[u8] {
        self.holder.as_bytes()
    }

    /// The options of connections of our own. They log nothing: a wait is not a slow statement.
    pub(crate) fn session_options(&self) -> PgConnectOptions {
        let options = match &self.sessions {
            Some(options) => options.0.clone(),
            None => self.pool_options(),
        };
        sqlx::ConnectOptions::disable_statement_logging(options)
            .application_name(&self.application_name)
    }

    fn pool_options(&self) -> PgConnectOptions {
        let options = PgConnectOptions::clone(&self.pool.connect_options());
        options.application_name(&self.application_name)
    }

    /// The server behind the pool.
    pub(crate) async fn server(&self) -> Result<Server> {
        let server =
            self.server.get_or_try_init(|| async { Server::look(&self.pool_options()).await });
        server.await.copied()
    }

    /// The server of the sessions; refused where no session would last.
    pub(crate) async fn session_server(&self) -> Result<Server> {
        let server = self.session_server.get_or_try_init(|| async {
            let server = match &self.sessions {
                Some(_) => Server::look(&self.session_options()).await?,
                None => self.server().await?,
            };
            if server.pooled {
                let detail = "the connection leads through a pooler in transaction mode, which \
                    cannot hold a lock of a session: give the builder session_options that lead \
                    to the server itself, or to a pooler in session mode";
                return Err(Error::new(ErrorKind::Unsupported, detail));
            }
            Ok(server)
        });
        server.await.copied()
    }

    /// A connection of the pool.
    pub(crate) async fn connection(&self) -> Result<Severed<PoolConnection<Postgres>>> {
        self.pool.acquire().await.map(Severed::new).map_err(store_error)
    }

    /// A connection of the handle's own pool that nobody uses. Nobody has asked it whether it lives.
    pub(crate) fn idle(&self) -> Option<PoolConnection<Postgres>> {
        if !self.own_pool {
            return None;
        }
        let ready = self.ready.take().map(|lane| lane.conn.into_inner());
        ready.or_else(|| self.pool.try_acquire())
    }

    /// Closes what stands ready.
    pub(crate) fn close_ready(&self) {
        self.ready.close();
    }

    async fn lane(&self) -> sqlx::Result<Lane<PoolConnection<Postgres>>> {
        match self.ready.take() {
            Some(lane) => Ok(lane),
            None => Ok(Lane::new(Severed::new(self.pool.acquire().await?))),
        }
    }

    /// For the next call.
    fn keep(&self, lane: Lane<PoolConnection<Postgres>>) {
        if self.own_pool && self.ready.has_room(lane.made) {
            self.ready.keep(lane);
        } else {
            drop(lane.conn.into_inner());
        }
    }

    /// Runs a statement on a connection of the pool; repeats it where it lost against another.
    pub(crate) async fn run(
        &self,
        statement: &Statement,
        args: Vec<Arg<'_>>,
    ) -> Result<Vec<PgRow>> {
        let mode = self.server().await?.mode();
        self.run_as(mode, statement, args).await.map_err(store_error)
    }

    /// As [`run`](Self::run), with the server's own error.
    pub(crate) async fn run_as(
        &self,
        mode: Mode,
        statement: &Statement,
        args: Vec<Arg<'_>>,
    ) -> sqlx::Result<Vec<PgRow>> {
        let mut repeats = 0;
        loop {
            let mut lane = self.lane().await?;
            let outcome = statement.run(&mut lane.conn, mode, args.clone()).await;
            match outcome {
                Err(error) if is_broken(&error) => {
                    self.ready.clear();
                    return Err(error);
                }
                Err(error) if is_conflict(&error) && repeats < REPEATS => repeats += 1,
                outcome => {
                    self.keep(lane);
                    return outcome;
                }
            }
            self.keep(lane);
        }
    }
}

/// Waits for the call, but not for longer than `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = sqlx::Result<T>>,
) -> sqlx::Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}
