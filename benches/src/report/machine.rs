//! Where a run was made, and of what.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// What a reader has to know of a machine. Its name is nobody's business.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The model of its processors.
    pub cpu: String,
    /// How many cores can be used.
    pub cores: usize,
    /// Memory, in MiB.
    pub memory: u64,
    /// The kernel's name and version.
    pub kernel: String,
    /// The compiler's version.
    pub compiler: String,
}

impl Machine {
    /// This one; what the system does not tell is left empty.
    pub fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpu = field(&read("/proc/cpuinfo"), "model name").unwrap_or_default();
        let memory = field(&read("/proc/meminfo"), "MemTotal")
            .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
        let kernel = ["ostype", "osrelease"].map(|name| read(&format!("/proc/sys/kernel/{name}")));
        Self {
            cpu,
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory: memory.unwrap_or_default() / 1_024,
            kernel: kernel.map(|text| text.trim().to_owned()).join(" "),
            compiler: said("rustc", &["--version"]),
        }
    }
}

/// The versions of the crates that take part, from the lock file that they were built with.
pub(crate) fn crates() -> Vec<(String, String)> {
    const SHOWN: [&str; 13] = [
        "leasehold",
        "distributed-lock-core",
        "rslock",
        "async-redis-lock",
        "redlock",
        "sqlx",
        "sqlx-core",
        "mysql_async",
        "fred",
        "redis",
        "deadpool-redis",
        "tokio",
        "hdrhistogram",
    ];
    versions(include_str!("../../Cargo.lock"), &SHOWN)
}

/// The last part of a line such as `name<tabs>: text`.
fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).trim().to_owned()
}

fn versions(lock: &str, shown: &[&str]) -> Vec<(String, String)> {
    let packages = lock.split("[[package]]").filter_map(|package| {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_matches(|c| c == '"' || c == ' ' || c == '=').to_owned())
        };
        Some((field("name = ")?, field("version = ")?))
    });
    packages.filter(|(name, _)| shown.contains(&name.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_tells_versions() {
        let lock = "version = 4\n\n[[package]]\nname = \"fred\"\nversion = \"10.1.0\"\n\
            source = \"x\"\n\n[[package]]\nname = \"other\"\nversion = \"1.0.0\"\n";
        assert_eq!(versions(lock, &["fred"]), [("fred".to_owned(), "10.1.0".to_owned())]);
        let names: Vec<_> = crates().into_iter().map(|(name, _)| name).collect();
        for peer in
            ["distributed-lock-core", "rslock", "async-redis-lock", "redlock", "sqlx", "fred"]
        {
            assert!(names.iter().any(|name| name == peer), "{peer} of {names:?}");
        }
    }

    #[test]
    fn this_machine_has_cores() {
        assert!(Machine::this().cores > 0);
    }
}
