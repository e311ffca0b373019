use std::{
    env,
    ffi::OsString,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{
    Error, Kind,
    instance::{Instance, Recipe},
    kind::Family,
    mysql, postgres, process,
    protocol::Address,
    redis,
};

/// A database server for tests.
///
/// One that was [started](Self::start) ends when the last handle to it is dropped,
/// or with the process, and its data goes with it.
#[derive(Clone, Debug)]
pub struct Server {
    kind: Kind,
    origin: Arc<Origin>,
}

#[derive(Debug)]
enum Origin {
    Ours(Mutex<Instance>),
    Given { url: String, address: Address },
}

impl Server {
    /// The server for tests that change nothing about it: that of the URL in
    /// [`Kind::variable`], else one that is started once for this process, when it
    /// is first asked for, and lives as long.
    ///
    /// # Errors
    /// When the URL is none, or as [`start`](Self::start).
    pub fn shared(kind: Kind) -> Result<Self, Error> {
        static SHARED: [Mutex<Option<Server>>; Kind::ALL.len()] =
            [const { Mutex::new(None) }; Kind::ALL.len()];
        let mut shared = SHARED[kind as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = &*shared {
            return Ok(server.clone());
        }
        let server = match env::var(kind.variable()) {
            Ok(url) if !url.is_empty() => Self::given(kind, url)?,
            _ => Self::start(kind)?,
        };
        Ok(shared.insert(server).clone())
    }

    /// Starts a server of its own, and returns when it answers.
    ///
    /// # Errors
    /// When its program is neither on this machine nor to be had, or it fails to
    /// start or to answer within 90 s.
    pub fn start(kind: Kind) -> Result<Self, Error> {
        Self::start_with(kind, &[])
    }

    /// As [`start`](Self::start), with further arguments for the server's program.
    /// They come last, so that they win over our own.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(kind: Kind, arguments: &[&str]) -> Result<Self, Error> {
        let extra = arguments.iter().map(OsString::from).collect();
        let recipe = match kind {
            Kind::PgBouncer => {
                return Err(Error::Name(
                    "a pgbouncer stands in front of a postgres: see PgBouncer::start".into(),
                ));
            }
            _ => match kind.family() {
                Family::Postgres => postgres::recipe(kind, extra)?,
                Family::MySql => mysql::recipe(kind, extra)?,
                Family::Redis => redis::recipe(kind, extra)?,
            },
        };
        Self::run(kind, &*recipe)
    }

    pub(super) fn run(kind: Kind, recipe: &Recipe<'_>) -> Result<Self, Error> {
        let instance = Instance::start(kind, recipe)?;
        Ok(Self { kind, origin: Arc::new(Origin::Ours(Mutex::new(instance))) })
    }

    fn given(kind: Kind, url: String) -> Result<Self, Error> {
        let address = Address::of(kind, &url)?;
        Ok(Self { kind, origin: Arc::new(Origin::Given { url, address }) })
    }

    /// What it is.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The URL for an application: `postgres://postgres@127.0.0.1:PORT/postgres`,
    /// `mysql://test:test@127.0.0.1:PORT/test`, `redis://127.0.0.1:PORT/0`.
    pub fn url(&self) -> String {
        match &*self.origin {
            Origin::Given { url, .. } => url.clone(),
            Origin::Ours(_) => {
                let port = self.port();
                match self.kind.family() {
                    Family::Postgres => format!("postgres://postgres@127.0.0.1:{port}/postgres"),
                    Family::MySql => format!("mysql://test:test@127.0.0.1:{port}/test"),
                    Family::Redis => format!("redis://127.0.0.1:{port}/0"),
                }
            }
        }
    }

    /// The URL for one who may do everything: root's on MySQL and MariaDB, else
    /// the same as [`url`](Self::url). For a server that was given, it is in the
    /// variable that ends in `_ADMIN_URL` instead of `_URL`.
    pub fn admin_url(&self) -> String {
        match &*self.origin {
            Origin::Given { url, .. } => {
                let name = self.kind.variable().replace("_URL", "_ADMIN_URL");
                env::var(name).unwrap_or_else(|_| url.clone())
            }
            Origin::Ours(_) if self.kind.family() == Family::MySql => {
                format!("mysql://root@127.0.0.1:{}/mysql", self.port())
            }
            Origin::Ours(_) => self.url(),
        }
    }

    /// The TCP port. It stays the same across restarts.
    pub fn port(&self) -> u16 {
        match &*self.origin {
            Origin::Ours(instance) => lock(instance).port(),
            Origin::Given { address, .. } => address.port(),
        }
    }

    /// The process id; none while it is stopped, nor of a server that was given.
    pub fn pid(&self) -> Option<u32> {
        match &*self.origin {
            Origin::Ours(instance) => lock(instance).pid(),
            Origin::Given { .. } => None,
        }
    }

    /// All of its processes, the main one first: Postgres has one a session.
    pub fn pids(&self) -> Vec<u32> {
        self.pid().map(process::family).unwrap_or_default()
    }

    /// The folder of its data; none of a server that was given.
    pub fn data_dir(&self) -> Option<PathBuf> {
        match &*self.origin {
            Origin::Ours(instance) => Some(lock(instance).data()),
            Origin::Given { .. } => None,
        }
    }

    /// The version as the server says it itself, over a connection of its own.
    ///
    /// # Errors
    /// When it does not answer within 10 s, or wants a password (Postgres).
    pub fn version(&self) -> Result<String, Error> {
        self.greet(Duration::from_secs(10))
    }

    /// Connects and waits for an answer of the server's own protocol.
    ///
    /// # Errors
    /// When there is none within `limit`, as from a server that is paused.
    pub fn ping(&self, limit: Duration) -> Result<(), Error> {
        self.greet(limit).map(drop)
    }

    /// Kills it as a crash of the machine's power would (`SIGKILL`, to all of its
    /// processes), and returns when it is gone. Nothing happens if it is stopped.
    ///
    /// # Errors
    /// When it was given by a URL.
    pub fn kill(&self) -> Result<(), Error> {
        self.ours("kill")?.kill()
    }

    /// Stops it gracefully, and returns when it is gone: `SIGTERM`, or Postgres's
    /// fast shutdown, which does not wait for clients. Nothing happens if it is
    /// stopped.
    ///
    /// # Errors
    /// When it was given by a URL, or has not ended within 60 s.
    pub fn stop(&self) -> Result<(), Error> {
        self.ours("stop")?.stop()
    }

    /// Starts it on the same port and data, after stopping it if it runs, and
    /// returns when it answers. A Redis keeps its data only with arguments for that,
    /// such as `--appendonly yes`.
    ///
    /// # Errors
    /// When it was given by a URL, or as [`start`](Self::start).
    pub fn restart(&self) -> Result<(), Error> {
        self.ours("restart")?.restart()
    }

    /// Freezes all of its processes (`SIGSTOP`): connections stay open, and new ones
    /// are made, but nothing is answered until [`resume`](Self::resume).
    ///
    /// # Errors
    /// When it was given by a URL, or is stopped.
    pub fn pause(&self) -> Result<(), Error> {
        self.ours("pause")?.pause()
    }

    /// Lets it go on after [`pause`](Self::pause).
    ///
    /// # Errors
    /// When it was given by a URL, or is stopped.
    pub fn resume(&self) -> Result<(), Error> {
        self.ours("resume")?.resume()
    }

    pub(super) fn address(&self) -> Result<Address, Error> {
        match &*self.origin {
            Origin::Ours(_) => Ok(Address::local(self.kind, self.port())),
            Origin::Given { url, .. } => Address::of(self.kind, url),
        }
    }

    fn greet(&self, limit: Duration) -> Result<String, Error> {
        self.address()?.greet(limit)
    }

    fn ours(&self, action: &'static str) -> Result<MutexGuard<'_, Instance>, Error> {
        match &*self.origin {
            Origin::Ours(instance) => Ok(lock(instance)),
            Origin::Given { url, .. } => {
                Err(Error::NotOurs { action, kind: self.kind, url: url.clone() })
            }
        }
    }
}

/// A panic elsewhere leaves nothing half-done that matters here.
fn lock(instance: &Mutex<Instance>) -> MutexGuard<'_, Instance> {
    instance.lock().unwrap_or_else(PoisonError::into_inner)
}
