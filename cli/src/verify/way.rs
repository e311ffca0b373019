//! The way to the server of a URL, and the URL that leads through a proxy instead.

use std::net::SocketAddr;

use crate::store::{option, with_option};

/// Host and port of the server, or why no proxy can stand in front of it.
pub(super) fn server(url: &str) -> Result<(String, u16), &'static str> {
    let (scheme, _) = url.split_once(':').unwrap_or((url, ""));
    let port = match scheme {
        "postgres" | "postgresql" => 5432,
        "mysql" | "mariadb" => 3306,
        "redis" | "valkey" => 6379,
        "rediss" | "valkeys" => return Err("its certificate would not hold for a proxy"),
        "memory" | "sqlite" => return Err("there is no network before the store"),
        _ => return Err("clients connect to the addresses that the servers announce"),
    };
    let is = |name: &str, values: &[&str]| {
        option(url, name).is_some_and(|value| values.contains(&value.as_str()))
    };
    if is("sslmode", &["verify-full"])
        || is("ssl-mode", &["verify-full"])
        || is("require_ssl", &["true"])
    {
        return Err("its certificate would not hold for a proxy");
    }
    if ["host", "hostaddr", "port", "socket"].iter().any(|name| option(url, name).is_some()) {
        return Err("an option of the url names the server");
    }
    let place = &url[place(url).ok_or("the url names no host")?];
    let (host, port) = match place.rsplit_once(':') {
        Some((host, digits)) if !digits.ends_with(']') => {
            (host, digits.parse().map_err(|_| "the url has no port that is one")?)
        }
        _ => (place, port),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() || host.contains('%') || host.contains(',') {
        return Err("the url names no host");
    }
    Ok((host.to_owned(), port))
}

/// The same URL, by way of a proxy.
pub(super) fn through(url: &str, proxy: SocketAddr) -> String {
    let Some(place) = place(url) else { return url.to_owned() };
    let url = format!("{}{proxy}{}", &url[..place.start], &url[place.end..]);
    match url.starts_with("mysql") || url.starts_with("mariadb") {
        // which would go past it
        true => with_option(&url, "prefer_socket", "false"),
        false => url,
    }
}

/// Where in the URL host and port stand.
fn place(url: &str) -> Option<std::ops::Range<usize>> {
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?']).map_or(url.len(), |end| start + end);
    let start = url[start..end].rfind('@').map_or(start, |at| start + at + 1);
    Some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_found_and_replaced() {
        let proxy: SocketAddr = "127.0.0.1:9".parse().unwrap();
        for (url, host, port, other) in [
            ("postgres://u:p%40@db:1/d?x=y", "db", 1, "postgres://u:p%40@127.0.0.1:9/d?x=y"),
            ("redis://db", "db", 6379, "redis://127.0.0.1:9"),
            ("postgres://[::1]/d", "::1", 5432, "postgres://127.0.0.1:9/d"),
            ("mysql://[::1]:7/d", "::1", 7, "mysql://127.0.0.1:9/d?prefer_socket=false"),
        ] {
            assert_eq!(server(url), Ok((host.to_owned(), port)), "{url}");
            assert_eq!(through(url, proxy), other);
        }
    }

    #[test]
    fn what_no_proxy_can_stand_before_is_told() {
        for url in [
            "memory:",
            "rediss://db",
            "redis-cluster://db",
            "postgres:///d?host=/run/postgresql",
            "postgres://db/d?sslmode=verify-full",
            "postgres:///d",
        ] {
            assert!(server(url).is_err(), "{url}");
        }
    }
}
