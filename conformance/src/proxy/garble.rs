//! Answers that arrive otherwise than the server sent them.

use std::fmt;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

/// What becomes of one chunk of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Garble {
    /// It ends early, and what follows goes on.
    Truncate,
    /// It arrives twice.
    Duplicate,
    /// It does not arrive, and what follows does.
    Omit,
    /// It arrives after the next one.
    Swap,
    /// Bytes of chance arrive before it.
    Precede,
    /// Bytes of chance arrive in its place.
    Replace,
    /// One of its bits is another one.
    Flip,
    /// Bytes of chance arrive in the middle of it.
    Insert,
}

impl Garble {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Truncate,
        Self::Duplicate,
        Self::Omit,
        Self::Swap,
        Self::Precede,
        Self::Replace,
        Self::Flip,
        Self::Insert,
    ];

    /// Whether the result can be a well-formed answer with another meaning: no protocol of the
    /// stores has a checksum, so that only TLS can tell.
    pub fn may_lie(self) -> bool {
        matches!(self, Self::Flip | Self::Insert)
    }
}

/// One chunk of answers that will be garbled.
#[derive(Debug)]
pub(super) struct Garbling {
    kind: Garble,
    /// So many chunks arrive before it.
    after: u32,
    rng: StdRng,
    /// The connection on which the chunk is that the next one overtakes.
    held_back: Option<(u64, Vec<u8>)>,
    done: Option<Garbled>,
}

/// What was done to an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Garbled {
    /// How it was garbled.
    pub kind: Garble,
    /// On which connection.
    pub connection: u64,
    /// How long the chunk was, in bytes.
    pub bytes: usize,
}

impl fmt::Display for Garbled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, connection, bytes } = self;
        write!(f, "{kind:?} of {bytes} bytes on connection {connection}")
    }
}

impl Garbling {
    pub(super) fn new(kind: Garble, after: u32, seed: u64) -> Self {
        let rng = StdRng::seed_from_u64(seed);
        Self { kind, after, rng, held_back: None, done: None }
    }

    pub(super) fn done(&self) -> Option<Garbled> {
        self.done
    }

    /// What arrives in the place of a chunk.
    pub(super) fn pass(&mut self, connection: u64, mut chunk: Vec<u8>) -> Vec<u8> {
        if self.held_back.as_ref().is_some_and(|(held, _)| *held == connection)
            && let Some((_, late)) = self.held_back.take()
        {
            chunk.extend(late);
            return chunk;
        }
        if self.done.is_some() || chunk.is_empty() {
            return chunk;
        }
        if self.after > 0 {
            self.after -= 1;
            return chunk;
        }
        self.done = Some(Garbled { kind: self.kind, connection, bytes: chunk.len() });
        let at = self.rng.random_range(0..chunk.len());
        match self.kind {
            Garble::Truncate => chunk.truncate(at),
            Garble::Duplicate => chunk.extend_from_within(..),
            Garble::Omit => chunk.clear(),
            Garble::Swap => self.held_back = Some((connection, std::mem::take(&mut chunk))),
            Garble::Precede => drop(chunk.splice(0..0, self.noise())),
            Garble::Replace => chunk = self.noise(),
            Garble::Flip => chunk[at] ^= 1 << self.rng.random_range(0..8),
            Garble::Insert => drop(chunk.splice(at..at, self.noise())),
        }
        chunk
    }

    fn noise(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.rng.random_range(1..=64)];
        self.rng.fill_bytes(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_chunk_is_garbled_and_the_same_one_for_the_same_seed() {
        for kind in Garble::ALL {
            let run = |seed| {
                let mut garbling = Garbling::new(kind, 1, seed);
                let chunks = [b"first answer", b"second answ.", b"third answer"];
                let passed = chunks.map(|chunk| garbling.pass(7, chunk.to_vec()));
                (passed, garbling.done())
            };
            let (passed, done) = run(3);
            assert_eq!((passed.clone(), done), run(3));
            assert_eq!(passed[0], b"first answer");
            assert_ne!(passed[1], b"second answ.", "{kind:?}");
            assert_eq!(done, Some(Garbled { kind, connection: 7, bytes: 12 }));
            let third: &[u8] = match kind {
                Garble::Swap => b"third answersecond answ.",
                _ => b"third answer",
            };
            assert_eq!(passed[2], third, "{kind:?}");
        }
    }
}
