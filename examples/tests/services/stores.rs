//! Where a service is run.

use leasehold_conformance::servers::{Kind, Server};

/// A store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In one process.
    Memory,
    /// On a server of its own.
    Server(Kind),
}

impl Place {
    pub(crate) const ALL: [Self; 6] = [
        Self::Memory,
        Self::Server(Kind::Postgres15),
        Self::Server(Kind::MySql),
        Self::Server(Kind::MariaDb),
        Self::Server(Kind::Redis7),
        Self::Server(Kind::Valkey),
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Server(kind) => kind.name(),
        }
    }

    /// The server, and the URL by which the services find it.
    pub(crate) fn start(self) -> Result<Option<(Server, String)>, String> {
        let Self::Server(kind) = self else { return Ok(None) };
        let server = Server::start(kind).map_err(|error| error.to_string())?;
        let options = match kind {
            // so that a paused process is one whose locks have run out
            Kind::Redis7 | Kind::Valkey => "?lock_ttl=2s&claim_ttl=2s",
            _ => "",
        };
        let url = format!("{}{options}", server.url());
        Ok(Some((server, url)))
    }
}
