//! [`PostgresBuilder`]: the settings of a handle.

use std::str::FromStr;
use std::sync::Arc;

use leasehold_core::backend::{LeaseLimits, SessionLimits};
use leasehold_core::{Error, ErrorKind, Holder, Key, Result};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::backend::PostgresBackend;
use crate::error::store_error;
use crate::keys::{Custom, KeyMap, LockKind};
use crate::sql::Names;
use crate::store::{SessionOptions, Store};

/// The share of the server's lock table that one handle may fill where nothing is set.
pub const DEFAULT_LOCK_TABLE_SHARE: f64 = 0.25;
/// The most connections of a pool that the handle opens itself.
const POOL_SIZE: u32 = 10;
/// The server cuts longer names.
const NAME_BYTES: usize = 63;
const NAMESPACE_BYTES: usize = 255;

/// The settings of a [`PostgresBackend`].
#[derive(Clone)]
pub struct PostgresBuilder {
    namespace: String,
    schema: String,
    application_name: Option<String>,
    holder: Option<Holder>,
    session_options: Option<SessionOptions>,
    session_limits: SessionLimits,
    lease_limits: LeaseLimits,
    lock_table_share: f64,
    key_hash: Option<Custom>,
}

impl PostgresBuilder {
    pub(crate) fn new() -> Self {
        let mut session_limits = SessionLimits::default();
        // the server's lock table is the limit
        session_limits.max_held = usize::MAX;
        Self {
            namespace: String::new(),
            schema: "leasehold".to_owned(),
            application_name: None,
            holder: None,
            session_options: None,
            session_limits,
            lease_limits: LeaseLimits::default(),
            lock_table_share: DEFAULT_LOCK_TABLE_SHARE,
            key_hash: None,
        }
    }

    /// The namespace: keys of different ones never meet. Default: empty; at most 255 bytes.
    ///
    /// Advisory locks are shared by all schemas and programs of a database, and by no other
    /// database; the namespace keeps services of one database apart.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The schema of the tables; default `leasehold`. Leases, dedupe entries and tokens of
    /// different schemas have nothing to do with each other; the locks of one database do.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// The name of the handle's connections in `pg_stat_activity`; default the label of the
    /// [`holder`](Self::holder). A pool that is brought along keeps its own.
    ///
    /// It is also by this name that others see who holds a named lock or a claim: under another
    /// one than a holder's label, they see the name and the connection only.
    #[must_use]
    pub fn application_name(mut self, name: impl Into<String>) -> Self {
        self.application_name = Some(name.into());
        self
    }

    /// Who the handle's leases, dedupe entries and connections say that they belong to. Default:
    /// [`Holder::this_process`], under the application name of the pool's options if they have
    /// one.
    #[must_use]
    pub fn holder(mut self, holder: Holder) -> Self {
        self.holder = Some(holder);
        self
    }

    /// Where the sessions of named locks and the subscription connect to; default: where the pool
    /// does. Needed where the pool leads through a pooler in transaction mode.
    #[must_use]
    pub fn session_options(mut self, options: PgConnectOptions) -> Self {
        self.session_options = Some(SessionOptions(options));
        self
    }

    /// The limits of named locks. `max_held` comes on top of
    /// [`lock_table_share`](Self::lock_table_share) and is not set by default.
    #[must_use]
    pub fn session_limits(mut self, limits: SessionLimits) -> Self {
        self.session_limits = limits;
        self
    }

    /// The limits of leases.
    #[must_use]
    pub fn lease_limits(mut self, limits: LeaseLimits) -> Self {
        self.lease_limits = limits;
        self
    }

    /// The share of the server's lock table that this handle's named locks may fill, and again
    /// one claim's keys; more are refused as [`ErrorKind::Exhausted`]. Default 0.25, of
    /// `max_locks_per_transaction × (max_connections + max_prepared_transactions)`: 1,600 locks
    /// with the server's own defaults.
    ///
    /// The table is shared by all sessions of all databases of the server. When it is full, new
    /// connections, other sessions' statements and DDL fail, so leave room for all your handles
    /// together and for everybody else.
    #[must_use]
    pub fn lock_table_share(mut self, share: f64) -> Self {
        self.lock_table_share = share;
        self
    }

