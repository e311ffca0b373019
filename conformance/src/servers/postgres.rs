use std::{
    ffi::OsString,
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
    process::Stdio,
};

use nix::unistd::{User, geteuid};

use super::{
    Error, Kind,
    instance::Recipe,
    paths,
    program::{self, Program},
};

/// Tests want speed: nothing here survives the machine's crash, all of it survives
/// the server's.
const SETTINGS: [&str; 10] = [
    "listen_addresses=127.0.0.1",
    // Its path could be longer than a socket's may be.
    "unix_socket_directories=",
    "max_connections=300",
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "logging_collector=off",
    // In the data folder, so that it goes with it when the server is killed.
    "dynamic_shared_memory_type=mmap",
    // The one zone that is known where the machine has no time zones.
    "timezone=GMT",
    "log_timezone=GMT",
];

pub(super) fn recipe(kind: Kind, extra: Vec<OsString>) -> Result<Box<Recipe<'static>>, Error> {
    let program = Program::find(kind)?;
    if program.is_unpacked() && !Path::new("/usr/share/zoneinfo/UTC").exists() {
        return Err(Error::Unavailable {
            kind,
            reason: "it needs the time zones of the package tzdata, as clients name one \
                     when they connect"
                .into(),
        });
    }
    let user = Unprivileged::here()?;
    let template = program.template(|folder| initialise(&program, user.as_ref(), folder))?;
    Ok(Box::new(move |folder, port| {
        let data = folder.join("data");
        program::copy(&template, &data)?;
        let mut command = user.as_ref().map(Unprivileged::command).unwrap_or_default();
        command.extend(program.command());
        command.extend(["-D".into(), data.into(), "-p".into(), port.to_string().into()]);
        for setting in SETTINGS {
            command.extend(["-c".into(), setting.into()]);
        }
        command.extend(extra.iter().cloned());
        Ok(command)
    }))
}

fn initialise(program: &Program, user: Option<&Unprivileged>, folder: &Path) -> Result<(), Error> {
    if let Some(user) = user {
        user.give(folder)?;
    }
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
        .map_err(Error::io(format!("close {} to others", folder.display())))?;
    let mut command = user.map(Unprivileged::command).unwrap_or_default();
    command.extend([program.sibling("initdb").into(), "-D".into(), folder.into()]);
    let options = ["-U", "postgres", "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync"];
    command.extend(options.map(OsString::from));
    program.run(&command, Stdio::null(), &paths::with_suffix(folder, ".log"))
}

/// The user that Postgres runs as where we are root: it refuses to be root.
#[derive(Debug)]
pub(super) struct Unprivileged {
    user: User,
    /// Whether the folders above are closed to it, as `/root` is.
    shut_out: bool,
}

impl Unprivileged {
    /// None when we are an ordinary user ourselves.
    pub(super) fn here() -> Result<Option<Self>, Error> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let find = |name| {
            User::from_name(name).map_err(|errno| Error::Io {
                what: format!("look for user {name}"),
                source: errno.into(),
            })
        };
        let user = match find("postgres")? {
            Some(user) => Some(user),
            None => find("nobody")?,
        };
        let user = user.ok_or_else(|| {
            Error::Command("there is no user postgres or nobody, and postgres refuses root".into())
        })?;
        let shut_out = !paths::open_to_all(&paths::base()?);
        Ok(Some(Self { user, shut_out }))
    }

    /// The words that run a program as this user, under the same process id.
    pub(super) fn command(&self) -> Vec<OsString> {
        let mut words = vec![
            "setpriv".into(),
            format!("--reuid={}", self.user.uid).into(),
            format!("--regid={}", self.user.gid).into(),
            "--clear-groups".into(),
        ];
        if self.shut_out {
            // The right to pass through folders, and no other, is kept; also for
            // access(2), which Postgres looks for its programs with.
            let kept = [
                "--inh-caps=-all,+dac_override",
                "--ambient-caps=-all,+dac_override",
                "--securebits=+no_setuid_fixup",
            ];
            words.extend(kept.map(OsString::from));
        }
        words
    }

    pub(super) fn give(&self, path: &Path) -> Result<(), Error> {
        let (user, group) = (self.user.uid.as_raw(), self.user.gid.as_raw());
        chown(path, Some(user), Some(group))
            .map_err(Error::io(format!("give {} to another user", path.display())))
    }
}
