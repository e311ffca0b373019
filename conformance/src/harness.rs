//! What a backend's author gives the suite: [`Harness`], and what it opens: [`Handle`].

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, ClaimOptions, Error, ErrorKind, Key, Keys, LeaseGuard, Result,
};

/// A store under test. One harness serves all cases, which run side by side, each in a namespace
/// of its own and on a tokio runtime of its own.
#[async_trait]
pub trait Harness: Debug + Send + Sync + 'static {
    /// The name of the backend, e.g. `postgres 18`.
    fn name(&self) -> String;

    /// Why the harness cannot give what a case needs; the case is then printed as ignored with
    /// this reason. `None`: it can. A store that is merely missing is no reason: fail.
    fn lacks(&self, need: Need) -> Option<&'static str> {
        let _ = need;
        None
    }

    /// Opens a handle, as one process of a service would. Handles of one namespace contend,
    /// handles of different namespaces never meet. The schema has been migrated.
    async fn open(&self, namespace: &str) -> Result<Handle>;

    /// Another harness over a store of its own, which nobody else uses, so that it may be
    /// restarted. Only for [`Need::Restart`].
    async fn private(&self) -> Result<Arc<dyn Harness>>;

    /// Kills the store at once (as `kill -9`), starts it again and waits until it answers. What
    /// it promises to keep is kept. Only for [`Need::Restart`], on a [`private`](Self::private)
    /// harness.
    async fn restart(&self) -> Result<()>;

    /// Where another process finds this store; `None` if it lives in this one.
    fn address(&self) -> Option<String>;

    /// Deletes the record of a lease as an outsider would, without telling its holder.
    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()>;

    /// Reads a number of a small table, on the claim's own transaction; none if never written.
    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>>;

    /// Writes a number of that table, on the claim's own transaction.
    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()>;

    /// Reads the committed number, outside of any claim. Names are unique over all cases.
    async fn committed(&self, name: &str) -> Result<Option<i64>>;

    /// [`LeaseGuard::verify`] on the claim's own transaction.
    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()>;

    /// Writes a number in a transaction of its own that first [verifies](Self::verify) the lease;
    /// nothing is written if that fails.
    async fn guarded_write(
        &self,
        handle: &Handle,
        lease: &LeaseGuard,
        name: &str,
        value: i64,
    ) -> Result<()> {
        // a claim of no keys is a plain transaction
        let (keys, opts) = (Keys::none(), ClaimOptions::default());
        let Some(mut claim) = handle.backend.claim(&keys, opts).await? else {
            let detail = "a transaction without keys found others in its way";
            return Err(Error::new(ErrorKind::Backend, detail));
        };
        self.verify(&mut claim, lease).await?;
        self.write(&mut claim, name, value).await?;
        claim.commit().await
    }

    /// What is left of a namespace on the store, in words: held or awaited locks, live leases,
    /// sessions that wait or idle in a transaction. Empty when all is released. (Dedupe entries,
    /// expired rows and idle connections do not count.)
    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>>;
}

/// One handle, and the faults on its way to the store.
#[derive(Clone, Debug)]
pub struct Handle {
    /// The handle.
    pub backend: Arc<dyn Backend>,
    /// Its way to the store.
    pub link: Arc<dyn Link>,
}

/// The way of one handle to its store. Faults concern this handle only.
#[async_trait]
pub trait Link: Debug + Send + Sync + 'static {
    /// The store ends all sessions (connections) of this handle, as its administrator would. New
    /// ones may be opened at once.
    async fn end_sessions(&self) -> Result<()>;

    /// The network goes silent: nothing arrives in either direction, nothing is refused, until
    /// [`heal`](Self::heal).
    async fn silence(&self) -> Result<()>;

    /// The network works again. Connections of before may be cut.
    async fn heal(&self) -> Result<()>;

    /// The next request reaches the store and is carried out, but its answer is lost: the
    /// connection is cut instead.
    async fn lose_next_answer(&self) -> Result<()>;
}

/// What a case needs beyond the traits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// [`Link::end_sessions`].
    EndSessions,
    /// [`Link::silence`] and [`Link::heal`].
    Silence,
    /// [`Link::lose_next_answer`].
    LoseAnswer,
    /// [`Harness::private`] and [`Harness::restart`].
    Restart,
    /// [`Harness::delete_lease`].
    DeleteLease,
    /// [`Harness::address`]: other processes on this store.
    Processes,
    /// [`Inspect`](leasehold_core::Inspect): who holds what, and forced release.
    Inspect,
    /// The store has a clock of its own: a process whose clock is set otherwise does not bring
    /// another time to it.
    OwnClock,
    /// A named lock is lost when its session ends (not by a ttl).
    SessionLocks,
    /// Transactions of different claims may have written at the same time; where a store has one
    /// writer, the second one waits with its first statement until the first has ended.
    ParallelWriters,
}
