//! What is asked for while an exchange is under way goes out together in the next.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::conn::Conn;

/// Exchanges under way at a time, so that the connection and the server are kept busy.
const UNDER_WAY: usize = 8;
/// Requests of one exchange: it takes the server a fraction of a millisecond, in which it serves
/// nobody else.
const MOST: usize = 64;

/// A request that can go out together with others of its kind.
pub(crate) trait Request: Debug + Send + Sync + Sized + 'static {
    type Answer: Debug + Send + 'static;

    /// Where a handle queues them.
    fn queue(conn: &Conn) -> &Queue<Self>;

    /// Only requests of one lane go out together: in a cluster, those of one slot.
    fn lane(&self, conn: &Conn) -> String;

    /// One exchange of requests of one lane; the answers are in the order of the requests.
    fn exchange(
        conn: &Conn,
        requests: &[Self],
    ) -> impl Future<Output = Result<Vec<Self::Answer>>> + Send;
}

/// Requests that wait for their exchange. A lane exists while something is under way in it.
#[derive(Debug)]
pub(crate) struct Queue<R: Request>(Mutex<HashMap<String, Lane<R>>>);

type Waiting<R> = (R, oneshot::Sender<Result<<R as Request>::Answer>>);

#[derive(Debug)]
struct Lane<R: Request> {
    under_way: usize,
    /// One of those under way has not taken its requests yet.
    gathering: bool,
    waiting: VecDeque<Waiting<R>>,
}

impl<R: Request> Lane<R> {
    fn take(&mut self) -> Vec<Waiting<R>> {
        let count = self.waiting.len().min(MOST);
        self.waiting.drain(..count).collect()
    }
}

impl<R: Request> Default for Queue<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<R: Request> Queue<R> {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Lane<R>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks: at once if nothing else is under way, otherwise together with those who ask next.
pub(crate) async fn ask<R: Request>(conn: &Arc<Conn>, request: R) -> Result<R::Answer> {
    let name = request.lane(conn);
    let entered = {
        let mut lanes = R::queue(conn).lock();
        let empty = || Lane { under_way: 0, gathering: false, waiting: VecDeque::new() };
        let lane = lanes.entry(name.clone()).or_insert_with(empty);
        if lane.under_way == 0 {
            lane.under_way = 1;
            Ok(request)
        } else {
            let (tell, answer) = oneshot::channel();
            lane.waiting.push_back((request, tell));
            let gathers = !lane.gathering && lane.under_way < UNDER_WAY;
            if gathers {
                lane.gathering = true;
                lane.under_way += 1;
            }
            Err((answer, gathers))
        }
    };
    match entered {
        Ok(request) => {
            let _turn = Turn::<R>::of(conn, name, false);
            let answers = R::exchange(conn, std::slice::from_ref(&request)).await?;
            answers.into_iter().next().ok_or_else(too_few)
        }
        Err((answer, gathers)) => {
            if gathers {
                tokio::spawn(gather(Turn::<R>::of(conn, name, true)));
            }
            answer.await.unwrap_or_else(|_| Err(ended()))
        }
    }
}

/// One of the exchanges under way. Dropping it begins the next.
struct Turn<R: Request> {
    conn: Arc<Conn>,
    lane: String,
    gathers: bool,
    requests: PhantomData<R>,
}

impl<R: Request> Turn<R> {
    fn of(conn: &Arc<Conn>, lane: String, gathers: bool) -> Self {
        Self { conn: conn.clone(), lane, gathers, requests: PhantomData }
    }

    /// Takes the requests that have gathered.
    fn take(&mut self) -> Vec<Waiting<R>> {
        self.gathers = false;
        let mut lanes = R::queue(&self.conn).lock();
        // it exists as long as there are turns in it
        let Some(lane) = lanes.get_mut(&self.lane) else { return Vec::new() };
        lane.gathering = false;
        lane.take()
    }
}

impl<R: Request> Drop for Turn<R> {
    fn drop(&mut self) {
        let batch: Vec<Waiting<R>> = {
            let mut lanes = R::queue(&self.conn).lock();
            let Some(lane) = lanes.get_mut(&self.lane) else { return };
            if self.gathers {
                lane.gathering = false;
            }
            if lane.waiting.is_empty() || lane.gathering {
                lane.under_way -= 1;
                if lane.under_way == 0 {
                    lanes.remove(&self.lane);
                }
                return;
            }
            lane.take()
        };
        // where the runtime has ended the batch is dropped with its turn, and so on
        let turn = Self::of(&self.conn, std::mem::take(&mut self.lane), false);
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(serve(turn, batch));
        }
    }
}

/// Lets those go first who are about to ask, as do all whom one exchange has answered.
async fn gather<R: Request>(mut turn: Turn<R>) {
    tokio::task::yield_now().await;
    let batch = turn.take();
    serve(turn, batch).await;
}

async fn serve<R: Request>(turn: Turn<R>, batch: Vec<Waiting<R>>) {
    if batch.is_empty() {
        return;
    }
    let (requests, waiting): (Vec<R>, Vec<_>) = batch.into_iter().unzip();
    let answers = R::exchange(&turn.conn, &requests).await;
    drop(turn);
    match answers {
        Ok(answers) => {
            // whom no answer is left for hears that the exchange has ended
            for (tell, answer) in waiting.into_iter().zip(answers) {
                drop(tell.send(Ok(answer))); // nobody waits for it any more
            }
        }
        Err(error) => {
            for tell in waiting {
                drop(tell.send(Err(error.clone()))); // nobody waits for it any more
            }
        }
    }
}

fn too_few() -> Error {
    Error::new(ErrorKind::Backend, "the server gave no answer to a request")
}

fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the exchange ended without an answer")
}
