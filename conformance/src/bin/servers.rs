//! Starts real database servers and keeps them until it ends.

use std::{
    fs,
    io::{self, IsTerminal as _, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand};
use leasehold_conformance::servers::{self, Error, Kind, PgBouncer, Server};

/// Starts throw-away database servers on loopback, without Docker.
///
/// They stay until Ctrl-C or the end of standard input, and leave nothing behind.
#[derive(Debug, Parser)]
#[command(name = "servers", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,

    #[command(flatten)]
    names: Names,

    /// Start them, print their versions, stop them, and fail if any is left.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Only fetch the programs that this machine lacks.
    Fetch(Names),
}

#[derive(Debug, clap::Args)]
struct Names {
    /// postgres, postgres17, postgres18, mysql, mariadb, mariadb11, redis, redis8,
    /// valkey, pgbouncer; the default is postgres, mysql, mariadb and redis.
    #[arg(value_name = "NAME", default_values_t = Kind::DEFAULT)]
    names: Vec<Kind>,
}

/// What must be gone once a server was stopped.
struct Traces {
    kind: Kind,
    pids: Vec<u32>,
    port: u16,
    data: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.action {
        Some(Action::Fetch(Names { names })) => fetch(&names),
        None => run(&arguments.names.names, arguments.check),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn fetch(kinds: &[Kind]) -> Result<bool, Error> {
    for (kind, result) in kinds.iter().zip(in_parallel(kinds, servers::fetch)) {
        result?;
        println!("{kind} is ready to start");
    }
    Ok(true)
}

fn run(kinds: &[Kind], check: bool) -> Result<bool, Error> {
    let started: Vec<Vec<Server>> =
        in_parallel(kinds, start).into_iter().collect::<Result<_, _>>()?;
    let servers: Vec<Server> = started.into_iter().flatten().collect();
    print(&servers)?;
    if check {
        let traces: Vec<Traces> = servers.iter().map(Traces::of).collect();
        drop(servers);
        // Each is to say what it left, also after one that left something.
        let clean: Vec<bool> = traces.iter().map(Traces::report).collect();
        return Ok(!clean.contains(&false));
    }
    if io::stdin().is_terminal() {
        eprintln!("Ctrl-C stops them");
    }
    // Ctrl-C needs nothing from us: each server goes when this process is gone.
    wait_for_end_of_input();
    Ok(true)
}

/// A PgBouncer comes with the server that it needs.
fn start(kind: Kind) -> Result<Vec<Server>, Error> {
    if kind == Kind::PgBouncer {
        let postgres = Server::start(Kind::Postgres15)?;
        return Ok(vec![PgBouncer::start(&postgres)?, postgres]);
    }
    Ok(vec![Server::start(kind)?])
}

fn print(servers: &[Server]) -> Result<(), Error> {
    let mut lines = vec![row("NAME", "VERSION", "PID", "URL")];
    for server in servers {
        let pid = server.pid().unwrap_or_default().to_string();
        let version = server.version()?;
        lines.push(row(server.kind().name(), &version, &pid, &server.url()));
    }
    lines.push(String::new());
    lines.extend(
        servers
            .iter()
            .map(|server| format!("export {}={}", server.kind().variable(), server.url())),
    );
    let mut output = io::stdout().lock();
    // Nobody reads it: then nobody misses it either.
    let _ = writeln!(output, "{}", lines.join("\n")).and_then(|()| output.flush());
    Ok(())
}

fn row(name: &str, version: &str, pid: &str, url: &str) -> String {
    format!("{name:<11} {version:<42} {pid:>8}  {url}")
}

/// All at once, as most of a start is waiting.
fn in_parallel<T: Send>(
    kinds: &[Kind],
    action: impl Fn(Kind) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    let action = &action;
    thread::scope(|scope| {
        let threads: Vec<_> = kinds.iter().map(|kind| scope.spawn(move || action(*kind))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a start does not panic")).collect()
    })
}

/// One that ended does not run, though its new parent may never take note of it.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

fn wait_for_end_of_input() {
    let mut buffer = [0; 1024];
    let mut input = io::stdin().lock();
    while input.read(&mut buffer).is_ok_and(|count| count > 0) {}
}

impl Traces {
    fn of(server: &Server) -> Self {
        Self {
            kind: server.kind(),
            pids: server.pids(),
            port: server.port(),
            data: server.data_dir(),
        }
    }

    /// Whether the server left nothing behind; says what it left.
    fn report(&self) -> bool {
        const LIMIT: Duration = Duration::from_secs(20);
        let deadline = Instant::now() + LIMIT;
        let left = loop {
            let left = self.left();
            if left.is_empty() || Instant::now() > deadline {
                break left;
            }
            thread::sleep(Duration::from_millis(10));
        };
        if left.is_empty() {
            println!("{}: stopped, nothing is left", self.kind);
            return true;
        }
        eprintln!("{}: still there: {}", self.kind, left.join(", "));
        false
    }

    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        for pid in &self.pids {
            if runs(*pid) {
                left.push(format!("process {pid}"));
            }
        }
        if TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {
            left.push(format!("port {}", self.port));
        }
        if let Some(data) = self.data.as_ref().filter(|data| data.exists()) {
            left.push(format!("folder {}", data.display()));
        }
        left
    }
}
