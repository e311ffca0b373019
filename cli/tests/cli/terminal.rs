//! A job at a terminal: it reads from it, and Ctrl-C is its own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::pty::openpty;

use super::support::{Place, postgres, until};

/// A command that leads the session of a terminal.
struct Session {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
}

/// What makes its terminal that of a new session, as a login does.
fn session() -> Command {
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait"]);
    command
}

impl Session {
    fn start(place: &Place, args: &[&str]) -> Self {
        let leasehold = place.leasehold(args);
        let mut command = session();
        command.arg(leasehold.get_program()).args(leasehold.get_args());
        Self::of(place, command)
    }

    /// An interactive shell with jobs.
    fn shell(place: &Place) -> Self {
        let mut command = session();
        command.args(["bash", "--norc", "--noprofile", "-i"]);
        Self::of(place, command)
    }

    fn of(place: &Place, mut command: Command) -> Self {
        for (name, value) in place.leasehold(&[]).get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let pty = openpty(None, None).expect("a terminal");
        let slave = |fd: &OwnedFd| Stdio::from(fd.try_clone().expect("a descriptor"));
        command.stdin(slave(&pty.slave)).stdout(slave(&pty.slave)).stderr(slave(&pty.slave));
        let child = command.spawn().expect("it starts");
        let mut reads = File::from(pty.master.try_clone().expect("a descriptor"));
        let screen = Arc::new(Mutex::new(String::new()));
        let shown = screen.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // a terminal without anybody at its other end is an error
            while let Ok(count @ 1..) = reads.read(&mut buffer) {
                shown.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
        });
        Self { child, keyboard: File::from(pty.master), screen }
    }

    fn shows(&self, part: &str) {
        until(part, || self.screen.lock().unwrap().contains(part));
    }

    fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("it listens");
    }

    fn code(&mut self) -> Option<i32> {
        let mut code = None;
        until("it ends", || {
            code = self.child.try_wait().expect("it can be waited for");
            code.is_some()
        });
        code.and_then(|status| status.code())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn a_job_reads_from_the_terminal() {
    let place = postgres();
    let script = "echo ready; read line; echo got $line";
    let mut session = Session::start(&place, &["run", "x", "--", "sh", "-c", script]);
    session.shows("ready");
    session.types("hello\n");
    session.shows("got hello");
    assert_eq!(session.code(), Some(0));
}

/// The scripts start no process once they are ready: dash loses a signal that comes between its
/// `vfork` and the `exec`, whoever sends it.
#[test]
fn ctrl_c_is_the_jobs() {
    let place = postgres();
    let script = "trap 'echo caught; exit 4' INT; echo ready; read line";
    let mut session = Session::start(&place, &["run", "x", "--", "sh", "-c", script]);
    session.shows("ready");
    session.types("\x03");
    session.shows("caught");
    assert_eq!(session.code(), Some(4));
    let mut session = Session::start(&place, &["run", "x", "--", "sh", "-c", "echo up; exec cat"]);
    session.shows("up");
    session.types("\x03");
    assert_eq!(session.code(), Some(130));
    place.ends(&["run", "--try", "x", "--", "true"]).code_is(0);
}

#[test]
fn under_a_shell_ctrl_z_stops_and_fg_goes_on() {
    let place = postgres();
    let program = env!("CARGO_BIN_EXE_leasehold");
    let job = "'echo ready; read line; echo got $line'";
    let mut session = Session::shell(&place);
    session.types(&format!("{program} run x -- sh -c {job}\n"));
    session.shows("ready\r\n");
    session.types("\x1a");
    session.shows("Stopped");
    session.types("echo the shell $((20 + 3))\n");
    session.shows("the shell 23");
    session.types("fg\n");
    session.types("again\n");
    session.shows("got again");
    session.types("echo code $? $((1 + 1)); exit 0\n");
    session.shows("code 0 2");
    assert_eq!(session.code(), Some(0));
}
