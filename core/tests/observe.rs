//! The spans and events: each once, with the documented names, levels and fields.

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::{key, millis, pair, poll_times, secs, until};
use leasehold_core::{
    Backend, ClaimLock, ClaimOptions, Dedupe, DedupeOptions, Inspect, Keys, Kind, Lease,
    LeaseOptions, LockOptions, NamedLock, observe,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

type Fields = BTreeMap<String, String>;

#[derive(Clone, Debug)]
struct Told {
    level: Level,
    message: String,
    fields: Fields,
    /// The names of the spans around it, the outermost first.
    spans: Vec<&'static str>,
}

impl Told {
    #[track_caller]
    fn has(&self, fields: &[(&str, &str)]) -> &Self {
        for (field, value) in fields {
            let found = self.fields.get(*field).map(String::as_str);
            assert_eq!(found, Some(*value), "{field} of {self:?}");
        }
        self
    }
}

/// Collects what has the documented target; spans when they close.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Told>>>);

impl Log {
    fn start() -> (Self, DefaultGuard) {
        let log = Self::default();
        let subscriber = tracing_subscriber::registry().with(log.clone());
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn all(&self, message: &str) -> Vec<Told> {
        let told = self.0.lock().unwrap();
        told.iter().filter(|told| told.message == message).cloned().collect()
    }

    /// The only one of this message since the last [`clear`](Self::clear).
    #[track_caller]
    fn only(&self, message: &str) -> Told {
        let mut all = self.all(message);
        let told = self.0.lock().unwrap().clone();
        assert_eq!(all.len(), 1, "{message}: {told:#?}");
        all.remove(0)
    }

    fn clear(&self) {
        self.0.lock().unwrap().clear();
    }
}

struct Reader<'a>(&'a mut Fields);

impl Visit for Reader<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Log {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Reader(&mut fields));
        context.span(id).unwrap().extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let mut extensions = span.extensions_mut();
        record.record(&mut Reader(extensions.get_mut().unwrap()));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != observe::TARGET {
            return;
        }
        let mut fields = Fields::new();
        event.record(&mut Reader(&mut fields));
        let message = fields.remove("message").unwrap_or_default();
        let spans = context.event_scope(event).into_iter().flatten();
        let mut spans: Vec<_> = spans.map(|span| span.name()).collect();
        spans.reverse();
        let level = *event.metadata().level();
        self.0.lock().unwrap().push(Told { level, message, fields, spans });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        if span.metadata().target() != observe::TARGET {
            return;
        }
        let fields = span.extensions().get::<Fields>().unwrap().clone();
        let (level, message) = (*span.metadata().level(), format!("span {}", span.name()));
        self.0.lock().unwrap().push(Told { level, message, fields, spans: Vec::new() });
    }
}

