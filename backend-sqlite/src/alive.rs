//! Locks of the operating system on files: proof that a process lives, without any timer.
//!
//! They are `flock`s, which belong to one opening of a file and not to the process: two handles of
//! one process exclude each other like two processes, and however the process ends, the kernel
//! closes the file and frees the lock. Files are opened close-on-exec, so that a program that is
//! started meanwhile does not keep them.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::place::Identity;

/// A locked file of our own. Dropping it removes the file and frees the lock.
#[derive(Debug)]
pub(crate) struct Locked {
    path: PathBuf,
    identity: Identity,
    file: File,
}

impl Locked {
    /// Locks the file at `path`, making it if need be; none if somebody else has it.
    pub(crate) fn try_at(path: &Path) -> io::Result<Option<Self>> {
        loop {
            let mut options = OpenOptions::new();
            let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let locked =
                Self { path: path.to_owned(), identity: Identity::of(&file.metadata()?), file };
            // its last owner may have removed it before we got the lock
            if locked.is_in_place() {
                return Ok(Some(locked));
            }
        }
    }

    /// Replaces what is in the file.
    pub(crate) fn write(&self, text: &[u8]) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(text, 0)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is still where others find it.
    pub(crate) fn is_in_place(&self) -> bool {
        Identity::at(&self.path) == Some(self.identity)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.is_in_place() {
            // a file that stays is harmless: nobody has it locked
            drop(std::fs::remove_file(&self.path));
        }
        drop(self.file.unlock());
    }
}

/// Whether the file's owner is dead: nobody has it locked, or it is gone.
///
/// The look itself is a shared lock, so that two who look at once don't take each other for the
/// owner.
pub(crate) fn is_dead(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_also_within_a_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert!(is_dead(&path).unwrap());
        let locked = Locked::try_at(&path).unwrap().unwrap();
        assert!(Locked::try_at(&path).unwrap().is_none());
        assert!(!is_dead(&path).unwrap());
        drop(locked);
        assert!(!path.exists() && is_dead(&path).unwrap());
        assert!(Locked::try_at(&path).unwrap().is_some());
    }

    #[test]
    fn a_file_that_stayed_behind_is_dead() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, "").unwrap();
        assert!(is_dead(&path).unwrap());
        assert!(Locked::try_at(&path).unwrap().is_some());
    }

    #[test]
    fn a_successor_at_the_same_path_is_spared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let old = Locked::try_at(&path).unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
        let new = Locked::try_at(&path).unwrap().unwrap();
        assert!(!old.is_in_place() && new.is_in_place());
        drop(old);
        assert!(new.is_in_place());
    }
}
