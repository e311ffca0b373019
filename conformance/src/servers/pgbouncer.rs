use std::{ffi::OsString, fs};

use super::{Error, Kind, Server, kind::Family, postgres::Unprivileged, program::Program};

/// A PgBouncer in transaction mode: behind it, each transaction of a client may come
/// to another session of the server.
#[derive(Debug)]
#[non_exhaustive]
pub struct PgBouncer;

impl PgBouncer {
    /// Starts one in front of a PostgreSQL, and returns when it answers. Its
    /// [`url`](Server::url) is used as the server's own.
    ///
    /// # Errors
    /// When `server` is no PostgreSQL, or as [`Server::start`].
    pub fn start(server: &Server) -> Result<Server, Error> {
        Self::start_with(server, &[])
    }

    /// As [`start`](Self::start), with further lines for its settings, which win over
    /// ours: `max_prepared_statements = 0`, say, to be as one before 1.21 was.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(server: &Server, settings: &[&str]) -> Result<Server, Error> {
        if server.kind().family() != Family::Postgres {
            return Err(Error::Name(format!(
                "a pgbouncer stands in front of a postgres, not of a {}",
                server.kind()
            )));
        }
        let program = Program::find(Kind::PgBouncer)?;
        let behind = server.address()?;
        // As Postgres, it refuses to be root.
        let user = Unprivileged::here()?;
        Server::run(Kind::PgBouncer, &|folder, port| {
            let data = folder.join("data");
            let (users, settings_file) = (data.join("users"), data.join("pgbouncer.ini"));
            let text = format!(
                "[databases]\n\
                 * = host={} port={}\n\
                 [pgbouncer]\n\
                 listen_addr = 127.0.0.1\n\
                 listen_port = {port}\n\
                 unix_socket_dir =\n\
                 auth_type = trust\n\
                 auth_file = {}\n\
                 pool_mode = transaction\n\
                 max_client_conn = 500\n\
                 default_pool_size = 50\n\
                 ignore_startup_parameters = extra_float_digits\n\
                 {}\n",
                behind.host(),
                behind.port(),
                users.display(),
                settings.join("\n"),
            );
            fs::create_dir(&data)
                .and_then(|()| fs::write(&users, "\"postgres\" \"\"\n"))
                .and_then(|()| fs::write(&settings_file, text))
                .map_err(Error::io(format!("write settings in {}", data.display())))?;
            let mut command: Vec<OsString> = Vec::new();
            if let Some(user) = &user {
                for path in [&data, &users, &settings_file] {
                    user.give(path)?;
                }
                command.extend(user.command());
            }
            command.extend(program.command());
            command.push(settings_file.into());
            Ok(command)
        })
    }
}
