//! Processes of the command, and real servers for them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use leasehold_conformance::servers::{Kind, Server};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// How long a test waits for what must happen soon: generous, for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A store for the processes of a test, in a namespace of its own.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) namespace: String,
    pub(crate) name: &'static str,
}

/// Every kind of store.
pub(crate) const ALL_STORES: [fn() -> Place; 5] = [sqlite, postgres, mysql, mariadb, redis];
/// Those that can tell who holds what.
pub(crate) const TELLING_STORES: [fn() -> Place; 2] = [sqlite, postgres];

/// A file of its own for each process of the tests.
pub(crate) fn sqlite() -> Place {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));
    Place::at("sqlite", &format!("sqlite:{}", FOLDER.path().join("cli.db").display()))
}

pub(crate) fn postgres() -> Place {
    shared("postgres", Kind::Postgres15)
}

pub(crate) fn mysql() -> Place {
    shared("mysql", Kind::MySql)
}

pub(crate) fn mariadb() -> Place {
    shared("mariadb", Kind::MariaDb)
}

pub(crate) fn redis() -> Place {
    shared("redis", Kind::Redis7)
}

pub(crate) fn valkey() -> Place {
    shared("valkey", Kind::Valkey)
}

fn shared(name: &'static str, kind: Kind) -> Place {
    Place::at(name, &Server::shared(kind).expect("the server starts").url())
}

impl Place {
    /// Whether the store can tell who holds what.
    pub(crate) fn tells(&self) -> bool {
        ["sqlite", "postgres"].contains(&self.name)
    }

    /// A namespace of its own on the store of this URL.
    pub(crate) fn at(name: &'static str, url: &str) -> Self {
        let namespace = format!("cli-{:016x}", rand::random::<u64>());
        Self { url: url.to_owned(), namespace, name }
    }

    /// The command on this store.
    pub(crate) fn leasehold(&self, args: &[&str]) -> Command {
        let mut command = leasehold(args);
        command.env("LEASEHOLD_URL", &self.url).env("LEASEHOLD_NAMESPACE", &self.namespace);
        command
    }

    /// Runs it to its end.
    pub(crate) fn ends(&self, args: &[&str]) -> Ended {
        ended(&mut self.leasehold(args))
    }

    /// Starts it.
    pub(crate) fn starts(&self, args: &[&str]) -> Running {
        Running::start(&mut self.leasehold(args))
    }

    /// Starts a job that says `up` and ends when its input does.
    pub(crate) fn holds(&self, args: &[&str]) -> Running {
        let job = ["--", "sh", "-c", "echo up; read line; echo done"];
        let mut running = self.starts(&[args, &job].concat());
        running.says("up");
        running
    }
}

/// The command, without what the environment says.
pub(crate) fn leasehold(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LEASEHOLD_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    /// Its output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The lines of its standard error as JSON.
    #[track_caller]
    pub(crate) fn news(&self) -> Vec<Value> {
        let line = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        self.err.lines().map(line).collect()
    }

    #[track_caller]
    pub(crate) fn code_is(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }
}

/// Runs a command to its end.
#[track_caller]
pub(crate) fn ended(command: &mut Command) -> Ended {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("it prints UTF-8");
    let code = status.code().unwrap_or_else(|| panic!("a signal ended {command:?}: {status}"));
    Ended { code, out: text(&stdout), err: text(&stderr) }
}

/// A command that runs. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    out: Receiver<String>,
    err: Receiver<String>,
    said: Vec<String>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let input = child.stdin.take();
        let out = lines(child.stdout.take().expect("it is piped"));
        let err = lines(child.stderr.take().expect("it is piped"));
        Self { child, input, out, err, said: Vec::new() }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("it runs");
    }

    /// Waits for a line of its output that contains this, and gives it.
    #[track_caller]
    pub(crate) fn says(&mut self, part: &str) -> String {
        let line = awaited(&self.out, &mut self.said, part);
        line.unwrap_or_else(|why| panic!("no {part:?} on stdout: {why} {:?}", self.all()))
    }

    /// The same of its standard error.
    #[track_caller]
    pub(crate) fn complains(&mut self, part: &str) -> String {
        let line = awaited(&self.err, &mut self.said, part);
        line.unwrap_or_else(|why| panic!("no {part:?} on stderr: {why} {:?}", self.all()))
    }

    /// All lines so far.
    pub(crate) fn all(&self) -> Vec<String> {
        let more = self.out.try_iter().chain(self.err.try_iter());
        self.said.iter().cloned().chain(more).collect()
    }

    /// Writes a line to its input.
    pub(crate) fn hears(&mut self, line: &str) {
        let input = self.input.as_mut().expect("it listens");
        writeln!(input, "{line}").expect("it listens");
    }

    /// Ends its input and waits for its end: the exit code.
    #[track_caller]
    pub(crate) fn finish(&mut self) -> i32 {
        drop(self.input.take());
        self.code()
    }

    /// Waits for its end: the exit code.
    #[track_caller]
    pub(crate) fn code(&mut self) -> i32 {
        let status = self.status();
        status.code().unwrap_or_else(|| panic!("signal {:?} ended it", status.signal()))
    }

    #[track_caller]
    pub(crate) fn status(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {:?}", self.all());
            pause();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // also where a test has failed; the warden ends the job
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return; // the test has ended
            }
        }
    });
    told
}

fn awaited(lines: &Receiver<String>, said: &mut Vec<String>, part: &str) -> Result<String, String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                said.push(line.clone());
                if line.contains(part) {
                    return Ok(line);
                }
            }
            Err(RecvTimeoutError::Timeout) => return Err("it took too long".to_owned()),
            Err(RecvTimeoutError::Disconnected) => return Err("it ended".to_owned()),
        }
    }
}

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "expected soon: {what}");
        pause();
    }
}

/// Between two looks at a condition.
fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}

/// Whether a process runs (one that has ended and that nobody waits for does not).
pub(crate) fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}
