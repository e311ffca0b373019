use super::{Error, kind::Family};

/// The parts of a server's URL that a greeting needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) path: Option<String>,
}

/// Takes `scheme://[user[:password]@]host[:port][/path][?query]` apart.
pub(super) fn parse(url: &str, family: Family) -> Result<Parts, Error> {
    let invalid = || Error::Name(format!("{url:?} is not the URL of a server"));
    let (_scheme, rest) = url.split_once("://").ok_or_else(invalid)?;
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let (authority, path) = match rest.split_once('/') {
        Some((authority, path)) => (authority, Some(path).filter(|path| !path.is_empty())),
        None => (rest, None),
    };
    let (login, address) = match authority.rsplit_once('@') {
        Some((login, address)) => (Some(login), address),
        None => (None, authority),
    };
    let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
        Some((user, password)) => (
            Some(user).filter(|user| !user.is_empty()),
            Some(password).filter(|password| !password.is_empty()),
        ),
        None => (None, None),
    };
    // An address of IPv6 has colons too, and stands in brackets.
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| invalid())?),
        _ => (address, default_port(family)),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        return Err(invalid());
    }
    Ok(Parts {
        user: user.map(str::to_owned),
        password: password.map(str::to_owned),
        host: host.to_owned(),
        port,
        path: path.map(str::to_owned),
    })
}

const fn default_port(family: Family) -> u16 {
    match family {
        Family::Postgres => 5432,
        Family::MySql => 3306,
        Family::Redis => 6379,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(
        user: Option<&str>,
        password: Option<&str>,
        host: &str,
        port: u16,
        path: Option<&str>,
    ) -> Parts {
        Parts {
            user: user.map(str::to_owned),
            password: password.map(str::to_owned),
            host: host.to_owned(),
            port,
            path: path.map(str::to_owned),
        }
    }

    #[test]
    fn urls_come_apart() {
        assert_eq!(
            parse("mysql://test:t@st@127.0.0.1:3307/test?ssl=no", Family::MySql).unwrap(),
            parts(Some("test"), Some("t@st"), "127.0.0.1", 3307, Some("test"))
        );
        assert_eq!(
            parse("postgres://postgres@[::1]/db", Family::Postgres).unwrap(),
            parts(Some("postgres"), None, "::1", 5432, Some("db"))
        );
        assert_eq!(
            parse("redis://:secret@cache", Family::Redis).unwrap(),
            parts(None, Some("secret"), "cache", 6379, None)
        );
    }

    #[test]
    fn what_is_no_url_is_refused() {
        for url in ["", "localhost:5432", "redis://", "redis://host:port/0"] {
            assert!(parse(url, Family::Redis).is_err(), "{url:?}");
        }
    }
}
