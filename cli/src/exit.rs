//! The exit codes that are not those of a job.

/// All is well, or the answer is yes.
pub(crate) const OK: u8 = 0;
/// The answer is no: nothing is held, seen before, a fault was found.
pub(crate) const NO: u8 = 1;
/// The command line is wrong.
pub(crate) const USAGE: u8 = 2;
/// The store cannot be reached, or refuses (`EX_UNAVAILABLE`).
pub(crate) const STORE: u8 = 69;
/// Something of this machine fails, e.g. no process can be started (`EX_OSERR`).
pub(crate) const SYSTEM: u8 = 71;
/// Somebody else holds it (`EX_TEMPFAIL`).
pub(crate) const BUSY: u8 = 75;
/// It was lost while the job ran.
pub(crate) const LOST: u8 = 76;
/// The job's program cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The job's program was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// The code of a process that a signal ended, as shells have it.
pub(crate) fn of_signal(number: i32) -> u8 {
    128_u8.saturating_add(number.clamp(0, 127) as u8)
}
