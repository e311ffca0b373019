//! [`World`]: what can happen next, and the wrappers by which tasks are held until it is their turn.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};

type Check = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// What becomes of a request when it reaches the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is carried out and answered.
    Done,
    /// It is not carried out: the connection breaks before.
    Fails,
    /// It is carried out, and the connection breaks before the answer has come.
    Unanswered,
    /// It is carried out only after so long.
    Late(Duration),
}

/// All that one run of a scenario is made of. Cloning gives another reference to it.
#[derive(Clone)]
pub(super) struct World(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// In the order in which it became ready: first come, first served is the schedule without
    /// delays.
    ready: VecDeque<Item>,
    /// How much of it was ready before the last step; the rest became so at once.
    settled: usize,
    tasks: BTreeMap<u64, Task>,
    requests: BTreeMap<u64, Request>,
    /// Faults that may happen at any moment.
    standing: BTreeMap<u64, Standing>,
    last_id: u64,
    stepping: Option<u64>,
    driver: Option<Waker>,
    failures: u32,
    violation: Option<String>,
    checks: Vec<Check>,
    at_end: Vec<Check>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Task(u64),
    Request(u64),
}

struct Task {
    name: Arc<str>,
    waker: Option<Waker>,
    its_turn: bool,
}

struct Request {
    name: Arc<str>,
    fates: &'static [Fate],
    run: Box<dyn FnOnce(Fate) + Send>,
}

struct Standing {
    name: Arc<str>,
    /// It explains errors and delays.
    is_failure: bool,
    run: Box<dyn FnOnce() + Send>,
}

/// Something that may happen next.
#[derive(Clone, Debug)]
pub(super) struct Possible {
    pub(super) what: What,
    /// By how many places it overtakes what is ready.
    pub(super) delays: u32,
    pub(super) faults: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Ready(usize, Fate),
    Standing(u64),
}

thread_local! {
    static CURRENT: RefCell<Option<World>> = const { RefCell::new(None) };
    static NEXT_NAME: RefCell<Option<String>> = const { RefCell::new(None) };
}

