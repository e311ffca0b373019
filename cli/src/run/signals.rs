//! [`Signals`]: what this process is told.

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::failure::Failure;

/// The signals that matter while a job runs.
#[derive(Debug)]
pub(super) struct Signals {
    term: Stream,
    int: Stream,
    hup: Stream,
    quit: Stream,
    usr1: Stream,
    usr2: Stream,
    cont: Stream,
    chld: Stream,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// A signal that the job is to get.
    Pass(Signal),
    /// This process goes on after a stop.
    Continued,
    /// A child changed its state.
    Child,
}

impl Signals {
    /// Takes them from now on.
    pub(super) fn listen() -> Result<Self, Failure> {
        let stream = |kind| signal(kind).map_err(|e| Failure::system("cannot take signals", &e));
        let raw = |signal: Signal| SignalKind::from_raw(signal as i32);
        Ok(Self {
            term: stream(SignalKind::terminate())?,
            int: stream(SignalKind::interrupt())?,
            hup: stream(SignalKind::hangup())?,
            quit: stream(SignalKind::quit())?,
            usr1: stream(SignalKind::user_defined1())?,
            usr2: stream(SignalKind::user_defined2())?,
            cont: stream(raw(Signal::SIGCONT))?,
            chld: stream(SignalKind::child())?,
        })
    }

    /// The next one.
    pub(super) async fn next(&mut self) -> News {
        tokio::select! {
            _ = self.term.recv() => News::Pass(Signal::SIGTERM),
            _ = self.int.recv() => News::Pass(Signal::SIGINT),
            _ = self.hup.recv() => News::Pass(Signal::SIGHUP),
            _ = self.quit.recv() => News::Pass(Signal::SIGQUIT),
            _ = self.usr1.recv() => News::Pass(Signal::SIGUSR1),
            _ = self.usr2.recv() => News::Pass(Signal::SIGUSR2),
            _ = self.cont.recv() => News::Continued,
            _ = self.chld.recv() => News::Child,
        }
    }

    /// The next one that asks to end.
    pub(super) async fn ending(&mut self) -> Signal {
        loop {
            if let News::Pass(signal) = self.next().await
                && ends(signal)
            {
                return signal;
            }
        }
    }
}

/// Whether a signal asks to end.
pub(super) fn ends(signal: Signal) -> bool {
    !matches!(signal, Signal::SIGUSR1 | Signal::SIGUSR2)
}
