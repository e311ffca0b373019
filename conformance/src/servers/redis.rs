use std::{ffi::OsString, fs};

use super::{Error, Kind, instance::Recipe, program::Program};

/// Nothing is written to disk unless `extra` says so.
const SETTINGS: [&str; 8] = [
    "--bind",
    "127.0.0.1",
    "--save",
    "",
    "--appendonly",
    "no",
    "--daemonize",
    "no",
];

pub(super) fn recipe(kind: Kind, extra: Vec<OsString>) -> Result<Box<Recipe<'static>>, Error> {
    let program = Program::find(kind)?;
    Ok(Box::new(move |folder, port| {
        let data = folder.join("data");
        fs::create_dir(&data).map_err(Error::io(format!("create folder {}", data.display())))?;
        let mut command = program.command();
        command.extend(["--port".into(), port.to_string().into()]);
        command.extend(["--dir".into(), data.into()]);
        command.extend(SETTINGS.map(OsString::from));
        command.extend(extra.iter().cloned());
        Ok(command)
    }))
}