    /// Replaces the mapping from keys to the numbers of advisory locks, to share locks with
    /// another program: see [`hashtext`](crate::hashtext()). Leases and dedupe do not use it.
    ///
    /// Keys with equal numbers are one lock, and so are a named lock and a claim of the same
    /// number: use the kind where they shall not meet. The namespace is not mixed in.
    #[must_use]
    pub fn key_hash(
        mut self,
        hash: impl Fn(LockKind, &Key) -> i64 + Send + Sync + 'static,
    ) -> Self {
        self.key_hash = Some(Arc::new(hash));
        self
    }

    /// A handle over the service's own pool, which claims, leases and dedupe use; named locks and
    /// the subscription open connections with the pool's options. Nothing connects yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a setting out of its range.
    pub fn build(self, pool: PgPool) -> Result<PostgresBackend> {
        self.over(pool, false)
    }

    /// A handle with a pool of its own, of up to ten connections, and checks that the server
    /// answers. The tables may be missing yet: see
    /// [`migrate`](leasehold_core::Backend::migrate).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOptions`] for a setting or URL that is none,
    /// [`ErrorKind::Unavailable`] if the server does not answer, [`ErrorKind::Unsupported`] if it
    /// is a standby.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn connect(mut self, url: &str) -> Result<PostgresBackend> {
        let options = PgConnectOptions::from_str(url).map_err(store_error)?;
        let holder = self.holder_for(&options);
        let name = self.application_name.clone().unwrap_or_else(|| holder.label(NAME_BYTES));
        self.holder = Some(holder);
        let options = options.application_name(&name);
        let pool = PgPoolOptions::new().max_connections(POOL_SIZE).connect_lazy_with(options);
        let backend = self.over(pool, true)?;
        backend.store().server().await.map_err(|error| error.at(crate::error::NAME, "connect"))?;
        Ok(backend)
    }

    fn over(self, pool: PgPool, own_pool: bool) -> Result<PostgresBackend> {
        self.check()?;
        let holder = self.holder_for(&pool.connect_options()).label(NAME_BYTES);
        let store = Store::new(
            pool,
            own_pool,
            self.session_options.map(|options| options.0),
            KeyMap::new(&self.namespace, self.key_hash),
            Names::new(&self.schema),
            self.application_name.unwrap_or_else(|| holder.clone()),
            holder,
        );
        Ok(PostgresBackend::assemble(
            Arc::new(store),
            self.session_limits,
            self.lease_limits,
            self.lock_table_share,
        ))
    }

    fn holder_for(&self, options: &PgConnectOptions) -> Holder {
        self.holder.clone().unwrap_or_else(|| {
            let holder = Holder::this_process();
            match options.get_application_name() {
                Some(name) => holder.named(name),
                None => holder,
            }
        })
    }

    fn check(&self) -> Result<()> {
        let fault = if self.namespace.len() > NAMESPACE_BYTES {
            format!("a namespace has at most {NAMESPACE_BYTES} bytes")
        } else if self.schema.is_empty() || self.schema.len() > NAME_BYTES {
            format!("a schema's name has from 1 to {NAME_BYTES} bytes")
        } else if self.schema.contains('\0') || self.namespace.contains('\0') {
            "a name must not contain a NUL character".to_owned()
        } else if !(self.lock_table_share > 0.0 && self.lock_table_share <= 1.0) {
            "lock_table_share is above 0 and at most 1".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidOptions, fault))
    }
}

impl std::fmt::Debug for PostgresBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresBuilder")
            .field("namespace", &self.namespace)
            .field("schema", &self.schema)
            .field("application_name", &self.application_name)
            .field("holder", &self.holder)
            .field("session_options", &self.session_options)
            .field("lock_table_share", &self.lock_table_share)
            .finish_non_exhaustive()
    }
}
