//! Redis and Valkey: alone, as a cluster, and watched by a sentinel.

use std::{ffi::OsString, fs, path::Path, time::Duration};

use super::{
    Error, Kind, Server,
    instance::Recipe,
    kind::Family,
    process::{free_port, wait_until},
    program::Program,
};

/// Nothing is written to disk unless further arguments say so.
const SETTINGS: [&str; 8] =
    ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"];

const LIMIT: Duration = Duration::from_secs(10);

/// For servers to find each other; they look once a second.
const SETTLE: Duration = Duration::from_mins(1);

/// Three masters that share the slots, without replicas.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
}

/// A primary, its replica, and a sentinel that makes the replica the primary when
/// the primary is gone for a second.
#[derive(Debug)]
pub struct Sentinel {
    /// The server that started as the primary.
    pub primary: Server,
    /// The server that started as the replica.
    pub replica: Server,
    /// The one that watches them. Clients ask it for the primary.
    pub sentinel: Server,
}

/// Starts a cluster of three masters, and returns when all slots are served.
///
/// # Errors
/// When `kind` is no Redis or Valkey, or as [`Server::start`].
pub fn cluster(kind: Kind) -> Result<Cluster, Error> {
    const SLOTS: [(u16, u16); 3] = [(0, 5460), (5461, 10_922), (10_923, 16_383)];
    let single = recipe_of(kind)?;
    let nodes = SLOTS.map(|_| {
        Server::run(kind, &|folder, port| {
            let mut command = single(folder, port)?;
            // The usual one, ten thousand above, may be taken or be none.
            let bus = free_port()?;
            command.extend(["--cluster-port".into(), bus.to_string().into()]);
            let settings = [
                "--cluster-enabled",
                "yes",
                "--cluster-announce-ip",
                "127.0.0.1",
                "--cluster-node-timeout",
                "2000",
            ];
            command.extend(settings.map(OsString::from));
            Ok(command)
        })
    });
    let nodes = nodes.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (number, (node, (first, last))) in nodes.iter().zip(SLOTS).enumerate() {
        let (first, last) = (first.to_string(), last.to_string());
        let epoch = (number + 1).to_string();
        call(node, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch])?;
        call(node, &["CLUSTER", "ADDSLOTSRANGE", &first, &last])?;
    }
    for node in &nodes[1..] {
        let bus = call(node, &["CONFIG", "GET", "cluster-port"])?;
        let bus = bus.lines().last().unwrap_or_default();
        let port = node.port().to_string();
        call(&nodes[0], &["CLUSTER", "MEET", "127.0.0.1", &port, bus])?;
    }
    let agreed = |node: &Server| {
        call(node, &["CLUSTER", "INFO"]).is_ok_and(|info| {
            ["state:ok", "known_nodes:3", "slots_ok:16384"]
                .iter()
                .all(|wanted| info.contains(&format!("cluster_{wanted}\r")))
        })
    };
    settle(kind, "agree on a cluster", || nodes.iter().all(agreed))?;
    Ok(Cluster { nodes })
}

/// Starts a primary, a replica and a sentinel, and returns when each knows the others.
///
/// # Errors
/// When `kind` is no Redis or Valkey, or as [`Server::start`].
pub fn sentinel(kind: Kind) -> Result<Sentinel, Error> {
    let single = recipe_of(kind)?;
    let program = Program::find(kind)?;
    let primary = Server::run(kind, &|folder, port| {
        let mut command = single(folder, port)?;
        // It waits for more replicas before it serves the first, unless told not to.
        command.extend(["--repl-diskless-sync-delay", "0"].map(OsString::from));
        Ok(command)
    })?;
    let replica = Server::run(kind, &|folder, port| {
        let mut command = single(folder, port)?;
        let primary = primary.port().to_string();
        command.extend(["--replicaof", "127.0.0.1", &primary].map(OsString::from));
        Ok(command)
    })?;
    let linked = || {
        call(&replica, &["INFO", "replication"])
            .is_ok_and(|info| info.contains("master_link_status:up"))
    };
    settle(kind, "start to replicate", linked)?;
    let sentinel = Server::run(kind, &|folder, port| {
        let settings = write_sentinel_settings(&folder.join("data"), port, primary.port())?;
        let mut command = program.command();
        command.extend([settings, "--sentinel".into()]);
        Ok(command)
    })?;
    let found = Sentinel { primary, replica, sentinel };
    settle(kind, "find the replica", || found.knows_its_replica())?;
    Ok(found)
}

impl Cluster {
    /// The masters: of the slots up to 5460, up to 10922, and the rest.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// The URL with all nodes, as fred reads it:
    /// `redis-cluster://127.0.0.1:PORT?node=127.0.0.1:PORT&node=127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        let address = |node: &Server| format!("127.0.0.1:{}", node.port());
        let all: Vec<String> = self.nodes.iter().map(address).collect();
        format!("redis-cluster://{}", all.join("&node=").replacen('&', "?", 1))
    }
}

impl Sentinel {
    /// The name by which the sentinel knows the primary.
    pub const SERVICE: &'static str = "leasehold";

    /// The URL as fred reads it:
    /// `redis-sentinel://127.0.0.1:PORT?sentinelServiceName=leasehold`.
    pub fn url(&self) -> String {
        format!(
            "redis-sentinel://127.0.0.1:{}?sentinelServiceName={}",
            self.sentinel.port(),
            Self::SERVICE
        )
    }

    /// The port of the server that the sentinel takes for the primary now.
    ///
    /// # Errors
    /// When the sentinel does not answer within 10 s.
    pub fn primary_port(&self) -> Result<u16, Error> {
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::SERVICE];
        let address = call(&self.sentinel, &words)?;
        let port = address.lines().last().and_then(|port| port.parse().ok());
        port.ok_or_else(|| Error::Protocol(format!("the sentinel answered {address:?}")))
    }

    fn knows_its_replica(&self) -> bool {
        let state = call(&self.sentinel, &["SENTINEL", "REPLICAS", Self::SERVICE]);
        let port = self.replica.port().to_string();
        state.is_ok_and(|state| {
            let linked = state.contains("master-link-status\nok");
            linked && state.contains(&format!("port\n{port}\n"))
        })
    }
}

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

fn recipe_of(kind: Kind) -> Result<Box<Recipe<'static>>, Error> {
    if kind.family() == Family::Redis {
        return recipe(kind, Vec::new());
    }
    Err(Error::Name(format!("{kind} is neither redis nor valkey")))
}

/// A sentinel keeps what it learns in its settings, so that they are a file.
fn write_sentinel_settings(folder: &Path, port: u16, primary: u16) -> Result<OsString, Error> {
    let path = folder.join("sentinel.conf");
    let name = Sentinel::SERVICE;
    let text = format!(
        "port {port}\n\
         bind 127.0.0.1\n\
         dir \"{}\"\n\
         sentinel monitor {name} 127.0.0.1 {primary} 1\n\
         sentinel down-after-milliseconds {name} 1000\n\
         sentinel failover-timeout {name} 3000\n",
        folder.display()
    );
    fs::create_dir(folder)
        .and_then(|()| fs::write(&path, text))
        .map_err(Error::io(format!("write {}", path.display())))?;
    Ok(path.into())
}

fn call(server: &Server, words: &[&str]) -> Result<String, Error> {
    server.address()?.redis(LIMIT)?.call(words)
}

fn settle(kind: Kind, what: &'static str, condition: impl FnMut() -> bool) -> Result<(), Error> {
    if wait_until(SETTLE, condition) {
        return Ok(());
    }
    Err(Error::Slow { kind, what, limit: SETTLE, log: String::new() })
}
