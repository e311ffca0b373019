//! Logs on the standard error, for `-v` and `LEASEHOLD_LOG`.

use std::borrow::Cow;
use std::io::{IsTerminal, Stderr, Write, stderr};

use tracing_subscriber::EnvFilter;

/// A password shorter than this would be found in words that are none.
const SHORTEST: usize = 4;

/// Logs as `LEASEHOLD_LOG` says, else as loud as `-v` was given often. The password of the store's
/// URL is left out, whoever logs it. A noisy command makes errors on purpose: only `-v` shows them.
pub(crate) fn start(verbose: u8, url: Option<&str>, is_noisy: bool) {
    let level = match verbose {
        0 if is_noisy => "off",
        0 => "error",
        1 => "leasehold=info,leasehold_core=info,warn",
        2 => {
            "leasehold=debug,leasehold_core=debug,leasehold_postgres=debug,\
             leasehold_mysql=debug,leasehold_redis=debug,leasehold_sqlite=debug,info"
        }
        _ => "trace",
    };
    let named = std::env::var("LEASEHOLD_LOG").ok().filter(|text| !text.is_empty());
    let filter = EnvFilter::new(named.as_deref().unwrap_or(level));
    let ansi = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let secrets = url.map(secrets).unwrap_or_default();
    let writer = move || Scrubber { out: stderr(), secrets: secrets.clone() };
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi);
    // fails only if somebody logs already
    drop(logs.with_writer(writer).try_init());
}

/// The passwords of a URL, as they stand there and decoded.
fn secrets(url: &str) -> Vec<String> {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let user = base.split_once("://").and_then(|(_, rest)| rest.rsplit_once('@'));
    let password = user.and_then(|(user, _)| user.split_once(':')).map(|(_, password)| password);
    let options = query.split('&').filter_map(|pair| pair.split_once('='));
    let options = options.filter(|(name, _)| name.to_ascii_lowercase().contains("pass"));
    let mut secrets = Vec::new();
    for secret in password.into_iter().chain(options.map(|(_, value)| value)) {
        // a plus is one in a password, and a space in an option
        let decoded = format!("x={}", secret.replace('+', "%2B"));
        let decoded = form_urlencoded::parse(decoded.as_bytes()).next();
        secrets.extend(decoded.map(|(_, value)| value.into_owned()));
        secrets.push(secret.to_owned());
    }
    secrets.retain(|secret| secret.len() >= SHORTEST);
    secrets
}

/// Writes lines without secrets.
struct Scrubber {
    out: Stderr,
    secrets: Vec<String>,
}

impl Write for Scrubber {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let mut text = String::from_utf8_lossy(line);
        for secret in &self.secrets {
            if text.contains(secret.as_str()) {
                text = Cow::Owned(text.replace(secret.as_str(), "***"));
            }
        }
        self.out.write_all(text.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_passwords_of_a_url_are_known() {
        for (url, known) in [
            ("pg://me:s3cr%40t+@db/a", vec!["s3cr@t+", "s3cr%40t+"]),
            ("redis-sentinel://h?sentinelPassword=hidden", vec!["hidden", "hidden"]),
            ("pg://me:abc@db/a", vec![]),
            ("pg://me@db:5432/a?app=x", vec![]),
        ] {
            assert_eq!(secrets(url), known, "{url}");
        }
    }
}
