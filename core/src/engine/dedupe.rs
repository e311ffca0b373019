//! [`DedupeEngine`]: the driver's statements, off the caller's cancellation.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::Instrument;

use super::backoff::Backoff;
use super::gate::{Gate, Permit, Turn};
use super::{asked, closed};
use crate::backend::{Admit, AdmitAnswer, DedupeDriver, Owner};
use crate::dedupe::{Admission, Dedupe, DedupeGuard, DedupeHold};
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Kind;
use crate::key::Key;
use crate::lost::LossSignal;
use crate::observe::Observer;
use crate::options::{Deadline, DedupeOptions};
use crate::steer::steered;

/// Makes a [`Dedupe`] of a [`DedupeDriver`].
///
/// Callers of one process queue locally for each key first: on some stores an admission of a key that
/// an open claim has seen waits for that claim's end with a connection, and its duplicates would wait
/// with all the others.
#[derive(Debug)]
pub struct DedupeEngine<D: DedupeDriver> {
    driver: Arc<D>,
    gate: Gate<Turn<Key>>,
    observer: Observer,
}

impl<D: DedupeDriver> DedupeEngine<D> {
    /// An engine over `driver`.
    pub fn new(driver: D) -> Self {
        let observer = Observer::new(driver.backend(), Kind::Dedupe);
        Self { driver: Arc::new(driver), gate: Gate::new(), observer }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    async fn run(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        opts.check()?;
        // equal keys are one question; the later ones find the first one's entry
        let mut first: HashMap<&Key, usize> = HashMap::with_capacity(keys.len());
        let mut items: Vec<Admit> = Vec::with_capacity(keys.len());
        for key in keys {
            first.entry(key).or_insert_with(|| {
                items.push(question(key, opts));
                items.len() - 1
            });
        }
        let answers = self.ask(items).await?;
        let mut answers: Vec<_> = answers.into_iter().map(Some).collect();
        let repeats = keys.iter().map(|key| (key, first[key]));
        // the first of equal keys takes the answer, the rest are asked for once more
        let mut admissions = Vec::with_capacity(keys.len());
        for (key, index) in repeats {
            admissions.push(match answers[index].take() {
                Some(answer) => answer,
                None => self.again(key, opts).await?,
            });
        }
        Ok(admissions)
    }

    /// A key that occurs a second time in one call.
    async fn again(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        self.ask(vec![question(key, opts)]).await?.pop().ok_or_else(closed)
    }

    async fn ask(&self, items: Vec<Admit>) -> Result<Vec<Admission>> {
        let permits = self.turn(&items).await?;
        let driver = self.driver.clone();
        let admit = async move {
            let admitted = admit(driver, items).await;
            drop(permits);
            admitted
        };
        tokio::spawn(steered(admit.in_current_span())).await.map_err(|_| closed())?
    }

    /// Waits for the turn of each key, in their order.
    async fn turn(&self, items: &[Admit]) -> Result<Vec<Permit<Turn<Key>>>> {
        let limit = self.driver.answer_limit();
        let deadline = Deadline::after(limit);
        let mut keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        keys.sort_unstable();
        let mut permits = Vec::with_capacity(keys.len());
        for key in keys {
            permits.push(self.gate.acquire(key, deadline, || ()).await.ok_or_else(|| {
                let detail = format!("no turn within {limit:?}: earlier admissions are unanswered");
                Error::new(ErrorKind::Unavailable, detail).on(key)
            })?);
        }
        Ok(permits)
    }
}

fn question(key: &Key, opts: DedupeOptions) -> Admit {
    let DedupeOptions { in_progress, retain, .. } = opts;
    Admit { key: key.clone(), owner: Owner::fresh(), in_progress, retain }
}

async fn admit<D: DedupeDriver>(driver: Arc<D>, items: Vec<Admit>) -> Result<Vec<Admission>> {
    let sent = Instant::now();
    // the same owners may ask again: what they were granted by a lost answer is still theirs
    let (answers, _) = asked(driver.answer_limit(), || driver.admit(&items)).await;
    let answers = match answers {
        Ok(answers) if answers.len() == items.len() => answers,
        outcome => {
            // what it did is not known: whatever was admitted is taken back
            for item in items {
                drop(Hold::new(&driver, &item));
            }
            return Err(outcome.err().unwrap_or_else(|| {
                Error::new(ErrorKind::Backend, "the store answered another number of keys")
            }));
        }
    };
    Ok(items
        .iter()
        .zip(answers)
        .map(|(item, answer)| match answer {
            AdmitAnswer::InProgress { since } => Admission::InProgress { since },
            AdmitAnswer::Done { at } => Admission::Done { at },
            AdmitAnswer::First(token) => {
                let signal = match item.in_progress.and_then(|time| sent.checked_add(time)) {
                    Some(deadline) => LossSignal::until(deadline),
                    None => LossSignal::new(),
                };
                let hold = Box::new(Hold::new(&driver, item));
                Admission::First(DedupeGuard::new(item.key.clone(), token, signal, hold))
            }
        })
        .collect())
}

#[async_trait]
impl<D: DedupeDriver> Dedupe for DedupeEngine<D> {
    async fn admit(&self, key: &Key, opts: DedupeOptions) -> Result<Admission> {
        let keys = std::slice::from_ref(key);
        let question = self.observer.question(keys);
        let admitted = self.run(keys, opts).instrument(question.span()).await;
        let admitted = admitted.map_err(|error| error.at(self.driver.backend(), "admit").on(key));
        question.end(opts.in_progress.is_some(), admitted)?.pop().ok_or_else(closed)
    }