impl World {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(State::default())))
    }

    /// That of the run on this thread, if there is one.
    pub(super) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    pub(super) fn enter(&self) {
        CURRENT.set(Some(self.clone()));
    }

    pub(super) fn leave() {
        CURRENT.set(None);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn number(&self) -> u128 {
        self.lock().next_id().into()
    }

    // --- for scenarios -----------------------------------------------------------------------

    /// Starts a task of the scenario.
    #[expect(clippy::unused_self, reason = "a task is started in a world")]
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        name: impl Into<String>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        NEXT_NAME.set(Some(name.into()));
        tokio::spawn(steered(work))
    }

    /// A request to the store: carried out when the explorer says so, answered with its result.
    pub(super) async fn request<T: Send + 'static>(
        &self,
        name: String,
        fates: &'static [Fate],
        run: impl FnOnce(Fate) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.happen(name, fates, move |fate| drop(reply.send(run(fate))));
        answer.await.unwrap_or_else(|_| Err(cut()))
    }

    /// A request of one statement, which is carried out also if nobody waits for its answer any more.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        name: String,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        const FATES: &[Fate] = &[Fate::Fails, Fate::Unanswered, Fate::Late(Duration::from_secs(6))];
        let asked = move |fate| match fate {
            Fate::Fails => Err(cut()),
            fate => {
                let answer = run();
                if fate == Fate::Unanswered { Err(cut()) } else { Ok(answer) }
            }
        };
        self.request(name, FATES, asked).await
    }

    /// Something that will happen at the store, sooner or later.
    pub(super) fn happen(
        &self,
        name: String,
        fates: &'static [Fate],
        run: impl FnOnce(Fate) + Send + 'static,
    ) {
        let mut state = self.lock();
        let id = state.next_id();
        state.requests.insert(id, Request { name: name.into(), fates, run: Box::new(run) });
        state.ready.push_back(Item::Request(id));
        state.tell_driver();
    }

    /// Something that may happen at any moment, as a fault, until it is taken back.
    pub(super) fn may_happen(&self, name: String, run: impl FnOnce() + Send + 'static) -> u64 {
        self.lock().stand(name, true, run)
    }

    pub(super) fn cannot_happen(&self, id: u64) {
        let standing = self.lock().standing.remove(&id);
        drop(standing);
    }

    /// How often something has failed. A call that was dropped is no failure: it explains neither
    /// an error nor a delay of others.
    pub(super) fn failures(&self) -> u32 {
        self.lock().failures
    }

    /// Says that a property does not hold; the first one stays.
    pub(super) fn violated(&self, what: String) {
        self.lock().violation.get_or_insert(what);
    }

    /// An error is one that the faults explain.
    pub(super) fn allowed(&self, error: &Error) {
        if self.failures() == 0 {
            self.violated(format!("an error without a fault: {error}"));
        }
    }

    /// What somebody got who waits for ever; none if the call was dropped.
    pub(super) fn taken<G>(&self, who: &str, call: Option<Result<Option<G>>>) -> Option<G> {
        match call? {
            Ok(Some(guard)) => return Some(guard),
            Ok(None) => {
                self.violated(format!("{who} waits for ever and was told that others hold"));
            }
            Err(error) => self.allowed(&error),
        }
        None
    }

    /// Without faults it took no longer than this.
    pub(super) fn in_time(&self, start: Instant, within: Duration, what: &str) {
        let took = start.elapsed();
        if self.failures() == 0 && took > within {
            self.violated(format!("{what}: it took {took:?}"));
        }
    }

    /// Looked at after each step.
    pub(super) fn check(&self, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.lock().checks.push(Arc::new(check));
    }

    /// Looked at when all tasks have ended.
    pub(super) fn at_end(&self, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) {
        self.lock().at_end.push(Arc::new(check));
    }

    // --- for the explorer --------------------------------------------------------------------

    pub(super) fn tasks(&self) -> Vec<Arc<str>> {
        self.lock().tasks.values().map(|task| task.name.clone()).collect()
    }

    pub(super) fn is_ready(&self) -> bool {
        !self.lock().ready.is_empty()
    }

    pub(super) fn violation(&self) -> Option<String> {
        let checks = self.lock().checks.clone();
        self.run_checks(&checks)
    }

    pub(super) fn violation_at_end(&self) -> Option<String> {
        let checks = self.lock().at_end.clone();
        self.run_checks(&checks)
    }

    fn run_checks(&self, checks: &[Check]) -> Option<String> {
        let failed = checks.iter().find_map(|check| check().err());
        self.lock().violation.clone().or(failed)
    }

    /// What may happen next, the schedule without delays and faults first.
    pub(super) fn options(&self, delays: u32, faults: u32) -> Vec<Possible> {
        let mut state = self.lock();
        state.settle();
        let mut options = Vec::new();
        let reach = state.ready.len().min(delays as usize + 1);
        for place in 0..reach {
            let delays = place as u32;
            options.push(Possible { what: What::Ready(place, Fate::Done), delays, faults: 0 });
        }
        if faults > 0 {
            for (place, item) in state.ready.iter().enumerate().take(reach) {
                if let Item::Request(id) = item {
                    for fate in state.requests[id].fates {
                        let what = What::Ready(place, *fate);
                        options.push(Possible { what, delays: place as u32, faults: 1 });
                    }
                }
            }
            let standing = state.standing.keys();
            options.extend(standing.map(|id| Possible {
                what: What::Standing(*id),
                delays: 0,
                faults: 1,
            }));
        }
        options
    }

    pub(super) fn describe(&self, option: &Possible) -> String {
        let state = self.lock();
        match option.what {
            What::Standing(id) => format!("!! {}", state.standing[&id].name),
            What::Ready(place, fate) => match state.ready[place] {
                Item::Task(id) => state.tasks[&id].name.to_string(),
                Item::Request(id) => {
                    let name = &state.requests[&id].name;
                    match fate {
                        Fate::Done => format!("-> {name}"),
                        fate => format!("!! {name}: {fate:?}"),
                    }
                }
            },
        }
    }

    /// Does one thing. A task is polled once.
    pub(super) async fn step(&self, option: &Possible) {
        if let Some(request) = self.begin(option) {
            request();
        }
        self.wait_until(|state| state.stepping.is_none()).await;
    }

    /// Lets a task have its turn, or gives what is to be done instead.
    fn begin(&self, option: &Possible) -> Option<Box<dyn FnOnce() + Send>> {
        let mut state = self.lock();
        let (place, fate) = match option.what {
            What::Standing(id) => {
                let fault = state.standing.remove(&id)?;
                state.failures += u32::from(fault.is_failure);
                return Some(fault.run);
            }
            What::Ready(place, fate) => (place, fate),
        };
        state.failures += option.faults;
        match state.take_ready(place)? {
            Item::Request(id) => {
                let request = state.requests.remove(&id)?;
                let world = self.clone();
                Some(Box::new(move || match fate {
                    Fate::Late(time) => world.later(request, time),
                    fate => (request.run)(fate),
                }))
            }
            Item::Task(id) => {
                state.stepping = Some(id);
                let task = state.tasks.get_mut(&id)?;
                task.its_turn = true;
                let waker = task.waker.take();
                drop(state);
                if let Some(waker) = waker {
                    waker.wake();
                }
                None
            }
        }
    }

    fn later(&self, request: Request, time: Duration) {
        let world = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            let mut state = world.lock();
            let id = state.next_id();
            let request = Request { fates: &[], ..request };
            state.requests.insert(id, request);
            state.ready.push_back(Item::Request(id));
            state.tell_driver();
        });
    }

    /// Lets time pass until something is ready; false if nothing is until `deadline`.
    pub(super) async fn idle(&self, deadline: Instant) -> bool {
        let ready = self.wait_until(|state| !state.ready.is_empty());
        tokio::time::timeout_at(deadline, ready).await.is_ok()
    }

    async fn wait_until(&self, mut holds: impl FnMut(&State) -> bool) {
        poll_fn(|context| {
            let mut state = self.lock();
            if holds(&state) {
                return Poll::Ready(());
            }
            state.driver = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Some primitives wake those who wait in an order that they draw by lot.
    fn settle(&mut self) {
        let settled = self.settled;
        let id = |item: &Item| match item {
            Item::Task(id) | Item::Request(id) => *id,
        };
        self.ready.make_contiguous()[settled..].sort_by_key(id);
        self.settled = self.ready.len();
    }

    fn is_not_ready(&mut self, item: Item) {
        if let Some(place) = self.ready.iter().position(|other| *other == item) {
            self.take_ready(place);
        }
    }

    fn take_ready(&mut self, place: usize) -> Option<Item> {
        if place < self.settled {
            self.settled -= 1;
        }
        self.ready.remove(place)
    }

    fn stand(
        &mut self,
        name: String,
        is_failure: bool,
        run: impl FnOnce() + Send + 'static,
    ) -> u64 {
        let id = self.next_id();
        let standing = Standing { name: name.into(), is_failure, run: Box::new(run) };
        self.standing.insert(id, standing);
        id
    }

    fn tell_driver(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    fn make_ready(&mut self, task: u64) {
        let item = Item::Task(task);
        if self.tasks.contains_key(&task) && !self.ready.contains(&item) {
            self.ready.push_back(item);
            self.tell_driver();
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

pub(super) fn cut() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection was cut")
}

// --- tasks ---------------------------------------------------------------------------------

/// A task that is polled only when it is its turn, if a run is under way on this thread.
pub(crate) fn steered<F: Future>(work: F) -> Steered<F> {
    let place = World::current().map(|world| {
        let name = NEXT_NAME.take().unwrap_or_else(|| {
            let name = std::any::type_name::<F>();
            let name = name.split('<').next().unwrap_or(name);
            name.trim_start_matches("leasehold_core::").replace("::{{closure}}", "")
        });
        let mut state = world.lock();
        let id = state.next_id();
        let name = format!("{name} #{}", state.tasks.len()).into();
        state.tasks.insert(id, Task { name, waker: None, its_turn: false });
        state.make_ready(id);
        drop(state);
        let waker = Waker::from(Arc::new(TaskWaker { world: world.clone(), id }));
        Place { world, id, waker }
    });
    Steered { work: Box::pin(work), place }
}

/// See [`steered`].
pub(crate) struct Steered<F> {
    work: Pin<Box<F>>,
    place: Option<Place>,
}

struct Place {
    world: World,
    id: u64,
    waker: Waker,
}

struct TaskWaker {
    world: World,
    id: u64,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.world.lock().make_ready(self.id);
    }
}

impl<F: Future> Future for Steered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { work, place } = &mut *self;
        let Some(place) = place else {
            return work.as_mut().poll(context);
        };
        {
            let mut state = place.world.lock();
            let task = state.tasks.get_mut(&place.id).expect("it lives");
            if !std::mem::take(&mut task.its_turn) {
                task.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            task.waker = Some(context.waker().clone());
        }
        let polled = work.as_mut().poll(&mut Context::from_waker(&place.waker));
        let mut state = place.world.lock();
        if polled.is_ready() {
            state.tasks.remove(&place.id);
            state.is_not_ready(Item::Task(place.id));
        }
        state.stepping = None;
        state.tell_driver();
        polled
    }
}

impl<F> Drop for Steered<F> {
    fn drop(&mut self) {
        let Some(place) = &self.place else { return };
        let mut state = place.world.lock();
        let task = state.tasks.remove(&place.id);
        state.is_not_ready(Item::Task(place.id));
        if let Some(task) = task
            && std::thread::panicking()
        {
            state.violation.get_or_insert(format!("{} panicked", task.name));
        }
        if state.stepping == Some(place.id) {
            state.stepping = None;
        }
        state.tell_driver();
    }
}

// --- calls that are dropped ------------------------------------------------------------------

type Slot<T> = Arc<Mutex<(Option<Pin<Box<dyn Future<Output = T> + Send>>>, Option<Waker>)>>;

/// A call that the explorer may drop at any moment.
pub(super) struct Droppable<T> {
    world: World,
    slot: Slot<T>,
    fault: u64,
}

impl<T: Send + 'static> Droppable<T> {
    pub(super) fn new(
        world: &World,
        name: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        let slot: Slot<T> = Arc::new(Mutex::new((Some(Box::pin(work)), None)));
        let dropped = slot.clone();
        let fault = world.lock().stand(format!("{name} drops its call"), false, move || {
            let (work, waker) = std::mem::take(&mut *dropped.lock().expect("not poisoned"));
            drop(work);
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        Self { world: world.clone(), slot, fault }
    }
}

impl<T> Future for Droppable<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut slot = self.slot.lock().expect("not poisoned");
        slot.1 = Some(context.waker().clone());
        let Some(work) = &mut slot.0 else {
            return Poll::Ready(None);
        };
        let Poll::Ready(done) = work.as_mut().poll(context) else {
            return Poll::Pending;
        };
        let work = slot.0.take();
        drop(slot);
        drop(work);
        self.world.cannot_happen(self.fault);
        Poll::Ready(Some(done))
    }
}

impl<T> Drop for Droppable<T> {
    fn drop(&mut self) {
        self.world.cannot_happen(self.fault);
    }
}
