//! What a [`Proxy`](super::Proxy) can do to the bytes: [`Weather`] that lasts, [`Strike`]s that
//! happen once.

use std::fmt;
use std::time::Duration;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    Requests,
    /// From the server to the client.
    Answers,
}

impl Direction {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Requests, Self::Answers];
}

/// The condition of one direction of a connection; by default clear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Weather {
    /// All bytes arrive so much later.
    pub delay: Duration,
    /// And by up to so much more, at random; they never overtake one another.
    pub jitter: Duration,
    /// They arrive a few at a time.
    pub trickle: Option<Trickle>,
    /// Nothing arrives, nothing is refused; also no end of a connection.
    pub silent: bool,
}

/// A slow line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trickle {
    /// So many bytes at a time, at least one.
    pub bytes: usize,
    /// So often.
    pub every: Duration,
}

impl Weather {
    /// Nothing in the way.
    pub fn clear() -> Self {
        Self::default()
    }

    /// Nothing arrives.
    pub fn silent() -> Self {
        Self { silent: true, ..Self::default() }
    }

    /// All bytes arrive later.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// By a random time more.
    #[must_use]
    pub fn jitter(self, jitter: Duration) -> Self {
        Self { jitter, ..self }
    }

    /// So many bytes (at least one) arrive so often.
    #[must_use]
    pub fn trickle(self, bytes: usize, every: Duration) -> Self {
        Self { trickle: Some(Trickle { bytes: bytes.max(1), every }), ..self }
    }
}

impl fmt::Display for Weather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return f.write_str("clear");
        }
        let mut gap = "";
        if self.silent {
            f.write_str("silent")?;
            gap = ", ";
        }
        if !self.delay.is_zero() || !self.jitter.is_zero() {
            write!(f, "{gap}{:?} to {:?} late", self.delay, self.delay + self.jitter)?;
            gap = ", ";
        }
        if let Some(Trickle { bytes, every }) = self.trickle {
            write!(f, "{gap}{bytes} bytes every {every:?}")?;
        }
        Ok(())
    }
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Both sides see an orderly end of the stream (FIN).
    Close,
    /// Both sides see a reset (RST).
    Reset,
    /// Neither side sees anything: from here on nothing of this connection arrives, whatever the
    /// weather, until it is ended otherwise.
    BlackHole,
}

/// What happens to a connection once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strike {
    /// It ends at once, also in silence.
    End(End),
    /// The receiving side of this direction sees the end of the stream, and nothing more; the
    /// other direction goes on.
    HalfClose(Direction),
    /// So many more bytes of this direction arrive, which may be in the middle of a statement or
    /// an answer; instead of the next one the connection ends.
    After {
        /// Of this direction.
        direction: Direction,
        /// What still arrives.
        bytes: usize,
        /// How it ends then.
        end: End,
    },
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End(End::Close) => f.write_str("cut"),
            Self::End(End::Reset) => f.write_str("reset"),
            Self::End(End::BlackHole) => f.write_str("black hole"),
            Self::HalfClose(Direction::Requests) => f.write_str("half close of the requests"),
            Self::HalfClose(Direction::Answers) => f.write_str("half close of the answers"),
            Self::After { direction, bytes, end } => {
                let of = match direction {
                    Direction::Requests => "requests",
                    Direction::Answers => "answers",
                };
                write!(f, "{} after {bytes} bytes of the {of}", Self::End(*end))
            }
        }
    }
}
