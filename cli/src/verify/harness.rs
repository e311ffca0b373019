//! [`StoreHarness`]: any store of a URL under the suite.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use leasehold::{
    Claim, ClaimOptions, Error, ErrorKind, HoldingQuery, Key, Keys, Kind, LeaseGuard, Result, Store,
};
use leasehold_conformance::{Handle, Harness, Link, Need, Proxy};
use tokio::net::lookup_host;

use super::numbers::Numbers;
use super::way;
use crate::commands::holding;
use crate::store::{has_option, with_option};

/// What all namespaces of the suite begin with.
const NAMESPACES: &str = "leasehold-verify-";
/// Settings that make a silent store known soon, where the URL says nothing else.
const QUICK: &[(&str, &str, &str)] = &[
    ("mysql", "keepalive", "500ms"),
    ("mysql", "answer", "2s"),
    ("redis", "command_limit", "3s"),
    ("redis", "lock_ttl", "4s"),
    ("redis", "claim_ttl", "4s"),
    ("redis", "cluster_tag", "verify"),
];

/// The store.
#[derive(Debug)]
pub(super) struct StoreHarness {
    url: String,
    name: String,
    numbers: Numbers,
    session_locks: bool,
    inspects: bool,
    /// Why there is no proxy.
    no_proxy: Option<&'static str>,
    /// Kept, because what a dropped handle still has to do goes through them.
    proxies: Mutex<Vec<Arc<Proxy>>>,
    /// Of all numbers.
    names: Mutex<BTreeSet<String>>,
}

impl StoreHarness {
    /// Connects, and makes what the suite needs.
    pub(super) async fn start(url: &str) -> Result<Self> {
        let harness = Self::on(url).await?;
        let mut claim = plain(&*harness.numbers_store().await?).await?;
        harness.numbers.prepare(&mut claim).await?;
        harness.end(claim).await?;
        Ok(harness)
    }

    /// That of another process.
    pub(super) fn join(address: &str) -> Result<Self> {
        // the suite calls it outside of any runtime
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(failed)?.block_on(Self::on(address))
    }

    async fn on(url: &str) -> Result<Self> {
        let store = leasehold::connect(url).await?;
        store.migrate().await?;
        let mut url = url.to_owned();
        if store.name() == "memory" {
            url = format!("memory:{NAMESPACES}{:016x}", rand::random::<u64>());
        }
        for (backend, option, value) in QUICK {
            if *backend == store.name() && !has_option(&url, option) {
                url = with_option(&url, option, value);
            }
        }
        let nobody = HoldingQuery::prefix(NAMESPACES).limit(1);
        let inspects = match holding::shown(&store, &nobody).await {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::Unsupported => false,
            Err(error) => return Err(error),
        };
        let harness = Self {
            numbers: Numbers::of(store.name())?,
            session_locks: store.capabilities().session_locks,
            inspects,
            no_proxy: way::server(&url).err(),
            name: store.name().to_owned(),
            url,
            proxies: Mutex::default(),
            names: Mutex::default(),
        };
        store.close().await?;
        Ok(harness)
    }

    /// Takes back what [`start`](Self::start) made.
    pub(super) async fn tidy(&self) -> Result<()> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut claim = plain(&*self.numbers_store().await?).await?;
        self.numbers.drop(&mut claim, &names).await?;
        self.end(claim).await
    }

    /// Ends a transaction in which a table was made or dropped.
    async fn end(&self, claim: Claim) -> Result<()> {
        match self.numbers.tables_commit() {
            true => claim.rollback().await,
            false => claim.commit().await,
        }
    }

    /// The namespace of a case.
    fn namespace(namespace: &str) -> String {
        format!("{NAMESPACES}{namespace}")
    }

    /// A handle for the numbers, past all faults.
    async fn numbers_store(&self) -> Result<Store> {
        let namespace = Self::namespace("numbers");
        leasehold::connect(&with_option(&self.url, "namespace", &namespace)).await
    }

    /// Remembers a name, to delete it at the end.
    fn note(&self, name: &str) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.contains(name) {
            names.insert(name.to_owned());
        }
    }

    async fn proxy(&self) -> Result<Option<Arc<Proxy>>> {
        let Ok((host, port)) = way::server(&self.url) else { return Ok(None) };
        let mut found = lookup_host((host, port)).await.map_err(failed)?;
        let server = found.next().ok_or_else(|| failed("the server's name has no address"))?;
        let proxy = Arc::new(Proxy::start(server).await.map_err(failed)?);
        self.proxies.lock().unwrap_or_else(PoisonError::into_inner).push(proxy.clone());
        Ok(Some(proxy))
    }
}

/// A claim of no keys: a plain transaction.
async fn plain(backend: &dyn leasehold::Backend) -> Result<Claim> {
    let claim = backend.claim(&Keys::none(), ClaimOptions::default()).await?;
    claim.ok_or_else(|| failed("a transaction without keys found others in its way"))
}

