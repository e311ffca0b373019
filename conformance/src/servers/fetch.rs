//! Programs from Debian's archive, unpacked below the target folder.
//!
//! A private `apt` (its own lists and cache, and an empty record of what is
//! installed) works out everything that a package depends on, the C library
//! included, within one suite. All of it is unpacked into one folder, and run with
//! that folder's own loader and libraries: so that a server of any suite runs on
//! any Linux, next to whatever that has.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::{self, File},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use super::{
    Error, Kind,
    kind::{Family, Package},
    paths,
    program::command,
    say,
};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// What no server reads.
const LEFT_OUT: [&str; 4] = ["doc", "man", "locale", "perl"];

/// The folder with the kind's unpacked program, fetched if it is not there yet.
pub(super) fn root(kind: Kind) -> Result<PathBuf, Error> {
    let base = paths::base()?;
    let package = kind.package();
    let root = base.join("roots").join(format!("{}-{}", package.name, package.suite));
    // It gets its name as the last step, so that it is there whole or not at all.
    if root.exists() {
        return Ok(root);
    }
    let lock = paths::lock(&base, &format!("apt-{}", package.suite))?;
    if root.exists() {
        return Ok(root);
    }
    let started = Instant::now();
    let unavailable = |error: Error| Error::Unavailable {
        kind,
        reason: format!(
            "this machine has none that fits, and Debian's {} ({}) could not be fetched: {error}",
            package.name, package.suite
        ),
    };
    let apt = Apt::new(&base, package.suite, lock).map_err(unavailable)?;
    let files = apt.download(package).map_err(unavailable)?;
    say(&format!("unpacking {} packages for {kind}", files.len()));
    let draft = paths::with_suffix(&root, ".draft");
    unpack(&files, &draft)?;
    if kind.family() == Family::Postgres && kind != Kind::PgBouncer {
        make_scripts(&draft, Path::new(kind.program()))?;
    }
    fs::rename(&draft, &root).map_err(Error::io(format!("move {}", draft.display())))?;
    say(&format!("{kind} is in {} after {} s", root.display(), started.elapsed().as_secs()));
    Ok(root)
}

/// The words that run an unpacked program with the libraries unpacked with it.
pub(super) fn with_own_libraries(root: &Path, program: &Path) -> Vec<OsString> {
    let Some((loader, libraries)) = loader(root) else {
        return vec![program.into()];
    };
    vec![
        loader.into(),
        "--library-path".into(),
        libraries.into(),
        // It finds its other files by the name it was called.
        "--argv0".into(),
        program.into(),
        program.into(),
    ]
}

/// The dynamic loader, and the folder of libraries it lies in, such as
/// `usr/lib/x86_64-linux-gnu`.
fn loader(root: &Path) -> Option<(PathBuf, PathBuf)> {
    let folders = fs::read_dir(root.join("usr/lib")).ok()?;
    folders.flatten().find_map(|folder| {
        let loader = fs::read_dir(folder.path()).ok()?.flatten().find(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with("ld-linux") && name.contains(".so.")
        })?;
        Some((loader.path(), folder.path()))
    })
}

/// An `apt` of our own for one suite.
struct Apt {
    folder: PathBuf,
    suite: &'static str,
    /// Held for as long as this is in use.
    lock: File,
}

impl Apt {
    fn new(base: &Path, suite: &'static str, lock: File) -> Result<Self, Error> {
        let folder = base.join("apt").join(suite);
        for part in ["lists/partial", "cache/archives/partial"] {
            let part = folder.join(part);
            fs::create_dir_all(&part).map_err(Error::io(format!("create {}", part.display())))?;
        }
        if !Path::new(KEYRING).exists() {
            return Err(Error::Command(format!(
                "{KEYRING} is missing: install the package debian-archive-keyring"
            )));
        }
        // Only lists of packages: neither translations nor descriptions.
        let source =
            format!("deb [signed-by={KEYRING} targets=Packages] {} {suite} main\n", mirror()?);
        for (name, text) in [("sources.list", source.as_str()), ("status", "")] {
            let path = folder.join(name);
            fs::write(&path, text).map_err(Error::io(format!("write {}", path.display())))?;
        }
        Ok(Self { folder, suite, lock })
    }

    /// The files of the package and of all it depends on.
    fn download(&self, package: Package) -> Result<Vec<PathBuf>, Error> {
        // Should that fail, then most likely as the archive moved on under the lists.
        if self.lists_are_fresh()
            && let Ok(files) = self.try_download(package)
        {
            return Ok(files);
        }
        say(&format!("reading the list of Debian's {}", self.suite));
        self.run(&["update"])?;
        let read = self.folder.join("read");
        fs::write(&read, "").map_err(Error::io(format!("write {}", read.display())))?;
        self.try_download(package)
    }

