//! The keys of a claim: a locked file for each, from before its transaction until after it.

use std::path::PathBuf;

use leasehold_core::{Deadline, FencingToken, Key, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::alive::Locked;
use crate::clock::now;
use crate::error::file_error;
use crate::file::pause;
use crate::store::Store;

/// The locked keys of a claim. Dropping them frees them.
#[derive(Debug)]
pub(super) struct KeyLocks(Vec<Locked>);

impl KeyLocks {
    /// Takes all keys, in their order; none if the deadline passes. It tries once at least.
    pub(super) async fn take(
        store: &Store,
        keys: &[Key],
        deadline: Deadline,
    ) -> Result<Option<Self>> {
        let mut locks = Vec::with_capacity(keys.len());
        for path in keys.iter().map(|key| path(store, key)) {
            let mut looks = 0;
            loop {
                let locked = Locked::try_at(&path);
                match locked.map_err(|error| file_error("lock the claimed key's", &path, error))? {
                    Some(locked) => {
                        locks.push(locked);
                        break;
                    }
                    None if deadline.has_passed() => return Ok(None),
                    None => {}
                }
                tokio::select! {
                    () = pause(looks) => {}
                    () = deadline.passed() => {}
                }
                looks += 1;
            }
        }
        Ok(Some(Self(locks)))
    }

    /// Writes into the files what others may be told.
    pub(super) fn describe(&self, store: &Store, keys: &[Key], token: FencingToken) -> Result<()> {
        let now = now()?;
        for (locked, key) in self.0.iter().zip(keys) {
            let (key, holder) = (key.as_str(), &store.holder);
            let told = json!([key, holder, token.value(), now.boot, now.micros]).to_string();
            let written = locked.write(told.as_bytes());
            written.map_err(|error| file_error("write", locked.path(), error))?;
        }
        Ok(())
    }

    /// Whether others still find them: an administrator may have removed the files.
    pub(super) fn are_in_place(&self) -> bool {
        self.0.iter().all(Locked::is_in_place)
    }
}

/// The file of a key. Its name is a hash, since a key may be longer than a file's name may be;
/// those of one namespace begin alike.
pub(crate) fn path(store: &Store, key: &Key) -> PathBuf {
    let text = [store.namespace.as_bytes(), b"\0", key.as_str().as_bytes()].concat();
    store.files.place.claims().join(format!("{}{}", prefix(store), hex(&Sha256::digest(text))))
}

/// What the names of a namespace's files begin with.
pub(crate) fn prefix(store: &Store) -> String {
    format!("{}-", hex(&Sha256::digest(store.namespace.as_bytes())[..8]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}