    async fn admit_many(&self, keys: &[Key], opts: DedupeOptions) -> Result<Vec<Admission>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let question = self.observer.question(keys);
        let admitted = self.run(keys, opts).instrument(question.span()).await;
        let admitted = admitted.map_err(|error| error.at(self.driver.backend(), "admit_many"));
        question.end(opts.in_progress.is_some(), admitted)
    }
}

/// An entry in progress; dropping it abandons.
#[derive(Debug)]
struct Hold<D: DedupeDriver> {
    driver: Arc<D>,
    key: Key,
    owner: Owner,
    retain: Duration,
    /// How long an abandon without an answer is tried on: then it can be taken over anyway.
    in_progress: Duration,
    /// Nothing is left to do when it is dropped.
    ended: bool,
    runtime: Handle,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Complete,
    Abandon,
}

impl<D: DedupeDriver> Hold<D> {
    fn new(driver: &Arc<D>, item: &Admit) -> Self {
        Self {
            driver: driver.clone(),
            key: item.key.clone(),
            owner: item.owner,
            retain: item.retain,
            in_progress: item.in_progress.unwrap_or_default(),
            ended: item.in_progress.is_none(),
            runtime: Handle::current(),
        }
    }

    /// Starts to end the entry in a task of its own; tells how the first try went.
    fn start(&mut self, end: End) -> oneshot::Receiver<Result<bool>> {
        self.ended = true;
        let (driver, key, owner) = (self.driver.clone(), self.key.clone(), self.owner);
        let (retain, until) = (self.retain, Instant::now().checked_add(self.in_progress));
        let (tell, told) = oneshot::channel();
        self.runtime.spawn(steered(async move {
            let limit = driver.answer_limit();
            let mut tell = Some(tell);
            let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
            loop {
                let outcome = match end {
                    End::Complete => asked(limit, || driver.complete(&key, owner, retain)).await.0,
                    End::Abandon => {
                        let (outcome, repeated) =
                            asked(limit, || driver.abandon(&key, owner)).await;
                        outcome.map(|ours| ours || repeated) // the lost one did it
                    }
                };
                let tries_on = matches!(end, End::Abandon)
                    && outcome.as_ref().is_err_and(Error::is_retryable)
                    && until.is_none_or(|until| Instant::now() < until);
                if let Some(tell) = tell.take() {
                    drop(tell.send(outcome)); // nobody waits for it any more
                }
                if !tries_on {
                    return;
                }
                tokio::time::sleep(backoff.next()).await;
            }
        }));
        told
    }

