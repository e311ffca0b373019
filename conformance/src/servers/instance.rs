use std::{
    ffi::OsString,
    fmt, fs,
    io::ErrorKind,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use super::{
    Error, Kind, paths,
    process::{alive, free_port, freeze, listens, send, slay, thaw, wait_until},
    protocol,
    supervisor::Supervisor,
};

/// Generous: a loaded machine with two cores may be starting six servers at once.
const START: Duration = Duration::from_secs(90);
const STOP: Duration = Duration::from_mins(1);
const SIGNAL: Duration = Duration::from_secs(20);

/// Fills a new server's folder, and says the command that runs it on that port.
/// Called again, in another folder, when another program took the port first.
pub(super) type Recipe<'a> = dyn Fn(&Path, u16) -> Result<Vec<OsString>, Error> + 'a;

/// A server of our own: its folder, its port, its process.
pub(super) struct Instance {
    kind: Kind,
    folder: PathBuf,
    port: u16,
    command: Vec<OsString>,
    /// None while it is stopped.
    pid: Option<u32>,
    paused: bool,
    supervisor: Supervisor,
}

impl Instance {
    pub(super) fn start(kind: Kind, recipe: &Recipe<'_>) -> Result<Self, Error> {
        const ATTEMPTS: u32 = 10;
        let base = paths::base()?;
        let mut attempt = 1;
        loop {
            let folder = new_folder(&base.join("run"), kind)?;
            // First of all, as it is what removes the folder again.
            let supervisor = Supervisor::new(&folder)?;
            let port = free_port()?;
            let mut instance = Self {
                kind,
                command: recipe(&folder, port)?,
                folder,
                port,
                pid: None,
                paused: false,
                supervisor,
            };
            match instance.launch() {
                Ok(()) => return Ok(instance),
                Err(_) if attempt < ATTEMPTS && instance.lost_its_port() => attempt += 1,
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) const fn port(&self) -> u16 {
        self.port
    }

    pub(super) const fn pid(&self) -> Option<u32> {
        self.pid
    }

    pub(super) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    pub(super) fn kill(&mut self) -> Result<(), Error> {
        let Some(pid) = self.pid else { return Ok(()) };
        if !slay(pid, SIGNAL)? {
            return Err(self.slow("die", SIGNAL));
        }
        self.ended()
    }

    pub(super) fn stop(&mut self) -> Result<(), Error> {
        let Some(pid) = self.pid else { return Ok(()) };
        if self.paused {
            self.resume()?;
        }
        // Postgres takes SIGTERM for: once every client has gone.
        let signal = match self.kind {
            Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 | Kind::PgBouncer => {
                Signal::SIGINT
            }
            _ => Signal::SIGTERM,
        };
        send(pid, signal)?;
        if !wait_until(STOP, || !alive(pid)) {
            return Err(self.slow("stop", STOP));
        }
        self.ended()
    }

    /// Stops it if it runs, and starts it on the same port and data.
    pub(super) fn restart(&mut self) -> Result<(), Error> {
        self.stop()?;
        self.launch()
    }

    pub(super) fn pause(&mut self) -> Result<(), Error> {
        let pid = self.running("pause")?;
        self.paused = true;
        if freeze(pid, SIGNAL)? { Ok(()) } else { Err(self.slow("pause", SIGNAL)) }
    }

    pub(super) fn resume(&mut self) -> Result<(), Error> {
        let pid = self.running("resume")?;
        thaw(pid)?;
        self.paused = false;
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Error> {
        let pid = self.supervisor.start(&self.command)?;
        self.pid = Some(pid);
        let deadline = Instant::now() + START;
        let address = protocol::Address::local(self.kind, self.port);
        let ready = wait_until(START, || {
            if !alive(pid) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            listens(pid, self.port)
                && address
                    .greet(left.clamp(Duration::from_millis(100), Duration::from_secs(5)))
                    .is_ok()
        });
        if !alive(pid) {
            self.ended()?;
            return Err(Error::Failed {
                kind: self.kind,
                what: "the server ended while starting".into(),
                log: self.end_of_log(),
            });
        }
        if ready { Ok(()) } else { Err(self.slow("answer", START)) }
    }

    fn ended(&mut self) -> Result<(), Error> {
        self.supervisor.wait()?;
        self.pid = None;
        self.paused = false;
        Ok(())
    }

    fn running(&self, action: &str) -> Result<u32, Error> {
        self.pid.ok_or_else(|| Error::Failed {
            kind: self.kind,
            what: format!("can't {action} it, as it is stopped"),
            log: String::new(),
        })
    }

    fn lost_its_port(&self) -> bool {
        self.pid.is_none() && self.end_of_log().to_lowercase().contains("already in use")
    }

    fn slow(&self, what: &'static str, limit: Duration) -> Error {
        Error::Slow { kind: self.kind, what, limit, log: self.end_of_log() }
    }

    fn end_of_log(&self) -> String {
        end_of(&self.folder.join("log"))
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instance")
            .field("kind", &self.kind)
            .field("port", &self.port)
            .field("pid", &self.pid)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// The last lines of a log, or nothing.
pub(super) fn end_of(log: &Path) -> String {
    const LINES: usize = 20;
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

fn new_folder(parent: &Path, kind: Kind) -> Result<PathBuf, Error> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("{kind}-{}-{number}", process::id()));
        match fs::create_dir(&folder) {
            Ok(()) => {
                // Postgres may have to get in as another user, whatever our umask.
                return fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))
                    .map(|()| folder.clone())
                    .map_err(Error::io(format!("open folder {}", folder.display())));
            }
            // Left by an earlier process of that number, on a machine that crashed.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(Error::io(format!("create folder {}", folder.display()))(error));
            }
        }
    }
}
