//! The two small processes beside a job, which are this program under other arguments.
//!
//! - The *starter* becomes the job: it asks the kernel for a signal when its parent dies, waits until
//!   the warden knows its group, takes the terminal for it, and executes the program in its own place.
//! - The *[warden](super::warden)* lives beside the job's group.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::{Pid, getpid, getppid};

use super::gate::{self, Gate};
use super::{terminal, warden};
use crate::failure::Failure;

/// The argument by which the starter is known.
const STARTER: &str = "__start";

/// The exit code of this process if it is a helper, and none if it is the command itself.
pub(crate) fn helper() -> Option<u8> {
    let mut args = std::env::args_os().skip(1);
    match args.next()?.to_str()? {
        STARTER => Some(start(args)),
        warden::ARGUMENT => Some(warden::ward(args)),
        _ => None,
    }
}

/// The command that starts a program by way of the starter.
pub(super) fn starter(
    program: &[OsString],
    take_terminal: bool,
    gate: &Gate,
) -> Result<Command, Failure> {
    let mut command = Command::new(this_program()?);
    command.arg(STARTER).arg(getpid().to_string()).arg(if take_terminal { "tty" } else { "-" });
    command.arg(gate.number()).args(program).process_group(0);
    Ok(command)
}

fn start(mut args: impl Iterator<Item = OsString>) -> u8 {
    let parent = args.next().and_then(|pid| pid.to_str()?.parse().ok()).map(Pid::from_raw);
    let take_terminal = args.next().as_deref() == Some(OsStr::new("tty"));
    let (Some(gate), Some(program)) = (args.next(), args.next()) else { return crate::exit::USAGE };
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGTERM) {
        eprintln!("leasehold: the kernel will not tell of its end: {error}");
    }
    if parent != Some(getppid()) {
        return crate::exit::of_signal(Signal::SIGTERM as i32); // it died before it could be asked
    }
    if !gate::opens(&gate.to_string_lossy()) {
        return crate::exit::of_signal(Signal::SIGTERM as i32);
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

/// This program, also where its file was replaced meanwhile.
pub(super) fn this_program() -> Result<std::path::PathBuf, Failure> {
    let running = std::path::Path::new("/proc/self/exe");
    if running.exists() {
        // not resolved: an update may have removed the file that runs
        return Ok(running.to_owned());
    }
    std::env::current_exe().map_err(|error| Failure::system("cannot find this program", &error))
}
