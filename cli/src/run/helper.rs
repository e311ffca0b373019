//! The two small processes beside a job, which are this program under other arguments.
//!
//! - The *starter* becomes the job: it takes the terminal for its group, asks the kernel for a
//!   signal when its parent dies, and executes the program in its own place.
//! - The *warden* lives beside the job's group and ends it when `leasehold` is gone without a word,
//!   i.e. killed: nobody would notice a loss any more.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write, stdin};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid};

use super::terminal;
use crate::failure::Failure;

/// The arguments by which the processes are known.
const STARTER: &str = "__start";
const WARDEN: &str = "__ward";
/// What the warden is called in a list of processes: it must outlive a `killall leasehold`.
const WARDEN_NAME: &str = "lh-warden";
/// What the warden is told when the job has ended.
const DONE: &str = "done";
/// How often the warden looks whether the group is empty.
const LOOK: Duration = Duration::from_millis(20);

/// The exit code of this process if it is a helper, and none if it is the command itself.
pub(crate) fn helper() -> Option<u8> {
    let mut args = std::env::args_os().skip(1);
    match args.next()?.to_str()? {
        STARTER => Some(start(args)),
        WARDEN => Some(ward(args)),
        _ => None,
    }
}

/// The command that starts a program by way of the starter.
pub(super) fn starter(program: &[OsString], take_terminal: bool) -> Result<Command, Failure> {
    let mut command = Command::new(this_program()?);
    command.arg(STARTER).arg(getpid().to_string()).arg(if take_terminal { "tty" } else { "-" });
    command.args(program).process_group(0);
    Ok(command)
}

fn start(mut args: impl Iterator<Item = OsString>) -> u8 {
    let parent = args.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let take_terminal = args.next().as_deref() == Some(OsStr::new("tty"));
    let Some(program) = args.next() else { return crate::exit::USAGE };
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGTERM) {
        eprintln!("leasehold: the kernel will not tell of its end: {error}");
    }
    if parent != Some(getppid()) {
        return crate::exit::of_signal(Signal::SIGTERM as i32); // it died before it could be asked
    }
    if take_terminal {
        terminal::give(getpid());
    }
    let error = Command::new(&program).args(args).exec();
    let failure = Failure::program(&program.to_string_lossy(), &error);
    let bad = crate::style::BAD;
    anstream::eprintln!("{bad}leasehold:{bad:#} {}", failure.message());
    anstream::eprintln!("next: {}", failure.advice());
    failure.code()
}

/// The warden of a job, as the command sees it.
#[derive(Debug)]
pub(super) struct Warden {
    child: Child,
    orders: ChildStdin,
}

impl Warden {
    /// Starts one; it wards nothing yet.
    pub(super) fn start(grace: Duration) -> Result<Self, Failure> {
        let mut command = Command::new(this_program()?);
        command.arg0(WARDEN_NAME).arg(WARDEN).arg(grace.as_millis().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let failed = |error| Failure::system("cannot start a process", &error);
        let mut child = command.spawn().map_err(failed)?;
        let orders = child.stdin.take().ok_or_else(|| failed(std::io::ErrorKind::Other.into()))?;
        Ok(Self { child, orders })
    }

    /// Lets it ward this group.
    pub(super) fn ward(&mut self, group: Pid) -> Result<(), Failure> {
        let failed = |error| Failure::system("cannot ward the command", &error);
        writeln!(self.orders, "{group}").map_err(failed)
    }

    /// Lets it go.
    pub(super) fn dismiss(mut self) {
        drop(writeln!(self.orders, "{DONE}"));
        drop(self.orders);
        drop(self.child.wait());
    }
}

fn ward(mut args: impl Iterator<Item = OsString>) -> u8 {
    #[cfg(target_os = "linux")]
    if let Ok(name) = std::ffi::CString::new(WARDEN_NAME) {
        let _ = nix::sys::prctl::set_name(&name); // a name only
    }
    let grace = args.next().and_then(|millis| millis.to_str()?.parse().ok());
    let Some(grace) = grace.map(Duration::from_millis) else { return crate::exit::USAGE };
    let mut lines = BufReader::new(stdin()).lines().map_while(Result::ok);
    let group = lines.next().and_then(|line| line.parse().ok()).map(Pid::from_raw);
    let Some(group) = group.filter(|group| group.as_raw() > 1) else { return crate::exit::OK };
    if lines.next().as_deref() == Some(DONE) || !lives(group) {
        return crate::exit::OK;
    }
    anstream::eprintln!("leasehold: was killed, so the command that it ran is ended");
    let _ = killpg(group, Signal::SIGTERM); // gone: looked at below
    let _ = killpg(group, Signal::SIGCONT); // a stopped process would never see it
    let end = Instant::now() + grace;
    while lives(group) {
        if Instant::now() >= end {
            let _ = killpg(group, Signal::SIGKILL);
            break;
        }
        std::thread::sleep(LOOK);
    }
    crate::exit::OK
}

/// Whether a group has any process that runs.
pub(super) fn lives(group: Pid) -> bool {
    // as the first process of a container this one inherits those that nobody waits for
    let any = Pid::from_raw(-group.as_raw());
    while let Ok(status) = waitpid(any, Some(WaitPidFlag::WNOHANG))
        && status != WaitStatus::StillAlive
    {}
    killpg(group, None::<Signal>) != Err(Errno::ESRCH) && runs(group)
}

/// Whether one of its processes has not ended: where nobody waits for the dead, they stay.
fn runs(group: Pid) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    let group = group.to_string();
    let mut known = false;
    for process in processes.flatten() {
        let Ok(stat) = std::fs::read_to_string(process.path().join("stat")) else { continue };
        // pid (name) state parent group …; a name may have anything in it
        let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
        let (state, of) = (fields.next(), fields.nth(1));
        known |= state.is_some();
        if of == Some(&group) && !matches!(state, Some("Z" | "X")) {
            return true;
        }
    }
    !known
}

/// This program, also where its file was replaced meanwhile.
fn this_program() -> Result<std::path::PathBuf, Failure> {
    let running = std::path::Path::new("/proc/self/exe");
    if running.exists() {
        // not resolved: an update may have removed the file that runs
        return Ok(running.to_owned());
    }
    std::env::current_exe().map_err(|error| Failure::system("cannot find this program", &error))
}
