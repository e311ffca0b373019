use std::{fmt, str::FromStr};

use super::Error;

/// A server, in a version that the suite is run against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// PostgreSQL 15, the default one.
    Postgres15,
    /// PostgreSQL 17.
    Postgres17,
    /// PostgreSQL 18.
    Postgres18,
    /// MySQL, 8.0 or later.
    MySql,
    /// MariaDB 10.x, the default one.
    MariaDb,
    /// MariaDB 11.x or later.
    MariaDbNew,
    /// Redis 7, the default one.
    Redis7,
    /// Redis 8.
    Redis8,
    /// Valkey.
    Valkey,
    /// PgBouncer, which stands in front of a PostgreSQL: see [`PgBouncer`](super::PgBouncer).
    PgBouncer,
}

/// What a Debian suite has of a kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Package {
    pub(super) suite: &'static str,
    pub(super) name: &'static str,
}

/// Which protocol a kind speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Postgres,
    MySql,
    Redis,
}

impl Kind {
    /// Every kind, in the order of the documentation.
    pub const ALL: [Self; 10] = [
        Self::Postgres15,
        Self::Postgres17,
        Self::Postgres18,
        Self::MySql,
        Self::MariaDb,
        Self::MariaDbNew,
        Self::Redis7,
        Self::Redis8,
        Self::Valkey,
        Self::PgBouncer,
    ];

    /// The kinds that a test run without further wishes is made on.
    pub const DEFAULT: [Self; 4] = [Self::Postgres15, Self::MySql, Self::MariaDb, Self::Redis7];

    /// The environment variable with the URL of a server of this kind for
    /// [`Server::shared`](super::Server::shared).
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Postgres15 => "LEASEHOLD_TEST_POSTGRES_URL",
            Self::Postgres17 => "LEASEHOLD_TEST_POSTGRES17_URL",
            Self::Postgres18 => "LEASEHOLD_TEST_POSTGRES18_URL",
            Self::MySql => "LEASEHOLD_TEST_MYSQL_URL",
            Self::MariaDb => "LEASEHOLD_TEST_MARIADB_URL",
            Self::MariaDbNew => "LEASEHOLD_TEST_MARIADB11_URL",
            Self::Redis7 => "LEASEHOLD_TEST_REDIS_URL",
            Self::Redis8 => "LEASEHOLD_TEST_REDIS8_URL",
            Self::Valkey => "LEASEHOLD_TEST_VALKEY_URL",
            Self::PgBouncer => "LEASEHOLD_TEST_PGBOUNCER_URL",
        }
    }

    /// The name on the command line, in folders and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Postgres15 => "postgres",
            Self::Postgres17 => "postgres17",
            Self::Postgres18 => "postgres18",
            Self::MySql => "mysql",
            Self::MariaDb => "mariadb",
            Self::MariaDbNew => "mariadb11",
            Self::Redis7 => "redis",
            Self::Redis8 => "redis8",
            Self::Valkey => "valkey",
            Self::PgBouncer => "pgbouncer",
        }
    }

    pub(super) const fn family(self) -> Family {
        match self {
            Self::Postgres15 | Self::Postgres17 | Self::Postgres18 | Self::PgBouncer => {
                Family::Postgres
            }
            Self::MySql | Self::MariaDb | Self::MariaDbNew => Family::MySql,
            Self::Redis7 | Self::Redis8 | Self::Valkey => Family::Redis,
        }
    }

    /// The stable suites are preferred: sid moves, and is taken only for what no
    /// stable suite has.
    pub(super) const fn package(self) -> Package {
        let (suite, name) = match self {
            Self::Postgres15 => ("bookworm", "postgresql-15"),
            Self::Postgres17 => ("trixie", "postgresql-17"),
            Self::Postgres18 => ("sid", "postgresql-18"),
            Self::MySql => ("sid", "mysql-server-core"),
            Self::MariaDb => ("bookworm", "mariadb-server-core"),
            Self::MariaDbNew => ("trixie", "mariadb-server-core"),
            Self::Redis7 => ("bookworm", "redis-server"),
            Self::Redis8 => ("trixie", "redis-server"),
            Self::Valkey => ("trixie", "valkey-server"),
            Self::PgBouncer => ("trixie", "pgbouncer"),
        };
        Package { suite, name }
    }

    /// Where the program lies below `/` once its package is unpacked.
    pub(super) const fn program(self) -> &'static str {
        match self {
            Self::Postgres15 => "/usr/lib/postgresql/15/bin/postgres",
            Self::Postgres17 => "/usr/lib/postgresql/17/bin/postgres",
            Self::Postgres18 => "/usr/lib/postgresql/18/bin/postgres",
            Self::MySql => "/usr/sbin/mysqld",
            Self::MariaDb | Self::MariaDbNew => "/usr/sbin/mariadbd",
            Self::Redis7 | Self::Redis8 => "/usr/bin/redis-server",
            Self::Valkey => "/usr/bin/valkey-server",
            Self::PgBouncer => "/usr/sbin/pgbouncer",
        }
    }

    /// Whether `banner`, what the program prints for `--version`, is this kind's.
    pub(super) fn accepts(self, banner: &str) -> bool {
        let Some(version) = version_in(banner) else {
            return false;
        };
        let major: u32 = version.split('.').next().and_then(|part| part.parse().ok()).unwrap_or(0);
        let maria = banner.contains("MariaDB");
        match self {
            Self::Postgres15 => major == 15,
            Self::Postgres17 => major == 17,
            Self::Postgres18 => major == 18,
            Self::MySql => !maria && major >= 8,
            Self::MariaDb => maria && major == 10,
            Self::MariaDbNew => maria && major >= 11,
            Self::Redis7 => major == 7,
            Self::Redis8 => major == 8,
            Self::Valkey | Self::PgBouncer => major >= 1,
        }
    }
}