/// What every span and event has.
fn of<'a>(kind: &'a str, key: &'a str) -> [(&'a str, &'a str); 3] {
    [("backend", "memory"), ("kind", kind), ("key", key)]
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_and_a_release_are_told_once() {
    let (log, _on) = Log::start();
    let (one, _) = pair();
    let lock = one.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
    let ended = log.only("acquire ended");
    ended.has(&of("lock", "a")).has(&[("outcome", "acquired"), ("wait_ms", "0")]);
    assert_eq!((ended.level, &*ended.spans), (Level::DEBUG, &["acquire"][..]));
    let span = log.only("span acquire");
    span.has(&of("lock", "a")).has(&[("outcome", "acquired"), ("wait_ms", "0")]);
    assert!(log.all("waiting").is_empty() && log.all("released").is_empty());
    let opened = log.only("session opened");
    opened.has(&[("backend", "memory"), ("kind", "lock"), ("role", "main")]);
    let token = lock.token().await.unwrap().to_string();
    tokio::time::sleep(millis(1500)).await;
    lock.release().await.unwrap();
    let released = log.only("released");
    released.has(&of("lock", "a")).has(&[("outcome", "released"), ("held_ms", "1500")]);
    released.has(&[("token", &token)]);
    assert!(released.level == Level::DEBUG && log.all("lost").is_empty());

    log.clear();
    let lease = one.lease(&key("b"), LeaseOptions::try_once()).await.unwrap().unwrap();
    let token = lease.token().to_string();
    log.only("acquire ended").has(&of("lease", "b")).has(&[("token", &token)]);
    log.only("span acquire").has(&[("token", &token), ("outcome", "acquired")]);
    drop(lease);
    log.only("released").has(&of("lease", "b")).has(&[("outcome", "dropped"), ("token", &token)]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_told_once_in_the_span_of_its_call() {
    let (log, _on) = Log::start();
    let (one, two) = pair();
    let opts = LockOptions::default().wait(secs(3));
    // on the store, then locally
    for other in [&two, &one] {
        let held = one.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
        log.clear();
        assert!(other.lock(&key("a"), opts).await.unwrap().is_none());
        let waiting = log.only("waiting");
        waiting.has(&of("lock", "a"));
        assert_eq!((waiting.level, &*waiting.spans), (Level::DEBUG, &["acquire"][..]));
        let wait = log.only("span acquire").has(&[("outcome", "busy")]).fields["wait_ms"].clone();
        assert!((3000..3200).contains(&wait.parse().unwrap()), "waited {wait} ms");
        held.release().await.unwrap();
    }
    // first locally, then on the store
    let held = two.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
    let a = key("a");
    let (first, second) = (one.lock(&a, opts), one.lock(&a, opts.wait(secs(9))));
    log.clear();
    assert!(tokio::join!(first, second).0.unwrap().is_none());
    assert_eq!(log.all("waiting").len(), 2);
    // one that waits locally behind one that tries, and takes its place on the store
    log.clear();
    let (first, second) = (one.lock(&a, LockOptions::try_once()), one.lock(&a, opts));
    assert!(tokio::join!(first, second).1.unwrap().is_none());
    log.only("waiting");
    held.release().await.unwrap();

    for other in [&two, &one] {
        let held = one.lease(&key("a"), LeaseOptions::default()).await.unwrap().unwrap();
        log.clear();
        let opts = LeaseOptions::default().wait(secs(3));
        assert!(other.lease(&key("a"), opts).await.unwrap().is_none());
        let waiting = log.only("waiting");
        waiting.has(&of("lease", "a"));
        assert_eq!(waiting.spans, ["acquire"]);
        held.release().await.unwrap();
    }

    let keys = Keys::new(["a", "b"]).unwrap();
    let held = one.claim(&keys, ClaimOptions::default()).await.unwrap().unwrap();
    log.clear();
    let opts = ClaimOptions::default().wait(secs(1));
    assert!(one.claim(&keys, opts).await.unwrap().is_none());
    log.only("waiting").has(&of("claim", "{a, b}"));
    log.only("acquire ended").has(&[("outcome", "busy")]);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn busy_errors_and_cancellations_are_told() {
    let (log, _on) = Log::start();
    let (one, two) = pair();
    let held = two.lease(&key("a"), LeaseOptions::default()).await.unwrap().unwrap();
    log.clear();
    assert!(one.lease(&key("a"), LeaseOptions::try_once()).await.unwrap().is_none());
    log.only("acquire ended").has(&of("lease", "a")).has(&[("outcome", "busy")]);
    assert!(log.all("waiting").is_empty(), "one that tries once does not wait");

    log.clear();
    let a = key("a");
    let waits = one.lease(&a, LeaseOptions::default());
    assert!(poll_times(waits, 3).await.is_none());
    log.only("acquire ended").has(&[("outcome", "cancelled")]);
    log.only("span acquire").has(&[("outcome", "cancelled")]);
    drop(held);

    log.clear();
    one.link().silence();
    let error = one.lease(&key("b"), LeaseOptions::try_once()).await.unwrap_err();
    let ended = log.only("acquire ended");
    ended.has(&of("lease", "b")).has(&[("outcome", "error"), ("error", &error.to_string())]);
    assert_eq!(ended.level, Level::DEBUG, "the caller has the error");
    assert!(log.all("released").is_empty());
}

#[tokio::test(start_paused = true)]
async fn losses_and_failed_renewals_are_warnings() {
    let (log, _on) = Log::start();
    let (one, two) = pair();
    let opts = LeaseOptions::default().ttl(secs(10));
    let lease = one.lease(&key("a"), opts).await.unwrap().unwrap();
    one.link().silence();
    lease.lost().wait().await;
    until("the loss is told", || !log.all("lost").is_empty()).await;
    let lost = log.only("lost");
    lost.has(&of("lease", "a"))
        .has(&[("reason", "expired"), ("token", &lease.token().to_string())]);
    let held: u64 = lost.fields["held_ms"].parse().unwrap();
    assert!(lost.level == Level::WARN && (9800..10_000).contains(&held), "{lost:?}");
    let failed = log.all("renewal failed");
    assert!(!failed.is_empty() && failed.iter().all(|failed| failed.level == Level::WARN));
    failed[0].has(&[("backend", "memory"), ("kind", "lease"), ("leases", "1")]);
    one.link().heal();
    log.clear();
    drop(lease);
    assert!(log.all("lost").is_empty() && log.all("released").is_empty(), "told twice");

    let lease = one.lease(&key("b"), opts).await.unwrap().unwrap();
    one.store().delete_lease("test", &key("b"));
    assert!(lease.renew().await.is_err());
    log.only("lost").has(&of("lease", "b")).has(&[("reason", "taken")]);

    let lock = one.lock(&key("a"), LockOptions::try_once()).await.unwrap().unwrap();
    log.clear();
    one.link().end_sessions();
    lock.lost().wait().await;
    let lost = log.only("lost");
    lost.has(&of("lock", "a")).has(&[("reason", "session_ended")]);
    let session = log.only("session lost");
    session.has(&[("kind", "lock"), ("role", "main"), ("locks", "1")]);
    assert_eq!((lost.level, session.level), (Level::WARN, Level::WARN));
    assert!(lock.release().await.is_err());
    log.only("lost");

    let lock = two.lock(&key("a"), LockOptions::default()).await.unwrap().unwrap();
    log.clear();
    assert!(one.force_release(Kind::Lock, &key("a")).await.unwrap().is_some());
    let forced = log.only("released by force");
    forced.has(&of("lock", "a"));
    assert_eq!(forced.level, Level::WARN);
    lock.lost().wait().await;
    log.only("lost").has(&of("lock", "a"));

    let lease = two.lease(&key("c"), opts).await.unwrap().unwrap();
    log.clear();
    two.close().await.unwrap();
    let lost = log.only("lost");
    lost.has(&of("lease", "c")).has(&[("reason", "closed")]);
    assert_eq!(lost.level, Level::DEBUG, "the owner closed it");
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn claims_and_admissions_are_told() {
    let (log, _on) = Log::start();
    let (one, _) = pair();
    let keys = Keys::new(["a"]).unwrap();
    let claim = one.claim(&keys, ClaimOptions::default()).await.unwrap().unwrap();
    let token = claim.token().to_string();
    claim.commit().await.unwrap();
    let commit = log.only("commit");
    commit.has(&of("claim", "{a}")).has(&[("outcome", "committed"), ("token", &token)]);
    assert_eq!(commit.level, Level::DEBUG);
    log.only("released").has(&of("claim", "{a}")).has(&[("outcome", "committed")]);
    log.clear();
    let claim = one.claim(&keys, ClaimOptions::default()).await.unwrap().unwrap();
    claim.rollback().await.unwrap();
    log.only("released").has(&[("outcome", "rolled_back"), ("kind", "claim")]);
    assert!(log.all("commit").is_empty());
    let claim = one.claim(&keys, ClaimOptions::default()).await.unwrap().unwrap();
    log.clear();
    one.link().lose_next_answer();
    assert!(claim.commit().await.is_err());
    let commit = log.only("commit");
    commit.has(&[("outcome", "unknown")]);
    assert!(commit.level == Level::WARN && commit.fields.contains_key("error"));
    log.only("released").has(&[("outcome", "unconfirmed")]);

    log.clear();
    let both = [key("x"), key("x")];
    let admitted = one.admit_many(&both, DedupeOptions::default()).await.unwrap();
    let told = log.all("admission");
    told[0].has(&of("dedupe", "x")).has(&[("outcome", "first")]);
    told[1].has(&of("dedupe", "x")).has(&[("outcome", "in_progress")]);
    assert!(told.len() == 2 && told.iter().all(|told| told.spans == ["admit"]));
    log.only("span admit").has(&[("backend", "memory"), ("kind", "dedupe"), ("keys", "2")]);
    let guard = admitted.into_iter().next().unwrap().first().unwrap();
    guard.complete().await.unwrap();
    log.only("released").has(&of("dedupe", "x")).has(&[("outcome", "completed")]);
}
