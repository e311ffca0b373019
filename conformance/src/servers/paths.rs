use std::{
    env,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::Error;

/// The folder that holds programs, templates and running servers, made if need be.
pub(super) fn base() -> Result<PathBuf, Error> {
    let base = locate()?;
    for folder in ["apt", "locks", "roots", "templates", "run"] {
        let folder = base.join(folder);
        fs::create_dir_all(&folder)
            .map_err(Error::io(format!("create folder {}", folder.display())))?;
    }
    fs::canonicalize(&base).map_err(Error::io(format!("find folder {}", base.display())))
}

/// Waits for and holds the lock of that name, so that several test processes may
/// fetch or initialise at once. The lock ends with the value, or with the process.
pub(super) fn lock(base: &Path, name: &str) -> Result<File, Error> {
    let path = base.join("locks").join(name);
    let what = format!("lock {}", path.display());
    let file = File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(&path)
        .map_err(Error::io(what.clone()))?;
    file.lock().map_err(Error::io(what))?;
    Ok(file)
}

/// Whether a user without rights on them can get through all of a path's folders.
pub(super) fn open_to_all(path: &Path) -> bool {
    path.ancestors()
        .filter_map(|folder| fs::metadata(folder).ok())
        .all(|folder| folder.mode() & 0o001 != 0)
}

/// The path with an ending added; `with_extension` would cut `15.18` short.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

fn locate() -> Result<PathBuf, Error> {
    if let Some(folder) = env::var_os("LEASEHOLD_SERVERS_DIR").filter(|folder| !folder.is_empty()) {
        return Ok(folder.into());
    }
    let workspace = workspace();
    if let Some(target) = env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty()) {
        // Cargo takes a relative one from where it was called: most often the root.
        let target = workspace.unwrap_or_default().join(target);
        return Ok(target.join("servers"));
    }
    match workspace {
        Some(root) => Ok(root.join("target/servers")),
        None => Err(Error::Name(
            "no folder to keep servers in: call this below a cargo workspace, \
             or set LEASEHOLD_SERVERS_DIR"
                .into(),
        )),
    }
}

/// The workspace in use (that of the current folder, which cargo sets for tests),
/// else the one that this was compiled in.
fn workspace() -> Option<PathBuf> {
    let has_lock = |folder: &Path| folder.join("Cargo.lock").is_file();
    let here = env::current_dir().ok();
    let compiled = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.iter()
        .flat_map(|folder| folder.ancestors())
        .chain(compiled.ancestors())
        .find(|folder| has_lock(folder))
        .map(Path::to_owned)
}
