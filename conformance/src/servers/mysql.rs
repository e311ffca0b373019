//! MySQL and MariaDB: one protocol and mostly the same options, but each is
//! initialised in its own way.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::Path,
    process::Stdio,
};

use nix::unistd::geteuid;

use super::{
    Error, Kind,
    instance::Recipe,
    paths,
    program::{self, Program},
};

const SETTINGS: [&str; 8] = [
    "--bind-address=127.0.0.1",
    // Relative to the data folder: a long path would be no socket's.
    "--socket=s",
    "--skip-name-resolve",
    "--skip-log-bin",
    "--max-connections=500",
    "--max-connect-errors=1000000",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-buffer-pool-size=64M",
];

/// A user without rights beyond its own databases, as an application has, and a
/// root that may come by TCP. A statement a line, as MariaDB's bootstrap wants.
const ACCOUNTS: &str = "\
create database test;
create user test@'%' identified by 'test';
grant all on test.* to test@'%';
grant all on `test\\_%`.* to test@'%';
create user root@'%';
grant all on *.* to root@'%' with grant option;
";

pub(super) fn recipe(kind: Kind, extra: Vec<OsString>) -> Result<Box<Recipe<'static>>, Error> {
    let program = Program::find(kind)?;
    let template = program.template(|folder| {
        if kind == Kind::MySql {
            initialise_mysql(&program, folder)
        } else {
            initialise_mariadb(&program, folder)
        }
    })?;
    Ok(Box::new(move |folder, port| {
        let data = folder.join("data");
        program::copy(&template, &data)?;
        let mut command = base_command(&program, &data)?;
        command.push(format!("--port={port}").into());
        command.push(option("--pid-file=", &folder.join("pid")));
        command.extend(SETTINGS.map(OsString::from));
        if kind == Kind::MySql {
            command.extend(["--mysqlx=0", "--secure-file-priv=NULL"].map(OsString::from));
        }
        command.extend(extra.iter().cloned());
        Ok(command)
    }))
}

fn initialise_mysql(program: &Program, folder: &Path) -> Result<(), Error> {
    let statements = paths::with_suffix(folder, ".sql");
    fs::write(&statements, ACCOUNTS)
        .map_err(Error::io(format!("write {}", statements.display())))?;
    let mut command = base_command(program, folder)?;
    command.push(option("--init-file=", &statements));
    command.push("--initialize-insecure".into());
    program.run(&command, Stdio::null(), &paths::with_suffix(folder, ".log"))?;
    // The server's own identity, which no two should share.
    let identity = folder.join("auto.cnf");
    fs::remove_file(&identity).map_err(Error::io(format!("remove {}", identity.display())))
}

fn initialise_mariadb(program: &Program, folder: &Path) -> Result<(), Error> {
    let share = share(program)?;
    let mut statements = String::from(
        "create database if not exists mysql;\nuse mysql;\n\
         set @auth_root_socket=NULL, @skip_auth_anonymous=1;\n",
    );
    for part in ["system_tables", "performance_tables", "system_tables_data"] {
        // Named after MySQL up to 10.11.
        let read = |prefix| fs::read_to_string(share.join(format!("{prefix}_{part}.sql")));
        let text = read("mariadb")
            .or_else(|_| read("mysql"))
            .map_err(Error::io(format!("read {part}.sql in {}", share.display())))?;
        statements.push_str(&text);
        statements.push('\n');
    }
    statements.push_str("flush privileges;\n");
    statements.push_str(ACCOUNTS);
    let path = paths::with_suffix(folder, ".sql");
    let what = format!("write {}", path.display());
    fs::write(&path, statements).map_err(Error::io(what.clone()))?;
    let input = File::open(&path).map_err(Error::io(what))?;
    let system = folder.join("mysql");
    fs::create_dir(&system).map_err(Error::io(format!("create folder {}", system.display())))?;
    let mut command = base_command(program, folder)?;
    command.extend(["--bootstrap", "--skip-networking"].map(OsString::from));
    program.run(&command, input.into(), &paths::with_suffix(folder, ".log"))
}

/// What the program is told for preparation and service alike.
fn base_command(program: &Program, data: &Path) -> Result<Vec<OsString>, Error> {
    let mut command = program.command();
    command.push("--no-defaults".into());
    command.push(option("--datadir=", data));
    command.push(if program.kind == Kind::MySql {
        "--innodb-redo-log-capacity=8M".into()
    } else {
        "--innodb-log-file-size=8M".into()
    });
    if geteuid().is_root() {
        command.push("--user=root".into());
    }
    if program.is_unpacked() {
        let share = share(program)?;
        command.push(option("--lc-messages-dir=", &share));
        command.push(option("--character-sets-dir=", &share.join("charsets")));
        for (name, path) in [("--basedir=", "/usr"), ("--plugin-dir=", "/usr/lib/mysql/plugin")] {
            command.extend(program.first_of(&[path]).map(|path| option(name, &path)));
        }
    }
    Ok(command)
}

/// The folder of messages, character sets and system tables.
fn share(program: &Program) -> Result<std::path::PathBuf, Error> {
    let charsets = program.first_of(&["/usr/share/mysql/charsets", "/usr/share/mariadb/charsets"]);
    let share = charsets.as_deref().and_then(Path::parent).map(Path::to_owned);
    share.ok_or_else(|| Error::Unavailable {
        kind: program.kind,
        reason: "its folder share/mysql or share/mariadb is missing".into(),
    })
}

fn option(name: &str, value: &Path) -> OsString {
    let mut option = OsString::from(name);
    option.push(value);
    option
}