/// The first word of digits and points in what `--version` printed, such as
/// `15.18` of `postgres (PostgreSQL) 15.18 (Debian ...)`.
pub(super) fn version_in(banner: &str) -> Option<&str> {
    banner
        .split(|c: char| !(c.is_ascii_digit() || c == '.'))
        .map(|word| word.trim_matches('.'))
        .find(|word| word.contains('.'))
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name.to_ascii_lowercase().as_str() {
            "postgres" | "postgres15" | "postgresql" | "pg" | "pg15" => Ok(Self::Postgres15),
            "postgres17" | "pg17" => Ok(Self::Postgres17),
            "postgres18" | "pg18" => Ok(Self::Postgres18),
            "mysql" => Ok(Self::MySql),
            "mariadb" | "mariadb10" => Ok(Self::MariaDb),
            "mariadb11" | "mariadb-new" => Ok(Self::MariaDbNew),
            "redis" | "redis7" => Ok(Self::Redis7),
            "redis8" => Ok(Self::Redis8),
            "valkey" => Ok(Self::Valkey),
            "pgbouncer" => Ok(Self::PgBouncer),
            _ => Err(Error::Name(format!(
                "no server is called {name:?}; there are {}",
                Self::ALL.map(Self::name).join(", ")
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_means_its_kind() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse::<Kind>().unwrap(), kind);
            assert_eq!(kind.to_string(), kind.name());
        }
        let refusal = "oracle".parse::<Kind>().unwrap_err().to_string();
        assert!(refusal.contains("oracle") && refusal.contains("mariadb"), "{refusal}");
    }

    #[test]
    fn a_banner_is_accepted_by_the_kinds_of_its_version_only() {
        let banners = [
            ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", vec![Kind::Postgres15]),
            ("postgres (PostgreSQL) 18.0", vec![Kind::Postgres18]),
            ("/usr/sbin/mysqld  Ver 9.7.4 for Linux on x86_64 (MySQL)", vec![Kind::MySql]),
            ("mariadbd  Ver 10.11.14-MariaDB-0+deb12u2 for debian-linux-gnu", vec![Kind::MariaDb]),
            ("mariadbd  Ver 11.8.3-MariaDB-0+deb13u1 from Debian", vec![Kind::MariaDbNew]),
            (
                "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64",
                vec![Kind::Redis7],
            ),
            ("Redis server v=8.0.2 sha=0", vec![Kind::Redis8]),
        ];
        // Valkey and PgBouncer take any version; their programs have names of their own.
        let versioned = Kind::ALL.map(|kind| (kind, kind.family()));
        for (banner, wanted) in banners {
            let accepted: Vec<Kind> = versioned
                .iter()
                .filter(|(kind, family)| {
                    !matches!(kind, Kind::Valkey | Kind::PgBouncer)
                        && *family == wanted[0].family()
                        && kind.accepts(banner)
                })
                .map(|(kind, _)| *kind)
                .collect();
            assert_eq!(accepted, wanted, "{banner}");
        }
        assert!(!Kind::Redis7.accepts("command not found"));
    }
}
