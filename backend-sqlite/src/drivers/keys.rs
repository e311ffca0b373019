//! The keys of a claim: a locked file for each, from before its transaction until after it.

use std::path::PathBuf;

use leasehold_core::{Deadline, Key, Result};
use sha2::{Digest, Sha256};

use crate::alive::Locked;
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

    /// Whether others still find them: an administrator may have removed the files.
    pub(super) fn are_in_place(&self) -> bool {
        self.0.iter().all(Locked::is_in_place)
    }
}

/// The file of a key. Its name is a hash, since a key may be longer than a file's name may be;
/// those of one namespace begin alike.
fn path(store: &Store, key: &Key) -> PathBuf {
    let (namespace, key) = (store.namespace.as_bytes(), key.as_str().as_bytes());
    let of_namespace = hex(&Sha256::digest(namespace)[..8]);
    let of_key = hex(&Sha256::digest([namespace, b"\0", key].concat()));
    store.files.place.claims().join(format!("{of_namespace}-{of_key}"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}
