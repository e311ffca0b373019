//! Where the files are: the database, and beside it the folder of its locks.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::sqlite::SqliteConnectOptions;

use crate::error::{file_error, store_error};

/// The paths of one store.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The database.
    pub(crate) main: PathBuf,
    folder: PathBuf,
}

impl Place {
    /// Finds the database that a URL names, and makes the folders that are missing.
    pub(crate) fn prepare(url: &str, prefix: &str) -> Result<Self> {
        let named = path_of(url)?;
        let main = settle(&named)?;
        let mut folder = main.clone().into_os_string();
        folder.push(format!("-{prefix}"));
        let place = Self { main, folder: PathBuf::from(folder) };
        refuse_network(&place.main)?;
        place.make_folders()?;
        Ok(place)
    }

    /// Makes the folders that are missing.
    pub(crate) fn make_folders(&self) -> Result<()> {
        for folder in [&self.folder, &self.sessions(), &self.claims()] {
            make_folder(folder)?;
        }
        Ok(())
    }

    /// The database of named locks.
    pub(crate) fn locks(&self) -> PathBuf {
        self.folder.join("locks.db")
    }

    /// The database of leases.
    pub(crate) fn leases(&self) -> PathBuf {
        self.folder.join("leases.db")
    }

    /// The lock under which files are set up.
    pub(crate) fn set_up(&self) -> PathBuf {
        self.folder.join("set-up.lock")
    }

    /// The proofs of life of sessions.
    pub(crate) fn sessions(&self) -> PathBuf {
        self.folder.join("sessions")
    }

    /// The locks of claims.
    pub(crate) fn claims(&self) -> PathBuf {
        self.folder.join("claims")
    }
}

/// The path in a URL; that of the default file if it names none.
fn path_of(url: &str) -> Result<PathBuf> {
    let invalid = |detail: String| Error::new(ErrorKind::InvalidOptions, detail);
    let Some(rest) = url.strip_prefix("sqlite:") else {
        return Err(invalid("a URL of this store begins with sqlite:".to_owned()));
    };
    let path = rest.strip_prefix("//").unwrap_or(rest);
    if path.is_empty() {
        return default_path();
    }
    if let Some((_, options)) = path.split_once('?') {
        let detail = format!(
            "a sqlite URL has no options, this has {options:?}: the builder sets them; \
             write a question mark in a path as %3F"
        );
        return Err(invalid(detail));
    }
    if path == ":memory:" {
        let detail = "a database in memory cannot be shared with other processes: \
                      name a file, or use the memory backend";
        return Err(invalid(detail.to_owned()));
    }
    let options = SqliteConnectOptions::from_str(&format!("sqlite:{path}")).map_err(store_error)?;
    Ok(options.get_filename().to_owned())
}

/// `$XDG_STATE_HOME/leasehold/leasehold.db`, else `~/.local/state/leasehold/leasehold.db`.
fn default_path() -> Result<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let home = || std::env::home_dir().filter(|home| home.is_absolute());
    let state = state.or_else(|| home().map(|home| home.join(".local/state")));
    let state = state.ok_or_else(|| {
        let detail = "there is no home folder for the default file: set XDG_STATE_HOME, \
                      or name a file as in sqlite:/path/to/file.db";
        Error::new(ErrorKind::InvalidOptions, detail)
    })?;
    Ok(state.join("leasehold/leasehold.db"))
}

/// One name for each file, however it is written and whatever links lead to it: the locks of two
/// names would be different ones.
fn settle(named: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(named).map_err(|error| file_error("find", named, error))?;
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        let detail = format!("{} is no path of a file", named.display());
        return Err(Error::new(ErrorKind::InvalidOptions, detail));
    };
    make_folder(folder)?;
    match fs::canonicalize(&path) {
        Ok(path) if path.is_dir() => {
            let detail = format!("{} is a folder: name a file in it", path.display());
            Err(Error::new(ErrorKind::InvalidOptions, detail))
        }
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder =
                fs::canonicalize(folder).map_err(|error| file_error("open", folder, error))?;
            Ok(folder.join(name))
        }
        Err(error) => Err(file_error("open", &path, error)),
    }
}

fn make_folder(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| file_error("make the folder", path, error))
}

/// Refuses a file on a network: neither the shared memory of SQLite's write-ahead log nor locks
/// reach other machines.
#[cfg(target_os = "linux")]
fn refuse_network(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else {
        return Ok(());
    };
    let found =
        rustix::fs::statfs(folder).map_err(|error| file_error("find", folder, error.into()))?;
    match network(found.f_type) {
        None => Ok(()),
        Some(name) => {
            let detail = format!(
                "{} is on a network ({name}): the processes of one machine share a file on its \
                 own disk; use a server's store between machines",
                folder.display()
            );
            Err(Error::new(ErrorKind::Unsupported, detail))
        }
    }
}

#[cfg(not(target_os = "linux"))]
#[allow(clippy::unnecessary_wraps)]
fn refuse_network(_: &Path) -> Result<()> {
    Ok(())
}

/// The name of a file system that is on a network, by its number (`man 2 statfs`).
#[cfg(target_os = "linux")]
fn network(number: impl Into<i64>) -> Option<&'static str> {
    match number.into() & 0xffff_ffff {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x00c3_6400 => Some("Ceph"),
        0x5346_414f => Some("AFS"),
        _ => None,
    }
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity(u64, u64);

impl Identity {
    /// Of what is at a path; none if there is nothing.
    ///
    /// A database is never opened for this: closing it would free SQLite's own locks on it in the
    /// whole process, as POSIX has it.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|data| Self::of(&data))
    }

    pub(crate) fn of(data: &Metadata) -> Self {
        Self(data.dev(), data.ino())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn networks_are_known() {
        assert_eq!(network(0x6969_i64), Some("NFS"));
        assert_eq!(network(i64::from(0xff53_4d42_u32.cast_signed())), Some("SMB"));
        assert_eq!(network(0xef53_i64), None, "ext4");
        refuse_network(&std::env::temp_dir().join("x.db")).unwrap();
    }

    #[test]
    fn urls_name_paths() {
        for (url, path) in [
            ("sqlite:/a/b.db", "/a/b.db"),
            ("sqlite:///a/b.db", "/a/b.db"),
            ("sqlite:b.db", "b.db"),
            ("sqlite://b.db", "b.db"),
            ("sqlite:/a%20b/%3F%23.db", "/a b/?#.db"),
        ] {
            assert_eq!(path_of(url).unwrap(), Path::new(path), "{url}");
        }
        for url in ["postgres://x", "b.db", "sqlite::memory:", "sqlite:b.db?mode=ro", "sqlite:?x"] {
            assert_eq!(path_of(url).unwrap_err().kind(), ErrorKind::InvalidOptions, "{url}");
        }
        assert!(path_of("sqlite:").unwrap().ends_with("leasehold/leasehold.db"));
    }
}
