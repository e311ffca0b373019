//! Just enough of each protocol to hear a server say its version.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use super::{
    Error, Kind,
    kind::Family,
    url::{self, Parts},
};

/// A server to talk to.
#[derive(Debug)]
pub(super) struct Address {
    family: Family,
    parts: Parts,
}

impl Address {
    pub(super) fn of(kind: Kind, url: &str) -> Result<Self, Error> {
        let family = kind.family();
        let parts = url::parse(url, family)?;
        Ok(Self { family, parts })
    }

    /// A server of ours.
    pub(super) fn local(kind: Kind, port: u16) -> Self {
        let parts =
            Parts { user: None, password: None, host: "127.0.0.1".into(), port, path: None };
        Self { family: kind.family(), parts }
    }

    pub(super) fn host(&self) -> &str {
        &self.parts.host
    }

    pub(super) const fn port(&self) -> u16 {
        self.parts.port
    }

    /// Connects and returns the version as the server says it. Every step of it may
    /// take `limit`.
    pub(super) fn greet(&self, limit: Duration) -> Result<String, Error> {
        match self.family {
            Family::Postgres => self.postgres(limit),
            Family::MySql => self.mysql(limit),
            Family::Redis => self.redis(limit)?.version(),
        }
    }

    pub(super) fn redis(&self, limit: Duration) -> Result<Redis, Error> {
        let mut redis = Redis(BufReader::new(self.connect(limit)?));
        if let Some(password) = &self.parts.password {
            let user = self.parts.user.as_deref().unwrap_or("default");
            redis.call(&["AUTH", user, password])?;
        }
        Ok(redis)
    }

    fn connect(&self, limit: Duration) -> Result<TcpStream, Error> {
        let Parts { host, port, .. } = &self.parts;
        let what = || format!("connect to {host}:{port}");
        let mut failure = Error::Protocol(format!("{host}:{port} is no address"));
        let addresses = (host.as_str(), *port).to_socket_addrs().map_err(Error::io(what()))?;
        for address in addresses {
            match TcpStream::connect_timeout(&address, limit) {
                Ok(stream) => {
                    stream
                        .set_read_timeout(Some(limit))
                        .and_then(|()| stream.set_write_timeout(Some(limit)))
                        .map_err(Error::io(what()))?;
                    return Ok(stream);
                }
                Err(error) => failure = Error::io(what())(error),
            }
        }
        Err(failure)
    }

    /// Starts a session far enough to be told the server's settings.
    fn postgres(&self, limit: Duration) -> Result<String, Error> {
        const PROTOCOL: i32 = 3 << 16;
        let what = "greet the postgres server";
        let user = self.parts.user.as_deref().unwrap_or("postgres");
        let database = self.parts.path.as_deref().unwrap_or(user);
        let mut body = PROTOCOL.to_be_bytes().to_vec();
        for word in ["user", user, "database", database] {
            body.extend_from_slice(word.as_bytes());
            body.push(0);
        }
        body.push(0);
        let mut stream = BufReader::new(self.connect(limit)?);
        let length = (body.len() as u32 + 4).to_be_bytes();
        stream.get_mut().write_all(&[&length[..], &body].concat()).map_err(Error::io(what))?;

        let mut version = None;
        loop {
            let mut head = [0; 5];
            stream.read_exact(&mut head).map_err(Error::io(what))?;
            let [tag, length @ ..] = head;
            let body = read(&mut stream, u32::from_be_bytes(length).saturating_sub(4), what)?;
            match tag {
                b'R' if body != [0; 4] => {
                    return Err(Error::Protocol(
                        "the postgres server wants a password: its version is told to \
                         users with trust authentication only"
                            .into(),
                    ));
                }
                b'S' => {
                    let mut words = body.split(|byte| *byte == 0).map(String::from_utf8_lossy);
                    if words.next().as_deref() == Some("server_version") {
                        // Debian's build adds its own version in brackets.
                        version =
                            words.next().and_then(|said| said.split(' ').next().map(str::to_owned));
                    }
                }
                b'E' => return Err(refusal("postgres", &postgres_message(&body))),
                // Ready for a query: a session can be had, not only a socket.
                b'Z' => {
                    // Said or not, the server ends the session when the socket closes.
                    let _ = stream.get_mut().write_all(b"X\0\0\0\x04");
                    return version.ok_or_else(|| refusal("postgres", "no version"));
                }
                _ => {}
            }
        }
    }

