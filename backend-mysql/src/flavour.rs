//! What server it is, and what it cannot do.

use std::collections::HashMap;
use std::fmt;

use leasehold_core::{Error, ErrorKind, Result};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

use crate::error::mapped;

/// Which of the two families a server is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Flavour {
    /// Oracle's MySQL, Percona Server and what follows them.
    MySql,
    /// MariaDB.
    MariaDb,
}

/// The server behind a handle, as it was read when the handle was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its family.
    pub flavour: Flavour,
    /// Major, minor and patch version.
    pub version: (u16, u16, u16),
    /// The version as the server says it.
    pub banner: String,
}

impl fmt::Display for ServerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.banner)
    }
}

/// What was read of a server.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) info: ServerInfo,
    variables: HashMap<String, String>,
}

const VARIABLES: &str = "SHOW VARIABLES WHERE Variable_name IN ('version', 'version_comment', \
    'read_only', 'wsrep_on', 'group_replication_group_name', \
    'group_replication_single_primary_mode')";

impl Facts {
    pub(crate) async fn read(conn: &mut Conn) -> Result<Self> {
        let variables: Vec<(String, String)> = conn.query(VARIABLES).await.map_err(mapped)?;
        Ok(Self::new(variables.into_iter().collect()))
    }

    fn new(variables: HashMap<String, String>) -> Self {
        let banner = variables.get("version").cloned().unwrap_or_default();
        let flavour = if banner.contains("MariaDB") { Flavour::MariaDb } else { Flavour::MySql };
        Self { info: ServerInfo { flavour, version: version_in(&banner), banner }, variables }
    }

    fn is_on(&self, variable: &str) -> bool {
        self.variables.get(variable).is_some_and(|value| matches!(value.as_str(), "ON" | "1"))
    }

    /// Refuses what cannot work, with what to do about it.
    pub(crate) fn check(&self, user_locks: bool) -> Result<()> {
        let unsupported = |detail: String| Err(Error::new(ErrorKind::Unsupported, detail));
        let ServerInfo { flavour, version, banner } = &self.info;
        let (name, oldest) = match flavour {
            Flavour::MySql => ("mysql", (8, 0, 0)),
            // from here on there is SKIP LOCKED, and AUTO_INCREMENT survives a restart
            Flavour::MariaDb => ("mariadb", (10, 6, 0)),
        };
        if *version < oldest {
            let (major, minor, _) = oldest;
            return unsupported(format!("{banner} is older than {name} {major}.{minor}"));
        }
        if let Some(why) = self.no_user_locks() {
            if user_locks {
                return unsupported(format!("{why}: build the handle without user locks"));
            }
        } else if user_locks && self.is_in_group() {
            tracing::warn!(
                server = banner,
                "user-level locks are local to a node of this group: all handles must reach its \
                 one primary"
            );
        }
        if self.is_on("read_only") {
            let detail = "the server is read-only: it is not the primary";
            return Err(Error::new(ErrorKind::Unavailable, detail));
        }
        Ok(())
    }

    /// Why user-level locks are absent, or no locks, here.
    pub(crate) fn no_user_locks(&self) -> Option<&'static str> {
        let comment = self.variables.get("version_comment");
        let said = |word: &str| {
            self.info.banner.contains(word) || comment.is_some_and(|comment| comment.contains(word))
        };
        if self.is_on("wsrep_on") {
            Some("this is a galera cluster, whose user-level locks are refused or local to a node")
        } else if self.is_in_group() && !self.is_on("group_replication_single_primary_mode") {
            Some("this is a group with several primaries, whose user-level locks are local to each")
        } else if said("Vitess") {
            Some("vitess keeps user-level locks on a session of its own")
        } else if said("ProxySQL") {
            Some("proxysql spreads the statements of a session over several")
        } else if said("TiDB") {
            Some("tidb is not a server on which this is tested")
        } else {
            None
        }
    }

    pub(crate) fn is_in_group(&self) -> bool {
        self.variables.get("group_replication_group_name").is_some_and(|name| !name.is_empty())
    }
}

fn version_in(banner: &str) -> (u16, u16, u16) {
    // an old replication hack: 5.5.5-10.11.2-MariaDB
    let banner = banner.strip_prefix("5.5.5-").unwrap_or(banner);
    let mut parts =
        banner.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let mut part = || parts.next().unwrap_or(0);
    (part(), part(), part())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(variables: &[(&str, &str)]) -> Facts {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Facts::new(variables.iter().map(owned).collect())
    }

    #[test]
    fn versions_are_read() {
        for (banner, flavour, version) in [
            ("9.7.4-2", Flavour::MySql, (9, 7, 4)),
            ("8.0.36-28.1 Percona", Flavour::MySql, (8, 0, 36)),
            ("10.11.18-MariaDB-0+deb12u1", Flavour::MariaDb, (10, 11, 18)),
            ("5.5.5-10.6.1-MariaDB", Flavour::MariaDb, (10, 6, 1)),
        ] {
            let info = facts(&[("version", banner)]).info;
            assert_eq!((info.flavour, info.version), (flavour, version), "{banner}");
        }
    }

    /// B48, B50, B51, B31: old servers, clusters, proxies and replicas are refused at start, and
    /// the message says what to do.
    #[test]
    fn what_cannot_work_is_refused() {
        let mysql = ("version", "8.4.0");
        let maria = ("version", "10.11.2-MariaDB");
        let group = ("group_replication_group_name", "0c1d");
        for variables in [
            vec![maria, ("wsrep_on", "ON")],
            vec![mysql, group, ("group_replication_single_primary_mode", "OFF")],
            vec![("version", "8.0.30-Vitess")],
            vec![mysql, ("version_comment", "(ProxySQL)")],
            vec![("version", "8.0.11-TiDB-v7.5.0")],
        ] {
            let facts = facts(&variables);
            let error = facts.check(true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{variables:?}");
            assert!(error.detail().contains("without user locks"), "{error}");
            assert!(facts.check(false).is_ok(), "{variables:?}");
        }
        for banner in ["5.7.44", "5.5.62", "10.5.29-MariaDB"] {
            let error = facts(&[("version", banner)]).check(false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{banner}");
        }
        let replica = facts(&[mysql, ("read_only", "ON")]);
        assert_eq!(replica.check(true).unwrap_err().kind(), ErrorKind::Unavailable);
        let single = [mysql, group, ("group_replication_single_primary_mode", "ON")];
        assert!(facts(&single).check(true).is_ok());
        assert!(facts(&[maria, ("wsrep_on", "OFF")]).check(true).is_ok());
    }
}
