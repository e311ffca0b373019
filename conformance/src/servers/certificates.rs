//! Certificates for servers that speak TLS.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// The authority of [`HERE`] and [`ELSEWHERE`], which nobody trusts who was not told to.
pub const AUTHORITY: &str = include_str!("certificates/authority.pem");
/// A certificate and its key for this machine: 127.0.0.1 and localhost.
pub const HERE: (&str, &str) =
    (include_str!("certificates/here.pem"), include_str!("certificates/here.key"));
/// A certificate and its key for another host, `elsewhere.example`.
pub const ELSEWHERE: (&str, &str) =
    (include_str!("certificates/elsewhere.pem"), include_str!("certificates/elsewhere.key"));

/// The files of a server with TLS.
#[derive(Clone, Debug)]
pub struct Files {
    /// That of [`AUTHORITY`].
    pub authority: PathBuf,
    /// The server's certificate.
    pub certificate: PathBuf,
    /// Its key, which only the folder's owner can read.
    pub key: PathBuf,
}

impl Files {
    /// Writes them, as files of the folder's owner: a server that runs as another user reads them.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(folder: &Path, (certificate, key): (&str, &str)) -> io::Result<Self> {
        let owner = fs::metadata(folder)?;
        let write = |name: &str, text: &str, mode| {
            let path = folder.join(name);
            fs::write(&path, text)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            chown(&path, Some(owner.uid()), Some(owner.gid()))?;
            Ok::<_, io::Error>(path)
        };
        Ok(Self {
            authority: write("authority.pem", AUTHORITY, 0o644)?,
            certificate: write("server.pem", certificate, 0o644)?,
            key: write("server.key", key, 0o600)?,
        })
    }
}