    /// The server speaks first, and its version comes first in that.
    fn mysql(&self, limit: Duration) -> Result<String, Error> {
        let what = "greet the mysql server";
        let mut stream = BufReader::new(self.connect(limit)?);
        let mut head = [0; 4];
        stream.read_exact(&mut head).map_err(Error::io(what))?;
        let [a, b, c, _sequence] = head;
        let body = read(&mut stream, u32::from_le_bytes([a, b, c, 0]), what)?;
        match body.split_first() {
            Some((10, rest)) => {
                let version = rest.split(|byte| *byte == 0).next().unwrap_or_default();
                let version = String::from_utf8_lossy(version).into_owned();
                // MariaDB 10 puts this in front for the sake of old replicas.
                let plain = version.strip_prefix("5.5.5-").map(str::to_owned);
                Ok(plain.unwrap_or(version))
            }
            Some((0xff, rest)) => {
                let message = String::from_utf8_lossy(rest.get(2..).unwrap_or_default());
                Err(refusal("mysql", &message))
            }
            _ => Err(refusal("mysql", "a greeting of another protocol")),
        }
    }
}

/// A connection to a Redis, with RESP 2.
#[derive(Debug)]
pub(super) struct Redis(BufReader<TcpStream>);

impl Redis {
    /// Sends a command and returns its answer as text: an array's elements come a
    /// line each.
    pub(super) fn call(&mut self, words: &[&str]) -> Result<String, Error> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            for part in ["$", &word.len().to_string(), "\r\n", word, "\r\n"] {
                request.push_str(part);
            }
        }
        self.0
            .get_mut()
            .write_all(request.as_bytes())
            .map_err(Error::io("write to the redis server"))?;
        self.answer()
    }

    fn version(&mut self) -> Result<String, Error> {
        let info = self.call(&["INFO", "server"])?;
        let line = |name: &str| {
            info.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
        };
        // Valkey says a version of Redis too, for old clients' sake.
        line("valkey_version:")
            .or_else(|| line("redis_version:"))
            .ok_or_else(|| refusal("redis", "no version"))
    }

    fn answer(&mut self) -> Result<String, Error> {
        let what = "read from the redis server";
        let mut line = String::new();
        self.0.read_line(&mut line).map_err(Error::io(what))?;
        let line = line.trim_end();
        let (kind, rest) = line
            .split_at_checked(1)
            .ok_or_else(|| refusal("redis", "the end of the connection"))?;
        match kind {
            "+" | ":" => Ok(rest.to_owned()),
            "$" if rest == "-1" => Ok(String::new()),
            "$" => {
                let length: u32 = rest.parse().map_err(|_| refusal("redis", line))?;
                let mut body = read(&mut self.0, length.saturating_add(2), what)?;
                body.truncate(length as usize);
                Ok(String::from_utf8_lossy(&body).into_owned())
            }
            "*" => {
                let count: usize = rest.parse().map_err(|_| refusal("redis", line))?;
                let elements: Result<Vec<_>, _> = (0..count).map(|_| self.answer()).collect();
                Ok(elements?.join("\n"))
            }
            _ => Err(refusal("redis", rest)),
        }
    }
}

fn read(stream: &mut BufReader<TcpStream>, length: u32, what: &str) -> Result<Vec<u8>, Error> {
    // Whoever listens there may be something else, and say gigabytes.
    const LIMIT: u32 = 1 << 24;
    if length > LIMIT {
        return Err(Error::Protocol(format!("{what}: it speaks another protocol")));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).map_err(Error::io(what))?;
    Ok(body)
}

fn refusal(server: &str, message: &str) -> Error {
    Error::Protocol(format!("the {server} server answered: {message}"))
}

/// The message field of an error.
fn postgres_message(body: &[u8]) -> String {
    body.split(|byte| *byte == 0)
        .find_map(|field| field.strip_prefix(b"M"))
        .map_or_else(String::new, |text| String::from_utf8_lossy(text).into_owned())
}
