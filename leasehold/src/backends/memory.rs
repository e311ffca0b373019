//! `memory:` a store of its own; `memory:name` one that the process shares by that name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_core::memory::{MemoryBackend, MemoryStore};
use leasehold_core::{Backend, Result};

use crate::url::StoreUrl;

/// Those that were named, for as long as the process lives.
static NAMED: Mutex<Option<HashMap<String, MemoryStore>>> = Mutex::new(None);

pub(super) fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    url.check(&[], &[])?;
    let store = match url.rest().trim_start_matches('/') {
        "" => MemoryStore::new(),
        name => {
            let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
            let named = named.get_or_insert_default();
            named.entry(name.to_owned()).or_default().clone()
        }
    };
    let mut builder = MemoryBackend::builder().store(&store).holder(url.holder());
    if let Some(namespace) = url.text("namespace") {
        builder = builder.namespace(namespace);
    }
    Ok(Arc::new(builder.build()))
}