    /// For six hours; then the archive may not have those versions any more.
    fn lists_are_fresh(&self) -> bool {
        const FRESH: Duration = Duration::from_hours(6);
        let age = fs::metadata(self.folder.join("read"))
            .and_then(|read| read.modified())
            .ok()
            .and_then(|read| read.elapsed().ok());
        age.is_some_and(|age| age < FRESH)
    }

    fn try_download(&self, package: Package) -> Result<Vec<PathBuf>, Error> {
        let plan = self.run(&["--simulate", "install", package.name])?;
        let plan = String::from_utf8_lossy(&plan.stdout);
        let files: Vec<_> = plan.lines().filter_map(|line| self.file(line)).collect();
        say(&format!(
            "fetching Debian's {} of {}: {} packages with all it needs",
            package.name,
            self.suite,
            files.len()
        ));
        self.run(&["--yes", "--download-only", "install", package.name])?;
        match files.iter().find(|file| !file.exists()) {
            Some(missing) => {
                Err(Error::Command(format!("apt-get did not leave {}", missing.display())))
            }
            None if files.is_empty() => {
                Err(Error::Command(format!("apt-get planned no package for {}", package.name)))
            }
            None => Ok(files),
        }
    }

    /// Where `apt` puts the file of a line such as
    /// `Inst libc6 (2.36-9 Debian:12.12/stable [amd64]) [...]`.
    fn file(&self, line: &str) -> Option<PathBuf> {
        let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
        let name = name.split(' ').next()?;
        let (inside, _) = rest.split_once(')')?;
        let version = inside.split(' ').next()?.replace(':', "%3a");
        let (_, architecture) = inside.rsplit_once('[')?;
        let architecture = architecture.trim_end_matches(']');
        let file = format!("{name}_{version}_{architecture}.deb");
        Some(self.folder.join("cache/archives").join(file))
    }

    fn run(&self, arguments: &[&str]) -> Result<Output, Error> {
        let own = |name: &str| self.folder.join(name).display().to_string();
        let options = [
            ("Dir::Etc::sourcelist", own("sources.list")),
            ("Dir::Etc::sourceparts", "/dev/null".into()),
            ("Dir::Etc::preferences", "/dev/null".into()),
            ("Dir::Etc::preferencesparts", "/dev/null".into()),
            ("Dir::State", own("")),
            ("Dir::State::lists", own("lists")),
            ("Dir::State::status", own("status")),
            ("Dir::State::extended_states", own("extended_states")),
            ("Dir::Cache", own("cache")),
            ("Dir::Cache::archives", own("cache/archives")),
            ("Dir::Log", own("")),
            ("APT::Install-Recommends", "false".into()),
            ("APT::Keep-Downloaded-Packages", "true".into()),
            // No other user could write below the target folder.
            ("APT::Sandbox::User", "root".into()),
            ("Acquire::Languages", "none".into()),
            ("Acquire::Retries", "3".into()),
            // Mirrors keep a suite past the date that its release file names.
            ("Acquire::Check-Valid-Until", "false".into()),
            ("Acquire::Check-Date", "false".into()),
            // Otherwise a list that could not be read is no failure.
            ("APT::Update::Error-Mode", "any".into()),
            ("Dpkg::Use-Pty", "false".into()),
        ];
        // An apt-get outlives us when we are killed; the next fetch has to wait for it
        // then, so that the lock is held by it too.
        let lock = self.lock.try_clone().map_err(Error::io("share a lock"))?;
        let output = Command::new("apt-get")
            .arg("-qq")
            .args(options.iter().map(|(name, value)| format!("-o{name}={value}")))
            .args(arguments)
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(lock)
            .output()
            .map_err(Error::io("run apt-get, which Debian and its like have"))?;
        if output.status.success() {
            return Ok(output);
        }
        Err(Error::Command(format!(
            "apt-get {} failed: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )))
    }
}

/// The Debian mirror that this machine uses anyway.
fn mirror() -> Result<String, Error> {
    if let Ok(mirror) = env::var("LEASEHOLD_DEBIAN_MIRROR") {
        return Ok(mirror);
    }
    let codename = fs::read_to_string("/etc/os-release")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME=").map(str::to_owned))
        .map(|codename| codename.trim_matches('"').to_owned());
    // Says what an update would read, from the settings alone: needs no lists.
    let output = Command::new("apt-get")
        .args(["--print-uris", "update"])
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(Error::io("run apt-get, which Debian and its like have"))?;
    let uris = String::from_utf8_lossy(&output.stdout);
    let suites: Vec<_> =
        ["stable", "testing", "unstable", "sid"].into_iter().chain(codename.as_deref()).collect();
    mirror_in(&uris, &suites).ok_or_else(|| {
        Error::Command(
            "apt's settings name no Debian mirror (`apt-get indextargets` shows them): \
             add one to its sources, or set LEASEHOLD_DEBIAN_MIRROR"
                .into(),
        )
    })
}

/// The first mirror with `debian` for its folder's name and one of these suites:
/// others may sit on the same host.
fn mirror_in(uris: &str, suites: &[&str]) -> Option<String> {
    uris.lines().find_map(|line| {
        let uri = line.strip_prefix('\'')?.split('\'').next()?;
        let (mirror, path) = uri.split_once("/dists/")?;
        let suite = path.strip_suffix("/InRelease")?;
        (mirror.contains("debian") && suites.contains(&suite)).then(|| mirror.to_owned())
    })
}

fn unpack(files: &[PathBuf], folder: &Path) -> Result<(), Error> {
    let what = format!("make folder {}", folder.display());
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(Error::io(what.clone()))?;
    }
    // The merged layout first: older packages have files below /lib, newer ones
    // below /usr/lib only, and both are to end up in the same place.
    for name in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(folder.join("usr").join(name)).map_err(Error::io(what.clone()))?;
        symlink(format!("usr/{name}"), folder.join(name)).map_err(Error::io(what.clone()))?;
    }
    for file in files {
        unpack_one(file, folder)?;
    }
    // Nothing here needs the rights of its file's owner.
    let target = [OsStr::new("-R"), OsStr::new("ug-s,u+w"), folder.as_os_str()];
    command("chmod", target)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(Error::io(what))
}

/// With `tar`, as `dpkg-deb -x` would put folders in place of the links.
fn unpack_one(file: &Path, folder: &Path) -> Result<(), Error> {
    let failed = |what: String| Error::Command(format!("unpack {}: {what}", file.display()));
    let mut source = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Error::io("run dpkg-deb"))?;
    let archive = source.stdout.take().expect("it was asked to be piped");
    let tar = Command::new("tar")
        .arg("-C")
        .arg(folder)
        .args(["-xf", "-", "--keep-directory-symlink", "--no-same-owner"])
        .args(LEFT_OUT.map(|name| format!("--exclude=./usr/share/{name}")))
        .stdin(archive)
        .output();
    let source = source.wait().map_err(Error::io("wait for dpkg-deb"))?;
    let tar = tar.map_err(Error::io("run tar"))?;
    if !tar.status.success() {
        return Err(failed(String::from_utf8_lossy(&tar.stderr).trim().to_owned()));
    }
    if !source.success() {
        return Err(failed(format!("dpkg-deb ended with {source}")));
    }
    Ok(())
}

