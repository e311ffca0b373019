//! What a client that is to be caught leaves behind with its operations.

use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::{Backend, DedupeOptions, Key, LockOptions};
use serde::{Deserialize, Serialize};

use super::Ctx;

/// Something that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Leak {
    /// Memory: 64 KiB an operation.
    Memory,
    /// Tasks that never end.
    Tasks,
    /// Open files.
    Descriptors,
    /// Handles, and with them connections, that are never closed.
    Connections,
    /// Entries on the store that outlive every run.
    Rows,
}

/// What is never given back.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

#[derive(Debug)]
enum Kept {
    #[expect(dead_code, reason = "it is there to be kept")]
    Memory(Vec<u8>),
    #[expect(dead_code, reason = "it is there to be kept")]
    File(File),
    #[expect(dead_code, reason = "it is there to be kept")]
    Handle(Arc<dyn Backend>),
}

impl Leak {
    /// After the so-manieth operation of a task.
    pub(super) async fn happen(self, ctx: &Ctx, operations: u64) {
        let kept = match self {
            Self::Memory => Some(Kept::Memory(vec![1; 64 * 1024])),
            Self::Tasks => {
                drop(tokio::spawn(std::future::pending::<()>()));
                None
            }
            Self::Descriptors if operations.is_multiple_of(10) => {
                File::open("/dev/null").ok().map(Kept::File)
            }
            Self::Connections if operations.is_multiple_of(10) => handle(ctx).await,
            Self::Rows => {
                let name = format!("left-{:032x}", rand::random::<u128>());
                let opts =
                    DedupeOptions::default().retain(Duration::from_secs(3600)).done_at_once();
                let key = Key::new(name).expect("a short name is a key");
                // one that fails leaves nothing: others will
                drop(ctx.backend.admit(&key, opts).await);
                None
            }
            Self::Descriptors | Self::Connections => None,
        };
        KEPT.lock().unwrap_or_else(PoisonError::into_inner).extend(kept);
    }
}

/// A handle with an open session.
async fn handle(ctx: &Ctx) -> Option<Kept> {
    let handle = ctx.shop.open("c0").await.ok()?;
    let key = Key::new("of a handle that is kept").expect("a short name is a key");
    drop(handle.lock(&key, LockOptions::try_once()).await);
    Some(Kept::Handle(handle))
}
