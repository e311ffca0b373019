use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
};

use super::{
    Error, Kind, fetch,
    instance::end_of,
    kind::{Family, version_in},
    paths, say,
};

/// A server's program, on this machine or unpacked from a package.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) kind: Kind,
    pub(super) version: String,
    /// The folder that stands for `/` to it, when it was unpacked.
    root: Option<PathBuf>,
    path: PathBuf,
}

impl Program {
    pub(super) fn find(kind: Kind) -> Result<Self, Error> {
        static FOUND: Mutex<BTreeMap<Kind, Program>> = Mutex::new(BTreeMap::new());
        let found = || FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(program) = found().get(&kind) {
            return Ok(program.clone());
        }
        let program = match Self::installed(kind) {
            Some(program) => program,
            None => Self::unpacked(kind, fetch::root(kind)?)?,
        };
        found().insert(kind, program.clone());
        Ok(program)
    }

    /// The words that run it, to be followed by its arguments.
    pub(super) fn command(&self) -> Vec<OsString> {
        match &self.root {
            // Postgres's programs start each other, so each was made a script.
            Some(root) if !self.has_scripts() => fetch::with_own_libraries(root, &self.path),
            _ => vec![self.path.clone().into()],
        }
    }

    /// The path of another program of the same package, in the same folder.
    pub(super) fn sibling(&self, name: &str) -> PathBuf {
        self.path.with_file_name(name)
    }

    /// The first of these absolute paths that exists, as this program would see it.
    pub(super) fn first_of(&self, paths: &[&str]) -> Option<PathBuf> {
        let root = self.root.as_deref().unwrap_or(Path::new("/"));
        paths.iter().map(|path| root.join(path.trim_start_matches('/'))).find(|path| path.exists())
    }

    pub(super) const fn is_unpacked(&self) -> bool {
        self.root.is_some()
    }

    fn has_scripts(&self) -> bool {
        self.kind.family() == Family::Postgres && self.kind != Kind::PgBouncer
    }

    fn installed(kind: Kind) -> Option<Self> {
        if env::var_os("LEASEHOLD_SERVERS_FETCH").is_some_and(|value| value == "1") {
            return None;
        }
        let usual = PathBuf::from(kind.program());
        let name = usual.file_name()?.to_owned();
        let folders = env::var_os("PATH").unwrap_or_default();
        let folders =
            env::split_paths(&folders).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
        let elsewhere: Vec<_> = folders.map(|folder| folder.join(&name)).collect();
        [usual].into_iter().chain(elsewhere).find_map(|path| {
            let program = Self::at(kind, None, path)?;
            let complete = !program.has_scripts() || program.sibling("initdb").is_file();
            complete.then_some(program)
        })
    }

    fn unpacked(kind: Kind, root: PathBuf) -> Result<Self, Error> {
        let path = root.join(kind.program().trim_start_matches('/'));
        let shown = path.display().to_string();
        Self::at(kind, Some(root), path).ok_or_else(|| Error::Unavailable {
            kind,
            reason: format!("{shown}, unpacked from Debian's package, is not of that version"),
        })
    }

    fn at(kind: Kind, root: Option<PathBuf>, path: PathBuf) -> Option<Self> {
        if !path.is_file() {
            return None;
        }
        let mut program = Self { kind, version: String::new(), root, path };
        let command = program.command();
        let output = Command::new(&command[0])
            .args(&command[1..])
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .ok()?;
        // Its own path may have digits in it, and some print it.
        let banner =
            String::from_utf8_lossy(&output.stdout).replace(&*program.path.to_string_lossy(), "");
        version_in(&banner)?.clone_into(&mut program.version);
        kind.accepts(&banner).then_some(program)
    }

    /// The folder of initialised data that servers of this program start from: made
    /// by `fill` once, then copied, which is ten times as fast.
    pub(super) fn template(
        &self,
        fill: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        let base = paths::base()?;
        let name = format!("{}-{}", self.kind, self.version);
        let template = base.join("templates").join(&name);
        if template.exists() {
            return Ok(template);
        }
        let _lock = paths::lock(&base, &format!("template-{}", self.kind))?;
        if template.exists() {
            return Ok(template);
        }
        say(&format!("initialising data for {} {}", self.kind, self.version));
        let draft = paths::with_suffix(&template, ".draft");
        let what = format!("make folder {}", draft.display());
        if draft.exists() {
            fs::remove_dir_all(&draft).map_err(Error::io(what.clone()))?;
        }
        fs::create_dir(&draft).map_err(Error::io(what.clone()))?;
        fill(&draft)?;
        fs::rename(&draft, &template).map_err(Error::io(what))?;
        Ok(template)
    }

    /// Runs a command of the preparation, with `input`, to its end; its output goes
    /// to `log`.
    pub(super) fn run(&self, command: &[OsString], input: Stdio, log: &Path) -> Result<(), Error> {
        let output =
            fs::File::create(log).map_err(Error::io(format!("write {}", log.display())))?;
        let errors = output.try_clone().map_err(Error::io("share a file"))?;
        let program = Path::new(&command[0]).display().to_string();
        let status = Command::new(&command[0])
            .args(&command[1..])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(input)
            .stdout(output)
            .stderr(errors)
            .status()
            .map_err(Error::io(format!("run {program}")))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Failed {
            kind: self.kind,
            what: format!("{program} failed while preparing its data ({status})"),
            log: end_of(log),
        })
    }
}

/// Copies a template to where a server will run on it.
pub(super) fn copy(template: &Path, data: &Path) -> Result<(), Error> {
    command(
        "cp",
        [OsStr::new("-a"), OsStr::new("--reflink=auto"), template.as_os_str(), data.as_os_str()],
    )
}

/// Runs a program of the system quietly; its error output is the error.
pub(super) fn command<'a>(
    program: &str,
    arguments: impl IntoIterator<Item = &'a OsStr>,
) -> Result<(), Error> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(Error::io(format!("run {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Command(format!(
        "{program} failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    )))
}
