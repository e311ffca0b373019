//! Where a service is run.

use leasehold_conformance::servers::{Kind, Server};

/// A store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In one process.
    Memory,
    /// In a file.
    Sqlite,
    /// On a server of its own.
    Server(Kind),
}

impl Place {
    pub(crate) const ALL: [Self; 7] = [
        Self::Memory,
        Self::Sqlite,
        Self::Server(Kind::Postgres15),
        Self::Server(Kind::MySql),
        Self::Server(Kind::MariaDb),
        Self::Server(Kind::Redis7),
        Self::Server(Kind::Valkey),
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Server(kind) => kind.name(),
        }
    }

    /// Starts the store; `None` where it is in this process.
    pub(crate) fn start(self) -> Result<Option<Started>, String> {
        let kind = match self {
            Self::Memory => return Ok(None),
            Self::Sqlite => {
                let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
                let url = format!("sqlite:{}", folder.path().join("services.db").display());
                return Ok(Some(Started { url, _kept: Kept::Folder(folder) }));
            }
            Self::Server(kind) => kind,
        };
        let server = Server::start(kind).map_err(|error| error.to_string())?;
        let options = match kind {
            // so that a paused process is one whose locks have run out
            Kind::Redis7 | Kind::Valkey => "?lock_ttl=2s&claim_ttl=2s",
            _ => "",
        };
        let url = format!("{}{options}", server.url());
        Ok(Some(Started { url, _kept: Kept::Server(server) }))
    }
}

/// A store that ends when this is dropped.
pub(crate) struct Started {
    /// By which the services find it.
    pub(crate) url: String,
    _kept: Kept,
}

#[expect(dead_code, reason = "kept for their drops")]
enum Kept {
    Folder(tempfile::TempDir),
    Server(Server),
}