#[async_trait]
impl Harness for StoreHarness {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn lacks(&self, need: Need) -> Option<&'static str> {
        match need {
            Need::EndSessions | Need::Silence | Need::LoseAnswer => self.no_proxy,
            Need::Restart => Some("nobody restarts a server that others use"),
            Need::Inspect | Need::DeleteLease if !self.inspects => {
                Some("the store cannot tell who holds what")
            }
            #[cfg(feature = "sqlite")]
            Need::OwnClock if self.numbers == Numbers::Sqlite => {
                Some("the clock of the machine is the store's, as a process reads it")
            }
            Need::ParallelWriters if self.numbers == Numbers::Sqlite => {
                Some("a file has one writer at a time")
            }
            Need::Processes if self.numbers == Numbers::Memory => {
                Some("the store lives in this process")
            }
            Need::SessionLocks if !self.session_locks => Some("named locks live by a ttl here"),
            _ => None,
        }
    }

    async fn open(&self, namespace: &str) -> Result<Handle> {
        static HANDLES: AtomicU64 = AtomicU64::new(0);
        let number = HANDLES.fetch_add(1, Ordering::Relaxed);
        let proxy = self.proxy().await?;
        let mut url = with_option(&self.url, "namespace", &Self::namespace(namespace));
        if !has_option(&url, "app") {
            url = with_option(&url, "app", &format!("verify-{number}"));
        }
        if let Some(proxy) = &proxy {
            url = way::through(&url, proxy.addr());
        }
        let store = leasehold::connect(&url).await?;
        Ok(Handle { backend: store.backend(), link: Arc::new(Way(proxy)) })
    }

    async fn private(&self) -> Result<Arc<dyn Harness>> {
        Err(failed("there is no private one of it"))
    }

    async fn restart(&self) -> Result<()> {
        Err(failed("nobody restarts a server that others use"))
    }

    fn address(&self) -> Option<String> {
        (self.numbers != Numbers::Memory).then(|| self.url.clone())
    }

    async fn delete_lease(&self, namespace: &str, key: &Key) -> Result<()> {
        // what the store refuses to show is not looked for
        let url = with_option(&self.url, "namespace", &Self::namespace(namespace));
        let store = leasehold::connect(&url).await?;
        store.force_release(Kind::Lease, key).await?;
        store.close().await
    }

    async fn read(&self, claim: &mut Claim, name: &str) -> Result<Option<i64>> {
        self.note(name);
        self.numbers.read(claim, name).await
    }

    async fn write(&self, claim: &mut Claim, name: &str, value: i64) -> Result<()> {
        self.note(name);
        self.numbers.write(claim, name, value).await
    }

    async fn committed(&self, name: &str) -> Result<Option<i64>> {
        self.note(name);
        #[cfg(feature = "sqlite")]
        if let Some(number) = self.numbers.committed(&self.url, name).await {
            return number;
        }
        let store = self.numbers_store().await?;
        let mut claim = plain(&*store).await?;
        let number = self.numbers.read(&mut claim, name).await?;
        claim.rollback().await?;
        store.close().await?;
        Ok(number)
    }

    async fn verify(&self, claim: &mut Claim, lease: &LeaseGuard) -> Result<()> {
        self.numbers.verify(claim, lease).await
    }

    async fn leftovers(&self, namespace: &str) -> Result<Vec<String>> {
        if !self.inspects {
            return Ok(Vec::new());
        }
        // what the store refuses to show is not looked for
        let url = with_option(&self.url, "namespace", &Self::namespace(namespace));
        let store = leasehold::connect(&url).await?;
        let query = HoldingQuery::default().kinds([Kind::Lock, Kind::Lease, Kind::Claim]);
        let (holdings, _) = holding::shown(&store, &query).await?;
        store.close().await?;
        Ok(holdings.iter().map(|held| format!("{} {}", held.kind, held.name)).collect())
    }
}

/// The way of a handle: through its proxy, if there is one.
#[derive(Debug)]
struct Way(Option<Arc<Proxy>>);

impl Way {
    fn proxy(&self) -> Result<&Proxy> {
        self.0.as_deref().ok_or_else(|| failed("there is no proxy on this way"))
    }
}

#[async_trait]
impl Link for Way {
    async fn end_sessions(&self) -> Result<()> {
        self.proxy()?.cut(); // the store ends a session whose connection ends
        Ok(())
    }

    async fn silence(&self) -> Result<()> {
        self.proxy()?.silence();
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.proxy()?.heal();
        Ok(())
    }

    async fn lose_next_answer(&self) -> Result<()> {
        self.proxy()?.lose_next_answer();
        Ok(())
    }
}

/// An error of the harness's own.
#[allow(clippy::needless_pass_by_value)] // it is handed to map_err
pub(super) fn failed(error: impl ToString) -> Error {
    Error::new(ErrorKind::Backend, error.to_string())
}
