//! Hosts of their own for the clients: network namespaces, each joined to ours by a pair of virtual
//! interfaces, whose link can be cut and can lose packets.

use std::io;
use std::net::Ipv4Addr;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Networks that are tried for a host.
const ATTEMPTS: u32 = 20;

/// The host of one client. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct Host {
    /// Of the namespace and of our end of the link.
    name: String,
    /// The address of our end.
    pub(crate) ours: Ipv4Addr,
}

impl Host {
    /// Makes a host.
    pub(crate) fn new() -> Result<Self, String> {
        // never twice: the kernel removes interfaces in the background
        static HOSTS: AtomicU32 = AtomicU32::new(0);
        let number = HOSTS.fetch_add(1, Ordering::Relaxed);
        // a name is that of an interface as well: at most 15 bytes
        let name = format!("lh{:x}n{number}", std::process::id());
        let mut attempt = 1;
        loop {
            // another run may have the same network
            let (a, b): (u8, u8) = (rand::random_range(16..250), rand::random());
            let (ours, theirs) = (Ipv4Addr::new(10, a, b, 1), Ipv4Addr::new(10, a, b, 2));
            let taken = run("ip", &format!("route get {theirs}"))
                .is_ok_and(|route| !route.contains(" via ") && !route.contains("unreachable"));
            if !taken {
                let host = Self { name, ours };
                host.join(theirs)?;
                return Ok(host);
            }
            if attempt == ATTEMPTS {
                return Err("no free network for another host".to_owned());
            }
            attempt += 1;
        }
    }

    fn join(&self, theirs: Ipv4Addr) -> Result<(), String> {
        let Self { name, ours } = self;
        for words in [
            format!("netns add {name}"),
            format!("link add {name} type veth peer name eth0 netns {name}"),
            format!("address add {ours}/30 dev {name}"),
            format!("link set {name} up"),
            format!("-n {name} address add {theirs}/30 dev eth0"),
            format!("-n {name} link set eth0 up"),
            format!("-n {name} link set lo up"),
        ] {
            run("ip", &words)?;
        }
        Ok(())
    }

    /// The command that runs a program there.
    pub(crate) fn command(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.name].map(str::to_owned).into()
    }

    /// Cuts the link, or joins it again.
    pub(crate) fn link(&self, up: bool) -> Result<(), String> {
        // the far end: ours keeps its address and port, as that of another host would
        let state = if up { "up" } else { "down" };
        run("ip", &format!("-n {} link set eth0 {state}", self.name)).map(drop)
    }

    /// Loses so many of a hundred packets in both directions; 0: none. Where the kernel has no
    /// `netem`, the link is made so narrow instead that it drops what does not fit.
    pub(crate) fn lose(&self, percent: u32) -> Result<(), String> {
        let name = &self.name;
        for (at, device) in [(String::new(), name.as_str()), (format!("-n {name} "), "eth0")] {
            if percent == 0 {
                run("tc", &format!("{at}qdisc del dev {device} root"))?;
                continue;
            }
            let replace = format!("{at}qdisc replace dev {device} root");
            if run("tc", &format!("{replace} netem loss {percent}%")).is_err() {
                let rate = 128_u32.saturating_sub(percent * 2).max(8);
                run("tc", &format!("{replace} tbf rate {rate}kbit burst 2kb latency 10ms"))?;
            }
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // the pair of interfaces goes with the namespace
        if let Err(error) = run("ip", &format!("netns del {}", self.name)) {
            tracing::warn!(%error, "a network namespace is left");
        }
    }
}

/// Whether this machine lets us make hosts, lose packets and cut links; otherwise why not.
pub(super) fn possible() -> Result<(), String> {
    let host = Host::new()?;
    host.lose(1)?;
    host.lose(0)?;
    host.link(false)
}

fn run(program: &str, words: &str) -> Result<String, String> {
    let output: io::Result<Output> =
        Command::new(program).args(words.split_whitespace()).env("LC_ALL", "C").output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {words}: {}", told.trim()))
}
