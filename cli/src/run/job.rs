//! [`Job`]: the command that runs, in a process group of its own.

use std::ffi::OsString;
use std::process::Child;
use std::time::Duration;

use leasehold::{FencingToken, Key, LossReason, Lost};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

use super::gate::Gate;
use super::group::lives;
use super::helper::starter;
use super::signals::{News, Signals, ends};
use super::terminal;
use super::warden::{Legacy, Warden};
use crate::exit;
use crate::failure::Failure;
use crate::ui::Ui;

/// How often a group that must end is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// A running job.
#[derive(Debug)]
pub(super) struct Job {
    /// Its first process leads its group.
    group: Pid,
    /// Not waited for by the library: it would not tell of stops.
    _leader: Child,
    /// Goes on after the job, until what that ran under is freed.
    warden: Warden,
    grace: Duration,
}

/// How a job ended.
#[derive(Debug)]
pub(super) struct End {
    /// The exit code of its first process, or 128 and the signal's number.
    pub(super) code: u8,
    /// Whether processes of its group go on.
    pub(super) left_behind: bool,
    /// To be dismissed once the lock is free.
    pub(super) warden: Warden,
}

/// Why a job must end.
#[derive(Clone, Copy, Debug)]
struct Ending {
    kill_at: Instant,
    killed: bool,
}

impl Job {
    /// Starts it. `legacy`: what it runs under, if somebody must free that after a kill.
    pub(super) fn start(
        ui: Ui,
        command: &[OsString],
        (key, token): (&Key, FencingToken),
        grace: Duration,
        legacy: Option<&Legacy>,
    ) -> Result<Self, Failure> {
        let failed = |error| Failure::system("cannot start a process", &error);
        let mut warden = Warden::start(ui, grace, legacy)?;
        let gate = Gate::closed().map_err(failed)?;
        let mut starter = starter(command, terminal::is_ours(), &gate)?;
        starter.env("LEASEHOLD_KEY", key.as_str()).env("LEASEHOLD_TOKEN", token.to_string());
        let leader = starter.spawn().map_err(failed)?;
        let group = Pid::from_raw(leader.id().cast_signed());
        let warded = warden.ward(group).and_then(|()| gate.open().map_err(failed));
        let job = Self { group, _leader: leader, warden, grace };
        if let Err(failure) = warded {
            job.signal(Signal::SIGKILL);
            return Err(failure);
        }
        Ok(job)
    }

    /// Waits for its end: passes signals on, and ends it when the lock is lost.
    pub(super) async fn supervise(
        mut self,
        ui: Ui,
        lost: &Lost,
        mut signals: Signals,
    ) -> Result<End, Failure> {
        let mut ending: Option<Ending> = None;
        let mut is_lost = false;
        let mut asked_to_end = false;
        let code = loop {
            if let Some(code) = self.leader_ended()? {
                break code;
            }
            let kill_at = ending.filter(|ending| !ending.killed).map(|ending| ending.kill_at);
            tokio::select! {
                news = signals.next() => match news {
                    News::Child => {}
                    News::Continued => self.go_on(),
                    News::Pass(signal) => {
                        self.signal(signal);
                        if ends(signal) {
                            asked_to_end = true;
                            self.signal(Signal::SIGCONT);
                        }
                    }
                },
                reason = lost.wait(), if !is_lost => {
                    is_lost = true;
                    ending = Some(self.end_for(ui, reason));
                }
                () = until(kill_at) => {
                    self.kill(ui);
                    ending = ending.map(|ending| Ending { killed: true, ..ending });
                }
            }
        };
        terminal::take_from(self.group);
        // who is told to end has so long, whichever process of the group it is
        let kill_at = match ending {
            Some(ending) => Some(ending.kill_at),
            None if asked_to_end => Some(Instant::now() + self.grace),
            None => None,
        };
        if let Some(kill_at) = kill_at {
            while lives(self.group) && Instant::now() < kill_at {
                sleep(LOOK).await;
            }
            if lives(self.group) {
                self.kill(ui);
            }
        }
        let left_behind = kill_at.is_none() && lives(self.group);
        self.warden.job_ended();
        Ok(End { code, left_behind, warden: self.warden })
    }

    /// The exit code of the first process, once it has ended.
    fn leader_ended(&self) -> Result<Option<u8>, Failure> {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        loop {
            match waitpid(self.group, Some(flags)) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(Some(code as u8)),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    return Ok(Some(exit::of_signal(signal as i32)));
                }
                Ok(WaitStatus::Stopped(..)) => self.stopped(),
                Ok(_) => return Ok(None),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(Failure::system("cannot wait", &errno.into())),
            }
        }
    }

    /// The job was stopped (Ctrl-Z): the shell is to get the terminal back.
    fn stopped(&self) {
        if !terminal::is_there() {
            return;
        }
        if terminal::is_shells() {
            terminal::take_from(self.group);
            terminal::stop_too();
        } else {
            self.signal(Signal::SIGCONT); // nobody could ever wake it
        }
    }

    /// After a stop (`fg` or `bg` of the shell).
    fn go_on(&self) {
        if terminal::is_ours() {
            terminal::give(self.group);
        }
        self.signal(Signal::SIGCONT);
    }

    fn end_for(&self, ui: Ui, reason: LossReason) -> Ending {
        let why = reason.as_str();
        let text = format!("lost: {why}; the command is told to end");
        ui.news("lost", json!({"reason": why}), &text);
        self.signal(Signal::SIGTERM);
        self.signal(Signal::SIGCONT); // a stopped process would never see it
        Ending { kill_at: Instant::now() + self.grace, killed: false }
    }

    fn kill(&self, ui: Ui) {
        let text = "the command did not end within the grace and is killed";
        ui.news("killed", json!({"grace_s": self.grace.as_secs_f64()}), text);
        self.signal(Signal::SIGKILL);
    }

    fn signal(&self, signal: Signal) {
        if let Err(error) = killpg(self.group, signal) {
            tracing::debug!(%error, %signal, "the group did not get a signal");
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