    async fn end(&mut self, end: End, operation: &'static str) -> Result<()> {
        let ended = self.start(end).await.unwrap_or_else(|_| Err(closed()));
        let at = |error: Error| error.at(self.driver.backend(), operation);
        match ended.map_err(at)? {
            true => Ok(()),
            false => Err(at(DedupeGuard::not_ours(operation, &self.key))),
        }
    }
}

#[async_trait]
impl<D: DedupeDriver> DedupeHold for Hold<D> {
    async fn complete(&mut self) -> Result<()> {
        if self.ended {
            return Ok(()); // done at once, when it was admitted
        }
        self.end(End::Complete, "complete").await
    }

    async fn abandon(&mut self) -> Result<()> {
        if self.ended {
            let detail = "an entry that is done at once cannot be abandoned";
            return Err(Error::new(ErrorKind::Unsupported, detail));
        }
        self.end(End::Abandon, "abandon").await
    }
}

impl<D: DedupeDriver> Drop for Hold<D> {
    fn drop(&mut self) {
        if !self.ended {
            drop(self.start(End::Abandon));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::future::join_all;
    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;

    /// Answers that a key is in progress; of "a", once it may.
    #[derive(Debug)]
    struct Stuck {
        may: Semaphore,
        asked: Mutex<Vec<Key>>,
    }

    #[async_trait]
    impl DedupeDriver for Stuck {
        fn backend(&self) -> &'static str {
            "stuck"
        }

        async fn admit(&self, items: &[Admit]) -> Result<Vec<AdmitAnswer>> {
            let keys = items.iter().map(|item| item.key.clone());
            self.asked.lock().expect("no test panics with it").extend(keys);
            if items.iter().any(|item| item.key.as_str() == "a") {
                self.may.acquire().await.expect("it is never closed").forget();
            }
            let since = std::time::UNIX_EPOCH;
            Ok(items.iter().map(|_| AdmitAnswer::InProgress { since }).collect())
        }

        async fn complete(&self, _: &Key, _: Owner, _: Duration) -> Result<bool> {
            Ok(true)
        }

        async fn abandon(&self, _: &Key, _: Owner) -> Result<bool> {
            Ok(true)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_store_is_asked_about_a_key_once_at_a_time() {
        let stuck = Stuck { may: Semaphore::new(0), asked: Mutex::default() };
        let engine = DedupeEngine::new(stuck);
        let asked = || engine.driver().asked.lock().expect("no test panics with it").clone();
        let key = |name: &str| Key::new(name).expect("a valid key");
        let (a, b, c) = (key("a"), key("b"), key("c"));
        let opts = DedupeOptions::default();
        let duplicates = join_all((0..10).map(|_| engine.admit(&a, opts)));
        let both = [b.clone(), a.clone()];
        let many = engine.admit_many(&both, opts);
        let others = async {
            let second = Duration::from_secs(1);
            assert!(timeout(second, engine.admit(&a, opts)).await.is_err(), "it has no turn");
            // neither duplicates nor those who have given up are in the way of another key
            assert!(engine.admit(&c, opts).await.is_ok());
            assert_eq!(asked(), [a.clone(), c.clone()]);
            engine.driver().may.add_permits(20);
        };
        let (duplicates, many, ()) = tokio::join!(duplicates, many, others);
        assert!(duplicates.iter().all(Result::is_ok), "{duplicates:?}");
        assert_eq!(many.expect("it had its turn").len(), 2);
        assert_eq!(asked().len(), 10 + 2 + 1);
        let left = engine.driver().may.available_permits();
        engine.driver().may.forget_permits(left);
        assert_eq!(engine.gate.len(), 0, "a queue was left behind");

        // who gets no turn is told why
        let stuck = tokio::join!(engine.admit(&a, opts), engine.admit(&a, opts)).1;
        let error = stuck.expect_err("the first one is not answered").to_string();
        assert!(error.contains("earlier admissions are unanswered"), "{error}");
    }
}
