//! Who takes part: the raw drivers, leasehold, and the libraries that one could take instead.

mod fred_raw;
mod mysql_raw;
mod ours;
mod pool;
mod postgres_raw;

use leasehold_conformance::servers::Kind;
use leasehold_peers::{Outcome, Store, peers};

use crate::record::Role;
use crate::scene::Entrant;

pub use self::fred_raw::RawFred;
pub use self::mysql_raw::RawMySql;
pub use self::ours::{Leasehold, Opener, Which};
pub use self::postgres_raw::RawPostgres;

/// All who can lock names on the server at `url`, the raw drivers first.
///
/// On Redis and Valkey, where peers have locks with a ttl, leasehold's leases come before its named
/// locks.
///
/// # Errors
/// If it is a kind of server that locks nothing.
pub fn of(kind: Kind, url: &str) -> Outcome<Vec<Entrant>> {
    let (store, mut all) = match kind {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => {
            let raw = Entrant::new(Role::Floor, RawPostgres::new(url)?);
            let lock = Leasehold::new(Opener::Postgres(url.to_owned()), Which::Lock);
            (Store::Postgres, vec![raw, Entrant::new(Role::Leasehold, lock)])
        }
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => {
            let raw = Entrant::new(Role::Floor, RawMySql::new(url)?);
            let lock = Leasehold::new(Opener::MySql(tcp(url)), Which::Lock);
            (Store::MySql, vec![raw, Entrant::new(Role::Leasehold, lock)])
        }
        Kind::Redis7 | Kind::Redis8 | Kind::Valkey => {
            let open = || Opener::Redis(url.to_owned());
            let all = vec![
                Entrant::new(Role::Floor, RawFred::silent(url)),
                Entrant::new(Role::Floor, RawFred::telling(url)),
                Entrant::new(Role::Leasehold, Leasehold::new(open(), Which::Lease)),
                Entrant::new(Role::Leasehold, Leasehold::new(open(), Which::Lock)),
            ];
            (Store::Redis, all)
        }
        _ => return Err(format!("{kind} locks nothing").into()),
    };
    let peers = peers(store, url).into_iter().map(Entrant::from_peer);
    all.extend(peers);
    Ok(all)
}

/// leasehold's leases on a server where [`of`] has only its named locks, as all peers' locks are of a
/// session there.
pub fn lease_of(kind: Kind, url: &str) -> Option<Entrant> {
    let opener = match kind {
        Kind::Postgres15 | Kind::Postgres17 | Kind::Postgres18 => Opener::Postgres(url.to_owned()),
        Kind::MySql | Kind::MariaDb | Kind::MariaDbNew => Opener::MySql(tcp(url)),
        _ => return None,
    };
    Some(Entrant::new(Role::Leasehold, Leasehold::new(opener, Which::Lease)))
}

/// Whether it speaks SQL.
pub fn is_sql(kind: Kind) -> bool {
    !matches!(kind, Kind::Redis7 | Kind::Redis8 | Kind::Valkey)
}

/// `url` with TCP for both sides: by default `mysql_async` looks for the server's socket.
pub(crate) fn tcp(url: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}prefer_socket=false")
}
