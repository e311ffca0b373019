//! Logs on the standard error, for `-v` and `LEASEHOLD_LOG`.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

/// Logs as `LEASEHOLD_LOG` says, else as loud as `-v` was given often.
pub(crate) fn start(verbose: u8) {
    let level = match verbose {
        0 => "error",
        1 => "leasehold=info,leasehold_core=info,warn",
        2 => "leasehold=debug,leasehold_core=debug,leasehold_postgres=debug,\
              leasehold_mysql=debug,leasehold_redis=debug,leasehold_sqlite=debug,info",
        _ => "trace",
    };
    let named = std::env::var("LEASEHOLD_LOG").ok().filter(|text| !text.is_empty());
    let filter = EnvFilter::new(named.as_deref().unwrap_or(level));
    let ansi = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi);
    // fails only if somebody logs already
    drop(logs.with_writer(stderr).try_init());
}
