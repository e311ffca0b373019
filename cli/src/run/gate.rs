//! [`Gate`]: keeps a job from running before somebody wards it.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsRawFd;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// The side of `leasehold`, of a pipe whose other side the starter inherits. If this process dies
/// the starter sees the pipe's end, and runs nothing.
#[derive(Debug)]
pub(super) struct Gate {
    starters: PipeReader,
    opens: PipeWriter,
}

impl Gate {
    /// A closed one.
    pub(super) fn closed() -> io::Result<Self> {
        let (starters, opens) = pipe()?;
        // inherited by the next process, and by no other: they are all started by one thread
        fcntl(&starters, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(Self { starters, opens })
    }

    /// The starter's name of it.
    pub(super) fn number(&self) -> String {
        self.starters.as_raw_fd().to_string()
    }

    /// Lets the starter go on.
    pub(super) fn open(mut self) -> io::Result<()> {
        self.opens.write_all(b".")
    }
}

/// The side of the starter: waits until the gate opens; false: it never will. The job inherits
/// nothing of it.
pub(super) fn opens(number: &str) -> bool {
    let Ok(fd) = number.parse::<i32>() else { return false };
    let own = File::open(format!("/proc/self/fd/{fd}"));
    let own = own.or_else(|_| File::open(format!("/dev/fd/{fd}")));
    // the inherited one would outlive the execution of the job
    let closed = nix::unistd::close(fd).is_ok();
    let opened = own.and_then(|mut own| own.read_exact(&mut [0]));
    closed && opened.is_ok()
}