/// Puts a script in the place of each of Postgres's programs, as `initdb` starts
/// `postgres` itself and knows nothing of the loader. By a relative path, so that
/// the whole may be moved.
fn make_scripts(root: &Path, postgres: &Path) -> Result<(), Error> {
    let folder = postgres.strip_prefix("/").unwrap_or(postgres);
    let folder = folder.parent().unwrap_or(folder);
    let up = "/..".repeat(folder.components().count());
    let (loader, libraries) = loader(root)
        .ok_or_else(|| Error::Command(format!("there is no loader in {}", root.display())))?;
    let below = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    let script = format!(
        "#!/bin/sh\nroot=${{0%/*}}{up}\nexec \"$root/{}\" --library-path \"$root/{}\" \
         --argv0 \"$0\" \"$0.elf\" \"$@\"\n",
        below(&loader),
        below(&libraries)
    );
    for name in ["postgres", "initdb"] {
        let path = root.join(folder).join(name);
        let what = format!("make a script of {}", path.display());
        fs::rename(&path, paths::with_suffix(&path, ".elf")).map_err(Error::io(what.clone()))?;
        fs::write(&path, &script).map_err(Error::io(what.clone()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(Error::io(what))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_that_of_the_suite() {
        let uris = "\
            'https://example.org/tools/dists/bookworm/InRelease' a 0 \n\
            'http://example.org/debian-security/dists/bookworm-security/InRelease' b 0 \n\
            'http://example.org/debian/dists/bookworm/main/binary-amd64/Packages.xz' c 0 \n\
            'http://example.org/debian/dists/bookworm/InRelease' d 0 \n";
        assert_eq!(
            mirror_in(uris, &["sid", "bookworm"]).as_deref(),
            Some("http://example.org/debian")
        );
        assert_eq!(mirror_in(uris, &["sid"]), None);
    }

    #[test]
    fn a_planned_package_has_its_file() {
        let apt = Apt { folder: "/a".into(), suite: "sid", lock: File::open("/dev/null").unwrap() };
        let file = |line| apt.file(line).map(|path| path.display().to_string());
        assert_eq!(
            file("Inst adduser (3.134 Debian:12.12/oldstable [all])").as_deref(),
            Some("/a/cache/archives/adduser_3.134_all.deb")
        );
        assert_eq!(
            file("Inst redis-server (5:7.0.15-1 Debian:12 [amd64]) [x:amd64 ]").as_deref(),
            Some("/a/cache/archives/redis-server_5%3a7.0.15-1_amd64.deb")
        );
        assert_eq!(file("Conf adduser (3.134 Debian:12 [all])"), None);
    }
}
